"""One connection to the store: commands go out in order, replies come in as they are ready, nothing ever waits.

A lane connects when it has work, and forgets its socket when that fails; a command is sent at most once.  Commands that
were not answered when a connection is given up are answered with LOST and an errno, all of them at once, so a store that
stands still costs one `stall_ns`, however many commands were queued.  There are no retries here: the next command
connects anew, and how soon that is worth trying is the breaker's business.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from attnix.kernel.errors import E

from .resp import Buffer, Kind, ProtocolError, Reply, ReplyReader, request

Address: TypeAlias = tuple[int, tuple[str, int] | tuple[str, int, int, int] | str]  # (family, what connect takes)

SOCKET_BUFFER_BYTES: Final = 4 << 20  # asked of the operating system; it may give less
_BUFFERS_PER_SEND: Final = 64
_CALLS_PER_TURN: Final = 64  # sends or receives on one connection before the others have their turn


class Command(NamedTuple):
    """One command and where its reply goes.

    parts        buffers to send; those that are views must not change before the reply
    done         called once, with the reply or with LOST
    target       memory for the content of a bulk reply
    """

    parts: Sequence[Buffer]
    done: Callable[[Reply], None]
    target: memoryview | None = None


class Refused(Exception):
    """The store answered the first words on a connection with an error: wrong password, still loading, too many clients."""


class LaneState(Enum):
    CLOSED = auto()
    CONNECTING = auto()
    GREETING = auto()  # password, database and PING are sent; nothing else before they are answered
    OPEN = auto()


class Lane:
    """A connection and the commands that wait for it.

    addresses   called at each connect: where the store may be, best first
    greeting    commands whose replies must not be errors before anything else is sent
    stall_ns    longest time without one byte in either direction while something is expected
    window_bytes  content asked for and not yet received: more would only fill buffers on the store's side
    failed      called with errno and reason after a connection with unanswered commands, or one that was being opened,
                has been given up
    """

    def __init__(
        self,
        addresses: Callable[[], Sequence[Address]],
        greeting: Sequence[bytes],
        *,
        stall_ns: int,
        window_bytes: int,
        longest_bytes: int,
        failed: Callable[[int, str], None],
    ) -> None:
        self.state = LaneState.CLOSED
        self.socket: socket.socket | None = None
        self.connects = 0
        self._addresses = addresses
        self._untried: deque[Address] = deque()
        self._greeting = greeting
        self._greetings_due = 0
        self._stall_ns = stall_ns
        self._window_bytes = window_bytes
        self._longest_bytes = longest_bytes
        self._failed = failed
        self._waiting: deque[Command] = deque()
        self._pending: deque[Command] = deque()  # sent, or being sent
        self._asked_bytes = 0  # of content, by the commands in _pending
        self._outbox: deque[memoryview] = deque()
        self._progress_ns = 0
        self._reader = self._new_reader()

    @property
    def is_busy(self) -> bool:
        """Whether something is expected of the store."""
        return bool(self._waiting or self._pending) or self.state in (LaneState.CONNECTING, LaneState.GREETING)

    @property
    def stalls_at_ns(self) -> int:
        """When a busy lane will be given up if nothing moves."""
        return self._progress_ns + self._stall_ns

    def submit(self, commands: Sequence[Command], now_ns: int) -> None:
        """Queue commands, and send what can be sent.  What fails at once is answered before this returns."""
        if not self.is_busy:
            self._progress_ns = now_ns
        self._waiting.extend(commands)
        self._attempt(now_ns, self._advance)

    def wanted_events(self) -> int:
        """What select.epoll should watch the socket for."""
        wants_room = self.state is LaneState.CONNECTING or bool(self._outbox)
        return select.EPOLLIN | (select.EPOLLOUT if wants_room else 0)

    def service(self, now_ns: int) -> None:
        """The socket is ready for something."""
        self._attempt(now_ns, self._exchange)

    def check_stall(self, now_ns: int) -> None:
        """Give the connection up if it has stood still for too long."""
        if self.is_busy and now_ns >= self.stalls_at_ns:
            self.give_up(int(E.ETIMEDOUT), f"nothing came for {self._stall_ns / 1e6:g} ms")

    def give_up(self, code: int, reason: str) -> None:
        """Close the connection; every command that is not answered is LOST.  After this nothing lands in any target."""
        was_busy = self.is_busy
        lost = [*self._pending, *self._waiting]
        self.close()
        self._waiting.clear()
        for command in lost:
            command.done(Reply(Kind.LOST, number=code))
        if was_busy:
            self._failed(code, reason)

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self.socket = None
        self.state = LaneState.CLOSED
        self._pending.clear()
        self._outbox.clear()
        self._untried.clear()
        self._asked_bytes = 0
        self._reader = self._new_reader()

    # -- progress -------------------------------------------------------------------------------------------------

    def _attempt(self, now_ns: int, step: Callable[[int], None]) -> None:
        try:
            step(now_ns)
        except (OSError, ProtocolError, Refused) as error:
            self.give_up(int(E.EIO), str(error) or type(error).__name__)

    def _exchange(self, now_ns: int) -> None:
        if self.state is LaneState.CONNECTING:
            self._finish_connect(now_ns)
            if self.state is LaneState.CONNECTING:
                return
        self._receive(now_ns)
        self._advance(now_ns)

    def _advance(self, now_ns: int) -> None:
        """Whatever can be done without an event: connect, or send what the window and the socket have room for."""
        if self.state is LaneState.CLOSED:
            self.state = LaneState.CONNECTING
            self._untried = deque(self._addresses())
            self._connect_next(now_ns, OSError("its name has no address"))
        if self.state is LaneState.OPEN:
            while self._waiting and self._has_room(self._waiting[0]):
                self._send_later(self._waiting.popleft())
        self._flush(now_ns)

    def _has_room(self, command: Command) -> bool:
        return (
            command.target is None
            or not self._asked_bytes
            or self._asked_bytes + len(command.target) <= self._window_bytes
        )

    def _send_later(self, command: Command) -> None:
        self._pending.append(command)
        self._outbox.extend(memoryview(part) for part in command.parts)
        if command.target is not None:
            self._asked_bytes += len(command.target)

    def _flush(self, now_ns: int) -> None:
        if self.socket is None or self.state is LaneState.CONNECTING:
            return
        for _ in range(_CALLS_PER_TURN):
            if not self._outbox:
                return
            try:
                sent = self.socket.sendmsg(list(islice(self._outbox, _BUFFERS_PER_SEND)))
            except BlockingIOError:
                return
            self._progress_ns = now_ns
            while self._outbox and sent >= len(self._outbox[0]):
                sent -= len(self._outbox.popleft())
            if sent:
                self._outbox[0] = self._outbox[0][sent:]

    def _receive(self, now_ns: int) -> None:
        for _ in range(_CALLS_PER_TURN):
            if self.socket is None:
                return
            buffers = self._reader.buffers()
            room = sum(map(len, buffers))
            try:
                n_bytes = self.socket.recvmsg_into(buffers)[0]
            except BlockingIOError:
                return
            if n_bytes == 0:
                raise ConnectionError("the store closed the connection")
            self._progress_ns = now_ns
            self._reader.landed(n_bytes)
            if n_bytes < room:  # that was all there is
                return

    def _new_reader(self) -> ReplyReader:
        return ReplyReader(self._target, self._deliver, self._longest_bytes)

    def _target(self) -> memoryview | None:
        return self._pending[0].target if self._pending else None

    def _deliver(self, reply: Reply) -> None:
        if not self._pending:
            raise ProtocolError("a reply to nothing")
        command = self._pending.popleft()
        if command.target is not None:
            self._asked_bytes -= len(command.target)
        command.done(reply)

    # -- connecting -----------------------------------------------------------------------------------------------

    def _connect_next(self, now_ns: int, error: OSError) -> None:
        """Try the next address.  Error: `error` when there is none left."""
        while self._untried:
            family, where = self._untried.popleft()
            if self.socket is not None:
                self.socket.close()
            self.socket = _new_socket(family)
            self.state = LaneState.CONNECTING
            self.connects += 1
            try:
                self.socket.connect(where)
            except BlockingIOError as blocked:
                if family != socket.AF_UNIX:
                    return  # under way
                error = blocked  # its queue is full
            except OSError as failure:
                error = failure
            else:
                self._greet(now_ns)
                return
        raise error

    def _finish_connect(self, now_ns: int) -> None:
        assert self.socket is not None
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._connect_next(now_ns, OSError(code, os.strerror(code)))
            return
        try:
            self.socket.getpeername()
        except OSError:
            return  # not connected yet: a wake-up for nothing
        self._greet(now_ns)

    def _greet(self, now_ns: int) -> None:
        self.state = LaneState.GREETING
        self._progress_ns = now_ns
        commands = [*self._greeting, request(b"PING")]
        self._greetings_due = len(commands)
        for command in commands:
            self._send_later(Command([command], self._on_greeting))
        self._flush(now_ns)

    def _on_greeting(self, reply: Reply) -> None:
        if reply.kind is Kind.LOST:
            return
        if reply.kind is not Kind.STATUS:
            raise Refused(f"refused: {reply.text.decode('ascii', 'replace') or reply.kind.value}")
        self._greetings_due -= 1
        if not self._greetings_due:
            self.state = LaneState.OPEN


def _new_socket(family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    with contextlib.suppress(OSError):
        if family == socket.AF_UNIX:  # a TCP socket grows its buffers by itself, and better if it is not told
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock
