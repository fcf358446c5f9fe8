"""`attnix lsctx`: every context, a line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer
from rich.table import Table

from attnix.syscalls.types import ContextRow

from ..output import FromOption, JsonOption, SocketOption, look_at, print_json, show, table
from ..units import count, size
from .waits import until


def lsctx(
    pid: Annotated[int, typer.Option("--pid", "-p", help="Only of this process.")] = 0,
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """List contexts.

    NAME is the one that it was published under, else that of its process in brackets.  IN HBM are the tokens that need not be
    loaded or computed when it goes on; SHARED its blocks that others map too.
    """
    with look_at(socket, "lsctx", source) as system:
        processes = system.ps(pid).processes
        published = {row.cid: row.name for row in system.names().rows if row.name}
    rows = tuple(context for process in processes for context in process.contexts)
    if as_json:
        print_json({"contexts": rows})
        return
    names = {c.cid: published.get(c.cid) or f"[{p.name or '-'}]" for p in processes for c in p.contexts}
    show(context_table(rows, names))


def context_table(rows: tuple[ContextRow, ...], names: Mapping[int, str]) -> Table:
    """A line per context, by cid."""
    made = table(
        ">CID",
        ">PID",
        "NAME",
        "STATE",
        "DEVICE",
        ">TOKENS",
        ">IN HBM",
        ">BLOCKS",
        ">SHARED",
        ">PSS",
        ">PARENT",
        "TOOL",
        ">UNTIL",
    )
    for row in sorted(rows):
        made.add_row(
            str(row.cid), str(row.pid), names[row.cid], row.state, row.device, count(row.tokens), count(row.cached_tokens),
            count(row.blocks), count(row.shared_blocks), size(row.proportional_bytes), str(row.parent or "-"), row.tool or "-",
            until(row),
        )  # fmt: skip
    return made
