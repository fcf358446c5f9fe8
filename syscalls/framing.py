"""Cutting a byte stream into messages: a 4-byte little-endian length, then that many bytes.  Both ends use it.

A message over the limit is skipped without being kept, so an honest sender that asked for too much loses that message
only.  A length that no sender could mean is lost framing: nothing after it can be trusted to begin where it seems to.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from attnix.kernel.params import MAX_MESSAGE_BYTES

HEADER_BYTES: Final = 4
LOST_BYTES: Final = 16 * MAX_MESSAGE_BYTES  # a length from here on is not a length

_length = struct.Struct("<I").unpack_from
_SMALL: Final = tuple(struct.pack("<I", n) for n in range(1024))


class Oversized(NamedTuple):
    """In place of a message: one of `size` bytes began here.  `lost` when framing is lost with it."""

    size: int
    lost: bool


def header(size: int) -> bytes:
    """The 4 bytes that go before a message of `size` bytes."""
    return _SMALL[size] if size < 1024 else size.to_bytes(HEADER_BYTES, "little")


class Splitter:
    """Incremental: feed it what arrived, get the messages that are complete.  Work is linear in the bytes fed."""

    __slots__ = ("_need", "_rest", "_skip", "lost")

    def __init__(self) -> None:
        self._rest = bytearray()  # the beginning of a message that is not complete
        self._need = HEADER_BYTES  # bytes of it that must be there before a look is worth while
        self._skip = 0  # bytes of an oversized message still to come
        self.lost = False

    @property
    def unfinished_bytes(self) -> int:
        """Bytes of a message that has begun and not ended; at the end of the stream that is a truncated message.

        One that is being skipped does not count: it has been reported.
        """
        return len(self._rest)

    @property
    def missing_bytes(self) -> int:
        """How many bytes that message still lacks, as far as is known."""
        return self._need - len(self._rest)

    def split(self, data: bytes) -> list[bytes | Oversized]:
        """The messages that `data` completes, in order.  After lost framing everything is ignored."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._need:
                return []
            data = bytes(self._rest)
            self._rest.clear()
            self._need = HEADER_BYTES
        position = 0
        if self._skip or self.lost:
            if self.lost or len(data) <= self._skip:
                self._skip = max(0, self._skip - len(data))
                return []
            position, self._skip = self._skip, 0
        end = len(data)
        messages: list[bytes | Oversized] = []
        while end - position >= HEADER_BYTES:
            (size,) = _length(data, position)
            stop = position + HEADER_BYTES + size
            if size > MAX_MESSAGE_BYTES:
                self.lost = size >= LOST_BYTES
                messages.append(Oversized(size, self.lost))
                if self.lost:
                    return messages
                if stop > end:
                    self._skip = stop - end
                    return messages
            elif stop > end:
                self._need = HEADER_BYTES + size
                break
            else:
                messages.append(data[position + HEADER_BYTES : stop])
            position = stop
        if position < end:
            self._rest += data[position:] if position else data
        return messages
