"""HTTP/1.1 connections whose other end may have said all it has to say, and still reads.

A client that has closed and one that has only shut down its sending half look the same: both send a FIN.  uvicorn closes on
either.  Here the connection stays open while an answer is due, and an interim response (102, RFC 2518; RFC 9110 has clients
take any 1xx) asks: the kernel of a peer that has closed answers it with a reset, a half-closed one takes it.  The state of the
TCP connection shows which it was (TCP_INFO, its first byte), and a reset ends the request.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

_PROBE: Final = b"HTTP/1.1 102 Processing\r\n\r\n"
_FIRST_LOOK_S: Final = 0.005
_LONGEST_LOOK_S: Final = 1.0
_TCP_CLOSE: Final = 7  # include/net/tcp_states.h


class Protocol(H11Protocol):
    """uvicorn's, with half-closed readers."""

    _look: asyncio.TimerHandle | None = None

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
        self._look_later(_FIRST_LOOK_S)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
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
