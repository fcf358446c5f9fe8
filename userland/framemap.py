"""The frame map: which frame of a device holds whose blocks, from `tiers` and the contexts' page tables.

One character is one frame, so that it reads without colours too:

    a b c ...  mapped by one context, the one that the legend gives this letter
    2 3 ... 9  shared by so many page-table entries, + by ten or more
    .          mapped by nobody: free, or cache that waits to be wanted again
"""

from __future__ import annotations

import string
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from rich.text import Text

from attnix.syscalls.types import PagemapResult, TierRow

LETTERS: Final = string.ascii_lowercase + string.ascii_uppercase
COLOURS: Final = ("cyan", "green", "magenta", "blue", "red", "bright_cyan", "bright_green", "bright_magenta")
SHARED_STYLE: Final = "bold black on yellow"
UNMAPPED: Final = "·"


class Mapped(NamedTuple):
    """A context and its page table."""

    name: str
    cid: int
    pagemap: PagemapResult


class Owner(NamedTuple):
    """One line of the legend."""

    letter: str
    style: str
    name: str
    cid: int
    private_frames: int
    shared_frames: int


class FrameMap(NamedTuple):
    """cells  one per frame of the device: 0 unmapped, > 0 sharers, < 0 the only owner, as -1 - index into owners"""

    device: str
    cells: array[int]
    owners: tuple[Owner, ...]

    @property
    def shared_frames(self) -> int:
        return sum(1 for cell in self.cells if cell > 0)

    @property
    def mapped_frames(self) -> int:
        return sum(1 for cell in self.cells if cell)


def frame_map(tier: TierRow, contexts: Sequence[Mapped]) -> FrameMap:
    """The map of one device; contexts on other devices are left out."""
    here = [mapped for mapped in contexts if mapped.pagemap.device == tier.device]
    cells = array("i", bytes(4 * tier.capacity_frames))
    for index, mapped in enumerate(here):
        sharers = array("i", mapped.pagemap.sharers)
        for frame, count in zip(_frames(mapped, len(cells)), sharers, strict=True):
            if frame is None:
                continue
            # Page tables are read one after the other: what two of them name is shared, whatever the counts said then.
            cells[frame] = max(2, count, cells[frame]) if count > 1 or cells[frame] else -1 - index
    owners: list[Owner] = []
    for index, mapped in enumerate(here):
        signs = [cells[frame] for frame in _frames(mapped, len(cells)) if frame is not None]
        own = sum(1 for sign in signs if sign < 0)
        style = COLOURS[index % len(COLOURS)]
        owners.append(Owner(LETTERS[index % len(LETTERS)], style, mapped.name, mapped.cid, own, len(signs) - own))
    return FrameMap(tier.device, cells, tuple(owners))


def _frames(mapped: Mapped, capacity: int) -> list[int | None]:
    """Its frame per logical block, None for a block that has none here."""
    return [frame if 0 <= frame < capacity else None for frame in array("i", mapped.pagemap.frames)]


def cell_text(cell: int, owners: Sequence[Owner]) -> tuple[str, str]:
    """(character, style) of one frame."""
    if cell == 0:
        return UNMAPPED, "dim"
    if cell > 0:
        return (str(cell) if cell < 10 else "+"), SHARED_STYLE
    owner = owners[-1 - cell]
    return owner.letter, owner.style


def draw(seen: FrameMap, columns: int, max_rows: int = 64) -> list[Text]:
    """Lines of `columns` frames, each after the number of its first; runs of rows with nothing mapped are one line."""
    width = len(str(max(0, len(seen.cells) - 1)))
    lines: list[Text] = []
    empty = drawn = 0
    starts = range(0, len(seen.cells), columns)
    for start in starts:
        row = seen.cells[start : start + columns]
        if not any(row):
            empty += 1
            continue
        if drawn == max_rows:
            rest = sum(1 for cell in seen.cells[start:] if cell)
            lines += _gap(empty, columns, width)
            lines.append(Text(f"{'':>{width}}  ... {rest} more mapped frames below", style="dim"))
            return lines
        lines += _gap(empty, columns, width)
        empty = 0
        line = Text(f"{start:>{width}}  ", style="dim")
        for cell in row:
            line.append(*cell_text(cell, seen.owners))
        lines.append(line)
        drawn += 1
    # The last row may be short; what is elided at the end is counted in frames that exist.
    lines += _gap(empty, columns, width, frames=len(seen.cells) - starts[-empty] if empty else 0)
    return lines


def _gap(rows: int, columns: int, width: int, frames: int = 0) -> list[Text]:
    if not rows:
        return []
    return [Text(f"{'':>{width}}  {UNMAPPED} x {frames or rows * columns}", style="dim")]


def legend(seen: FrameMap) -> list[Text]:
    """One line per context, and what the other signs mean."""
    wide = max((len(owner.name) for owner in seen.owners), default=0)
    lines = []
    for owner in seen.owners:
        line = Text("  ").append(f"{owner.letter} {owner.name or '-':<{wide}}", owner.style)
        line.append(f"  cid {owner.cid}: {owner.private_frames} own, {owner.shared_frames} shared", "dim")
        lines.append(line)
    line = (
        Text("  ")
        .append("2", SHARED_STYLE)
        .append("…", SHARED_STYLE)
        .append("9", SHARED_STYLE)
        .append("+", SHARED_STYLE)
    )
    line.append(" shared by so many  ").append(UNMAPPED, "dim").append(" unmapped: free, or cache", "dim")
    return [*lines, line]
