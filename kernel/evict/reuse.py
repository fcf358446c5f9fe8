"""Reuse probability: the block least likely to be used again goes first; among equals, the least recently used.

Probability per class, a class being how often a block was found and how the last turn of its context ended:
(uses seen in the class + 1) / (uses + removals without one + 2), Laplace's rule of succession.  No time in it: that is
what `learned` adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .protocol import BlockView, Fact
from .sampled import draw, take_ranked

MOST: Final = 7  # uses told apart
Class = tuple[int, int]


def class_of(fact: Fact) -> Class:
    return min(MOST, fact.hits), fact.kind


class Reuse:
    name = "reuse"
    listens = True

    def __init__(self) -> None:
        self.calls = 0
        self.of: dict[int, Class] = {}  # the class each block is waiting in
        self.again: dict[Class, int] = {}
        self.never: dict[Class, int] = {}

    def probability(self, fact: Fact) -> float:
        kind = class_of(fact)
        again = self.again.get(kind, 0)
        return (again + 1) / (again + self.never.get(kind, 0) + 2)

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        self.calls += 1
        leaves, facts = draw(view, device, self.calls)
        ranked = [(self.probability(fact), fact.used_ns, leaf) for leaf, fact in zip(leaves, facts, strict=True)]
        return take_ranked(view, device, sorted(ranked), want)

    def inserted(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def used(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        self._count(blocks, self.again)

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        for block, fact in zip(blocks, view.facts(blocks), strict=True):
            self.of[block] = class_of(fact)

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        self._count(blocks, self.never)

    def _count(self, blocks: Sequence[int], counts: dict[Class, int]) -> None:
        for block in blocks:
            kind = self.of.pop(block, None)
            if kind is not None:
                counts[kind] = counts.get(kind, 0) + 1
