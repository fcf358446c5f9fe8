"""ARC: recency and frequency share the cache, and misses that either would have caught move the border (Megiddo, Modha, "ARC: a
self-tuning, low overhead replacement cache", FAST 2003, figure 4).

One difference: the kernel makes room before it says for what, so a miss moves the border for the next eviction, not
for its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from .protocol import BlockView
from .queue import Ghosts, Queue, drop, push, take


class Arc:
    """t1: used once, t2: used more often (least recent first); b1, b2: keys of what left them; p: wanted size of t1."""

    name = "arc"
    listens = True

    def __init__(self) -> None:
        self.t1: Queue = {}
        self.t2: Queue = {}
        self.b1 = Ghosts()
        self.b2 = Ghosts()
        self.p = 0.0
        self.key: dict[int, int] = {}

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        over = min(want, max(0, len(self.t1) - int(self.p)))
        found = take(view, device, self.t1, over)
        found += take(view, device, self.t2, want - len(found))
        if len(found) < want:
            chosen = set(found)
            found += [block for block in take(view, device, self.t1, want) if block not in chosen][: want - len(found)]
        return found

    def inserted(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        capacity = view.capacity_frames(device)
        for block, key in zip(reversed(blocks), reversed(view.keys(blocks)), strict=True):
            drop(self.t1, (block,))
            drop(self.t2, (block,))
            self.key[block] = key
            sizes = len(self.b1), len(self.b2)
            if self.b1.forget(key):
                self.p = min(capacity, self.p + max(1.0, sizes[1] / sizes[0]))
                self.t2[block] = None
            elif self.b2.forget(key):
                self.p = max(0.0, self.p - max(1.0, sizes[0] / sizes[1]))
                self.t2[block] = None
            else:
                self.t1[block] = None
        self.b1.trim(capacity - len(self.t1))
        self.b2.trim(2 * capacity - len(self.t1) - len(self.t2) - len(self.b1))

    def used(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        drop(self.t1, blocks)
        push(self.t2, blocks)

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        capacity = view.capacity_frames(device)
        for block in blocks:
            key = self.key.pop(block, None)
            if key is None:
                continue
            ghosts = self.b1 if block in self.t1 else self.b2
            ghosts.add((key,), capacity)
            self.t1.pop(block, None)
            self.t2.pop(block, None)
