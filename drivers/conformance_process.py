"""What both conformance suites stand on: one driver process and the talk with it, every wait with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from .channel import BadMessage, Channel, ChannelClosed
from .messages import decode_probe
from .protocol import Probe
from .spec import DriverFds, DriverSpec

START_S: Final = 300.0


class Nonconformance(AssertionError):
    """The driver does not do what the protocol says; the message says what was seen."""


def require(holds: bool, what: str) -> None:
    """Error: Nonconformance."""
    if not holds:
        raise Nonconformance(what)


class Finding(NamedTuple):
    check: str
    problem: str


class Report(NamedTuple):
    """passed: names of checks; findings: the others, with what was wrong."""

    passed: tuple[str, ...]
    findings: tuple[Finding, ...]


class Closable(Protocol):
    def close(self) -> None: ...


RigType = TypeVar("RigType", bound=Closable)


def run_checks(checks: Mapping[str, Callable[[RigType], None]], start: Callable[[], RigType]) -> Report:
    """Run every check.  A driver is started once, and again after each finding, since a faulty one may be in any state."""
    passed: list[str] = []
    findings: list[Finding] = []
    rig: RigType | None = None
    try:
        for name, check in checks.items():
            try:
                rig = start() if rig is None else rig
                check(rig)
                passed.append(name)
            except Nonconformance as problem:
                findings.append(Finding(name, str(problem)))
                if rig is not None:
                    rig.close()
                rig = None
    finally:
        if rig is not None:
            rig.close()
    return Report(tuple(passed), tuple(findings))


class DriverProcess:
    """A driver process under test.

    arena_fd, rows_fd  what it inherits besides its channel; they stay the caller's
    deadline_s         longest wait for any one answer; the first, which follows loading, may take START_S
    before_probe       messages that came before the answer of the first probe
    """

    def __init__(self, spec: DriverSpec, arena_fd: int, rows_fd: int, *, deadline_s: float = 30.0) -> None:
        self.spec = spec
        self.deadline_s = START_S
        self.logs: list[str] = []
        self.before_probe: list[list[Any]] = []
        self._request = 0
        self._inbox: deque[list[Any]] = deque()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = DriverFds(theirs.fileno(), arena_fd, rows_fd, spec.fds)
        try:
            self.process = subprocess.Popen(
                spec.argv(fds, json.dumps(dict(spec.config))),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), arena_fd, rows_fd, *spec.fds.values()),
                env={**os.environ, **spec.environment},
                process_group=0,
            )
        finally:
            theirs.close()
        self.channel = Channel(ours)
        self.channel.setblocking(False)
        try:
            self.probe = self._first_probe()
        except BaseException:
            self.close()
            raise
        self.deadline_s = deadline_s

    def close(self) -> None:
        """End the process, whatever state it is in, and reap it."""
        self.channel.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def send(self, message: list[Any]) -> None:
        try:
            sent = self.channel.send(message)
            while not sent:
                self._wait(select.POLLOUT, f"it did not read a {message[0]!r} message")
                sent = self.channel.flush()
        except ChannelClosed:
            raise Nonconformance(f"the channel closed; {self._death()}") from None

    def receive(self, what: str) -> list[Any]:
        """The next message, log lines apart.  Error: Nonconformance when it dies, is silent, or speaks nonsense."""
        while True:
            while self._inbox:
                message = self._inbox.popleft()
                if message[0] != "log":
                    return message
                self.logs.append(str(message[1:]))
            if self.channel.eof:
                raise Nonconformance(f"the channel closed while waiting for {what}; {self._death()}")
            self._wait(select.POLLIN, f"no {what}")
            try:
                self._inbox.extend(self.channel.recv_ready())
            except BadMessage as error:
                raise Nonconformance(f"nonsense instead of {what}: {error}") from error

    def _first_probe(self) -> Probe:
        """The first probe's answer; what a driver found in its frames comes before it."""
        self._request += 1
        self.send(["probe", self._request])
        while (message := self.receive("probe answer"))[0] == "found":
            self.before_probe.append(message)
        return self._probe_of(message)

    def ask_probe(self) -> Probe:
        self._request += 1
        self.send(["probe", self._request])
        return self._probe_of(self.receive("probe answer"))

    def _probe_of(self, message: list[Any]) -> Probe:
        require(message[0] == "probe", f"a probe was answered with {message!r:.200}")
        try:
            request, probe = decode_probe(message)
        except BadMessage as error:
            raise Nonconformance(str(error)) from error
        require(request == self._request, f"probe {self._request} was answered as {request}")
        return probe

    def until_health(self) -> list[list[Any]]:
        """Ask for health; everything that came before its answer.  Messages are handled in order, so that is all there is."""
        self._request += 1
        self.send(["health", self._request])
        before: list[list[Any]] = []
        while True:
            message = self.receive("health answer")
            if message[0] == "health":
                require(
                    message[1] == self._request and isinstance(message[2], dict), f"bad health answer {message!r:.200}"
                )
                return before
            before.append(message)

    def ask_health(self) -> dict[str, int]:
        """Its counters.  Nothing else may be on its way."""
        self._request += 1
        self.send(["health", self._request])
        message = self.receive("health answer")
        require(message[0] == "health" and message[1] == self._request, f"health was answered with {message!r:.200}")
        return dict(message[2])

    def _wait(self, event: int, what: str) -> None:
        poll = select.poll()
        poll.register(self.channel.fileno(), event)
        if not poll.poll(self.deadline_s * 1000):
            raise Nonconformance(f"{what} within {self.deadline_s:g} s")

    def wait_for_exit(self) -> int | None:
        """The exit status, negative for a signal; None when it still runs at the deadline."""
        if self.process.returncode is None:
            pidfd = os.pidfd_open(self.process.pid)
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(self.deadline_s * 1000)
            finally:
                os.close(pidfd)
        return self.process.poll()

    def _death(self) -> str:
        status = self.wait_for_exit()
        return "the driver still runs" if status is None else f"the driver ended with status {status}"
