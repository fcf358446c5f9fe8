"""`attnix dmesg`: the kernel's log."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.text import Text

from ..output import JsonOption, SocketOption, call_system, print_json, show

_STYLES: Final = {"warning": "yellow", "error": "red"}


def dmesg(
    since: Annotated[int, typer.Option(help="Only entries after this number.")] = 0,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Print the kernel's log, oldest first.  Times are seconds on the machine's monotonic clock."""
    with call_system(socket, "dmesg") as system:
        found = system.dmesg(since)
    if as_json:
        print_json(found)
        return
    for row in found.rows:
        line = Text(f"[{row.at_ns / 1e9:12.6f}] {row.number:>4} {row.level:<7} {row.text}", _STYLES.get(row.level, ""))
        show(line)
