"""`attnix nice`: who goes first, and who is ended first when memory runs out."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from ..output import JsonOption, SocketOption, call_system, print_json, show

_AS_IS: Final = -1001  # setpriority: leave the adjustment as it is


def nice(
    pid: Annotated[int, typer.Argument(metavar="PID", help="As `attnix ps` shows it.", min=1)],
    value: Annotated[
        int | None, typer.Argument(metavar="[VALUE]", help="From -20 (first) to 19 (last).", min=-20, max=19)
    ] = None,
    oom: Annotated[
        int | None,
        typer.Option(
            "--oom",
            metavar="ADJ",
            help="Added to the oom score: -1000 (never ended) to 1000 (first).",
            min=-1000,
            max=1000,
        ),
    ] = None,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Set a process's nice value, how willingly it is ended when memory runs out, or both; without either, show them."""
    with call_system(socket, "nice") as system:
        row = system.ps(pid).processes[0]
        if value is not None or oom is not None:
            system.setpriority(pid, row.nice if value is None else value, _AS_IS if oom is None else oom)
            row = system.ps(pid).processes[0]
    if as_json:
        print_json({"pid": pid, "nice": row.nice, "oom_score": row.oom_score, "oom_score_adj": row.oom_score_adj})
    else:
        show(f"pid {pid} {row.name}: nice {row.nice}, oom score {row.oom_score} (adjusted by {row.oom_score_adj})")
