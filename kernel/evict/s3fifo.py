"""S3-FIFO: three queues are enough (Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023,
section 4).

A small queue (a tenth) takes what is new, so that one-use blocks leave early; what was used more than once there moves
to the main queue, the rest leaves and its key goes to the ghost queue; what returns while its key is there enters main.
Main goes round like a clock with two bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .protocol import BlockView
from .queue import Ghosts, Queue, take

SMALL_SHARE: Final = 0.1
MOST: Final = 3


class S3fifo:
    name = "s3fifo"
    listens = True

    def __init__(self) -> None:
        self.small: Queue = {}
        self.main: Queue = {}
        self.uses: dict[int, int] = {}
        self.key: dict[int, int] = {}
        self.ghosts = Ghosts()

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        found: list[int] = []
        target = max(1, int(SMALL_SHARE * view.capacity_frames(device)))
        if len(self.small) >= target or not self.main:
            most = want if not self.main else min(want, len(self.small) - target + 1)
            found = take(view, device, self.small, most, self._promote, self._to_main)
        if len(found) < want:
            # A block of main whose bits are set gives one of them for another round.
            for _ in range(MOST + 1):
                found += take(view, device, self.main, want - len(found), self._again)
                if len(found) >= want:
                    break
        if len(found) < want:
            chosen = set(found)
            more = take(view, device, self.small, want, self._promote, self._to_main)
            found += [block for block in more if block not in chosen][: want - len(found)]
        return found

    def inserted(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        for block, key in zip(reversed(blocks), reversed(view.keys(blocks)), strict=True):
            self._leave(block)
            self.uses[block] = 0
            self.key[block] = key
            (self.main if self.ghosts.forget(key) else self.small)[block] = None

    def used(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        uses = self.uses
        for block in blocks:
            uses[block] = min(MOST, uses.get(block, 0) + 1)

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        limit = view.capacity_frames(device) - max(1, int(SMALL_SHARE * view.capacity_frames(device)))
        self.ghosts.add((self.key[block] for block in blocks if block in self.small), limit)
        for block in blocks:
            self._leave(block)

    def _leave(self, block: int) -> None:
        self.small.pop(block, None)
        self.main.pop(block, None)
        self.uses.pop(block, None)
        self.key.pop(block, None)

    def _promote(self, block: int) -> bool:
        return self.uses.get(block, 0) > 1

    def _to_main(self, block: int) -> None:
        self.uses[block] = 0
        self.main[block] = None

    def _again(self, block: int) -> bool:
        if self.uses.get(block, 0) == 0:
            return False
        self.uses[block] -= 1
        return True
