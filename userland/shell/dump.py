"""`attnix dump`: everything that can be looked at, in one file; what it holds is dumpfile.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from attnix.syscalls import Client
from attnix.syscalls.abi import Record
from attnix.syscalls.types import (
    DmesgArgs,
    Empty,
    ExplainArgs,
    GroupsArgs,
    HealthArgs,
    LookArgs,
    NamesArgs,
    PressureArgs,
    PsArgs,
    ReadArgs,
    SysctlArgs,
)

from .. import dumpfile
from ..output import JsonOption, SocketOption, call_system, print_json, show
from ..units import count, size

Asked: TypeAlias = tuple[str, Callable[[], Any], Record]


def dump(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; what is there is replaced.")],
    text: Annotated[
        bool, typer.Option("--text", help="The contexts' tokens and text too, for `cat`, `tree` and `doctor`.")
    ] = False,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Write what the commands that only look would show into one file, for `--from FILE`.

    The file is for its owner alone (0600).  It holds names of processes, contexts and tools; what was said only with --text.
    """
    at = datetime.now(UTC).isoformat(timespec="seconds")
    with call_system(socket, "dump") as system:
        taken = dumpfile.take(at, system.server, questions(system, text))
    written = dumpfile.write(file, taken)
    refused = [answer.call for answer in taken.answers if answer.error is not None]
    if as_json:
        print_json({"file": str(file), "calls": len(taken.answers), "bytes": written, "refused": refused})
        return
    show(f"{file}: {count(len(taken.answers))} calls, {size(written)}")
    if refused:
        show(f"refused, and refused again to those who read it: {', '.join(sorted(set(refused)))}")


def questions(system: Client, text: bool) -> Iterator[Asked]:
    """Every call that only looks, with what it may be asked about."""
    everything = (
        ("uname", Empty()), ("ps", PsArgs()), ("tiers", Empty()), ("vmstat", Empty()), ("pressure", PressureArgs()),
        ("sysctl", SysctlArgs()), ("groups", GroupsArgs()), ("names", NamesArgs()), ("fsck", Empty()), ("dmesg", DmesgArgs()),
        ("explain", ExplainArgs()), ("health", HealthArgs() if text else HealthArgs(0)),
    )  # fmt: skip
    for call, args in everything:
        yield call, partial(getattr(system, call), *args), args
    for process in system.ps().processes:
        for context in process.contexts:
            of = LookArgs(0, context.cid)
            yield "pagemap", partial(system.pagemap, *of), of
            about = ExplainArgs(0, context.cid)
            yield "explain", partial(system.explain, *about), about
            if text:
                log = ReadArgs(0, context.cid)
                yield "read", partial(system.read, *log), log
