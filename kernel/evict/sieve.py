"""SIEVE: one queue, one bit, and a hand that does not move what it spares (Zhang, Yang, Yue, Vigfusson, Rashmi, "SIEVE is
simpler than LRU", NSDI 2024, section 3).

The hand goes from the oldest block towards the newest: it clears the bit of a used block and leaves it where it is, and takes
the first without one; past the newest it starts at the oldest again.  New blocks enter at the new end.  Here the queue is
kept as the part behind the hand and the part ahead of it, each oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from .protocol import BlockView
from .queue import CHUNK, LOOK, Queue, drop, push


class Sieve:
    name = "sieve"
    listens = True

    def __init__(self) -> None:
        self.behind: Queue = {}
        self.ahead: Queue = {}
        self.visited: set[int] = set()

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        found: list[int] = []
        looked = 0
        while looked < LOOK and len(found) < want:
            if not self.ahead:
                self.ahead, self.behind = self.behind, {}
            heads = list(islice(self.ahead, CHUNK))
            if not heads:
                break
            unused = [block for block in heads if block not in self.visited]
            can = set(view.evictable(device, found + unused, len(found) + CHUNK))
            for block in heads:
                if len(found) == want:
                    break
                looked += 1
                del self.ahead[block]
                self.behind[block] = None
                if block in self.visited:
                    self.visited.discard(block)
                elif block in can and block not in found:
                    found.append(block)
        return found

    def inserted(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        drop(self.behind, blocks)
        if not self.ahead:
            self.ahead, self.behind = self.behind, {}
        self.visited.difference_update(blocks)
        push(self.ahead, blocks)

    def used(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        self.visited.update(blocks)

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        drop(self.behind, blocks)
        drop(self.ahead, blocks)
        self.visited.difference_update(blocks)
