"""`attnix ps`: who is there, and what their KV weighs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from attnix.syscalls.types import ContextRow, ProcessRow, PsResult

from ..output import JsonOption, SocketOption, call_system, print_json, show, table
from ..units import age, count, size


def ps(
    contexts: Annotated[bool, typer.Option("--contexts", "-c", help="A line per context, too.")] = False,
    pid: Annotated[int, typer.Option("--pid", "-p", help="Only this process.")] = 0,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """List processes (this command's own left out).

    KV is all of a process's tokens in hbm; PSS divides each shared frame by its sharers, so PSS adds up to what is used.
    GROUP is a uid, or a uid and the name of a sub-group of its.
    """
    with call_system(socket, "ps") as system:
        rows = system.ps(pid).processes
        own = system.server.pid
    rows = tuple(row for row in rows if row.pid != own)
    if as_json:
        print_json(PsResult(rows))
    else:
        show(process_table(rows, contexts))


def process_table(rows: tuple[ProcessRow, ...], contexts: bool) -> Table:
    """A line per process; with `contexts` one more per context, indented."""
    made = table(
        ">PID", ">PPID", "GROUP", "NAME", "STATE", ">NI", ">CTX", ">TOKENS", ">KV", ">PSS", ">COMP", ">HIT", ">AGE"
    )
    for row in rows:
        made.add_row(
            str(row.pid), str(row.parent), row.group.removeprefix("uid:") or "-", row.name or "-", row.state, str(row.nice), str(len(row.contexts)),
            count(row.tokens), size(row.kv_bytes), size(row.proportional_bytes), count(row.usage.computed_tokens),
            count(row.usage.hit_tokens), age(row.age_ns),
        )  # fmt: skip
        for context in row.contexts if contexts else ():
            made.add_row(*_context_cells(context), style="dim")
    return made


def _context_cells(row: ContextRow) -> tuple[str, ...]:
    return (
        "", "", "", f"  cid {row.cid}", row.state, "", row.device, count(row.tokens), size(row.kv_bytes),
        size(row.proportional_bytes), count(row.usage.computed_tokens), count(row.usage.hit_tokens), "",
    )  # fmt: skip
