"""The driver's side of the protocol: arguments, the death of the parent, and the loop that answers messages.

A driver written in Python needs a `Backend` and one call of `run_driver`; docs/writing-a-driver.md walks through one.
Drivers in other languages follow drivers/protocol.py and are held to the same conformance suite.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

from attnix.kernel.batch import SEQ_BYTES
from attnix.kernel.errors import E
from attnix.kernel.events import Exec, ExecDone, ExecFailed

from .channel import BadMessage, Channel, ChannelClosed
from .messages import decode_exec, done_message, failed_message, probe_message
from .protocol import ExecStats, Probe

_PR_SET_PDEATHSIG = 1


class Backend(Protocol):
    """What a compute driver is, beyond its messages."""

    def probe(self) -> Probe:
        """Who we are; the same answer every time."""
        ...

    def execute(self, effect: Exec) -> ExecDone | ExecFailed:
        """Run one pass to its end.  ExecFailed, or any exception, means that it may be run again."""
        ...

    def copied_frames(self) -> int:
        """Frames copied since the start, counted where it is done."""
        ...

    def drop(self, frames: Sequence[int]) -> None:
        """Overwrite these frames with zeros."""
        ...

    def health(self) -> dict[str, int]:
        """Counters worth showing."""
        ...


class DriverArguments(NamedTuple):
    """What the daemon passes at spawn: open descriptors by number, and the configuration."""

    channel_fd: int
    arena_fd: int
    rows_fd: int  # opened read-only
    config: dict[str, Any]


class ConfigError(Exception):
    """The configuration cannot work: starting this driver again with it would fail in the same way."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def die_with_parent() -> None:
    """Have the operating system kill this process when the one that started it ends (DESIGN.md §10, item 19).

    End-of-file on the channel says the same, but only to a driver that still reads.
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before we could ask
        os._exit(1)


def parse_arguments(program: str, argv: Sequence[str]) -> DriverArguments:
    """Parse the command line every driver process has.  Error: ConfigError."""
    parser = _Parser(program, description="An attnix driver; the daemon starts it.")
    parser.add_argument("--channel", type=int, required=True, metavar="FD", help="SOCK_SEQPACKET channel to the daemon")
    parser.add_argument("--arena", type=int, required=True, metavar="FD", help="memfd of the frames")
    parser.add_argument("--rows", type=int, required=True, metavar="FD", help="memfd of the page-table rows")
    parser.add_argument("--config", default="{}", metavar="JSON", help="the driver's own settings, a JSON object")
    parsed = parser.parse_args(argv)
    try:
        config = json.loads(parsed.config)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError("--config must be a JSON object")
    return DriverArguments(parsed.channel, parsed.arena, parsed.rows, config)


def run_driver(program: str, make: Callable[[DriverArguments], Backend], argv: Sequence[str]) -> NoReturn:
    """The main of a driver process: set up, build the backend, answer until the channel closes, exit.

    Exits 0 when the channel closed; 78 (EX_CONFIG) after printing the reason when `make` raised ConfigError, which
    tells the supervisor that trying again is useless; 1 with a traceback for anything unforeseen.
    """
    die_with_parent()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C in a terminal is for the daemon, which then closes the channel
    try:
        arguments = parse_arguments(program, argv)
        backend = make(arguments)
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr, flush=True)
        sys.exit(os.EX_CONFIG)
    channel = Channel.from_fd(arguments.channel_fd, arena_fd=arguments.arena_fd)
    with contextlib.suppress(ChannelClosed):  # the daemon went away while we answered: the same as end-of-file
        serve(channel, backend)
    sys.stderr.flush()
    sys.exit(0)


def serve(channel: Channel, backend: Backend) -> None:
    """Answer messages, in order, until the channel closes."""
    while (message := channel.recv()) is not None:
        for answer in answers(message, backend):
            channel.send(answer)


def answers(message: list[Any], backend: Backend) -> list[list[Any]]:
    """What a driver says to one message.  Never raises: a message that makes no sense costs a log line, not the driver."""
    verb = message[0]
    request = message[1] if len(message) > 1 else None
    try:
        if verb == "exec":
            return [_execute(message, backend)]
        if verb == "probe":
            return [probe_message(int(message[1]), backend.probe())]
        if verb == "health":
            return [["health", int(message[1]), backend.health()]]
        if verb == "drop":
            backend.drop([int(frame) for frame in message[2]])
            return [["dropped", int(message[1])]]
        return [["unknown", verb]]
    except Exception as error:  # whatever it is, the daemon gets its answer and the others their driver
        traceback.print_exc()
        if verb == "exec" and isinstance(request, int):
            return [["failed", request, int(E.EIO), f"{type(error).__name__}: {error}"]]
        return [["log", "error", f"{verb}: {type(error).__name__}: {error}"]]


def _execute(message: list[Any], backend: Backend) -> list[Any]:
    try:
        effect = decode_exec(message)
    except BadMessage as error:
        if len(message) > 1 and isinstance(message[1], int):
            return ["failed", message[1], int(E.EINVAL), str(error)]
        raise
    copied_before = backend.copied_frames()
    outcome = backend.execute(effect)
    if isinstance(outcome, ExecFailed):
        return failed_message(outcome)
    copied = backend.copied_frames() - copied_before
    stats = ExecStats(outcome.computed_tokens, len(effect.seqs) // SEQ_BYTES, outcome.compute_ns, copied)
    return done_message(outcome, stats)
