"""HTTP/1.1 connections whose other end may have said all it has to say, and still reads.

A client that has closed and one that has only shut down its sending half look the same: both send a FIN.  uvicorn closes on
either.  Here the connection stays open while an answer is due, and an interim response (102, RFC 2518; RFC 9110 has clients
take any 1xx) asks, or in a stream of events a comment, since the next event may be far away: the kernel of a peer that has
closed answers it with a reset, a half-closed one takes it.  The state of the TCP connection shows which it was (TCP_INFO, its
first byte), and a reset ends the request.

While a request is answered and its client has sent more already (it pipelines), uvicorn stops reading, and would not learn
that the client has left.  Then too the state of the connection is looked at: it shows a FIN that nobody has read.

Nor does a connection last that asks for nothing and takes nothing: it is reset when a request's head is not there, or nothing
of an answer can be written, within a time; the end of an answer as well, which is small enough to wait in this process.

What two programs could read in two ways is refused (RFC 9112, 6.1): a body with Content-Length and Transfer-Encoding, behind a
proxy that looks at the other one, would hide a request.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from http import HTTPStatus
from typing import Final

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from attnix.syscalls.descriptors import Shortage

from .errors import ApiError, in_shape
from .upstream import RETRY_AFTER_S

EVENTS: Final = "attnix.events"  # in the scope of a request: its answer is a stream of events
_PROBE: Final = b"HTTP/1.1 102 Processing\r\n\r\n"
_COMMENT: Final = b"3\r\n:\n\n\r\n"  # of server-sent events, as a chunk of a body
_FIRST_LOOK_S: Final = 0.005
_LONGEST_LOOK_S: Final = 1.0
_shortage: Final = Shortage()
_TCP_CLOSE, _TCP_CLOSE_WAIT = 7, 8  # include/net/tcp_states.h


class Framing(h11.Connection):
    """h11's, without requests whose end is a matter of opinion."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Error: h11.RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("the length of this body is given in two ways")
        return event


class Protocol(H11Protocol):
    """uvicorn's, with half-closed readers, and an end to those that do nothing.

    limit_s  for a request's head, and for a client to take more of its answer
    """

    limit_s: float = 30.0
    _look: asyncio.TimerHandle | None = None
    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _half_closed: bool = False
    _asked: object = None  # the request whose client was asked whether it is there

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.conn = Framing(h11.SERVER)
        super().connection_made(transport)
        why = _shortage.at(transport.get_extra_info("socket").fileno())
        if not why:
            self._await_head()
            return
        if _shortage.is_news():
            print(f"attnix: clients get 503: {why}", file=sys.stderr, flush=True)
        self._say(ApiError(503, why, code="overloaded", retry_after_s=RETRY_AFTER_S), "")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.flow.read_paused and self._look is None:
            self._look_later(_FIRST_LOOK_S)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._head = self._cancel(self._head)
        elif self._head is None:
            self._await_head()

    def on_response_complete(self) -> None:
        """uvicorn's own time limit begins here, for a connection on which nothing comes at all."""
        self._head = self._cancel(self._head)
        answered = self.cycle
        super().on_response_complete()
        if self.cycle is answered and self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits(0)  # `pause_writing`, until the last of it is written

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel(self._stall)
        self._stall = self.loop.call_later(self.limit_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall = self._cancel(self._stall)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP.  uvicorn would answer in plain text, and fail where an answer has begun."""
        cycle = self.cycle
        path = ""
        if cycle is not None and not cycle.response_complete:  # it came in the midst of a body
            path = self.scope["path"]
            cycle.disconnected = True  # nobody is to answer that
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._say(ApiError(400, "this is not a valid HTTP request", code="invalid_http"), path)
        self.transport.close()

    def _say(self, error: ApiError, path: str) -> None:
        """An answer to what is no request, and the last one."""
        said = msgspec.json.encode(in_shape(error, path))
        headers = {"content-type": "application/json", "content-length": str(len(said)), "connection": "close"}
        response = h11.Response(
            status_code=error.status,
            headers=list((headers | error.headers).items()),
            reason=HTTPStatus(error.status).phrase.encode(),
        )
        for event in (response, h11.Data(said), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Never: what asks for another protocol is answered in this one, and no line of the log is spent on it."""
        return False

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
        if not self._answering():
            return False
        self.cycle.keep_alive = False
        self._half_closed = True
        self._ask()
        return True

    def _answering(self) -> bool:
        """An answer is due to a request that is whole, and its client can be asked whether it is there."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        return bool(self.scope["http_version"] == "1.1")

    def _ask(self) -> None:
        """Write something that a client which has gone answers with a reset, and look for that."""
        if not self.cycle.response_started:
            self.transport.write(_PROBE)
        elif EVENTS in self.scope:
            self.transport.write(_COMMENT)
        self._asked = self.cycle
        self._look_later(_FIRST_LOOK_S)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._look, self._head, self._stall):
            self._cancel(timer)
        super().connection_lost(exc)

    def _look_later(self, delay_s: float) -> None:
        self._cancel(self._look)
        self._look = self.loop.call_later(delay_s, self._is_there, delay_s)

    def _is_there(self, delay_s: float) -> None:
        """Has the other end reset the connection?  If so, abort; else look again, less and less often, as long as nobody reads."""
        self._look = None
        connection: socket.socket | None = self.transport.get_extra_info("socket")
        if connection is None or self.transport.is_closing() or not (self._half_closed or self.flow.read_paused):
            return
        try:
            state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            state = _TCP_CLOSE
        if state == _TCP_CLOSE:
            self.transport.abort()
        elif state == _TCP_CLOSE_WAIT and self._asked is not self.cycle and self._answering():
            self._ask()
        else:
            self._look_later(min(_LONGEST_LOOK_S, 2 * delay_s))


def limited(limit_s: float) -> type[Protocol]:
    """The protocol with this limit, if it is shorter than the usual one: uvicorn makes its protocols from a class."""
    return type("Protocol", (Protocol,), {"limit_s": min(Protocol.limit_s, limit_s)})
