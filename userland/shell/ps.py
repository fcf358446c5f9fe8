"""`attnix ps`: who is there, and what their KV weighs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from attnix.syscalls.types import ContextRow, ProcessRow, PsResult

from ..output import FromOption, JsonOption, SocketOption, look_at, print_json, show, table
from ..units import age, count, size
from .waits import soonest, until

LongOption = Annotated[
    bool, typer.Option("--long", "-l", help="Parent, tokens computed and found, and oom score, too.")
]


def ps(
    contexts: Annotated[bool, typer.Option("--contexts", "-c", help="A line per context, too.")] = False,
    long: LongOption = False,
    pid: Annotated[int, typer.Option("--pid", "-p", help="Only this process.")] = 0,
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """List processes (this command's own left out).

    KV is all of a process's tokens in hbm, its resident set; PSS divides each shared frame by its sharers, so PSS adds up to
    what is used.  GROUP is a uid, or a uid and the name of a sub-group of its.  TOOL is what it waits for and UNTIL when that
    is expected: `by` stands before the time at which the wait is given up, where nobody knows when the answer comes.
    The higher the OOM score, the sooner a process is ended when memory runs out.
    """
    with look_at(socket, "ps", source) as system:
        rows = system.ps(pid).processes
        own = system.server.pid
    rows = tuple(row for row in rows if row.pid != own)
    if as_json:
        print_json(PsResult(rows))
    else:
        show(process_table(rows, contexts, long))


def process_table(rows: tuple[ProcessRow, ...], contexts: bool, long: bool = False) -> Table:
    """A line per process; with `contexts` one more per context, indented."""
    made = table(
        ">PID", *([">PPID"] if long else []), "GROUP", "NAME", "STATE", ">NI", ">CTX", ">TOKENS", ">KV", ">PSS"
    )
    for column in ([">COMP", ">HIT", ">OOM", ">ADJ"] if long else []) + [">AGE", "TOOL", ">UNTIL"]:
        made.add_column(column.lstrip(">"), justify="right" if column[0] == ">" else "left", no_wrap=True)
    for row in rows:
        made.add_row(*_cells(row, long))
        for context in row.contexts if contexts else ():
            made.add_row(*_context_cells(context, long), style="dim")
    return made


def _cells(row: ProcessRow, long: bool) -> list[str]:
    group = row.group.removeprefix("uid:") or str(row.uid)
    more = (row.usage.computed_tokens, row.usage.hit_tokens, row.oom_score, row.oom_score_adj)
    return [
        str(row.pid), *([str(row.parent)] if long else []), group, row.name or "-", row.state, str(row.nice),
        str(len(row.contexts)), count(row.tokens), size(row.kv_bytes), size(row.proportional_bytes),
        *(map(count, more) if long else []), age(row.age_ns), *soonest(row.contexts),
    ]  # fmt: skip


def _context_cells(row: ContextRow, long: bool) -> list[str]:
    more = [count(row.usage.computed_tokens), count(row.usage.hit_tokens), "", ""]
    return [
        "", *([""] if long else []), "", f"  cid {row.cid}", row.state, "", row.device, count(row.tokens), size(row.kv_bytes),
        size(row.proportional_bytes), *(more if long else []), "", row.tool or "-", until(row),
    ]  # fmt: skip
