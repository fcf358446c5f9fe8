"""The network tier's driver process: stored frames in a Redis-protocol store (Valkey, Redis, ...).

    python -m attnix.drivers.remote --channel FD --arena FD --rows FD --config JSON

The parts, in reading order: config.py what it is told; resp.py the protocol's bytes; lane.py one connection that never
waits; breaker.py when not to ask; store.py transfers as objects, and what every failure becomes.

A store is a cache of hints.  Nothing that happens to it fails the driver, which starts, answers and stops as well
without one: every error is an errno of the items it concerns, within the deadline, and costs nothing while the breaker
is open.  Frame numbers are the kernel's bookkeeping only; the store holds objects named by key, shared by every machine
that derives the same keys, and forgets them by time-to-live or when it is full.  So `drop` removes nothing: a dropped
frame's object is still what its name says, and whoever cannot name the block cannot ask for it.

Beyond drivers/protocol.py it answers one message, for finding what other machines have written:

    ["exists", id, tags]        ["exists", id, bitmap]     bit i % 8 of byte i // 8: the store has tag i's block
                                                           (in its size; not yet verified).  Within the deadline; an
                                                           item that could not be asked counts as not there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from attnix.kernel.events import Transfer, TransferDone
from attnix.kernel.tag import HEADER_BYTES

from ..channel import Channel, ChannelClosed
from ..memfd import advise_huge_pages, map_shared
from ..messages import moved_message
from ..protocol import PROTOCOL_VERSION, Probe
from ..serve import ConfigError, DriverArguments, answers, die_with_parent, parse_arguments
from ..stored import Gates
from .config import parse_settings
from .store import RemoteStore

PROGRAM = "attnix.drivers.remote"


class RemoteDriver:
    """A RemoteStore as a driver backend.  `transfer` only begins; `messages` says how things ended."""

    def __init__(self, store: RemoteStore) -> None:
        self.store = store

    def probe(self) -> Probe:
        """What was measured at the start; health repeats it as it changes."""
        store = self.store
        return Probe(
            protocol=PROTOCOL_VERSION,
            kind="remote",
            pid=os.getpid(),
            fingerprint=store.settings.identity.hex(),
            capabilities=("read", "write", "drop", "exists"),
            capacity_frames=store.settings.capacity_frames,
            frame_bytes=store.settings.frame_bytes,
            alignment_bytes=HEADER_BYTES,
            vocab_tokens=0,
            numerics="",
            engine="resp2",
            model=store.settings.address_text,
            stored_bytes=store.format.stored_bytes,
            read_bytes_s=store.rates_bytes_s["read"],
            write_bytes_s=store.rates_bytes_s["write"],
            latency_ns=store.latency_ns,
        )

    def transfer(self, effect: Transfer) -> TransferDone | None:
        self.store.submit(effect)
        return None

    def timeout_ms(self) -> int:
        """Rounded up: waking before the time would be a turn for nothing."""
        if self.store.done or self.store.logs:
            return 0
        wake_ns = self.store.wake_ns()
        return -1 if wake_ns is None else max(0, -(-(wake_ns - self.store.now_ns()) // 1_000_000))

    def drop(self, frames: Sequence[int]) -> None:
        """Nothing: see above."""

    def health(self) -> dict[str, int]:
        return self.store.health()

    def answer(self, message: list[Any]) -> list[list[Any]]:
        """What is to be said at once to one message."""
        if message[0] != "exists":
            return answers(message, self)
        valid = len(message) == 3 and isinstance(message[1], int) and isinstance(message[2], bytes)
        if not valid or len(message[2]) % self.store.format.tag_bytes:
            return [["log", "error", f"exists: not what the protocol says: {message!r:.100}"]]
        self.store.ask_exists(message[1], message[2])
        return []

    def messages(self) -> Iterator[list[Any]]:
        """Go on with what is under way, without waiting; what there is to say then."""
        self.store.turn()
        while self.store.logs:
            yield ["log", *self.store.logs.popleft()]
        while self.store.done:
            end = self.store.done.popleft()
            yield moved_message(end) if isinstance(end, TransferDone) else ["exists", end.number, end.bitmap]


def make_driver(arguments: DriverArguments) -> RemoteDriver:
    """Build the driver that the command line describes, and measure the store if it is there.  Error: ConfigError."""
    settings = parse_settings(arguments.config)
    gates_fd = arguments.config.get("gates_fd")
    gates = Gates(map_shared(gates_fd)) if isinstance(gates_fd, int) else None
    arena = map_shared(arguments.arena_fd)
    advise_huge_pages(arena)
    try:
        store = RemoteStore(settings, arena, gates)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    store.self_test()
    return RemoteDriver(store)


def serve_remote(channel: Channel, driver: RemoteDriver) -> None:
    """serve.serve_deep, with `exists` and log lines besides: until the channel closes."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    poll.register(driver.store.fileno(), select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll(driver.timeout_ms())]
        if channel.fileno() in ready:
            message = channel.recv()
            if message is None:
                return
            for answer in driver.answer(message):
                channel.send(answer)
        for message in driver.messages():
            channel.send(message)


def main(argv: Sequence[str] | None = None) -> None:
    """serve.run_driver, for `serve_remote`."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        arguments = parse_arguments(PROGRAM, sys.argv[1:] if argv is None else argv)
        driver = make_driver(arguments)
    except ConfigError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr, flush=True)
        sys.exit(os.EX_CONFIG)
    channel = Channel.from_fd(arguments.channel_fd, arena_fd=arguments.arena_fd)
    with contextlib.suppress(ChannelClosed):
        serve_remote(channel, driver)
    sys.stderr.flush()
    sys.exit(0)
