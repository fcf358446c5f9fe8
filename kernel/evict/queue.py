"""What policies with a queue of their own share: blocks in an order, and taking those from its head that can go.

The papers' caches hold single objects.  Here a block can go only when nobody maps it and no child of it is left on the device,
so one rule is added to each of them: *a block that cannot go when its turn comes starts again at the tail*.  Blocks of one
call are queued deepest first, so that along a prefix the turn of a child comes before its parent's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from .protocol import BlockView

CHUNK: Final = 64  # blocks asked about at once
LOOK: Final = 512  # blocks looked at in one call: beyond, the kernel's least recently used must do

Queue = dict[int, None]  # a dict keeps insertion order: its first key is the head


def push(queue: Queue, blocks: Sequence[int]) -> None:
    """To the tail, deepest first; those already there move."""
    for block in reversed(blocks):
        queue.pop(block, None)
        queue[block] = None


def drop(queue: Queue, blocks: Iterable[int]) -> None:
    for block in blocks:
        queue.pop(block, None)


def stays(block: int) -> bool:
    """The rule of a queue whose blocks get no second chance."""
    return False


def take(
    view: BlockView,
    device: int,
    queue: Queue,
    want: int,
    spare: Callable[[int], bool] = stays,
    saved: Callable[[int], None] | None = None,
) -> list[int]:
    """Up to `want` blocks from the head that can go, first to go first.  They stay in the queue until they are removed.

    spare(block) is asked once for each block whose turn comes and may change the caller's marks; who is spared
    goes to `saved`, the tail of this queue if that is None.
    """
    found: list[int] = []
    looked = 0
    while looked < min(LOOK, len(queue)) and len(found) < want:
        heads = list(islice(queue, len(found), len(found) + CHUNK))
        if not heads:
            break
        looked += len(heads)
        able = view.evictable(device, found + heads, len(found) + CHUNK)[len(found) :]
        can = set(able)
        for block in heads:
            if len(found) == want:
                break
            if block not in can:
                del queue[block]
                queue[block] = None
            elif spare(block):
                del queue[block]
                if saved is None:
                    queue[block] = None
                else:
                    saved(block)
            else:
                found.append(block)
    return found


class Ghosts:
    """Keys of the blocks that left last, the oldest forgotten beyond a number."""

    def __init__(self) -> None:
        self.keys: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, keys: Iterable[int], limit: int) -> None:
        for key in keys:
            self.keys.pop(key, None)
            self.keys[key] = None
        self.trim(limit)

    def trim(self, limit: int) -> None:
        while len(self.keys) > max(0, limit):
            del self.keys[next(iter(self.keys))]

    def forget(self, key: int) -> bool:
        """True if it was there."""
        if key not in self.keys:
            return False
        del self.keys[key]
        return True
