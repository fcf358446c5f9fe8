"""`attnix dmesg`: the kernel's log."""

from __future__ import annotations

import time
from typing import Annotated, Final

import typer
from rich.text import Text

from attnix.syscalls.types import DmesgRow

from ..errors import CommandError
from ..output import FromOption, JsonOption, SocketOption, look_at, print_json, show

_STYLES: Final = {"warning": "yellow", "error": "red"}
_POLL_S: Final = 0.5


def dmesg(
    since: Annotated[int, typer.Option(help="Only entries after this number.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """Print the kernel's log, oldest first.  Times are seconds on the machine's monotonic clock."""
    if follow and source:
        raise CommandError(f"dmesg --follow needs a running system: {source} is a dump, which is only looked at")
    with look_at(socket, "dmesg", source) as system:
        found = system.dmesg(since)
        if as_json and not follow:
            print_json(found)
            return
        try:
            while True:
                for row in found.rows:
                    print_json(row) if as_json else show(line(row))
                    since = row.number
                if not follow:
                    return
                time.sleep(_POLL_S)
                found = system.dmesg(since)
        except KeyboardInterrupt:  # that is how it is ended
            return


def line(row: DmesgRow) -> Text:
    """`[   12.345678]    7 warning hbm0: driver is down`"""
    return Text(f"[{row.at_ns / 1e9:12.6f}] {row.number:>4} {row.level:<7} {row.text}", _STYLES.get(row.level, ""))
