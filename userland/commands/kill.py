"""`attnix kill`: signal a process of the system (not of the machine)."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from ..output import JsonOption, SocketOption, call_system, print_json

SIGNALS: Final = {"KILL": 9, "TERM": 15, "CONT": 18, "STOP": 19}


def signal_number(name: str) -> int:
    """A number as it is; TERM, SIGTERM, term by name.  Error: BadParameter."""
    if name.isdecimal():
        return int(name)
    try:
        return SIGNALS[name.upper().removeprefix("SIG")]
    except KeyError:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(SIGNALS)} and no number") from None


def kill(
    pids: Annotated[list[int], typer.Argument(metavar="PID...", help="As `attnix ps` shows them.", min=1)],
    signal: Annotated[str, typer.Option("--signal", "-s", help="TERM, KILL, STOP or CONT, or its number.")] = "TERM",
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Signal processes: TERM and KILL end them and release their contexts, STOP and CONT take them off the device and back."""
    number = signal_number(signal)
    with call_system(socket, "kill") as system:
        for pid in pids:
            system.kill(pid, number)
    if as_json:
        print_json({"pids": pids, "signal": number})
