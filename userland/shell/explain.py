"""`attnix explain`: why the kernel evicted, kept, loaded or computed something."""

from __future__ import annotations

from typing import Annotated

import typer

from attnix.syscalls.types import DecisionRow

from ..output import FromOption, JsonOption, SocketOption, cid_number, look_at, print_json, show


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

    Without either the latest of all, which the daemon's own user may see.
    """
    with look_at(socket, "explain", source) as system:
        found = system.explain(0, cid, block)
    if as_json:
        print_json(found)
        return
    for row in found.rows:
        show(line(row))
    if not found.rows:
        show("no decision is remembered (the ring holds the latest ones only)")


def line(row: DecisionRow) -> str:
    """`[ 12.345678] evict hbm0 cid 3 blocks 4-7: ...`"""
    last = row.block + row.blocks - 1
    span = "" if row.block < 0 else f" block {row.block}" if row.blocks < 2 else f" blocks {row.block}-{last}"
    whose = f" cid {row.cid}" if row.cid else ""
    return f"[{row.at_ns / 1e9:12.6f}] {row.what} {row.device}{whose}{span}: {row.why}"
