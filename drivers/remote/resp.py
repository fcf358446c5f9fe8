"""RESP2, the Redis protocol's second version: requests as buffers to send, replies read into place.

Only what this tier says and hears: requests are arrays of bulk strings; replies are a status, an error, an integer, a
bulk string or the null bulk string (https://redis.io/docs/latest/develop/reference/protocol-spec/).  The content of a
bulk string is received straight into the memory that its request named, at no copy beyond the operating system's, but
for the few bytes that arrived together with the line before it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

SCRATCH_BYTES: Final = 4096  # a line of a reply is shorter, and so is what of a bulk string is copied


class ProtocolError(Exception):
    """What arrived is not a reply: the connection has lost its framing and must be closed."""


class Kind(Enum):
    STATUS = "+"
    ERROR = "-"
    INTEGER = ":"
    BULK = "$"  # landed whole in its target
    NIL = "nil"  # there is no such key
    MISFIT = "misfit"  # a bulk string that is not as long as its target: discarded
    LOST = "lost"  # no reply will come (never made here: by the connection, when it is given up)


class Reply(NamedTuple):
    """text: of STATUS and ERROR.  number: the INTEGER, the length of BULK and MISFIT, the errno of LOST."""

    kind: Kind
    text: bytes = b""
    number: int = 0


def request(*arguments: bytes) -> bytes:
    """One command."""
    return b"*%d\r\n" % len(arguments) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in arguments)


def set_request(name: bytes, content: memoryview, ttl_ms: int) -> list[Buffer]:
    """SET `name` to `content`, which is not copied: it must not change before the reply.  ttl_ms 0: it never expires."""
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (5 if ttl_ms else 3, len(name), name, len(content))
    expiry = b"$2\r\nPX\r\n$%d\r\n%d\r\n" % (len(b"%d" % ttl_ms), ttl_ms) if ttl_ms else b""
    return [head, content, b"\r\n" + expiry]


class ReplyReader:
    """Reads the replies of one connection, in order.

    target   called at the head of a bulk string: the memory for its content, or None to discard it
    deliver  called with every complete reply
    longest  bytes of a bulk string beyond which the connection is given up instead of reading on

    Both ends of the wire are used like this: receive into `buffers()`, then say how much it was with `landed`.
    """

    def __init__(
        self, target: Callable[[], memoryview | None], deliver: Callable[[Reply], None], longest_bytes: int
    ) -> None:
        self._target = target
        self._deliver = deliver
        self._longest_bytes = longest_bytes
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._junk = memoryview(bytearray(1 << 16))
        self._start = 0  # of what is in the scratch and not read yet
        self._end = 0
        self._into: memoryview | None = None  # what is missing of a bulk string's target
        self._discard_bytes = 0  # what is missing of a bulk string that nobody wants
        self._bulk: Reply | None = None  # to be delivered once its content and the line end behind it are here

    def buffers(self) -> list[memoryview]:
        """Where the next bytes of the connection belong, in order."""
        if self._into is not None:
            return [self._into, self._view]
        if self._discard_bytes:
            return [self._junk[: self._discard_bytes], self._view]
        if self._start:
            rest = self._end - self._start
            self._scratch[:rest] = self._scratch[self._start : self._end]
            self._start, self._end = 0, rest
        return [self._view[self._end :]]

    def landed(self, n_bytes: int) -> None:
        """`n_bytes` have been received into `buffers()`.  Error: ProtocolError."""
        if self._into is not None:
            taken = min(n_bytes, len(self._into))
            self._into = self._into[taken:] if taken < len(self._into) else None
            self._start, self._end = 0, n_bytes - taken
        elif self._discard_bytes:
            taken = min(n_bytes, self._discard_bytes, len(self._junk))
            self._discard_bytes -= taken
            self._start, self._end = 0, n_bytes - taken
            if self._discard_bytes and self._end:  # the junk buffer was shorter than what is discarded
                self._drop_from_scratch()
        else:
            self._end += n_bytes
        while self._into is None and not self._discard_bytes and self._read_one():
            pass

    def _read_one(self) -> bool:
        """Read one line, or the line end behind a bulk string; False when there is none yet."""
        if self._bulk is not None:
            if self._end - self._start < 2:
                return False
            if self._scratch[self._start : self._start + 2] != b"\r\n":
                raise ProtocolError("a bulk string does not end where it should")
            self._start += 2
            reply, self._bulk = self._bulk, None
            self._deliver(reply)
            return True
        end = self._scratch.find(b"\r\n", self._start, self._end)
        if end < 0:
            if self._end - self._start >= SCRATCH_BYTES - 2:
                raise ProtocolError("a line does not end")
            return False
        line = bytes(self._view[self._start : end])
        self._start = end + 2
        self._read_line(line)
        return True

    def _read_line(self, line: bytes) -> None:
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            self._deliver(Reply(Kind.STATUS, rest))
        elif kind == b"-":
            self._deliver(Reply(Kind.ERROR, rest))
        elif kind == b":" and rest.lstrip(b"-").isdigit() and len(rest) < 20:
            self._deliver(Reply(Kind.INTEGER, number=int(rest)))
        elif line == b"$-1":
            self._deliver(Reply(Kind.NIL))
        elif kind == b"$" and rest.isdigit() and len(rest) < 20:
            self._begin_bulk(int(rest))
        else:
            raise ProtocolError(f"not a reply: {line[:40]!r}")

    def _begin_bulk(self, n_bytes: int) -> None:
        if n_bytes > self._longest_bytes:
            raise ProtocolError(f"a bulk string of {n_bytes} bytes; the limit is {self._longest_bytes}")
        target = self._target()
        if target is None or len(target) != n_bytes:
            self._bulk = Reply(Kind.MISFIT, number=n_bytes)
            self._discard_bytes = n_bytes
            self._drop_from_scratch()
            return
        self._bulk = Reply(Kind.BULK, number=n_bytes)
        here = min(n_bytes, self._end - self._start)
        target[:here] = self._view[self._start : self._start + here]
        self._start += here
        self._into = target[here:] if here < n_bytes else None

    def _drop_from_scratch(self) -> None:
        here = min(self._discard_bytes, self._end - self._start)
        self._start += here
        self._discard_bytes -= here
