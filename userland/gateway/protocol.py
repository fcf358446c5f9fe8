"""HTTP/1.1 connections whose other end may have said all it has to say, and still reads.

A client that has closed and one that has only shut down its sending half look the same: both send a FIN.  uvicorn closes on
either.  Here the connection stays open while an answer is due, and an interim response (102, RFC 2518; RFC 9110 has clients
take any 1xx) asks, or in a stream of events a comment, since the next event may be far away: the kernel of a peer that has
closed answers it with a reset, a half-closed one takes it.  The state of the TCP connection shows which it was (TCP_INFO, its
first byte), and a reset ends the request.

Nor does a connection last that asks for nothing and takes nothing: it is reset when a request's head is not there, or nothing
of an answer can be written, within a time.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

EVENTS: Final = "attnix.events"  # in the scope of a request: its answer is a stream of events
_PROBE: Final = b"HTTP/1.1 102 Processing\r\n\r\n"
_COMMENT: Final = b"3\r\n:\n\n\r\n"  # of server-sent events, as a chunk of a body
_FIRST_LOOK_S: Final = 0.005
_LONGEST_LOOK_S: Final = 1.0
_TCP_CLOSE: Final = 7  # include/net/tcp_states.h


class Protocol(H11Protocol):
    """uvicorn's, with half-closed readers, and an end to those that do nothing.

    limit_s  for a request's head, and for a client to take more of its answer
    """

    limit_s: float = 30.0
    _look: asyncio.TimerHandle | None = None
    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._head = self._cancel(self._head)
        elif self._head is None:
            self._await_head()

    def on_response_complete(self) -> None:
        """uvicorn's own time limit begins here, for a connection on which nothing comes at all."""
        self._head = self._cancel(self._head)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self.limit_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall = self._cancel(self._stall)

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
        """None, in its place."""
        if timer is not None:
            timer.cancel()
        return None

    def _await_head(self) -> None:
        """The head of the next request has to be whole in time."""
        self._head = self.loop.call_later(self.limit_s, self.transport.abort)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Whether the connection stays open."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or self.scope["http_version"] != "1.1":
            return False
        if cycle.more_body:  # the request itself is cut off
            return False
        cycle.keep_alive = False
        if not cycle.response_started:
            self.transport.write(_PROBE)
        elif EVENTS in self.scope:
            self.transport.write(_COMMENT)
        self._look_later(_FIRST_LOOK_S)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._look, self._head, self._stall):
            self._cancel(timer)
        super().connection_lost(exc)

    def _look_later(self, delay_s: float) -> None:
        self._look = self.loop.call_later(delay_s, self._is_there, delay_s)

    def _is_there(self, delay_s: float) -> None:
        """Has the other end reset the connection?  If so, abort; else look again, less and less often."""
        connection: socket.socket | None = self.transport.get_extra_info("socket")
        if connection is None or self.transport.is_closing():
            return
        try:
            state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            state = _TCP_CLOSE
        if state == _TCP_CLOSE:
            self.transport.abort()
        else:
            self._look_later(min(_LONGEST_LOOK_S, 2 * delay_s))


def limited(limit_s: float) -> type[Protocol]:
    """The protocol with this limit, if it is shorter than the usual one: uvicorn makes its protocols from a class."""
    return type("Protocol", (Protocol,), {"limit_s": min(Protocol.limit_s, limit_s)})
