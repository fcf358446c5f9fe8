"""`attnix strace`: another process's system calls, as they happen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import typer

from attnix.syscalls import Client
from attnix.syscalls.exceptions import ConnectionLost, NotFound
from attnix.syscalls.types import E, SyscallNote

from ..output import JsonOption, SocketOption, call_system, console, print_json, show, table
from ..units import count


def strace(
    pid: Annotated[int, typer.Argument(metavar="PID", help="As `attnix ps` shows it.", min=1)],
    calls: Annotated[
        int, typer.Option("--calls", "-n", help="End after so many calls; 0: with the process, or by Ctrl-C.", min=0)
    ] = 0,
    summary: Annotated[
        bool, typer.Option("--summary", "-c", help="In the end calls, errors and time by name, instead of a line each.")
    ] = False,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Show a process's system calls live, with what they answered, their errno and how many microseconds they took.

    The time is from when the daemon took the call until it handed the answer to the socket.  A call that is not answered at once
    is `<unfinished>` and comes again with its answer.  Processes that share a connection (children made with spawn) are seen
    together.  Yours and, as root, everybody's; what is traced is not slowed down but by the telling.  With --json every call is
    a document.
    """
    seen: list[SyscallNote] = []
    with call_system(socket, "strace") as system:
        system.trace(pid)
        try:
            for note in told(system, pid, calls):
                if summary:
                    seen.append(note)
                elif as_json:
                    print_json(note)
                else:
                    show(line(note))
        except KeyboardInterrupt:  # that is how it is ended
            pass
        except ConnectionLost:
            if summary:
                _summarize(seen, as_json)
            raise
    if summary:
        _summarize(seen, as_json)


def told(system: Client, pid: int, calls: int) -> Iterator[SyscallNote]:
    """Until the process is gone, or so many calls were answered."""
    answered = 0
    while not calls or answered < calls:
        note = system.notice(timeout=1.0)
        if note is None:
            if _ended(system, pid):
                return
            continue
        if note.kind != "syscall":
            continue
        if not note.payload.name:
            return
        yield note.payload
        answered += note.payload.took_ns >= 0


def _ended(system: Client, pid: int) -> bool:
    """Killed, while its client stays: it makes no more calls of its own."""
    try:
        return system.ps(pid).processes[0].state == "zombie"
    except NotFound:
        return True


def line(note: SyscallNote) -> str:
    """`[   12.345678] generate(ctx=1, max_tokens=3) = {reason="stop"} <1234 us>`"""
    start = f"[{note.at_ns / 1e9:12.6f}] " + (f"({note.lost} lost) " if note.lost else "")
    if note.took_ns < 0:
        return f"{start}{note.name}({note.args}) <unfinished>"
    answer = f"-1 {_errno(note.errno)} ({note.result})" if note.errno else f"{{{note.result}}}" if note.result else "0"
    return f"{start}{note.name}({note.args}) = {answer} <{note.took_ns // 1000} us>"


def _errno(number: int) -> str:
    try:
        return E(number).name
    except ValueError:
        return f"errno {number}"


def _summarize(seen: list[SyscallNote], as_json: bool) -> None:
    calls, errors, took = Counter[str](), Counter[str](), Counter[str]()
    for note in seen:
        if note.took_ns >= 0:
            calls[note.name] += 1
            errors[note.name] += note.errno != 0
            took[note.name] += note.took_ns // 1000
    rows = [{"name": n, "calls": calls[n], "errors": errors[n], "us": us} for n, us in took.most_common()]
    if as_json:
        print_json({"calls": rows})
        return
    made = table("CALL", ">CALLS", ">ERRORS", ">US", ">US/CALL")
    for name, us in took.most_common():
        made.add_row(name, count(calls[name]), count(errors[name]), count(us), count(us // calls[name]))
    show(made, console())
