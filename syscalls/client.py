"""The blocking client: what scripts, the shell and the examples use.

    import attnix

    with attnix.connect() as os:
        ctx = os.alloc_context()
        ctx.append(text="The capital of France is")
        a, b = ctx.fork(2)
        print(a.generate(max_tokens=20).text)
        for note in b.stream(max_tokens=20, temperature=0.8, seed=7):
            print(note.text, end="", flush=True)

Every method is one system call (docs/syscalls.md), and an errno is raised as its exception (exceptions.py).  `submit`
sends without waiting: requests of one connection are taken in order, so they can be pipelined.  A client serves one
thread; open one connection per thread.  `os.sys` has every call on bare handles.
"""

from __future__ import annotations

import select
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeAlias, TypedDict, TypeVar, Unpack, cast

from attnix.kernel import calls as c
from attnix.kernel.params import ABI_VERSION, OOM_ADJ_AS_IS

from .abi import Record
from .exceptions import AccessDenied, AttnixError, Busy, ConnectionLost
from .paths import default_socket_path, too_long
from .records import pack_ids, unpack_floats, unpack_ids
from .resume import Handles, Renewed, delays, went_down
from .session import Note, Session, outcome
from .stubs import SyncCalls, SyncPlainCalls

R = TypeVar("R", bound=tuple[Any, ...])

_RECEIVE_BYTES: Final = 1 << 18
LONGEST_S: Final = 1 << 32  # of what a client asks for; the kernel's own limits are far below

