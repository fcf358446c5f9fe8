"""The driver's side of the protocol: arguments, the death of the parent, and the loop that answers messages.

A driver written in Python needs a backend and one call of `run_driver`; docs/writing-a-driver.md walks through one.
A backend is a `Driver` and what else it can do: `Backend` computes, `Mover` moves stored frames, `DeepMover` moves many
at once and answers in any order, `Finder` knows what its slots hold, `Sealing` is told the identity late.
Drivers in other languages follow drivers/protocol.py and are held to the same conformance suite.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

from attnix.kernel.batch import SEQ_BYTES
from attnix.kernel.errors import E
from attnix.kernel.events import Exec, ExecDone, ExecFailed, Transfer, TransferDone

from .channel import BadMessage, Channel, ChannelClosed
from .messages import (
    decode_exec,
    decode_transfer,
    done_message,
    failed_message,
    found_message,
    moved_message,
    probe_message,
)
from .protocol import ExecStats, Probe

_PR_SET_PDEATHSIG = 1


class Driver(Protocol):
    """What every driver is, beyond its messages."""

    def probe(self) -> Probe:
        """Who we are; what was measured may change from one answer to the next, nothing else does."""
        ...

    def drop(self, frames: Sequence[int]) -> None:
        """Make sure that nobody reads what is in these frames now: a compute driver overwrites them with zeros."""
        ...

    def health(self) -> dict[str, int]:
        """Counters worth showing."""
        ...


@runtime_checkable
class Backend(Driver, Protocol):
    """A driver that computes."""

    def execute(self, effect: Exec) -> ExecDone | ExecFailed:
        """Run one pass to its end.  ExecFailed, or any exception, means that it may be run again."""
        ...

    def copied_frames(self) -> int:
        """Frames copied since the start, counted where it is done."""
        ...


@runtime_checkable
class Mover(Driver, Protocol):
    """A driver that moves stored frames between its own frames and an arena."""

    def transfer(self, effect: Transfer) -> TransferDone | None:
        """Move all items, to the end; items fail one by one.  An exception fails every item with EIO.

        None, of a DeepMover only: begun, `completed` will say how it ended.
        """
        ...


@runtime_checkable
class DeepMover(Mover, Protocol):
    """A mover with many transfers under way, which end in any order.

    Transfers and passes that touch the same frames still have the effect of running in the order of their messages.
    """

    def fileno(self) -> int:
        """A descriptor that polls readable when `completed` has something to do (an eventfd, an epoll, ...)."""
        ...

    def timeout_ms(self) -> int:
        """Call `completed` after this long even so; -1: no need."""
        ...

    def completed(self) -> list[TransferDone]:
        """Go on with what is under way, without waiting; the transfers that ended since the last call."""
        ...


@runtime_checkable
class Finder(Driver, Protocol):
    """A driver whose frames outlive it."""

    def inventory(self) -> Iterable[bytes]:
        """What its frames hold: rows of (int32 frame, packed tag), in portions of a few MiB.  Asked once, before serving."""
        ...


@runtime_checkable
class Sealing(Driver, Protocol):
    """A driver that learns only after its probe what goes into the headers it writes."""

    def identify(self, identity: bytes) -> None:
        """The 16-byte identity digest.  Comes before the first transfer."""
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


def run_driver(program: str, make: Callable[[DriverArguments], Driver], argv: Sequence[str]) -> NoReturn:
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
        announce(channel, backend)
        if isinstance(backend, DeepMover):
            serve_deep(channel, backend)
        else:
            serve(channel, backend)
    sys.stderr.flush()
    sys.exit(0)


def announce(channel: Channel, backend: Driver) -> None:
    """Send the inventory of a driver that has one."""
    if isinstance(backend, Finder):
        for rows in backend.inventory():
            channel.send(found_message(rows))


def serve(channel: Channel, backend: Driver) -> None:
    """Answer messages, in order, until the channel closes."""
    while (message := channel.recv()) is not None:
        for answer in answers(message, backend):
            channel.send(answer)


def serve_deep(channel: Channel, backend: DeepMover) -> None:
    """Answer messages and send what has completed, until the channel closes."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    poll.register(backend.fileno(), select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll(backend.timeout_ms())]
        if channel.fileno() in ready:
            message = channel.recv()
            if message is None:
                return
            for answer in answers(message, backend):
                channel.send(answer)
        for done in backend.completed():
            channel.send(moved_message(done))


def answers(message: list[Any], backend: Driver) -> list[list[Any]]:
    """What a driver says to one message.  Never raises: a message that makes no sense costs a log line, not the driver."""
    verb = message[0]
    request = message[1] if len(message) > 1 else None
    try:
        if verb == "exec" and isinstance(backend, Backend):
            return [_execute(message, backend)]
        if verb in ("read", "write") and isinstance(backend, Mover):
            done = backend.transfer(decode_transfer(message))
            return [] if done is None else [moved_message(done)]
        if verb == "probe":
            return [probe_message(int(message[1]), backend.probe())]
        if verb == "health":
            return [["health", int(message[1]), backend.health()]]
        if verb == "drop":
            backend.drop([int(frame) for frame in message[2]])
            return [["dropped", int(message[1])]]
        if verb == "identity" and isinstance(backend, Sealing):
            backend.identify(bytes(message[1]))
            return []
        return [["unknown", verb]]
    except Exception as error:  # whatever it is, the daemon gets its answer and the others their driver
        if not isinstance(error, BadMessage):
            traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        if verb == "exec" and isinstance(request, int):
            return [["failed", request, int(E.EIO), reason]]
        if verb in ("read", "write") and isinstance(request, int):
            return [["log", "error", f"{verb}: {reason}"], _nothing_moved(message, error)]
        return [["log", "error", f"{verb}: {reason}"]]


def _nothing_moved(message: list[Any], error: Exception) -> list[Any]:
    """All items of a transfer that could not be begun failed; of one whose items cannot even be counted, the first."""
    items = len(message[3]) // 8 if len(message) > 3 and isinstance(message[3], bytes) else 0
    code = E.EINVAL if isinstance(error, BadMessage | ValueError) else E.EIO
    return moved_message(TransferDone(0, message[1], tuple((i, int(code)) for i in range(max(1, items))), 0, 0))


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
    stats = ExecStats(
        outcome.computed_tokens, len(effect.seqs) // SEQ_BYTES, outcome.compute_ns, copied, outcome.waited_ns
    )
    return done_message(outcome, stats)
