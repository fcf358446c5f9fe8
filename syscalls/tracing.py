"""Telling a client of another's system calls: what `strace` is made of.

While nobody is traced none of this runs: the dispatcher takes requests and writes answers as if this file were not there.
A traced client's requests go through `Tracing.request`, and what is written to it through a tap that finds the answers
among the bytes.  So every way in which a call can be answered is seen, and times are those of the daemon: from when it took
the request until the answer was handed to the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec

from attnix.kernel.calls import Message, SyscallNote
from attnix.kernel.events import Trace

from . import wire
from .framing import Oversized
from .wire import BAD_MESSAGE, ROUTES, Route, envelope

if TYPE_CHECKING:
    from .dispatch import Client

TEXT_CHARS: Final = 40  # of a text in a note
NOTE_CHARS: Final = 200  # of all arguments, or of a result
_SECRET: Final = "session"
_TOKENS: Final = ("tokens", "stop_tokens")
_answers: Final = msgspec.msgpack.Decoder(tuple[int, int | str, msgspec.Raw]).decode

Take: TypeAlias = "Callable[[Client, bytes | Oversized], bytes | None]"


class _Open(NamedTuple):
    """A call that has no answer yet."""

    at_ns: int
    route: Route
    args: str


class _Tracer:
    """Who is told."""

    __slots__ = ("lost", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.lost = 0


class _Target:
    """Whose calls are told, and to whom (by connection)."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.tracers: dict[int, _Tracer] = {}
        self.open: dict[int, _Open] = {}


class Tracing:
    """clients: everybody connected, by connection.  take(client, body), send(client, data): the dispatcher's own."""

    def __init__(
        self, clients: Mapping[int, Client], take: Take, send: Callable[[Client, bytes], None], clock: Callable[[], int]
    ) -> None:
        self._clients = clients
        self._take = take
        self._send = send
        self._clock = clock
        self._targets: dict[int, _Target] = {}

    @property
    def active(self) -> bool:
        """Whether anybody is traced."""
        return bool(self._targets)

    def change(self, effect: Trace) -> None:
        """Somebody is told from now on, or no more."""
        client = self._clients.get(effect.target)
        if effect.what == "none":
            self._leave(effect.target, effect.conn)
        elif client is not None:
            target = self._targets.get(effect.target)
            if target is None:
                target = self._targets[effect.target] = _Target(client)
                client.write = lambda data: self._written(target, data)
            target.tracers[effect.conn] = _Tracer(effect.pid)

    def gone(self, conn: int) -> None:
        """A client has left: nobody is told of it any more, nor it of anybody."""
        target = self._targets.pop(conn, None)
        if target is not None:
            self._tell(target, SyscallNote(0, self._clock(), 0, "", ""))
        for traced in list(self._targets):
            self._leave(traced, conn)

    def _leave(self, traced: int, tracer: int) -> None:
        target = self._targets.get(traced)
        if target is not None and target.tracers.pop(tracer, None) is not None and not target.tracers:
            del self._targets[traced]
            target.client.write = target.client.peer.write

    # -- what a traced client does -----------------------------------------------------------------------------------

    def request(self, client: Client, body: bytes | Oversized) -> bytes | None:
        """As the dispatcher's own, with a look at it."""
        target = self._targets.get(client.conn)
        asked = None if target is None else _asked(body)
        if target is None or asked is None or asked[0] in target.open:
            return self._take(client, body)
        request, route, args = asked
        opened = target.open[request] = _Open(self._clock(), route, args)
        answer = self._take(client, body)
        if answer is None and request in client.outstanding:
            self._tell(target, SyscallNote(0, opened.at_ns, request, route.name, args))
        return answer

    def _written(self, target: _Target, data: bytes) -> None:
        target.client.peer.write(data)
        now_ns = self._clock()
        for request, code, raw in _messages(data):
            opened = target.open.pop(request, None) if request else None
            if opened is None or isinstance(code, str):
                continue
            result = _result(opened.route, code, raw)
            note = SyscallNote(
                0, opened.at_ns, request, opened.route.name, opened.args, now_ns - opened.at_ns, code, result
            )
            self._tell(target, note)

    def _tell(self, target: _Target, note: SyscallNote) -> None:
        for conn, tracer in target.tracers.items():
            client = self._clients.get(conn)
            if client is None:
                continue
            if client.unread:  # it would pile up here
                tracer.lost += 1
                continue
            self._send(client, wire.notification("syscall", note._replace(pid=tracer.pid, lost=tracer.lost)))
            tracer.lost = 0


def _asked(body: bytes | Oversized) -> tuple[int, Route, str] | None:
    """Id, call and arguments of a request; None for what is none, which the dispatcher will say."""
    try:
        request, number, raw = envelope(body)  # type: ignore[arg-type]  # Oversized: a TypeError
        route = ROUTES[number]
        return request, route, _fields(route.decode(raw))
    except BAD_MESSAGE:
        return None


def _messages(data: bytes) -> Iterator[tuple[int, int | str, msgspec.Raw]]:
    """The messages in what is written: always whole ones."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        yield _answers(data[at + 4 : at + 4 + size])
        at += 4 + size


def _result(route: Route, code: int, raw: msgspec.Raw) -> str:
    if code:
        detail = msgspec.msgpack.decode(raw)
        return str(detail.get("message", ""))[:NOTE_CHARS] if isinstance(detail, dict) else ""
    return _fields(msgspec.msgpack.decode(raw, type=route.call.result))


def _fields(record: tuple[object, ...]) -> str:
    """name=value, ... of what is not the default; what is long is cut short."""
    names: tuple[str, ...] = getattr(record, "_fields", ())
    defaults: Mapping[str, Any] = getattr(record, "_field_defaults", {})
    parts, length = [], 0
    for name, value in zip(names, record, strict=True):
        if name in defaults and value == defaults[name]:
            continue
        parts.append(f"{name}={_value(name, value)}")
        length += len(parts[-1]) + 2
        if length > NOTE_CHARS:
            parts[-1] = "..."
            break
    return ", ".join(parts)


def _value(name: str, value: Any) -> str:
    if name == _SECRET:
        return '"..."' if value else '""'
    if isinstance(value, bytes):
        return f"<{len(value) // 4} tokens>" if name in _TOKENS else f"<{len(value)} bytes>"
    if isinstance(value, str):
        short = value if len(value) <= TEXT_CHARS else f"{value[:TEXT_CHARS]}..."
        return '"' + short.encode("unicode_escape").decode().replace('"', '\\"') + '"'
    if isinstance(value, Message):
        return f"{value.role} {_value('', value.content)}"
    if hasattr(value, "_fields"):
        return "{...}"
    if isinstance(value, tuple):
        few = len(value) <= 4 and all(isinstance(each, int | str | Message) for each in value)
        return f"[{', '.join(_value('', each) for each in value)}]" if few else f"[{len(value)} items]"
    return f"{{{len(value)} items}}" if isinstance(value, dict) else str(value)