Messages: TypeAlias = Iterable[c.Message | tuple[str, str] | Mapping[str, str]]
Tokens: TypeAlias = bytes | Sequence[int]


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate`; each is the field of the same name in docs/syscalls.md."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int
    stop: str | Sequence[str]
    stop_tokens: Tokens
    ignore_eos: bool
    ttft_ms: int
    tpot_ms: int


def connect(
    path: str | None = None, *, name: str = "python", timeout: float | None = None, resume: float = 0.0
) -> Client:
    """Connect to the daemon; `path` defaults to the one place where its socket is.

    name     shown by `ps`
    timeout  seconds that any single wait for the daemon may take, None for ever
    resume   seconds for which a broken connection is tried again, 0 not at all.  Named and detached contexts are then
             there as before and their generations go on where they were, no token lost or doubled, also when the daemon
             died and was booted again.  Other contexts are gone (StaleHandle, BadHandle); a call under way of which
             nobody can say whether it was done is ConnectionLost, and the client can still be used.
    Error: ConnectionLost when there is no daemon; InvalidArgument when it speaks another ABI version.
    """
    return Client(path, name=name, timeout=timeout, resume=resume)


def as_bytes(tokens: Tokens) -> bytes:
    """Token ids in the form in which they travel."""
    return tokens if isinstance(tokens, bytes) else pack_ids(tokens)


def as_messages(messages: Messages) -> tuple[c.Message, ...]:
    """Chat messages from records, pairs or {"role", "content"} maps."""
    return tuple([c.Message(m["role"], m["content"]) if isinstance(m, Mapping) else c.Message(*m) for m in messages])


def as_ms(seconds: float | None) -> int:
    """A duration as it travels; None: not given.  Error: ValueError when it is no time from now."""
    if seconds is None:
        return -1
    if not 0 <= seconds < LONGEST_S:  # nor NaN
        raise ValueError(f"{seconds} is no number of seconds from now: 0 or more, or None")
    return round(1000 * seconds)


class Pending(Generic[R]):
    """A request on its way.  `result()` waits for the answer."""

    def __init__(self, client: Client, request: int, name: str, args: Record, result: type[R]) -> None:
        self.request = request
        self.notes: deque[c.TokensNote] = deque()
        self._client = client
        self._name = name
        self._args = args
        self._got = bytearray()  # tokens that its notifications brought
        self._undone = False  # the daemon goes down and said that it has not done this
        self._kind = result
        self._outcome: R | AttnixError | None = None

    @property
    def done(self) -> bool:
        """Whether the answer has been read; does not look at the socket."""
        return self._outcome is not None

    def result(self) -> R:
        """Wait for the answer.  Error: the call's own, or ConnectionLost."""
        while self._outcome is None:
            self._client._receive()
        if isinstance(self._outcome, AttnixError):
            raise self._outcome
        return self._outcome

    def cancel(self) -> None:
        """Ask the kernel to end this request; its answer still comes, and says so."""
        if not self.done:
            self._client.submit("cancel", c.CancelArgs(self.request), c.Empty)

    def _settle(self, outcome: Record | AttnixError) -> None:
        self._outcome = cast("R | AttnixError", outcome)


class Stream(Pending[c.GenerateResult]):
    """A streamed generation: iterate over its notifications, then ask for `result()`."""

    def __iter__(self) -> Iterator[c.TokensNote]:
        while True:
            while self.notes:
                yield self.notes.popleft()
            if self.done:
                self.result()  # raises what went wrong
                return
            self._client._receive()


class _Bound(SyncCalls):
    def __init__(self, client: Client) -> None:
        self._client = client

    def _invoke(self, name: str, args: Record, result: type[R]) -> R:
        return self._client._invoke(name, args, result)


class Client(SyncPlainCalls):
    """A connection.  Closing it releases every context that it made, but for named and detached ones."""

    def __init__(
        self, path: str | None = None, *, name: str = "python", timeout: float | None = None, resume: float = 0.0
    ) -> None:
        self.path: Final = path or default_socket_path()
        self.sys: Final[SyncCalls] = _Bound(self)
        self.reconnects = 0  # how often it came back to a daemon
        self.notices: deque[Note] = deque()  # notifications that belong to no request, as they came
        self._name: Final = name
        self._timeout: Final = timeout
        self._resume: Final = resume
        self._session = Session()
        self._pending: dict[int, Pending[Any]] = {}
        self._handles = Handles()
        self._lost: ConnectionLost | None = None
        self._opening = True
        self._socket = self._dial()
        try:
            self.server = self.hello(name, ABI_VERSION)
        except BaseException:
            self.close()
            raise
        self._opening = False

    def _dial(self) -> socket.socket:
        if why := too_long(self.path):
            raise ConnectionLost(why)
        dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        dialled.settimeout(self._timeout)
        try:
            dialled.connect(self.path)
        except OSError as error:
            dialled.close()
            raise ConnectionLost(
                f"no attnix at {self.path} ({error.strerror or error}); start one with `attnix boot`"
            ) from None
        return dialled

    # -- objects ----------------------------------------------------------------------------------------------

    def alloc_context(self, pid: int = 0, device: str = "", domain: str = "") -> Context:
        """A new empty context, in the connection's own process unless `pid` names another of its processes."""
        return Context(self, *self.sys.alloc_context(pid, device, domain))

    def spawn(
        self, name: str = "", nice: int = 0, fork_of: Context | None = None, group: str = "", domain: str = ""
    ) -> Process:
        """A child process; with `fork_of` it holds a fork of that context."""
        made = self.sys.spawn(name, nice, fork_of.handle if fork_of else 0, group, domain)
        return Process(self, made.pid, Context(self, made.ctx, made.cid) if made.ctx else None)

    def open(self, name: str = "", fork: bool = False, cid: int = 0) -> Context:
        """A named context of this uid, or one by cid; with `fork` a private copy of it."""
        made = self.sys.open(name, fork, cid)
        return Context(self, made.ctx, made.cid)

    def snapshot(self, name: str, contexts: Iterable[Context]) -> c.SnapshotResult:
        """Write contexts into the snapshot `name`, whole or not at all."""
        return self.sys.snapshot(name, tuple([context.handle for context in contexts]))

    def restore(self, name: str) -> list[Context]:
        """New contexts made of those in a snapshot, in its order."""
        made = self.sys.restore(name)
        return [Context(self, *pair) for pair in zip(made.ctxs, made.cids, strict=True)]

    # -- the connection ---------------------------------------------------------------------------------------

    def submit(self, name: str, args: Record, result: type[R]) -> Pending[R]:
        """Send a request without waiting for its answer."""
        pending: Pending[R] = self._send(Pending, name, (args,), result)[0]
        return pending

    def submit_all(self, name: str, asked: Sequence[Record], result: type[R]) -> list[Pending[R]]:
        """Send requests of one name in one piece, without waiting for their answers: what they start shares its first pass."""
        pending: list[Pending[R]] = self._send(Pending, name, asked, result)
        return pending

    def notice(self, timeout: float | None = None) -> Note | None:
        """The next notification that belongs to no request, waited for as long as `timeout` seconds; None when none came.
        Error: ConnectionLost, when those that had come are told."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.notices:
            if self._lost is not None:
                raise self._lost
            left_ms = None if end is None else 1000 * (end - time.monotonic())
            ready = select.poll()
            ready.register(self._socket, select.POLLIN)
            if left_ms is not None and (left_ms <= 0 or not ready.poll(left_ms)):
                return None
            self._receive()
        return self.notices.popleft()

    def close(self) -> None:
        """End the connection; the kernel releases what it held, but for named and detached contexts.  Requests still
        pending are lost."""
        self._fail(ConnectionLost("this connection was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _invoke(self, name: str, args: Record, result: type[R]) -> R:
        return self.submit(name, args, result).result()

    def _send(self, kind: Any, name: str, asked: Sequence[Record], result: type[R]) -> list[Any]:
        """All of them or, when one cannot travel, none."""
        if self._lost is not None:
            raise self._lost
        made = [(*self._session.request(name, args), args) for args in asked]
        sent = [kind(self, request, name, args, result) for request, _, args in made]
        for one in sent:
            self._pending[one.request] = one
        try:
            self._socket.sendall(b"".join(message for _, message, _ in made))
        except OSError as error:
            # The daemon may have said why before it closed.  A message that could not be sent whole was not taken; of several
            # the first may have been.
            for one in sent:
                one._undone = len(sent) == 1
            if not self._drain():
                self._broken(ConnectionLost(f"the connection broke: {error}"))
            if self._lost is not None:
                raise self._lost from None
        except BaseException:  # interrupted inside a message: what would follow is out of step
            self._fail(ConnectionLost("interrupted while sending"))
            raise
        return sent

    def _broken(self, error: ConnectionLost) -> None:
        """The connection is no more: come back with another, as far as this client was told to."""
        if self._opening or not self._resume or self._lost is not None:
            self._fail(error)
            return
        self._socket.close()
        pending, self._pending = self._pending, {}
        self._opening = True
        try:
            back = self._try_to_come_back()
        except AttnixError as refusal:  # it speaks another ABI version, or does not want this client
            back, error = False, ConnectionLost(f"the daemon is back and refuses: {refusal.message}", refusal.detail)
        except BaseException:  # interrupted: the next call tries again
            self._pending, self._lost = pending, None
            raise
        finally:
            self._opening = False
        if not back:
            self._pending, self._lost = pending, None
            self._fail(error)
            return
        self.reconnects += 1
        renewed = self._handles.renew(self.server.contexts)
        waiting = deque(pending.values())
        while waiting and self._lost is None:
            self._repeat(renewed, waiting.popleft(), waiting)

    def _try_to_come_back(self) -> bool:
        end = time.monotonic() + self._resume
        for delay in delays():
            time.sleep(delay)
            if self._come_back():
                return True
            if time.monotonic() > end:
                break
        return False

    def _come_back(self) -> bool:
        """One attempt; whether it led to a daemon that knows this session, or to one in which nothing of it is left."""
        token = self.server.session
        for session in (token, "") if token else ("",):
            self._lost = None
            self._session = Session(after=self._session)
            try:
                self._socket = self._dial()
                self.server = self.hello(self._name, ABI_VERSION, session)
            except AccessDenied:
                self._socket.close()
                continue
            except (ConnectionLost, Busy):
                self._socket.close()
                return False
            return True
        return False

    def _repeat(self, renewed: Renewed, pending: Pending[Any], waiting: deque[Pending[Any]]) -> None:
        """What was under way when the connection broke goes on, or is lost."""
        again = renewed.again(pending._name, pending._args, bytes(pending._got), pending._undone)
        if isinstance(again, ConnectionLost):
            pending._settle(again)
            return
        pending._args = renewed.translate(pending._args) or pending._args
        pending._undone = False
        pending.request, message = self._session.request(*again)
        self._pending[pending.request] = pending
        try:
            self._socket.sendall(message)
        except OSError as error:  # once more; those that were not sent yet wait with the others
            for other in waiting:
                other._args = renewed.translate(other._args) or other._args
                self._pending[-other.request] = other
            waiting.clear()
            self._broken(ConnectionLost(f"the connection broke: {error}"))

    def _receive(self) -> None:
        """Wait for something to arrive and give it to whom it belongs."""
        if self._lost is not None:
            raise self._lost
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionLost("the daemon closed the connection")
            self._deliver(data)
        except TimeoutError:
            raise ConnectionLost("the daemon did not answer in time") from None
        except OSError as error:
            self._broken(ConnectionLost(f"the connection broke: {error}"))
        except ConnectionLost as error:
            self._broken(error)

    def _deliver(self, data: bytes) -> None:
        for message in self._session.receive(data):
            if isinstance(message, Note):
                if message.kind != "tokens":
                    self.notices.append(message)
                    continue
                owner = self._pending.get(message.payload.request)
                if owner is not None and isinstance(owner, Stream):
                    owner.notes.append(message.payload)
                    owner._got += message.payload.tokens
                continue
            pending = self._pending.pop(message.request, None)
            if pending is None:
                continue
            answer: Record | AttnixError
            try:
                answer = outcome(pending._name, message)
                self._handles.learn(answer)
                if pending._name == "release":
                    self._handles.forget(getattr(pending._args, "ctx", 0))
            except AttnixError as error:
                answer = error
            if self._resume and went_down(answer):
                pending._undone = True
                self._pending[pending.request] = pending  # it goes on when the daemon is back
            else:
                pending._settle(answer)

    def _drain(self) -> bool:
        """Read what is left after a failed send; whether the daemon said why it closed."""
        try:
            while data := self._socket.recv(_RECEIVE_BYTES):
                self._deliver(data)
        except OSError:
            return False
        except ConnectionLost as error:
            self._broken(error)
            return True
        return False

    def _fail(self, error: ConnectionLost) -> None:
        if self._lost is None:
            self._lost = error
        self._socket.close()
        lost, self._pending = self._pending, {}
        for pending in lost.values():
            pending._settle(error)


class Context:
    """A context of this connection.  As a context manager it is released at the end."""

    def __init__(self, client: Client, handle: int, cid: int) -> None:
        self.client: Final = client
        self.cid: Final = cid
        self._handle: Final = handle

    @property
    def handle(self) -> int:
        """What stands for it on the present connection; no handle at all when it went with an earlier one."""
        return self.client._handles.now(self.cid, self._handle)

    def __repr__(self) -> str:
        return f"<context {self.cid}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.client._lost is None:
            self.release()

    def append(
        self, text: str = "", *, tokens: Tokens = b"", messages: Messages = (), more: bool = False
    ) -> c.AppendResult:
        """Add plain text, token ids or chat messages; answers when they are logged, not when they are computed.

        more: a generate, forward or score on it follows at once, whose pass computes them too; nothing begins before.
        """
        return self.client.append(self.handle, as_bytes(tokens), text, as_messages(messages), more)

    def fork(self, n: int = 1) -> list[Context]:
        """`n` contexts that share this one's blocks, all or none."""
        made = self.client.fork(self.handle, n)
        return [Context(self.client, *pair) for pair in zip(made.ctxs, made.cids, strict=True)]

    def truncate(self, length: int) -> int:
        """Cut the log to its first `length` tokens; the length now."""
        return self.client.truncate(self.handle, length).tokens

    def release(self) -> None:
        """Give the context back."""
        self.client.release(self.handle)

    def publish(self, name: str, replace: bool = False) -> None:
        """Give it a name; it outlives this connection and the daemon from now on."""
        self.client.publish(self.handle, name, replace)

    def detach(self) -> None:
        """Let it outlive this connection and the daemon without a name."""
        self.client.detach(self.handle)

    def reattach(self, tokens: Tokens = b"") -> Stream:
        """Go on with the generation on it that lost its client; `tokens` is what the caller has of it."""
        args = c.ReattachArgs(self.handle, as_bytes(tokens))
        stream: Stream = self.client._send(Stream, "reattach", (args,), c.GenerateResult)[0]
        stream._got += args.tokens
        return stream

    def stat(self) -> c.ContextRow:
        """State, size, sharing and usage."""
        return self.client.stat(self.handle)

    def pagemap(self) -> c.PagemapResult:
        """The page table."""
        return self.client.pagemap(self.handle)

    def generate(self, max_tokens: int = 256, **options: Unpack[GenerateOptions]) -> c.GenerateResult:
        """Generate and wait for the whole.  Options are the fields of `generate` in docs/syscalls.md."""
        args = generate_args(self.handle, max_tokens, options)._replace(stream=False)
        return self.client.submit("generate", args, c.GenerateResult).result()

    def stream(self, max_tokens: int = 256, **options: Unpack[GenerateOptions]) -> Stream:
        """Generate, token by token: iterate over the result."""
        args = generate_args(self.handle, max_tokens, options)
        stream: Stream = self.client._send(Stream, "generate", (args,), c.GenerateResult)[0]
        return stream

    def forward(self, top_k: int = 20, allowed: bytes = b"", tokens: Tokens = b"") -> list[tuple[int, float]]:
        """The likeliest next tokens with their log-probabilities, likeliest first.

        allowed  a bit per token id, lowest bit first: only these; empty: all
        tokens   appended first
        """
        return as_pairs(self.client.forward(self.handle, top_k, allowed, as_bytes(tokens)))

    def score(self, tokens: Tokens) -> list[float]:
        """The log-probability of each of `tokens` as the continuation."""
        return unpack_floats(self.client.score(self.handle, as_bytes(tokens)).logprobs)

    def wait_tool(self, tool: str, eta: float | None = None, deadline: float | None = None) -> c.WaitToolResult:
        """It waits for a tool from now on: `eta` and `deadline` in seconds from now.  `resume` ends that."""
        return self.client.wait_tool(self.handle, tool, as_ms(eta), as_ms(deadline))

    def resume(
        self, text: str = "", *, tokens: Tokens = b"", messages: Messages = (), wait: int = 0, more: bool = False
    ) -> c.ResumeResult:
        """The tool has answered; `wait` as `wait_tool` gave it, `more` as of `append`.

        Error: StaleHandle when that wait is over already.
        """
        return self.client.resume(self.handle, wait, as_bytes(tokens), text, as_messages(messages), more=more)

    def inject(self, text: str = "", *, tokens: Tokens = b"") -> c.InjectResult:
        """Deliver tokens into the generation that runs on it."""
        return self.client.inject(self.handle, as_bytes(tokens), text)


class Process:
    """A process made by this connection.  `context` is the fork that it was spawned with."""

    def __init__(self, client: Client, pid: int, context: Context | None) -> None:
        self.client: Final = client
        self.pid: Final = pid
        self.context: Final = context

    def __repr__(self) -> str:
        return f"<process {self.pid}>"

    def alloc_context(self, device: str = "", domain: str = "") -> Context:
        """A new empty context in this process."""
        return self.client.alloc_context(self.pid, device, domain)

    def kill(self, signum: int = signal.SIGTERM) -> None:
        """Send SIGTERM, SIGKILL, SIGSTOP or SIGCONT."""
        self.client.kill(self.pid, int(signum))

    def exit(self, code: int = 0) -> None:
        """End it; it stays a zombie until `wait`."""
        self.client.exit(self.pid, code)

    def wait(self, timeout_ms: int = -1) -> c.WaitResult:
        """Wait until it has ended."""
        return self.client.wait(self.pid, timeout_ms)

    def setpriority(self, nice: int, oom_score_adj: int = OOM_ADJ_AS_IS) -> None:
        """Set its nice value, and how willingly it is ended when memory runs out (as it is, unless given)."""
        self.client.setpriority(self.pid, nice, oom_score_adj)

    def getrusage(self) -> c.Usage:
        """What it has cost."""
        return self.client.getrusage(self.pid)


def generate_args(handle: int, max_tokens: int, options: GenerateOptions) -> c.GenerateArgs:
    """The arguments of `generate`, streamed, from keywords.  Error: TypeError for an option that it does not have."""
    fields: dict[str, Any] = dict(options)
    stop = fields.get("stop", ())
    fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    fields["stop_tokens"] = as_bytes(fields.get("stop_tokens", b""))
    return c.GenerateArgs(handle, max_tokens, **fields)


def as_pairs(result: c.ForwardResult) -> list[tuple[int, float]]:
    """(token, log-probability) pairs of a forward."""
    return list(zip(unpack_ids(result.tokens), unpack_floats(result.logprobs), strict=True))
