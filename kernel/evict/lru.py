"""Least recently used: the block whose last context let go of it longest ago goes first.

The core keeps that order itself, in a ring with lazy deletion.  A context gives its blocks back deepest first, so
along every prefix a leaf is older than its parent and goes before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .protocol import BlockView


class Lru:
    name = "lru"
    listens = False

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        return view.evictable(device, view.oldest(device, want + want // 2 + 16), want)

    def inserted(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def used(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None: ...
