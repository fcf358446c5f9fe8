"""`attnix group`: who is charged for what, and how much each may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import typer
from rich.table import Table

from attnix.syscalls.types import GroupRow, GroupsResult, LimitRow

from ..output import FromOption, JsonOption, SocketOption, call_system, look_at, print_json, show, table
from ..units import count, parse_size, size

group = typer.Typer(
    no_args_is_help=True, help="Groups of processes: what each uses, and its limits (see docs/groups.md)."
)

_KEEP: Final = -1  # setlimit: leave it as it is


@group.command("ls")
def ls(
    name: Annotated[
        str, typer.Argument(metavar="[GROUP]", help="One group, uid:N or uid:N/NAME; otherwise all that you may see.")
    ] = "",
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """List groups: a line each, and below it a line per limit or resource in use.

    Frames are charged to one group, the one that first needed them; what a sub-group uses is in its uid's numbers too. PSS
    divides each shared frame by its sharers.
    """
    with look_at(socket, "group", source) as system:
        rows = system.groups(name).rows
        frame_bytes = {row.tier: row.frame_bytes for row in system.tiers().tiers}
    if as_json:
        print_json(GroupsResult(rows))
    else:
        show(group_table(rows, frame_bytes))


@group.command("set")
def set_(
    name: Annotated[str, typer.Argument(metavar="GROUP", help="uid:N, or uid:N/NAME, made when it is new.")],
    resource: Annotated[str, typer.Argument(metavar="RESOURCE", help="hbm, dram, nvme, contexts, tokens_s or weight.")],
    hard: Annotated[
        str,
        typer.Option(
            help="Never more: frames (512) or bytes (24MiB); of the rest a number. 0 or none: no limit.",
            metavar="AMOUNT",
        ),
    ] = "",
    soft: Annotated[str, typer.Option(help="Guaranteed against other groups: as --hard.", metavar="AMOUNT")] = "",
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Set a limit of a group; what is not given stays as it is.

    Bytes become whole frames: of a limit the most that fit in, of a guarantee the fewest that hold them. A weight is given
    with --hard. Limits end with the daemon: `attnix boot --groups FILE` sets those that shall be there again.
    """
    if not hard and not soft:
        raise typer.BadParameter("give --hard or --soft")
    with call_system(socket, "group") as system:
        frame_bytes = {row.tier: row.frame_bytes for row in system.tiers().tiers}
        low = _KEEP if not soft else amount(soft, frame_bytes.get(resource, 0), up=True)
        high = _KEEP if not hard else amount(hard, frame_bytes.get(resource, 0), up=False)
        row = system.setlimit(name, resource, low, high)
    if as_json:
        print_json(row)
    else:
        show(group_table((row,), frame_bytes))


def amount(text: str, frame_bytes: int, *, up: bool) -> int:
    """Frames or a plain number; `none` is 0.  frame_bytes 0: not a resource that is counted in frames.
    Error: typer.BadParameter."""
    if text == "none":
        return 0
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        if not text[-1:].isalpha():  # neither whole frames nor bytes with their unit: 1.5, -1
            raise ValueError
        bytes_ = parse_size(text)
    except ValueError:
        wanted = "frames (512), bytes (24MiB)" if frame_bytes else "a whole number"
        raise typer.BadParameter(f"{text!r} is no amount of this resource: write {wanted} or none") from None
    if not frame_bytes:
        raise typer.BadParameter(f"{text!r}: bytes are for hbm, dram and nvme, where there is such a tier")
    frames = -(-bytes_ // frame_bytes) if up else bytes_ // frame_bytes
    if not frames and bytes_:
        raise typer.BadParameter(f"{text} is less than one frame of {size(frame_bytes)}")
    return frames


def group_table(rows: tuple[GroupRow, ...], frame_bytes: Mapping[str, int]) -> Table:
    """A line per group and one per resource that is limited or in use; frames also in bytes."""
    made = table("GROUP", ">WEIGHT", ">PROC", ">PSS", ">SERVED", ">HELD", "RESOURCE", ">USED", ">SOFT", ">HARD")
    for row in rows:
        made.add_row(
            row.name, str(row.weight), str(row.processes), size(row.proportional_bytes), count(row.served_tokens),
            count(row.throttled), "", "", "", "",
        )  # fmt: skip
        for limit in row.limits:
            if limit.used or limit.soft or limit.hard:
                made.add_row("", "", "", "", "", "", *_cells(limit, frame_bytes), style="dim")
    return made


def _cells(limit: LimitRow, frame_bytes: Mapping[str, int]) -> tuple[str, str, str, str]:
    each = frame_bytes.get(limit.resource, 0)

    def cell(amount: int) -> str:
        if not each or not amount:
            return count(amount)
        return f"{count(amount)} ({size(amount * each)})"

    return (
        limit.resource,
        cell(limit.used),
        cell(limit.soft) if limit.soft else "-",
        cell(limit.hard) if limit.hard else "-",
    )
