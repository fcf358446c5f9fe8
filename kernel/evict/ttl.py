"""Time to live: a block expires TTL_NS after its last use, or, where somebody said when it will be wanted, GRACE_NS after
that moment if that is later.  What has been expired longest, or expires first, goes first.

The fixed lifetimes of hosted prompt caches (minutes), with the promise of a tool call kept: Continuum (arXiv 2511.02230) gives a
context that waits for a tool a time to live of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .protocol import BlockView
from .sampled import draw, take_ranked

TTL_NS: Final = 300_000_000_000
GRACE_NS: Final = 5_000_000_000


class Ttl:
    name = "ttl"
    listens = False

    def __init__(self) -> None:
        self.calls = 0

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        self.calls += 1
        leaves, facts = draw(view, device, self.calls)
        ranked = [
            (float(max(fact.used_ns + TTL_NS, fact.due_ns + GRACE_NS)), fact.used_ns, leaf)
            for leaf, fact in zip(leaves, facts, strict=True)
        ]
        return take_ranked(view, device, sorted(ranked), want)

    def inserted(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def used(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...
