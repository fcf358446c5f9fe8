"""Priority first: the block with the least priority goes first; among equals, the least recently used.

`advise` gives ranges of a context's tokens a priority from 0 to 100 and a duration; the kernel takes it back to 50
when that is over, so a policy sees the present one in `Fact.priority`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .protocol import BlockView
from .sampled import draw, take_ranked


class Priority:
    name = "priority"
    listens = False

    def __init__(self) -> None:
        self.calls = 0

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        self.calls += 1
        leaves, facts = draw(view, device, self.calls)
        ranked = [(float(fact.priority), fact.used_ns, leaf) for leaf, fact in zip(leaves, facts, strict=True)]
        return take_ranked(view, device, sorted(ranked), want)

    def inserted(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def used(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...
