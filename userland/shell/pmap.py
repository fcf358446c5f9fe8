"""`attnix pmap`: one context's page table, or the frame map of all."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Final

import typer
from rich.console import Console

from attnix.syscalls import Client
from attnix.syscalls.exceptions import AccessDenied, NotFound
from attnix.syscalls.types import PagemapResult, ProcessRow, TierRow

from ..framemap import Mapped, draw, frame_map, legend
from ..output import JsonOption, SocketOption, call_system, console, print_json, show, table
from ..units import count, size

_HBM: Final = "hbm"
_FLAGS: Final = ((1, "F"), (2, "I"), (4, "V"), (8, "W"))
_MARGIN: Final = 12  # columns for the frame number


def pmap(
    cid: Annotated[int, typer.Argument(metavar="[CTX]", help="The context's cid, as `attnix ps -c` shows it.")] = 0,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Show a context's page table; without CTX, draw which frame belongs to whom.

    Flags: F full, I indexed (others can find it), V valid (computed), W wired (in the running batch).
    COPIES are the devices that hold the block's content; only hbm has page tables, so only hbm is drawn as a map.
    """
    with call_system(socket, "pmap") as system:
        if cid:
            page_table = system.pagemap(0, cid)
            if as_json:
                print_json(page_table)
            else:
                devices = [tier.device for tier in system.tiers().tiers]
                print_page_table(console(), page_table, devices)
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


def collect(system: Client, processes: tuple[ProcessRow, ...]) -> list[Mapped]:
    """The page tables of every context that this uid may see.  One that ends meanwhile is left out."""
    found = []
    for process in processes:
        for context in process.contexts:
            try:
                found.append(Mapped(process.name, context.cid, system.pagemap(0, context.cid)))
            except (NotFound, AccessDenied):
                continue
    return found


def print_page_table(to: Console, seen: PagemapResult, devices: Sequence[str]) -> None:
    """A line per logical block.  devices: their names, by number."""
    show(f"cid {seen.cid} on {seen.device}: {count(seen.tokens)} tokens in blocks of {seen.block_tokens}", to)
    made = table(">BLOCK", ">TOKENS", ">FRAME", ">SHIFT", ">COUNT", ">SHARERS", "FLAGS", ">HITS")
    copies = [copies_text(bits, devices) for bits in seen.copies]
    if copies:
        made.add_column("COPIES", no_wrap=True)
    first = 0
    columns = (array(kind, data) for kind, data in zip("iihiBi", seen[4:10], strict=True))
    for block, (frame, shift, tokens, sharers, flags, hits) in enumerate(zip(*columns, strict=True)):
        letters = "".join(letter if flags & bit else "-" for bit, letter in _FLAGS)
        span = f"{first}-{first + tokens - 1}" if tokens else "-"
        cells = (block, span, frame if frame >= 0 else "-", shift, tokens, sharers, letters, hits)
        made.add_row(*map(str, cells), *copies[block : block + 1], style="yellow" if sharers > 1 else "")
        first += tokens
    show(made, to)


def copies_text(bits: int, devices: Sequence[str]) -> str:
    """Names of the devices whose bits are set; `-` for none."""
    return " ".join(name for number, name in enumerate(devices) if bits >> number & 1) or "-"


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
    for line in draw(seen, columns=max(16, (min(to.width, 100) - _MARGIN) // 8 * 8)):
        show(line, to)
    for line in legend(seen):
        show(line, to)
