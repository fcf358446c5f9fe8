"""`attnix pmap`: one context's page table, or the frame map of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer
from rich.console import Console

from attnix.syscalls.exceptions import AccessDenied, NotFound
from attnix.syscalls.types import PagemapResult, ProcessRow, TierRow

from ..framemap import Mapped, draw, frame_map, legend
from ..output import FromOption, JsonOption, SocketOption, System, cid_number, console, look_at, print_json, show, table
from ..units import age, count, size
from .blocks import FULL, INDEXED, VALID, WIRED, Run, blocks_of, frames_text, runs, span_text

_HBM: Final = "hbm"
_FLAGS: Final = ((FULL, "F"), (INDEXED, "I"), (VALID, "V"), (WIRED, "W"))
_MARGIN: Final = 12  # columns for the frame number
_WIDEST: Final = 96


def pmap(
    cid: Annotated[
        int, typer.Argument(metavar="[CTX]", help="The context's cid, as `attnix ps -c` shows it.", parser=cid_number)
    ] = 0,
    every: Annotated[bool, typer.Option("--all", "-a", help="A line per block: fold no runs.")] = False,
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """Show a context's page table; without CTX, draw which frame belongs to whom.

    Blocks that follow each other and differ in frame, hits and age only are one line.  TIER is the fastest device that has
    the block, `-` when it is in none and will be computed.  Flags: F full, I indexed (others can find it), V valid (computed),
    W wired (in the running batch).  AGE is the time since the block was last wanted.  COPIES are all devices that hold it;
    only hbm has page tables, so only hbm is drawn as a map.
    """
    with look_at(socket, "pmap", source) as system:
        if cid:
            page_table = system.pagemap(0, cid)
            if as_json:
                print_json(page_table)
            else:
                devices = [tier.device for tier in system.tiers().tiers]
                print_page_table(console(), page_table, devices, not every)
            return
        tiers = system.tiers().tiers
        mapped = collect(system, system.ps().processes)
    if as_json:
        print_json({"tiers": tiers, "contexts": [{"name": m.name, "pagemap": m.pagemap} for m in mapped]})
        return
    for tier in tiers:
        if tier.tier == _HBM:
            print_frame_map(console(), tier, mapped)
        else:
            print_store(console(), tier)


def collect(system: System, processes: tuple[ProcessRow, ...]) -> list[Mapped]:
    """The page tables of every context that this uid may see.  One that ends meanwhile is left out."""
    found = []
    for process in processes:
        for context in process.contexts:
            try:
                found.append(Mapped(process.name, context.cid, system.pagemap(0, context.cid)))
            except (NotFound, AccessDenied):
                continue
    return found


def print_page_table(to: Console, seen: PagemapResult, devices: Sequence[str], folded: bool = True) -> None:
    """A line per run of blocks that are alike, or per block.  devices: their names, by number."""
    show(f"cid {seen.cid} on {seen.device}: {count(seen.tokens)} tokens in blocks of {seen.block_tokens}", to)
    blocks = blocks_of(seen)
    made = table(">BLOCK", ">TOKENS", "TIER", ">FRAME", ">SHIFT", ">SHARERS", "FLAGS", ">HITS", ">AGE", "~COPIES")
    for run in runs(blocks) if folded else (run for block in blocks for run in runs([block])):
        made.add_row(*_cells(run, seen.device, devices), style="yellow" if run.first.sharers > 1 else "")
    show(made, to)


def _cells(run: Run, device: str, devices: Sequence[str]) -> tuple[str, ...]:
    first, last = run.first, run.last
    end = last.start + last.tokens
    held = [name for number, name in enumerate(devices) if first.copies >> number & 1]
    return (
        span_text(first.number, last.number), span_text(first.start, end - 1) if end > first.start else "-",
        device if first.frame >= 0 else held[0] if held else "-", frames_text(run.frames), str(first.shift), str(first.sharers),
        "".join(letter if first.flags & bit else "-" for bit, letter in _FLAGS), span_text(*run.hits), _ages(run.ages_ms),
        " ".join(held) or "-",
    )  # fmt: skip


def _ages(ages_ms: tuple[int, int]) -> str:
    """Of a run the latest and the longest ago, when they read differently."""
    if ages_ms[0] < 0:
        return "-"
    least, most = (age(ms * 1_000_000) for ms in ages_ms)
    return least if least == most else f"{least} - {most}"


def print_store(to: Console, tier: TierRow) -> None:
    """One line about a tier that has no page tables."""
    held = tier.capacity_frames - tier.free_frames
    show(
        f"{tier.device}: {count(tier.capacity_frames)} frames of {size(tier.frame_bytes)}; "
        f"{count(held)} hold copies ({size(held * tier.frame_bytes)})",
        to,
    )


def print_frame_map(to: Console, tier: TierRow, mapped: list[Mapped]) -> None:
    """The map, its legend, and a line that adds up."""
    seen = frame_map(tier, mapped)
    used = seen.mapped_frames
    show(
        f"{tier.device}: {count(tier.capacity_frames)} frames of {size(tier.frame_bytes)}; "
        f"{used} mapped ({size(used * tier.frame_bytes)}), {seen.shared_frames} of them shared",
        to,
    )
    for line in draw(seen, columns=max(16, (min(to.width if to.is_terminal else _WIDEST, 100) - _MARGIN) // 8 * 8)):
        show(line, to)
    for line in legend(seen):
        show(line, to)
