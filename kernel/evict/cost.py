"""Cost aware: what it would cost to have the block back, times the probability that it is wanted, per frame.

Cost is the time to compute the block again or, if another tier holds a copy, to load it, whichever is less.  Blocks are
of one size, so "per byte" needs no division.  Old merit fades as in GreedyDual (Young 1994; Cao and Irani, USITS 1997):
a block's worth is its cost x probability plus the worth of the last victim at the block's last use, so
what is never used again is overtaken.
"""

from __future__ import annotations

from collections.abc import Sequence

from .protocol import BlockView, Fact
from .reuse import Reuse
from .sampled import draw, take_ranked


def cost_ns(view: BlockView, device: int, fact: Fact) -> int:
    """Time to have a block back after `device` lost it."""
    rebuild = view.rebuild_ns(fact.depth)
    return min(rebuild, view.reload_ns(device) or rebuild) if fact.elsewhere else rebuild


class Cost(Reuse):
    name = "cost"

    def __init__(self) -> None:
        super().__init__()
        self.level = 0.0  # worth of the last victim
        self.base: dict[int, float] = {}  # block: the level at its last use

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        self.calls += 1
        leaves, facts = draw(view, device, self.calls)
        ranked = [
            (self.base.get(leaf, 0.0) + self.probability(fact) * cost_ns(view, device, fact), fact.used_ns, leaf)
            for leaf, fact in zip(leaves, facts, strict=True)
        ]
        ranked.sort()
        if ranked:
            self.level = max(self.level, ranked[0][0])
        return take_ranked(view, device, ranked, want)

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        super().ended(view, device, blocks)
        self.base.update(dict.fromkeys(blocks, self.level))

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        super().removed(view, device, blocks)
        for block in blocks:
            self.base.pop(block, None)
