"""The daemon: the event loop around the kernel, from the first connection to an orderly end.

    listener = Listener(path)                       # refuses a second daemon before anything is loaded
    daemon = Daemon(kernel, listener, text, port)   # ports.py says what each must do
    status = await daemon.run()                     # on uvloop; drivers report through daemon.feed(event)

One Python thread runs here (DESIGN.md §10, item 21): reading, stepping the kernel, writing.  Drivers and the text
worker are processes of their own.
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Final

from attnix.kernel.errors import E
from attnix.kernel.events import Bug, Event
from attnix.kernel.params import RETRY_MS

from .connection import Connection, HangupWatch
from .descriptors import Shortage, raise_limit
from .dispatch import Dispatcher
from .listen import Credentials, Listener, peer_credentials
from .ports import DriverPort, JournalPort, KernelPort, SnapshotPort, TextPort
from .systemd import InheritedListener
from .wire import Refusal

EXIT_PANIC: Final = 70  # sysexits.h: internal software error
CANCEL_SECONDS: Final = 2.0  # at the end: for generations to finish their pass
FLUSH_SECONDS: Final = 2.0  # at the end: for clients to read their last answers
LOOK_SECONDS: Final = 0.005  # between two looks whether they have
_LONGEST_TIMER_NS: Final = 3_600_000_000_000  # a longer one is set again: loops overflow at very long delays


class Daemon:
    """Serves one kernel on one socket.

    kernel       `KernelPort`; after construction only `run` and `feed` may step it
    listener     the socket, already listening; closed by `run`
    text         `TextPort`, or None for a model without a tokenizer; closed by `run`
    port         `DriverPort`; closed by `run`
    journal      `JournalPort`, or None: nothing outlives this daemon; closed by `run`
    snapshots    `SnapshotPort`, or None; closed by `run`
    credentials  who is at the other end of a descriptor (a test may say otherwise)
    """

    def __init__(
        self,
        kernel: KernelPort,
        listener: Listener | InheritedListener,
        text: TextPort | None,
        port: DriverPort,
        *,
        journal: JournalPort | None = None,
        snapshots: SnapshotPort | None = None,
        credentials: Callable[[int], Credentials] = peer_credentials,
    ) -> None:
        self._listener = listener
        self._text = text
        self._port = port
        self._journal = journal
        self._snapshots = snapshots
        self._peer_credentials = credentials
        self._owner_uid = os.geteuid()
        self._connections: set[Connection] = set()
        self._stopping = asyncio.Event()
        self._status = 0
        self._shortage = Shortage()
        self.dispatcher: Final = Dispatcher(
            kernel,
            port,
            text,
            journal=journal,
            snapshots=snapshots,
            token=lambda: secrets.token_hex(16),
            on_soon=_on_soon,
            on_timer=_on_timer,
            on_halt=lambda: self.stop("shutdown"),
            on_panic=self._panic,
        )

    def feed(self, event: Event) -> None:
        """Give the kernel something that happened outside: a driver's answer, its death."""
        self.dispatcher.feed(event)

    def log(self, level: str, text: str) -> None:
        """A line for dmesg."""
        self.dispatcher.feed(Bug(level, text))

    def stop(self, why: str) -> None:
        """Begin the orderly end; `run` returns when it is done."""
        if not self._stopping.is_set():
            self._stopping.set()
            if self._status == 0:
                self.log("info", f"going down: {why}")

    async def run(self, ready: Callable[[], None] | None = None) -> int:
        """Serve until `shutdown`, SIGTERM, SIGINT, `stop` or a panic; the exit status.  `ready` is called when serving."""
        loop = asyncio.get_running_loop()
        raise_limit()
        watch = HangupWatch(loop)
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.stop, f"signal {signum.name}")
        server = await loop.create_unix_server(
            lambda: Connection(self.dispatcher, watch, self._peer_credentials, self._may_connect, self._connections),
            sock=self._listener.socket,
        )
        gc.collect()
        gc.freeze()  # what exists now lives as long as the daemon: no collection need look at it again
        if ready is not None:
            ready()
        try:
            await self._stopping.wait()
        finally:
            server.close()
            await self._end_conversations()
            watch.close()
            if self._snapshots is not None:
                await self._snapshots.close()
            if self._text is not None:
                await self._text.close()
            await self._port.close()
            if self._journal is not None:
                self._journal.close()
            self._listener.close()
            for signum in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(signum)
            gc.unfreeze()
        return self._status

    async def _end_conversations(self) -> None:
        """Every request gets its answer, and every client the time to read it."""
        dispatcher = self.dispatcher
        if self._status == 0:
            dispatcher.cancel_all()
            await _until(lambda: dispatcher.outstanding == 0, CANCEL_SECONDS)
        dispatcher.abandon()
        for client in dispatcher.clients:
            client.peer.finish()
        await _until(lambda: not self._connections, FLUSH_SECONDS)
        for connection in list(self._connections):
            connection.abort()

    def _may_connect(self, credentials: Credentials, fd: int) -> Refusal | None:
        if credentials.uid != self._owner_uid and not self._listener.shared:
            # Who else reaches a shared socket is a member of its group: the file's rights say so.
            text = f"this attnix belongs to uid {self._owner_uid}; you are uid {credentials.uid}"
            return Refusal(0, E.EACCES, {"message": text, "uid": credentials.uid})
        why = self._shortage.at(fd)
        if not why:
            return None
        if self._shortage.is_news():
            self.log("warning", f"clients are refused: {why}")
        return Refusal(0, E.EAGAIN, {"message": why, "retry_after_ms": RETRY_MS})

    def _panic(self, error: BaseException, event: Event | None) -> None:
        """Broken state is not served from: say everything that is known, stop."""
        self._status = EXIT_PANIC
        print("attnix: panic: the kernel's state cannot be trusted; stopping", file=sys.stderr)
        print(f"  while handling {str(event)[:2000]}", file=sys.stderr)
        traceback.print_exception(error, file=sys.stderr)
        sys.stderr.flush()
        self.stop("panic")


def _on_soon(work: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(work)


def _on_timer(delay_ns: int, fire: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(min(delay_ns, _LONGEST_TIMER_NS) / 1e9, fire)


async def _until(holds: Callable[[], bool], seconds: float) -> None:
    """Wait until `holds`, at most for so many looks as fit into that: a machine that is held up does not use the time up."""
    for _ in range(round(seconds / LOOK_SECONDS)):
        if holds():
            return
        await asyncio.sleep(LOOK_SECONDS)
