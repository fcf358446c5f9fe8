"""First in, first out: the block that came to the device longest ago goes first, however often it was used.

The yardstick of what any policy must beat: a flood of one-use prompts pushes out everything.
"""

from __future__ import annotations

from collections.abc import Sequence

from .protocol import BlockView
from .queue import Queue, drop, push, take


class Fifo:
    name = "fifo"
    listens = True

    def __init__(self) -> None:
        self.queue: Queue = {}

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        return take(view, device, self.queue, want)

    def inserted(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        push(self.queue, blocks)

    def used(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        drop(self.queue, blocks)
