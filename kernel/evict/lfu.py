"""Least frequently used: the block with the fewest uses since it came goes first; among equals, the least recently used.

One queue per use count, so that a use costs O(1) (Shah, Mitra, Matani, "An O(1) algorithm for implementing the LFU cache
eviction scheme", 2010).  Counts stop at MOST: what was hot long ago must not stay for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .protocol import BlockView
from .queue import Queue, take

MOST: Final = 15


class Lfu:
    name = "lfu"
    listens = True

    def __init__(self) -> None:
        self.queues: list[Queue] = [{} for _ in range(MOST + 1)]
        self.count: dict[int, int] = {}

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        found: list[int] = []
        for queue in self.queues:
            if queue and len(found) < want:
                found += take(view, device, queue, want - len(found))
        return found

    def inserted(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._leave(block)
            self.count[block] = 0
            self.queues[0][block] = None

    def used(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            count = min(MOST, self._leave(block) + 1)
            self.count[block] = count
            self.queues[count][block] = None

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._leave(block)

    def _leave(self, block: int) -> int:
        count = self.count.pop(block, -1)
        if count >= 0:
            del self.queues[count][block]
        return max(0, count)
