"""The client's half of the wire without any I/O: numbers requests, encodes them, decodes what comes back.

It speaks through the `msgpack` package, while the daemon uses msgspec: two independent codecs check each other, and
this file is what a client in another language has to do.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import msgpack

from attnix.kernel.errors import E
from attnix.kernel.params import MAX_MESSAGE_BYTES

from .abi import BY_NAME, NOTIFICATIONS, Record
from .exceptions import ConnectionLost, TooBig, syscall_error
from .framing import Splitter, header
from .records import build, trimmed


class Reply(NamedTuple):
    """The answer to a request, still as plain values."""

    request: int
    errno: int
    result: Any


class Note(NamedTuple):
    """A notification: its record, and the request that it belongs to."""

    kind: str
    payload: Any


Message: TypeAlias = Reply | Note


class Session:
    """Ids count up from 1 and are never used twice, so a late answer can never meet a new request.

    after  the session of an earlier connection of the same client: ids go on from there
    """

    def __init__(self, after: Session | None = None) -> None:
        self._last_request: int = after._last_request if after else 0
        self._splitter = Splitter()
        self._pack = msgpack.Packer(use_bin_type=True).pack

    def request(self, name: str, args: Record) -> tuple[int, bytes]:
        """The id and the bytes of a request.

        Error: TooBig when the message would pass the limit, InvalidArgument for text or a number that cannot travel.
        """
        self._last_request += 1
        try:
            body: bytes = self._pack([self._last_request, BY_NAME[name].number, trimmed(args)])
        except UnicodeEncodeError as error:  # of a file or an argument in another encoding, or half of a JSON escape
            message = (
                f"{error.object[error.start]!r} at position {error.start} of a text is no character: text is UTF-8"
            )
            raise syscall_error(E.EINVAL, {"message": message, "position": error.start}, name) from None
        except OverflowError:
            message = "a number has more than 64 bits"
            raise syscall_error(E.EINVAL, {"message": message, "bits": 64}, name) from None
        if len(body) > MAX_MESSAGE_BYTES:
            message = f"the message would be {len(body)} bytes; at most {MAX_MESSAGE_BYTES} can be sent"
            raise TooBig(7, {"message": message, "bytes": len(body), "limit": MAX_MESSAGE_BYTES}, name)
        return self._last_request, header(len(body)) + body

    def receive(self, data: bytes) -> list[Message]:
        """What `data` completes, in order.  Error: ConnectionLost when the peer breaks the protocol, or says we did."""
        messages: list[Message] = []
        for body in self._splitter.split(data):
            if not isinstance(body, bytes):
                raise ConnectionLost(f"the daemon sent a message of {body.size} bytes")
            message = self._decode(body)
            if message is not None:
                messages.append(message)
        return messages

    def _decode(self, body: bytes) -> Message | None:
        try:
            request, code, payload = msgpack.unpackb(body, use_list=False, strict_map_key=False)
        except (ValueError, TypeError) as error:  # msgpack's exceptions are ValueErrors
            raise ConnectionLost(f"the daemon sent what is not a message: {error}") from None
        if request:
            return Reply(request, code, payload)
        if isinstance(code, int):  # an answer to something that had no usable id
            complaint = syscall_error(code, payload if isinstance(payload, dict) else {})
            raise ConnectionLost(str(complaint), complaint.detail) from complaint
        record = NOTIFICATIONS.get(code)
        return None if record is None else Note(code, build(record, payload))  # unknown kinds come from newer servers


def outcome(name: str, reply: Reply) -> Record:
    """The result record of a reply.  Error: the SyscallError that it carries."""
    if reply.errno:
        raise syscall_error(reply.errno, reply.result if isinstance(reply.result, dict) else {}, name)
    try:
        return build(BY_NAME[name].result, reply.result)
    except ValueError as error:
        raise ConnectionLost(f"the daemon answered {name} with {error}") from None
