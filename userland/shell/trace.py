"""`attnix trace`: what happens for a while, as a file for Perfetto."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from attnix.syscalls import AttnixError, Client, SyscallError
from attnix.syscalls.exceptions import ConnectionLost
from attnix.syscalls.types import DecisionRow, SampleRow, SyscallNote

from .. import perfetto
from ..errors import CommandError
from ..output import JsonOption, SocketOption, call_system, print_json, show
from ..perfetto import Span, Traced
from ..units import count, size

LOOK_S: Final = 0.25  # between two looks at who is there and in which state


def trace(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to; what is there is replaced.")],
    pids: Annotated[
        list[int] | None, typer.Argument(metavar="[PID]...", help="Only these processes' calls.", min=1)
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", "-s", help="For so long, or until Ctrl-C.", min=0.1)] = 10.0,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Write system calls, states of processes, rates and the kernel's decisions as a trace for ui.perfetto.dev or chrome://tracing.

    Yours, and as root everybody's.  Arguments and results are in it, long ones cut short.  A program that begins meanwhile is
    noticed within a quarter of a second: the first calls of it, or all of a shorter one, are missing.
    """
    if not out.exists() or out.is_file() or out.is_dir():  # a pipe takes it once, when it is written
        try:
            # Arguments are in it, words among them: nobody else's, as a dump is.
            os.close(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        except OSError as error:  # now, and not after all that has been traced
            raise CommandError(f"{out}: {error.strerror}") from error
    lost: ConnectionLost | None = None
    with call_system(socket, "trace") as system:
        runs = system.uname()
        for pid in pids or ():
            system.ps(pid)  # a process that is gone, or another's, is no empty trace
        tracer = Tracer(system, frozenset(pids or ()))
        tracer.look()  # whoever is there is traced before anything is said
        with until_interrupted() as going:  # before anybody is told of Ctrl-C
            if not as_json:
                show(f"tracing for {seconds:g} s; Ctrl-C ends it sooner")
            try:
                tracer.run(seconds, going)
            except ConnectionLost as error:
                lost = error
        traced = tracer.traced()
        about = {"system": runs.version, "model": runs.model}
    try:
        document = perfetto.document(traced, about)
        out.write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{out}: {error.strerror}") from error
    said = {
        "file": str(out), "bytes": out.stat().st_size, "processes": len(traced.names), "calls": len(traced.calls),
        "decisions": len(traced.decisions), "lost": traced.lost,
    }  # fmt: skip
    if as_json:
        print_json(said)
    else:
        calls, processes = len(traced.calls), len(traced.names)
        show(
            f"{out}: {count(calls)} call{'s' * (calls != 1)} of {processes} process{'es' * (processes != 1)}, "
            f"{size(out.stat().st_size)}"
        )
    if lost is not None:
        raise CommandError(f"{lost}; {out} has what was traced until then") from lost


@contextlib.contextmanager
def until_interrupted() -> Iterator[Callable[[], bool]]:
    """Something that is true until Ctrl-C.  A handler that returns leaves the client's read whole; an exception would not."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: pressed.append(signum))
    try:
        yield lambda: not pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Tracer:
    """Collects.  only: pids whose calls are wanted; empty: all, those that come later too."""

    def __init__(self, system: Client, only: frozenset[int]) -> None:
        self._system = system
        self._only = only
        self._began_ns = system.health(0).at_ns
        self._asked: set[int] = set()
        self._names: dict[int, str] = {}
        self._calls: dict[tuple[int, int, str], SyscallNote] = {}
        self._states: dict[int, Span] = {}
        self._spans: list[Span] = []
        self._lost = 0

    def run(self, seconds: float, going: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and going():
            self.look()
            until = min(end, time.monotonic() + LOOK_S)
            while time.monotonic() < until and going():
                self.hear(max(0.001, until - time.monotonic()))

    def hear(self, timeout_s: float) -> bool:
        """One notification.  False: none has come."""
        note = self._system.notice(timeout=timeout_s)
        if note is not None and note.kind == "syscall":
            self.told(note.payload)
        return note is not None

    def look(self) -> None:
        """Who is there, and doing what."""
        now_ns = self._system.health(0).at_ns
        for row in self._system.ps().processes:
            if row.pid == self._system.server.pid or (self._only and row.pid not in self._only):
                continue
            self._names[row.pid] = row.name
            self._state(row.pid, row.state, now_ns)
            if row.pid not in self._asked:
                self._asked.add(row.pid)
                with contextlib.suppress(SyscallError):  # it has just ended, or is another's
                    self._system.trace(row.pid)

    def told(self, note: SyscallNote) -> None:
        """A call that is not answered at once comes twice; processes on one connection are told of each other's."""
        self._lost += note.lost
        if note.name:
            key = (note.at_ns, note.request, note.name)
            first = self._calls.get(key, note)
            self._calls[key] = note._replace(pid=min(first.pid, note.pid))

    def traced(self) -> Traced:
        """Also when the system has gone meanwhile: then without its last numbers."""
        samples: tuple[SampleRow, ...] = ()
        decisions: tuple[DecisionRow, ...] = ()
        end_ns = max((note.at_ns for note in self._calls.values()), default=self._began_ns)
        with contextlib.suppress(AttnixError):
            health = self._system.health(0)
            end_ns, samples = health.at_ns, tuple(s for s in health.samples if s.at_ns >= self._began_ns)
            while self.hear(0.001):  # what had been told before that answer
                pass
            decisions = tuple(row for row in self._system.explain().rows if row.at_ns >= self._began_ns)
        spans = [*self._spans, *self._states.values()]
        return Traced(self._names, list(self._calls.values()), spans, samples, decisions, end_ns, self._lost)

    def _state(self, pid: int, state: str, now_ns: int) -> None:
        """It is in it since somebody looked last."""
        last = self._states.get(pid)
        if last is not None and last.state == state:
            self._states[pid] = last._replace(to_ns=now_ns)
            return
        if last is not None:
            self._spans.append(last._replace(to_ns=now_ns))
        self._states[pid] = Span(pid, state, now_ns, now_ns)
