"""One client's connection: an asyncio Protocol that knows bytes, and leaves what they mean to the dispatcher.

How a client leaves is told apart here.  One that shuts down its sending side and still reads gets its answers; one
that closed, or died, is disconnected at once.  Both look the same to `read`, so while a connection is not being read
(its stream has ended, or it is held back) its descriptor waits in `HangupWatch`, where only a hang-up is news.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable
from typing import Final, cast

from attnix.kernel.params import MAX_UNREAD_BYTES

from . import wire
from .dispatch import Client, Dispatcher
from .framing import Splitter
from .listen import Credentials


class HangupWatch:
    """An epoll set that reports nothing but hang-ups, itself watched by the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        loop.add_reader(self._epoll.fileno(), self._ready)

    def add(self, fd: int, hung_up: Callable[[], None]) -> None:
        """Call `hung_up` once when the peer has closed."""
        if fd in self._callbacks:
            self._forget(fd)
        self._epoll.register(fd, 0)  # EPOLLHUP and EPOLLERR are always reported
        self._callbacks[fd] = hung_up

    def discard(self, fd: int, hung_up: Callable[[], None]) -> None:
        """Stop watching.  The descriptor may be closed already, and its number another connection's by now."""
        if self._callbacks.get(fd) == hung_up:
            self._forget(fd)

    def _forget(self, fd: int) -> None:
        del self._callbacks[fd]
        with contextlib.suppress(OSError):  # closed: epoll let go of it by itself
            self._epoll.unregister(fd)

    def close(self) -> None:
        """Stop watching everything."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _ready(self) -> None:
        for fd, _ in self._epoll.poll(0):
            callback = self._callbacks.get(fd)
            if callback is not None:
                self._forget(fd)
                callback()


class Connection(asyncio.Protocol):
    """Also the dispatcher's `Peer`.

    credentials  who is at the other end of a descriptor
    may_connect  None, or why somebody may not
    connections  all that are open; this one adds and removes itself
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        watch: HangupWatch,
        credentials: Callable[[int], Credentials],
        may_connect: Callable[[Credentials, int], wire.Refusal | None],
        connections: set[Connection],
    ) -> None:
        self._dispatcher = dispatcher
        self._watch = watch
        self._credentials = credentials
        self._may_connect = may_connect
        self._connections = connections
        self._splitter: Final = Splitter()
        self._transport: asyncio.Transport
        self._client: Client | None = None
        self._fd = -1
        self._reading = True
        self._at_end = False

    # -- the event loop's side ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._fd = transport.get_extra_info("socket").fileno()
        credentials = self._credentials(self._fd)
        refusal = self._may_connect(credentials, self._fd)
        if refusal is not None:
            self._transport.write(wire.reply(refusal.request, refusal.code, {**refusal.detail, "closing": 1}))
            self._transport.close()
            return
        self._transport.set_write_buffer_limits(high=MAX_UNREAD_BYTES, low=MAX_UNREAD_BYTES // 4)
        self._client = self._dispatcher.connect(self, credentials)

    def data_received(self, data: bytes) -> None:
        client = self._client
        if client is not None:
            messages = self._splitter.split(data)
            if messages:
                self._dispatcher.receive(client, messages)

    def eof_received(self) -> bool:
        """True keeps the sending half open."""
        if self._client is None:
            return False
        self._at_end = True
        poll = select.poll()
        poll.register(self._fd, 0)
        if poll.poll(0):  # both halves are closed: nobody will read the answers
            self._gone()
            return False
        self._watch.add(self._fd, self._gone)
        self._dispatcher.end_of_requests(self._client, self._splitter.unfinished_bytes, self._splitter.missing_bytes)
        return True

    def pause_writing(self) -> None:
        if self._client is not None:
            self._dispatcher.set_unread(self._client, True)

    def resume_writing(self) -> None:
        if self._client is not None:
            self._dispatcher.set_unread(self._client, False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._gone()

    def _gone(self) -> None:
        """The peer is not there any more: release what it held, in the next step of the kernel."""
        self._leave()
        self._transport.abort()

    def _leave(self) -> None:
        client, self._client = self._client, None
        self._watch.discard(self._fd, self._gone)
        if client is not None:
            self._dispatcher.disconnect(client)

    # -- the dispatcher's side ---------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._client is not None:
            self._transport.write(data)

    def set_reading(self, reading: bool) -> None:
        if reading == self._reading or self._client is None or self._at_end:
            return
        self._reading = reading
        if reading:
            self._watch.discard(self._fd, self._gone)
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
            self._watch.add(self._fd, self._gone)

    def finish(self) -> None:
        if self._client is not None:
            self._leave()  # now: a peer that does not read could keep the connection open for ever
            self._transport.close()  # sends what is queued

    def abort(self) -> None:
        """Close without sending what is queued."""
        self._transport.abort()
