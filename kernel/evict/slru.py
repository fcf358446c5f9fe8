"""Segmented LRU: a block must be used once more before it is protected from those that are not (Karedla, Love, Wherry,
"Caching strategies to improve disk system performance", IEEE Computer 1994).

New blocks enter probation; a use moves a block to the recent end of the protected segment, whose least recent
overflow returns to the recent end of probation.  Victims come from probation's least recent end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .protocol import BlockView
from .queue import Queue, drop, push, take

PROTECTED_SHARE: Final = 0.8


class Slru:
    name = "slru"
    listens = True

    def __init__(self) -> None:
        self.probation: Queue = {}
        self.protected: Queue = {}

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        found = take(view, device, self.probation, want)
        return found + take(view, device, self.protected, want - len(found))

    def inserted(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        drop(self.protected, blocks)
        push(self.probation, blocks)

    def used(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        drop(self.probation, blocks)
        push(self.protected, blocks)
        over = len(self.protected) - max(1, int(PROTECTED_SHARE * view.capacity_frames(device)))
        for _ in range(over):
            block = next(iter(self.protected))
            del self.protected[block]
            self.probation[block] = None

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        drop(self.probation, blocks)
        drop(self.protected, blocks)
