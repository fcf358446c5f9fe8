"""One end of the channel between the daemon and a driver process: whole MessagePack arrays over SOCK_SEQPACKET.

The same class serves both ends.  A driver leaves its socket blocking: `send` returns when the message is with the
operating system, `recv` waits for the next one.  The daemon makes its socket non-blocking: `send` never waits, what the
peer does not take stays in a queue that `flush` empties when the loop says the socket is writable, and `recv_ready`
returns what has arrived.  A driver that hangs therefore costs the daemon a queue, never a wait.

    Exception
    ├── ChannelClosed   the peer is gone (send only; recv says it with None)
    └── BadMessage      what arrived is not a message of this protocol: the peer cannot be trusted any more
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from typing import Any, Final, cast

import msgpack

from .protocol import LAST, MORE, PACKET_BYTES

MAX_CHANNEL_MESSAGE_BYTES: Final = 64 << 20  # token histories of a full batch are the largest thing sent
SEND_BUFFER_BYTES: Final = 4 << 20  # asked of the kernel; it may give less, which only means more waits for room
FAULTS_VARIABLE: Final = "ATTNIX_DRIVER_FAULTS"  # in a driver's environment: see drivers/faulty.py
EPOCH_VARIABLE: Final = "ATTNIX_DRIVER_EPOCH"  # set by the supervisor: 1 for the first life of a driver
_PACKETS_PER_CALL: Final = 256  # recv_ready returns to the loop after so many


class ChannelClosed(Exception):
    """The other end closed the channel or died."""


class BadMessage(Exception):
    """A packet or message that breaks the protocol: wrong continuation byte, bad MessagePack, no verb, too long."""


class Channel:
    """Send and receive messages on one connected SOCK_SEQPACKET socket, which the channel owns from now on.

    bytes_queued  bytes that `send` accepted and the socket has not taken yet (non-blocking end only)
    eof           the peer has closed; nothing more will arrive
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._queue: deque[bytes] = deque()
        self._packet = bytearray(PACKET_BYTES + 1)  # one byte more than allowed: a longer packet shows
        self._partial = bytearray()
        self.bytes_queued = 0
        self.eof = False

    @staticmethod
    def from_fd(fd: int, *, arena_fd: int | None = None) -> Channel:
        """Take over an inherited descriptor (the `--channel` argument of a driver), as a blocking end.

        With ATTNIX_DRIVER_FAULTS in the environment the channel misbehaves as that says (drivers/faulty.py): fault
        injection reaches every driver, and the one that ships is the one that was tested.
        """
        sock = socket.socket(fileno=fd)
        sock.setblocking(True)
        if FAULTS_VARIABLE in os.environ:
            from .faulty import FaultyChannel  # a healthy driver never loads it

            return FaultyChannel(sock, arena_fd)
        return Channel(sock)

    def fileno(self) -> int:
        return self._sock.fileno()

    def setblocking(self, blocking: bool) -> None:
        self._sock.setblocking(blocking)

    def close(self) -> None:
        """Close this end.  The peer reads end-of-file; whatever was still queued is lost."""
        self._queue.clear()
        self.bytes_queued = 0
        self.eof = True
        self._sock.close()

    # -- sending --------------------------------------------------------------------------------------------------

    def send(self, message: list[Any] | tuple[Any, ...]) -> bool:
        """Send one message; True when the operating system has taken all of it.

        A non-blocking end returns False when part of it had to be queued: call `flush` once the socket is writable.
        Error: ChannelClosed when the peer is gone; BadMessage when the message is too long to be received.
        """
        packed = cast(bytes, msgpack.packb(message))
        if len(packed) > MAX_CHANNEL_MESSAGE_BYTES:
            raise BadMessage(f"message of {len(packed)} bytes; the limit is {MAX_CHANNEL_MESSAGE_BYTES}")
        room = PACKET_BYTES - 1
        last = max(0, len(packed) - 1) // room * room
        for at in range(0, last, room):
            self._queue.append(MORE + packed[at : at + room])
        self._queue.append(LAST + packed[last:])
        self.bytes_queued += len(packed) + last // room + 1
        return self.flush()

    def flush(self) -> bool:
        """Give queued packets to the socket until it is full; True when the queue is empty.  Error: ChannelClosed."""
        while self._queue:
            packet = self._queue[0]
            try:
                self._sock.send(packet)
            except BlockingIOError:
                return False
            except OSError as error:
                self._queue.clear()
                self.bytes_queued = 0
                raise ChannelClosed(str(error)) from error
            self._queue.popleft()
            self.bytes_queued -= len(packet)
        return True

    # -- receiving ------------------------------------------------------------------------------------------------

    def recv(self) -> list[Any] | None:
        """Wait for the next message (blocking end); None when the peer has closed.  Error: BadMessage."""
        while not self.eof:
            message = self._recv_packet()
            if message is not None:
                return message
        return None

    def recv_ready(self) -> list[list[Any]]:
        """The messages that have arrived, without waiting (non-blocking end); after the last one `eof` may be set.

        Bounded work: what remains after a few hundred packets is for the next call (readiness is level-triggered).
        Error: BadMessage; messages before the bad one are lost, since such a peer is killed anyway.
        """
        messages: list[list[Any]] = []
        for _ in range(_PACKETS_PER_CALL):
            if self.eof:
                break
            try:
                message = self._recv_packet()
            except BlockingIOError:
                break
            if message is not None:
                messages.append(message)
        return messages

    def _recv_packet(self) -> list[Any] | None:
        """Read one packet; the message that it completes, or None (more follows, or eof was set)."""
        try:
            n_bytes = self._sock.recv_into(self._packet)
        except (ConnectionResetError, BrokenPipeError):
            n_bytes = 0  # the peer died with unread input: end-of-file in another form
        if n_bytes == 0:
            self.eof = True
            return None
        if n_bytes > PACKET_BYTES:
            raise BadMessage(f"packet longer than {PACKET_BYTES} bytes")
        follows = self._packet[:1]
        body = memoryview(self._packet)[1:n_bytes]
        if follows == LAST and not self._partial:
            return _unpack(body)
        if bytes(follows) not in (LAST, MORE):
            raise BadMessage(f"packet begins with byte {follows[0]}, not 0 or 1")
        if len(self._partial) + len(body) > MAX_CHANNEL_MESSAGE_BYTES:
            raise BadMessage(f"message longer than {MAX_CHANNEL_MESSAGE_BYTES} bytes")
        self._partial += body
        if follows == MORE:
            return None
        whole, self._partial = self._partial, bytearray()
        return _unpack(whole)


def _unpack(packed: memoryview | bytearray) -> list[Any]:
    try:
        message = msgpack.unpackb(packed)
    except Exception as error:  # msgpack raises several unrelated types for bad input
        raise BadMessage(f"not MessagePack: {error}") from error
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise BadMessage("a message is an array that begins with its verb")
    return message


def channel_pair() -> tuple[Channel, Channel]:
    """A connected pair of blocking channels, for tests and for drivers that run inside the calling process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), Channel(theirs)
