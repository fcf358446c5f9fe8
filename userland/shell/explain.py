"""`attnix explain`: why the kernel evicted, kept, loaded or computed something."""

from __future__ import annotations

from typing import Annotated

import typer

from attnix.syscalls.exceptions import AccessDenied, NotFound
from attnix.syscalls.types import DecisionRow, ExplainResult

from ..output import FromOption, JsonOption, SocketOption, System, cid_number, look_at, print_json, show


def explain(
    cid: Annotated[
        int, typer.Argument(metavar="[CTX]", help="A context's cid, as `attnix ps -c` shows it.", parser=cid_number)
    ] = 0,
    block: Annotated[int, typer.Option("--block", "-b", help="Only decisions that touched this block.")] = -1,
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """Tell the kernel's decisions about a context or a block, oldest first, with the numbers that decided.

    Without either the latest of all, which the daemon's own user may see: so may it those about a context that has ended.
    """
    with look_at(socket, "explain", source) as system:
        try:
            found = system.explain(0, cid, block)
        except NotFound as gone:
            found = _of_the_gone(system, cid, gone)
    if as_json:
        print_json(found)
        return
    for row in found.rows:
        show(line(row))
    if not found.rows:
        show("no decision is remembered (the ring holds the latest ones only)")


def _of_the_gone(system: System, cid: int, gone: NotFound) -> ExplainResult:
    """A context that has ended is what people ask about: its decisions are remembered among those about all.
    Error: `gone`, when there are none, or they are not for this user."""
    try:
        rows = tuple(row for row in system.explain().rows if row.cid == cid)
    except AccessDenied:
        rows = ()
    if not rows:
        raise gone
    return ExplainResult(rows)


def line(row: DecisionRow) -> str:
    """`[ 12.345678] evict hbm0 cid 3 blocks 4-7: ...`"""
    last = row.block + row.blocks - 1
    span = "" if row.block < 0 else f" block {row.block}" if row.blocks < 2 else f" blocks {row.block}-{last}"
    whose = f" cid {row.cid}" if row.cid else ""
    return f"[{row.at_ns / 1e9:12.6f}] {row.what} {row.device}{whose}{span}: {row.why}"
