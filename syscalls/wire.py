"""The daemon's half of the wire: bytes to typed requests, results to bytes (msgspec), and what to say when it fails.

`ROUTES` holds a typed decoder per call, made from the ABI table, so a wrong type never reaches the kernel.  The fast
path is two decodes, the envelope and the arguments; `explain` is the slow path, which looks at a message that one of
them refused and says what is wrong with it.  Nothing here raises for what a client sent.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from attnix.kernel.errors import Detail, E
from attnix.kernel.params import MAX_MESSAGE_BYTES, MAX_REQUESTS, RETRY_MS
from attnix.kernel.trap_table import TRAPS

from .abi import BY_NUMBER, CALLS, RESERVED, Call, Record
from .framing import Oversized, header

MAX_REQUEST_ID: Final = 2**63 - 1

# Whatever a decoder may raise for bytes that it does not like (UnicodeDecodeError is a ValueError), the lookup of an
# unknown number, and the TypeError of something that is no bytes (Oversized).
BAD_MESSAGE: Final = (msgspec.MsgspecError, ValueError, RecursionError, KeyError, OverflowError, TypeError)


class Route:
    """A call with its decoder.

    promises        its caller asks for what outlives the daemon
    prepares        the daemon has work of its own to do for it (text, streams, the journal)
    kept, kept_raw  a result that the kernel may give again as the very same object, with its bytes
    """

    __slots__ = ("call", "decode", "errnos", "kept", "kept_raw", "name", "prepares", "promises")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.name = call.name
        self.promises = call.name in ("publish", "detach")
        self.prepares = self.promises or call.name in ("append", "resume", "inject", "generate", "read")
        self.errnos = frozenset(int(errno) for errno in call.errnos)
        self.decode: Callable[[Any], Any] = msgspec.msgpack.Decoder(call.args).decode
        self.kept: Record | None = None
        self.kept_raw = msgspec.Raw()


ROUTES: Final = {call.number: Route(call) for call in CALLS if call.name in TRAPS}  # what this kernel can do

# (id, number, arguments still encoded): the structure of the whole message is checked, the types of two items.
envelope: Final[Callable[[bytes], tuple[int, int, msgspec.Raw]]] = msgspec.msgpack.Decoder(
    tuple[int, int, msgspec.Raw]
).decode
_encode: Final = msgspec.msgpack.Encoder().encode
_SMALL_BYTES: Final = 1024
_SMALL: Final = tuple(header(size) for size in range(_SMALL_BYTES))


class Refusal(NamedTuple):
    """The one answer to a message that is no request.  `request` is 0 where no usable id could be read."""

    request: int
    code: E
    detail: Detail


def reply(request: int, code: int, result: object) -> bytes:
    """The bytes of a reply, its header included."""
    body = _encode((request, code, result))
    return header(len(body)) + body


def result_reply(request: int, route: Route, result: Record) -> bytes:
    """A successful reply.  A result that is the same object as last time is not encoded again (uname never changes).

    A result that would pass the message limit becomes E2BIG.
    """
    if result is route.kept:
        body = _encode((request, 0, route.kept_raw))
        return _SMALL[len(body)] + body
    body = _encode((request, 0, result))
    if len(body) < _SMALL_BYTES:
        if route.name == "uname" and len(body) < _SMALL_BYTES - 16:  # room for a longer id
            route.kept, route.kept_raw = result, msgspec.Raw(_encode(result))
        return _SMALL[len(body)] + body
    if len(body) > MAX_MESSAGE_BYTES:
        message = f"{route.name}: the result is {len(body)} bytes, more than a message holds; ask for less"
        return reply(request, E.E2BIG, {"message": message, "bytes": len(body), "limit": MAX_MESSAGE_BYTES})
    return header(len(body)) + body


def notification(kind: str, payload: Record) -> bytes:
    """The bytes of a notification, its header included."""
    return reply(0, kind, payload)  # type: ignore[arg-type]  # the same three items


def refuse_oversized(message: Oversized) -> Refusal:
    """The answer to a message over the limit."""
    if message.lost:
        text = f"framing is lost: no message has {message.size} bytes; closing the connection"
        return Refusal(0, E.EINVAL, {"message": text, "bytes": message.size, "limit": MAX_MESSAGE_BYTES, "closing": 1})
    text = f"a message of {message.size} bytes is over the limit of {MAX_MESSAGE_BYTES}; it was skipped"
    return Refusal(0, E.E2BIG, {"message": text, "bytes": message.size, "limit": MAX_MESSAGE_BYTES})


def refuse_truncated(have_bytes: int, missing_bytes: int) -> Refusal:
    """The answer to a stream that ends inside a message."""
    text = f"the stream ended inside a message: {have_bytes} bytes came and at least {missing_bytes} are missing"
    return Refusal(0, E.EINVAL, {"message": text, "bytes": have_bytes, "missing": missing_bytes})


def refuse_crowd() -> tuple[E, Detail]:
    """The answer to a request too many."""
    text = f"{MAX_REQUESTS} requests are outstanding on this connection; read answers first"
    return E.EAGAIN, {"message": text, "outstanding": MAX_REQUESTS, "limit": MAX_REQUESTS, "retry_after_ms": RETRY_MS}


def explain(body: bytes, is_outstanding: Callable[[int], bool]) -> Refusal:
    """Why `body` is not a request that can be taken, and which id its answer carries."""
    request = _peek_id(body)
    if is_outstanding(request):
        text = f"request id {request} is outstanding on this connection"
        return Refusal(0, E.EINVAL, {"message": text, "field": "id", "request": request})
    try:
        request, number, raw = envelope(body)
    except BAD_MESSAGE as error:
        return Refusal(request, E.EINVAL, _envelope_detail(body, error))
    if not 0 < request <= MAX_REQUEST_ID:
        text = f"a request id is 1 .. 2^63-1, not {request}"
        return Refusal(0, E.EINVAL, {"message": text, "field": "id"})
    route = ROUTES.get(number)
    if route is None:
        name = BY_NUMBER[number].name if number in BY_NUMBER else RESERVED.get(number)
        text = f"{name} ({number}) is not in this version" if name else f"there is no system call number {number}"
        return Refusal(request, E.ENOSYS, {"message": text, "number": number})
    try:
        route.decode(raw)
    except BAD_MESSAGE as error:
        return Refusal(request, E.EINVAL, _argument_detail(route.call, error))
    return Refusal(request, E.EINVAL, {"message": "the message was refused", "call": route.name})


def _envelope_detail(body: bytes, error: Exception) -> Detail:
    if isinstance(error, msgspec.ValidationError):
        place = re.search(r"\$\[(\d)\]", str(error))
        field = ("id", "number", "args")[int(place[1])] if place and int(place[1]) < 3 else ""
        text = f"a request is an array [id, number, args]: {_plain(error)}"
        return {"message": text, "field": field} if field else {"message": text}
    if isinstance(error, RecursionError):
        return {"message": "the message is nested too deeply"}
    return {"message": f"not one MessagePack value: {error}" if body else "the message is empty"}


def _argument_detail(call: Call, error: Exception) -> Detail:
    """Names the field: msgspec's path `$[2][0]` is the third argument, item 0."""
    fields: tuple[str, ...] = getattr(call.args, "_fields", ())
    place = re.search(r"`\$\[(\d+)\](.*?)`", str(error))
    if place and int(place[1]) < len(fields):
        field = fields[int(place[1])]
        return {"message": f"{call.name}: {field}{place[2]}: {_plain(error)}", "call": call.name, "field": field}
    got = re.search(r"length (?:\d+ to )?(\d+), got (\d+)|least length (\d+), got (\d+)", str(error))
    count = int(got[2] or got[4]) if got else -1
    signature = f"arguments are ({', '.join(fields)})"
    if 0 <= count < len(fields):
        field = fields[count]
        return {"message": f"{call.name}: {field} is missing; {signature}", "call": call.name, "field": field}
    if count > len(fields):
        text = f"{call.name}: {count} arguments given, {len(fields)} known; {signature}"
        return {"message": text, "call": call.name, "field": "args"}
    return {"message": f"{call.name}: {_plain(error)}; {signature}", "call": call.name, "field": "args"}


def _plain(error: Exception) -> str:
    return re.sub(r" - at `\$.*`$", "", str(error))


_INTEGERS: Final = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}


def _peek_id(body: bytes) -> int:
    """The first item of an array when it is an id, else 0; looks at a few bytes, whatever follows them."""
    first = body[:1]
    if not first:
        return 0
    at = 1 if 0x90 <= first[0] <= 0x9F else {0xDC: 3, 0xDD: 5}.get(first[0], 0)
    if at == 0 or first[0] == 0x90 or len(body) <= at:
        return 0
    kind = body[at]
    if kind < 0x80:
        return kind
    form = _INTEGERS.get(kind)
    if form is None or len(body) < at + 1 + struct.calcsize(form):
        return 0
    (value,) = struct.unpack_from(form, body, at + 1)
    return value if value <= MAX_REQUEST_ID else 0
