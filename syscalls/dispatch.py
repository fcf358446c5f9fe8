"""Between connections and the kernel: requests become events, effects become bytes.

One *turn* is everything that follows from one thing that happened (bytes from a client, a driver's answer, a timer):
events are stepped until none is left, and then each connection that has something to send writes it once.  Replies go
through one place, which knows the requests outstanding on every connection, so each gets exactly one (invariant I9).

Nothing that a client sends can raise here.  What the kernel raises is a Panic or a bug in it; either way its state
cannot be trusted any more, so the turn ends, nothing is sent, and the daemon stops.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

from attnix.kernel.calls import CancelArgs, GenerateArgs, GenerateResult, InjectArgs, ReadResult, Usage
from attnix.kernel.errors import Detail, E, Errno
from attnix.kernel.events import (
    AttachTier,
    Bug,
    Connect,
    DetachTier,
    Disconnect,
    Effect,
    Event,
    Exec,
    Halt,
    Journal,
    Notify,
    Pause,
    Plug,
    Prime,
    ReadSnapshot,
    Reply,
    RestartDriver,
    Resume,
    SetTimer,
    SleepDriver,
    SnapshotRead,
    SnapshotWritten,
    StopAt,
    Suspend,
    Syscall,
    Timer,
    Tokens,
    Trace,
    Transfer,
    Unplug,
    WakeDriver,
    WriteSnapshot,
)
from attnix.kernel.params import MAX_REQUESTS
from attnix.kernel.traps_wait import TextArgs

from . import wire
from .abi import Record
from .framing import Oversized
from .listen import Credentials
from .ports import DriverPort, Failure, JournalPort, KernelPort, SnapshotPort, TextPort
from .streams import Stream, spelled
from .tracing import Tracing
from .wire import MAX_REQUEST_ID, ROUTES, Refusal, Route, envelope, result_reply

TAIL_TOKENS: Final = 64  # how much of a context's end the chat template wants to see

REQUESTS_AT_ONCE: Final = 512  # of one connection, before its answers are written: bounds what a turn holds in memory

BUSY_NS: Final = 20_000  # messages of different clients that come closer together are a crowd ...
BUSY_TIMES: Final = 8  # ... when it happens so often in a row

_TEXT: Final = frozenset(route for route in ROUTES.values() if route.name in ("append", "resume", "inject"))
_GENERATE: Final = next(route for route in ROUTES.values() if route.name == "generate")
_READ: Final = next(route for route in ROUTES.values() if route.name == "read")
_STREAMED: Final = frozenset(route for route in ROUTES.values() if route.name in ("generate", "reattach"))
_ENDLESS: Final = ("generate", "reattach", "forward", "score", "wait")  # what `cancel` ends
_record: Final = tuple.__new__  # a NamedTuple in half the time of calling its class
_NO_TOKENIZER: Final = "this model has no tokenizer: send token ids"


class Peer(Protocol):
    """The transport half of a connection (connection.py)."""

    def write(self, data: bytes) -> None:
        """Queue bytes; never blocks, never raises."""
        ...

    def set_reading(self, reading: bool) -> None:
        """Stop or go on taking bytes from the client."""
        ...

    def finish(self) -> None:
        """Send what is queued, then close."""
        ...


class Client:
    """What the daemon knows of one connection.

    inbox        messages that came and were not taken yet
    outbox       bytes to write at the end of this turn
    outstanding  requests without their reply yet
    waiting      a text job must end before the next request is taken: requests of a connection stay in order
    """

    __slots__ = (
        "conn",
        "ended",
        "faulted",
        "inbox",
        "outbox",
        "outstanding",
        "peer",
        "streams",
        "unread",
        "waiting",
        "write",
    )

    def __init__(self, conn: int, peer: Peer) -> None:
        self.conn: Final = conn
        self.peer: Final = peer
        self.write = peer.write
        self.inbox: deque[bytes | Oversized] = deque()
        self.outbox: list[bytes] = []
        self.outstanding: dict[int, Route] = {}
        self.streams: dict[int, Stream] = {}
        self.waiting = False
        self.unread = False  # it leaves too much unread
        self.ended = False  # it sends no more, and leaves when its last answer is out
        self.faulted = False  # its framing is lost: it leaves when what is written now is out


class Dispatcher:
    """port, text, journal, snapshots: see ports.py; text None means a model without a tokenizer.

    token()                   an unguessable session token for a new connection; "" where sessions are not resumed

    on_soon(work)             calls `work` when the event loop has read what there is to read now
    on_timer(delay_ns, fire)  calls `fire` after that time, once
    on_halt()                 the kernel accepted a shutdown
    on_panic(error, event)    the kernel broke; no event is taken after it
    """

    def __init__(
        self,
        kernel: KernelPort,
        port: DriverPort,
        text: TextPort | None,
        *,
        journal: JournalPort | None = None,
        snapshots: SnapshotPort | None = None,
        token: Callable[[], str] = lambda: "",
        on_soon: Callable[[Callable[[], None]], None],
        on_timer: Callable[[int, Callable[[], None]], None],
        on_halt: Callable[[], None],
        on_panic: Callable[[BaseException, Event | None], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._kernel = kernel
        self._port = port
        self._journal = journal
        self._snapshots = snapshots
        self._token = token
        self._unsaved = False  # this turn has something for the journal
        self._promises: list[Reply] = []  # they say that something lasts, and go out when it is on record
        self._retrying = False  # a timer will try again what the disk refused
        self._orphans: dict[tuple[int, int], Stream] = {}  # generations without a client that have stop strings
        self._text = text
        self._on_soon = on_soon
        self._on_timer = on_timer
        self._on_halt = on_halt
        self._on_panic = on_panic
        self._clock = clock
        self._clients: dict[int, Client] = {}
        self._events: deque[Event] = deque()
        self._dirty: dict[int, Client] = {}
        self._in_turn = False
        self._plugged = False  # several requests are being taken
        self._now_ns = 0
        self._gathering = False
        self._gathered: list[Client] = []
        self._busy = 0  # how sure we are that many clients are
        self._last_client: Client | None = None
        self._event: Event | None = None
        self._last_conn = 0
        self._dead = False
        self._tracing = Tracing(self._clients, self._request, self._send, clock)
        self._take_request = self._request  # or the tracing one, while anybody is traced
        self.accepting = True  # False once the system goes down: requests are ECANCELED
        self._performers: Final[dict[type[Effect], Callable[..., None]]] = {
            Reply: self._on_reply,
            Tokens: self._on_tokens,
            Exec: port.exec,
            Transfer: port.transfer,
            AttachTier: port.attach,
            DetachTier: lambda effect: port.detach(effect.device),
            SleepDriver: lambda effect: port.sleep(effect.device),
            WakeDriver: lambda effect: port.wake(effect.device),
            Notify: self._on_notify,
            Trace: self._on_trace,
            Prime: self._on_prime,
            Journal: self._on_journal,
            WriteSnapshot: self._on_snapshot,
            ReadSnapshot: self._on_snapshot,
            SetTimer: self._on_set_timer,
            RestartDriver: lambda effect: port.restart(effect.device, effect.reason),
            Halt: lambda effect: self._on_halt(),
        }

    # -- what happens ------------------------------------------------------------------------------------------

    def connect(self, peer: Peer, credentials: Credentials) -> Client:
        """A client whose credentials were accepted."""
        self._last_conn += 1
        client = self._clients[self._last_conn] = Client(self._last_conn, peer)
        self.feed(Connect(client.conn, credentials.uid, credentials.gid, credentials.pid, self._token()))
        return client

    def disconnect(self, client: Client) -> None:
        """It is gone: what it held is released in this step, and nothing is sent to it any more."""
        if self._clients.pop(client.conn, None) is not None:
            client.inbox.clear()
            client.outbox.clear()
            client.outstanding.clear()
            client.streams.clear()
            self._dirty.pop(client.conn, None)
            if self._tracing.active:
                self._tracing.gone(client.conn)
                self._switch_tracing()
            self.feed(Disconnect(client.conn))

    def end_of_requests(self, client: Client, have_bytes: int, missing_bytes: int) -> None:
        """It sends no more but still reads; bytes of a truncated message get an answer."""
        client.ended = True
        if have_bytes:
            self._refuse(client, wire.refuse_truncated(have_bytes, missing_bytes))
        self._turn(self._leave_if_done, client)

    def receive(self, client: Client, messages: list[bytes | Oversized]) -> None:
        """Messages came.

        A lone request is taken at once.  When many clients are busy, what they sent is gathered until the loop has read
        all of them and then taken in one go: the same code runs for all while it is in the caches, which saves an
        eighth of the whole cost of a call.  (Gathering alone would cost a lone client a microsecond of latency.)
        """
        if self._gathering:
            client.inbox.extend(messages)
            if not self._gathered:
                self._on_soon(self._take_gathered)
            self._gathered.append(client)
            return
        now_ns = self._clock()
        if now_ns - self._now_ns < BUSY_NS and client is not self._last_client:
            self._busy += 1
            self._gathering = self._busy >= BUSY_TIMES
        else:
            self._busy = 0
        self._last_client = client
        if len(messages) != 1 or client.inbox or client.ended or self._in_turn:
            client.inbox.extend(messages)
            self._turn(self._take, client)
            return
        client.inbox.append(messages[0])
        self._take_each((client,), now_ns)

    def _take_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        self._busy = BUSY_TIMES if len(gathered) > 2 else self._busy - 1
        self._gathering = self._busy > 0
        self._take_each(gathered, self._clock())

    def _take_each(self, clients: Sequence[Client], now_ns: int) -> None:
        """A turn for clients that most often have one request each, answered on the spot."""
        if self._dead:
            return
        self._in_turn = True
        self._now_ns = now_ns
        try:
            if len(clients) > 1:
                self._plug()
            for client in clients:
                inbox = client.inbox
                if len(inbox) != 1 or client.waiting or client.unread or client.ended:
                    self._take(client)
                    continue
                answer = self._take_request(client, inbox.popleft())
                if answer is not None:
                    client.write(answer)
            if self._plugged or self._events or self._dirty or self._unsaved:
                self._settle()
        except Exception as error:
            self._break(error)
        finally:
            self._in_turn = False

    def feed(self, event: Event) -> None:
        """Something else happened: a driver answered, a client left too much unread, a line for dmesg."""
        self._events.append(event)
        if not self._in_turn:
            self._turn()

    def set_unread(self, client: Client, unread: bool) -> None:
        """It leaves too much unread, or has read on: pauses its generations, and its requests too."""
        client.unread = unread
        client.peer.set_reading(not (unread or client.waiting))
        self.feed(Pause(client.conn) if unread else Resume(client.conn))
        if not unread:
            self._turn(self._take, client)

    def cancel_all(self) -> None:
        """The system goes down: end what is outstanding, as far as the kernel can by itself."""
        self.accepting = False
        self.feed(Suspend())
        for client in list(self._clients.values()):
            for request, route in list(client.outstanding.items()):
                if route.name in _ENDLESS:
                    self.feed(Syscall(client.conn, 0, "cancel", CancelArgs(request)))

    def abandon(self) -> None:
        """Answer what is still outstanding: a generation that has sent tokens with a reason, the rest with ECANCELED."""
        self.accepting = False
        self._promises.clear()  # still outstanding, so they are answered like the rest
        for client in list(self._clients.values()):
            client.waiting = client.unread = False
            self._take(client)  # what came and was not taken; nothing reaches the kernel any more
            for request, route in list(client.outstanding.items()):
                stream = client.streams.get(request)
                if stream is not None and stream.begun:
                    whole = GenerateResult("killed", stream.tokens, "", Usage(), 0)
                    self._on_reply(Reply(client.conn, request, 0, whole))
                else:
                    detail: Detail = {"message": f"{route.name}: the system is going down", "going_down": 1}
                    self._on_reply(Reply(client.conn, request, E.ECANCELED, detail))
        self._flush()

    @property
    def outstanding(self) -> int:
        """Requests without their reply, over all connections."""
        return sum(len(client.outstanding) for client in self._clients.values())

    @property
    def clients(self) -> list[Client]:
        """Everyone connected."""
        return list(self._clients.values())

    # -- a turn ------------------------------------------------------------------------------------------------

    def _turn(self, work: Callable[[Client], None] | None = None, client: Client | None = None) -> None:
        if self._dead:
            return
        if self._in_turn:  # a write inside this turn made the transport call back
            if work is not None and client is not None:
                work(client)
            return
        self._in_turn = True
        self._now_ns = self._clock()
        try:
            if work is not None and client is not None:
                work(client)
            self._settle()
        except Exception as error:
            self._break(error)
        finally:
            self._in_turn = False

    def _settle(self) -> None:
        """The end of a turn: no event is left, and everybody's answers are written."""
        while self._plugged or self._events or self._dirty or self._unsaved:
            if self._plugged:
                self._plugged = False
                self._step(Unplug())
            self._drain()
            if self._unsaved:
                self._save()
            self._flush()

    def _save(self) -> None:
        """What this turn changed is on record before anybody hears of it."""
        self._unsaved = False
        journal = self._journal
        if journal is None:
            return
        if journal.pending:
            journal.commit()
        if self._promises:
            self._promise(journal)
        if journal.retry_ns and not self._retrying:  # an idle system has no turn in which it would be tried again
            self._retrying = True
            self._on_timer(journal.retry_ns, self._save_again)

    def _promise(self, journal: JournalPort) -> None:
        """Answer who asked for something that lasts.  Where the disk refuses since `refusal` asked it, that waits until it does not;
        where the journal is given up meanwhile, the answer says why, though the name holds as long as this daemon."""
        if not journal.written and journal.retry_ns:
            return
        refusal = None if journal.written else journal.refusal()
        promises, self._promises = self._promises, []
        for reply in promises:
            if refusal is not None:
                reply = Reply(reply.conn, reply.request, refusal.code, refusal.detail)
            self._end_request(reply)

    def _save_again(self) -> None:
        self._retrying = False
        self._unsaved = True
        self._turn()

    def _break(self, error: Exception) -> None:
        """The kernel's error, or ours: the state behind it is not to be served from."""
        self._dead = True
        self._on_panic(error, self._event)

    def _drain(self) -> None:
        events = self._events
        while events:
            self._step(events.popleft())

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._performers[type(effect)](effect)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for client in dirty.values():
            outbox, client.outbox = client.outbox, []
            if outbox:
                client.write(outbox[0] if len(outbox) == 1 else b"".join(outbox))
            if client.faulted:
                client.peer.finish()
            elif client.inbox and not (client.waiting or client.unread):
                self._take(client)
            elif client.ended:
                self._leave_if_done(client)

    def _send(self, client: Client, data: bytes) -> None:
        self._dirty[client.conn] = client
        client.outbox.append(data)

    def _leave_if_done(self, client: Client) -> None:
        if not (client.outstanding or client.inbox or client.waiting or client.outbox):
            client.peer.finish()

    # -- requests ----------------------------------------------------------------------------------------------

    def _plug(self) -> None:
        """Several requests are there: until the end of the turn nothing begins, so that what they start may share a pass."""
        if self.accepting and not self._plugged:
            self._plugged = True
            self._step(Plug())

    def _step(self, event: Event) -> None:
        self._event = event
        self._perform(self._kernel.step(event, self._now_ns))

    def _take(self, client: Client) -> None:
        """Take the requests in the inbox, until one has to wait."""
        inbox, outbox, request = client.inbox, client.outbox, self._take_request
        left = REQUESTS_AT_ONCE
        if len(inbox) > 1:
            self._plug()
        while inbox and left and not client.waiting and not client.unread:
            left -= 1
            answer = request(client, inbox.popleft())
            if answer is not None:
                outbox.append(answer)
        if inbox or outbox:
            self._dirty[client.conn] = client

    def _request(self, client: Client, body: bytes | Oversized) -> bytes | None:
        """Take one request.  The bytes of its answer when the kernel gave it at once; else they come as they come.

        The hot path: a request that is answered in its own step, as most are, costs two decodes, the step and an
        encode, and is never entered among the outstanding.
        """
        outstanding = client.outstanding
        try:
            request, number, raw = envelope(body)  # type: ignore[arg-type]  # Oversized: a TypeError, below
            route = ROUTES[number]
            args = route.decode(raw)
        except wire.BAD_MESSAGE:
            self._refuse(client, self._why(client, body))
            return None
        if request in outstanding or not 0 < request <= MAX_REQUEST_ID:
            self._refuse(client, self._why(client, body))
            return None
        if (route.prepares or len(outstanding) >= MAX_REQUESTS or not self.accepting) and not self._prepare(
            client, request, route, args
        ):
            return None
        self._event = event = _record(Syscall, (client.conn, request, route.name, args))
        try:
            effects = self._kernel.step(event, self._now_ns)
        except Exception:  # a panic: this request is owed its answer like the others
            outstanding[request] = route
            raise
        if len(effects) == 1:
            effect = effects[0]
            if type(effect) is Reply:
                conn, answered, code, result = effect
                if not code and answered == request and conn == client.conn and not route.prepares:
                    return result_reply(request, route, cast(Record, result))
        outstanding[request] = route
        self._perform(effects)
        if self._events:
            self._drain()
        return None

    def _prepare(self, client: Client, request: int, route: Route, args: Any) -> bool:
        """What some requests need before the kernel sees them; False when it is not to see this one, or not yet."""
        if not self.accepting:
            detail: Detail = {"message": "the system is going down", "going_down": 1}
            self._send(client, wire.reply(request, E.ECANCELED, detail))
            return False
        if len(client.outstanding) >= MAX_REQUESTS:
            self._send(client, wire.reply(request, *wire.refuse_crowd()))
            return False
        if route.promises and self._journal is not None:
            refusal = self._journal.refusal()
            if refusal is not None:  # nothing is done, since it would not last
                message = f"{route.name}: {refusal.detail.get('message', '')}"
                self._send(client, wire.reply(request, refusal.code, {**refusal.detail, "message": message}))
                return False
        if route in _TEXT and (args.text or getattr(args, "messages", ())):
            self._begin_text(client, request, route, args)
            return False
        return route is not _GENERATE or self._begin_stream(client, request, args)

    def _why(self, client: Client, body: bytes | Oversized) -> Refusal:
        if isinstance(body, Oversized):
            return wire.refuse_oversized(body)
        return wire.explain(body, client.outstanding.__contains__)

    def _refuse(self, client: Client, refusal: Refusal) -> None:
        """Queue the one answer to a message that is no request."""
        self._send(client, wire.reply(refusal.request, refusal.code, refusal.detail))
        if "closing" in refusal.detail:
            client.inbox.clear()
            client.faulted = True

    def _begin_stream(self, client: Client, request: int, args: GenerateArgs) -> bool:
        if args.stop and self._text is None:
            self._send(client, wire.reply(request, E.ENOSYS, {"message": f"stop strings: {_NO_TOKENIZER}"}))
            return False
        try:
            table = None if self._text is None else self._text.table
            client.streams[request] = Stream(client.conn, request, args, table)
        except ValueError as error:  # an empty stop string
            detail: Detail = {"message": f"generate: stop: {error}", "call": "generate", "field": "stop"}
            self._send(client, wire.reply(request, E.EINVAL, detail))
            return False
        return True

    # -- text and messages, of append, resume and inject --------------------------------------------------------

    def _begin_text(self, client: Client, request: int, route: Route, args: TextArgs) -> None:
        messages = () if isinstance(args, InjectArgs) else args.messages
        try:
            if self._text is None:
                raise Errno(E.ENOSYS, f"{route.name}: {_NO_TOKENIZER}")
            if bool(args.tokens) + bool(args.text) + bool(messages) != 1:
                choice = "tokens and text" if isinstance(args, InjectArgs) else "tokens, text and messages"
                message = f"{route.name}: give exactly one of {choice}"
                raise Errno(E.EINVAL, message, call=route.name, field="text")
            length, tail = self._kernel.tail(client.conn, args, TAIL_TOKENS)
        except Errno as error:
            self._send(client, wire.reply(request, error.code, error.detail))
            return
        client.outstanding[request] = route
        client.waiting = True  # what comes behind it waits too
        client.peer.set_reading(False)
        done = partial(self._text_done, client, request, route.name, args)
        if args.text:
            self._text.encode(args.text, length, done)
        else:
            self._text.encode_messages(messages, tail, length, done)

    def _text_done(self, client: Client, request: int, name: str, args: TextArgs, outcome: bytes | Failure) -> None:
        if client.conn not in self._clients or request not in client.outstanding:
            return

        def go_on(client: Client) -> None:
            client.waiting = False
            client.peer.set_reading(not client.unread)
            if isinstance(outcome, Failure):
                self._on_reply(Reply(client.conn, request, outcome.code, outcome.detail))
            elif self.accepting:
                if isinstance(args, InjectArgs):
                    with_tokens: TextArgs = args._replace(tokens=outcome, text="")
                else:
                    with_tokens = args._replace(tokens=outcome, text="", messages=())
                if client.inbox:
                    self._plug()
                self._step(Syscall(client.conn, request, name, with_tokens))
            self._take(client)

        self._turn(go_on, client)

    # -- effects -----------------------------------------------------------------------------------------------

    def _on_reply(self, effect: Reply) -> None:
        client = self._clients.get(effect.conn)
        if client is None or effect.request == 0:  # request 0: the daemon's own cancel
            orphan = self._orphans.pop((effect.conn, effect.request), None)
            if orphan is not None and not orphan.stopped:
                self._finish(orphan)
            return
        if self._journal is not None and not effect.code:
            asked = client.outstanding.get(effect.request)
            if asked is not None and asked.promises:
                self._promises.append(effect)
                self._unsaved = True
                return
        self._end_request(effect)

    def _end_request(self, effect: Reply) -> None:
        client = self._clients.get(effect.conn)
        if client is None:
            return
        route = client.outstanding.pop(effect.request, None)
        if route is None:
            self._events.append(Bug("error", f"a second reply to request {effect.request} of connection {effect.conn}"))
            return
        self._answer(client, route, effect)

    def _answer(self, client: Client, route: Route, effect: Reply) -> None:
        _, request, code, result = effect
        if route in _STREAMED:
            stream = client.streams.pop(request, None)
            if stream is not None and not code:
                result = self._end_stream(client, stream, cast(GenerateResult, result))
        if code:
            if code not in route.errnos:
                text = f"{route.name} returned errno {int(code)}, which its ABI entry does not declare"
                self._events.append(Bug("error", text))
            data = wire.reply(request, int(code), result)
        else:
            if route is _READ and self._text is not None:
                result = spelled(cast(ReadResult, result), self._text.table)
            data = result_reply(request, route, cast(Record, result))
        self._send(client, data)

    def _end_stream(self, client: Client, stream: Stream, result: GenerateResult) -> GenerateResult:
        if result.reason != "suspended":  # it goes on: what its text withholds now may yet be a stop string's
            self._finish(stream)
        self._tell(client, stream)
        return stream.complete(result)

    def _finish(self, stream: Stream) -> None:
        was_stopped = stream.stopped
        stream.finish()
        if stream.stopped and not was_stopped:  # its very last character completed a stop string
            self._events.append(StopAt(stream.conn, stream.request, stream.keep_tokens))

    def _on_notify(self, effect: Notify) -> None:
        client = self._clients.get(effect.conn)
        if client is not None:
            self._send(client, wire.notification(effect.kind, effect.record))

    def _on_trace(self, effect: Trace) -> None:
        self._tracing.change(effect)
        self._switch_tracing()

    def _switch_tracing(self) -> None:
        """What nobody asked for costs nothing: not even a look at whether somebody did."""
        self._take_request = self._tracing.request if self._tracing.active else self._request

    def _on_prime(self, effect: Prime) -> None:
        """A generation has another client than before, or none: its text and its stop strings begin anew, with its tokens."""
        self._orphans.pop(effect.was, None)
        client = self._clients.get(effect.conn)
        if effect.orphan and (not effect.args.stop or self._text is None):
            return  # nobody reads its text and nothing in it is looked for
        table = None if self._text is None else self._text.table
        stream = Stream(effect.conn, effect.request, effect.args, table)
        stream.prime(array("i", effect.tokens), effect.told, effect.logprobs)
        if stream.stopped:
            self._events.append(StopAt(stream.conn, stream.request, stream.keep_tokens))
        if effect.orphan:
            self._orphans[effect.conn, effect.request] = stream
        elif client is not None:
            client.streams[effect.request] = stream
            self._tell(client, stream)

    def _on_journal(self, effect: Journal) -> None:
        if self._journal is not None:
            self._journal.add(effect.records)
            self._unsaved = True

    def _on_snapshot(self, effect: WriteSnapshot | ReadSnapshot) -> None:
        if self._snapshots is not None:
            self._snapshots.perform(effect)
            return
        detail: Detail = {"message": "this attnix has no state directory to keep snapshots in"}
        answer = SnapshotWritten if isinstance(effect, WriteSnapshot) else SnapshotRead
        self._events.append(answer(effect.conn, effect.request, E.ENOSYS, detail))

    def _on_tokens(self, effect: Tokens) -> None:
        """Hand every token to its generation, then tell each client once."""
        streams = memoryview(effect.streams).cast("q")
        tokens = memoryview(effect.tokens).cast("i")
        logprobs = memoryview(effect.logprobs).cast("f")
        tops = effect.tops
        touched: dict[tuple[int, int], Stream] = {}
        for index, token in enumerate(tokens):
            key = (streams[2 * index], streams[2 * index + 1])
            client = self._clients.get(key[0])
            stream = self._orphans.get(key) if client is None else client.streams.get(key[1])
            if stream is None or stream.stopped:
                continue  # its client is gone, or this token comes after its stop string
            detail = None
            if stream.with_logprobs:
                ids, values = (tops[index] if tops else None) or (b"", b"")
                detail = (logprobs[index], ids, values)
            if stream.push(token, detail):
                self._events.append(StopAt(stream.conn, stream.request, stream.keep_tokens))
            touched[key] = stream
        for (conn, _), stream in touched.items():
            if conn in self._clients:
                self._tell(self._clients[conn], stream)

    def _tell(self, client: Client, stream: Stream) -> None:
        note = stream.note()
        if note is not None and stream.notifies:
            self._send(client, wire.notification("tokens", note))

    def _on_set_timer(self, effect: SetTimer) -> None:
        def fire() -> None:
            left_ns = effect.at_ns - self._clock()
            if left_ns > 0:  # a loop's timer may be early by its resolution
                self._on_timer(left_ns, fire)
            else:
                self.feed(Timer(effect.timer))

        self._on_timer(max(0, effect.at_ns - self._clock()), fire)
