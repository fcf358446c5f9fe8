"""The asynchronous client, for programs that run many contexts at once.

    async with attnix.aconnect() as os:
        ctx = await os.alloc_context()
        await ctx.append(text="The capital of France is")
        a, b = await ctx.fork(2)
        async for note in a.generate(max_tokens=20):      # streamed
            print(note.text, end="", flush=True)
        print((await b.generate(max_tokens=20)).text)      # or as a whole

The same calls, errors and objects as in client.py.  Nothing here is generated twice by hand: the wire is session.py,
the methods are stubs.py, and this file only waits differently.
"""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack, cast

from attnix.kernel import calls as c
from attnix.kernel.params import ABI_VERSION, OOM_ADJ_AS_IS

from .abi import Record
from .client import GenerateOptions, Messages, Tokens, as_bytes, as_messages, as_ms, as_pairs, generate_args
from .exceptions import AccessDenied, AttnixError, Busy, ConnectionLost
from .paths import default_socket_path, too_long
from .records import unpack_floats
from .resume import Handles, Renewed, delays, went_down
from .session import Note, Session, outcome
from .stubs import AsyncCalls, AsyncPlainCalls

R = TypeVar("R", bound=tuple[Any, ...])


def aconnect(path: str | None = None, *, name: str = "python", resume: float = 0.0) -> AsyncClient:
    """A client that connects in `async with` (or by `await client.start()`); `resume` as in client.py."""
    return AsyncClient(path, name=name, resume=resume)


def _look(answer: asyncio.Future[Record]) -> None:
    """Take note of an error that nobody waits for: asyncio would log it as forgotten."""
    if not answer.cancelled():
        answer.exception()


class _Asked:
    """A request without its answer, from one connection to the next."""

    __slots__ = ("answer", "args", "got", "name", "request", "stream", "undone")

    def __init__(self, name: str, args: Record) -> None:
        self.name = name
        self.args = args
        self.answer: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        self.answer.add_done_callback(_look)
        self.request = 0
        self.stream: AsyncStream | None = None
        self.got = bytearray()  # tokens that its notifications brought
        self.undone = False  # the daemon has not done this, for certain


class _Wire(asyncio.Protocol):
    """One connection: bytes in, messages to whom they belong.  Streams wait in memory, so read those you start.

    taken(asked, answer)  an answer came
    noticed(note)         a notification that belongs to no request
    broken(wire, error)   the connection is no more; called once
    """

    def __init__(
        self,
        session: Session,
        taken: Callable[[_Asked, Record | AttnixError], None],
        noticed: Callable[[Note], None],
        broken: Callable[[_Wire, ConnectionLost], None],
    ) -> None:
        self.session: Final = session
        self.asked: dict[int, _Asked] = {}
        self.lost: ConnectionLost | None = None
        self.transport: asyncio.Transport | None = None
        self._taken = taken
        self._noticed = noticed
        self._broken = broken
        self._writable = asyncio.Event()
        self._writable.set()
        self._unsent: list[bytes] = []

    def send(self, asked: _Asked, name: str, args: Record) -> None:
        """What is asked in one turn of the event loop goes in one piece, so that what it starts shares its first pass."""
        asked.request, message = self.session.request(name, args)
        self.asked[asked.request] = asked
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unsent.append(message)

    def flush(self) -> None:
        """Hand what was asked to the transport."""
        unsent, self._unsent = self._unsent, []
        if unsent and self.transport is not None and not self.transport.is_closing():
            self.transport.write(b"".join(unsent))

    async def drain(self) -> None:
        await self._writable.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.session.receive(data):
                if isinstance(message, Note):
                    if message.kind != "tokens":
                        self._noticed(message)
                        continue
                    noted = self.asked.get(message.payload.request)
                    if noted is not None and noted.stream is not None:
                        noted.got += message.payload.tokens
                        noted.stream._push(message.payload)
                    continue
                asked = self.asked.pop(message.request, None)
                if asked is None:
                    continue
                try:
                    answer: Record | AttnixError = outcome(asked.name, message)
                except AttnixError as error:
                    answer = error
                self._taken(asked, answer)
        except ConnectionLost as error:
            self.fail(error)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(ConnectionLost(f"the connection broke: {exc}" if exc else "the daemon closed the connection"))

    def fail(self, error: ConnectionLost) -> None:
        """End it."""
        if self.lost is not None:
            return
        self.lost = error
        self._writable.set()
        self.flush()
        if self.transport is not None:
            self.transport.close()
        self._broken(self, error)


class AsyncStream:
    """A generation under way: `async for` its notifications, or `await` its result, or both."""

    def __init__(self, client: AsyncClient, asked: _Asked) -> None:
        self._client = client
        self._asked = asked
        self._answer = answer = asked.answer
        self._notes: deque[c.TokensNote] = deque()
        self._news = asyncio.Event()
        answer.add_done_callback(lambda _: self._news.set())

    @property
    def request(self) -> int:
        """Its id on the present connection."""
        return self._asked.request

    def _push(self, note: c.TokensNote) -> None:
        self._notes.append(note)
        self._news.set()

    def __await__(self) -> Generator[Any, None, c.GenerateResult]:
        return self.result().__await__()

    async def result(self) -> c.GenerateResult:
        """Wait for the end.  Giving up the wait does not end the generation: `cancel` does."""
        return cast(c.GenerateResult, await asyncio.shield(self._answer))

    async def __aiter__(self) -> AsyncIterator[c.TokensNote]:
        while True:
            while self._notes:
                yield self._notes.popleft()
            if self._answer.done():
                await self.result()  # raises what went wrong
                return
            self._news.clear()
            await self._news.wait()

    def cancel(self) -> None:
        """Ask the kernel to end it; the result still comes, with reason `cancelled`."""
        if not self._answer.done():
            self._client._forget("cancel", c.CancelArgs(self.request))


class _Bound(AsyncCalls):
    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def _invoke(self, name: str, args: Record, result: type[R]) -> R:
        return await self._client._invoke(name, args, result)


class AsyncClient(AsyncPlainCalls):
    """A connection.  Closing it releases every context that it made, but for named and detached ones."""

    def __init__(self, path: str | None = None, *, name: str = "python", resume: float = 0.0) -> None:
        self.path: Final = path or default_socket_path()
        self.sys: Final[AsyncCalls] = _Bound(self)
        self.server: c.HelloResult | None = None
        self.reconnects = 0  # how often it came back to a daemon
        self.notices: asyncio.Queue[Note] = asyncio.Queue()  # notifications that belong to no request, as they came
        self._name = name
        self._resume = resume
        self._session = Session()
        self._handles = Handles()
        self._wire: _Wire | None = None
        self._lost: ConnectionLost | None = None
        self._ended = asyncio.Event()
        self._backlog: list[_Asked] = []  # asked for while there is no connection
        self._recovery: asyncio.Task[None] | None = None

    async def start(self) -> Self:
        """Connect and say hello.  Error: ConnectionLost; InvalidArgument when the ABI versions differ."""
        try:
            self._wire, self.server = await self._dial("")
        except BaseException:
            self.close()
            raise
        return self

    async def _dial(self, session: str) -> tuple[_Wire, c.HelloResult]:
        if why := too_long(self.path):
            raise ConnectionLost(why)
        wire = _Wire(self._session, self._taken, self.notices.put_nowait, self._broken)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: wire, self.path)
        except OSError as error:
            raise ConnectionLost(
                f"no attnix at {self.path} ({error.strerror or error}); start one with `attnix boot`"
            ) from None
        if wire.lost is not None:  # refused at once: nothing that is sent now would ever be answered
            raise wire.lost
        asked = _Asked("hello", c.HelloArgs(self._name, ABI_VERSION, session))
        wire.send(asked, asked.name, asked.args)
        try:
            return wire, cast(c.HelloResult, await asked.answer)
        except BaseException:
            wire.fail(ConnectionLost("this connection was closed"))
            raise

    def close(self) -> None:
        """End the connection; the kernel releases what it held, but for named and detached contexts."""
        self._resume = 0.0
        error = self._lost or ConnectionLost("this connection was closed")
        if self._recovery is not None:
            self._recovery.cancel()
        if self._wire is not None and self._wire.lost is None:
            self._wire.fail(error)
        self._give_up(error, [])

    @property
    def connected(self) -> bool:
        """Whether it can be used: started, and neither closed nor lost for good."""
        return self.server is not None and self._lost is None

    async def ended(self) -> None:
        """Wait until it is closed, or lost for good."""
        await self._ended.wait()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- requests and their answers ---------------------------------------------------------------------------

    def _ask(self, name: str, args: Record) -> _Asked:
        if self._lost is not None:
            raise self._lost
        asked = _Asked(name, args)
        if self._wire is not None and self._wire.lost is None:
            self._wire.send(asked, name, args)
        elif self._recovery is not None:
            asked.undone = True
            self._backlog.append(asked)
        else:
            raise ConnectionLost("this client is not connected yet: use `async with`, or await `start`")
        return asked

    def _taken(self, asked: _Asked, answer: Record | AttnixError) -> None:
        if asked.answer.done():
            return
        if self._resume and went_down(answer):
            asked.undone = True
            self._backlog.append(asked)  # it goes on when the daemon is back
        elif isinstance(answer, AttnixError):
            asked.answer.set_exception(answer)
        else:
            self._handles.learn(answer)
            if asked.name == "release":
                self._handles.forget(getattr(asked.args, "ctx", 0))
            asked.answer.set_result(answer)

    def _broken(self, wire: _Wire, error: ConnectionLost) -> None:
        asked = [*wire.asked.values()]
        wire.asked.clear()
        if wire is self._wire and self._resume and self._recovery is None:
            self._backlog += asked
            self._recovery = asyncio.ensure_future(self._recover(error))
        elif wire is self._wire:
            self._give_up(error, asked)
        else:  # it never came to be the connection
            _fail_all(asked, error)

    def _give_up(self, error: ConnectionLost, asked: list[_Asked]) -> None:
        self._lost = self._lost or error
        self._ended.set()
        waiting, self._backlog = self._backlog, []
        _fail_all([*asked, *waiting], error)

    async def _recover(self, error: ConnectionLost) -> None:
        """Come back with another connection, and go on with what was under way."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._resume
        try:
            for delay in delays():
                await asyncio.sleep(delay)
                if await self._come_back():
                    break
                if loop.time() > end:
                    self._give_up(error, [])
                    return
        except AttnixError as refusal:  # it speaks another ABI version, or does not want this client
            text = f"the daemon is back and refuses: {refusal.message}"
            self._give_up(ConnectionLost(text, refusal.detail), [])
            return
        finally:
            self._recovery = None
        assert self._wire is not None and self.server is not None
        self.reconnects += 1
        renewed = self._handles.renew(self.server.contexts)
        waiting, self._backlog = self._backlog, []
        for asked in waiting:
            self._repeat(self._wire, renewed, asked)

    async def _come_back(self) -> bool:
        """One attempt; whether it led to a daemon that knows this session, or to one in which nothing of it is left."""
        token = self.server.session if self.server else ""
        for session in (token, "") if token else ("",):
            self._session = Session(after=self._session)
            try:
                self._wire, self.server = await self._dial(session)
            except AccessDenied:
                continue
            except (ConnectionLost, Busy):
                return False
            return True
        return False

    def _repeat(self, wire: _Wire, renewed: Renewed, asked: _Asked) -> None:
        if asked.answer.done():
            return
        again = renewed.again(asked.name, asked.args, bytes(asked.got), asked.undone)
        if isinstance(again, ConnectionLost):
            asked.answer.set_exception(again)
            return
        asked.args = renewed.translate(asked.args) or asked.args
        asked.undone = False
        if wire.lost is None:
            wire.send(asked, *again)
        else:
            self._backlog.append(asked)

    async def _invoke(self, name: str, args: Record, result: type[R]) -> R:
        asked = self._ask(name, args)
        if self._wire is not None:
            await self._wire.drain()
        return cast(R, await asked.answer)

    def _forget(self, name: str, args: Record) -> None:
        self._ask(name, args)

    def _stream(self, name: str, args: c.GenerateArgs | c.ReattachArgs) -> AsyncStream:
        asked = self._ask(name, args)
        asked.stream = AsyncStream(self, asked)
        return asked.stream

    # -- objects ----------------------------------------------------------------------------------------------

    async def open(self, name: str = "", fork: bool = False, cid: int = 0) -> AsyncContext:
        """A named context of this uid, or one by cid; with `fork` a private copy of it."""
        made = await self.sys.open(name, fork, cid)
        return AsyncContext(self, made.ctx, made.cid)

    async def snapshot(self, name: str, contexts: Iterable[AsyncContext]) -> c.SnapshotResult:
        """Write contexts into the snapshot `name`, whole or not at all."""
        return await self.sys.snapshot(name, tuple([context.handle for context in contexts]))

    async def restore(self, name: str) -> list[AsyncContext]:
        """New contexts made of those in a snapshot, in its order."""
        made = await self.sys.restore(name)
        return [AsyncContext(self, *pair) for pair in zip(made.ctxs, made.cids, strict=True)]

    async def alloc_context(self, pid: int = 0, device: str = "", domain: str = "") -> AsyncContext:
        """A new empty context."""
        return AsyncContext(self, *await self.sys.alloc_context(pid, device, domain))

    async def spawn(
        self, name: str = "", nice: int = 0, fork_of: AsyncContext | None = None, group: str = "", domain: str = ""
    ) -> AsyncProcess:
        """A child process; with `fork_of` it holds a fork of that context."""
        made = await self.sys.spawn(name, nice, fork_of.handle if fork_of else 0, group, domain)
        return AsyncProcess(self, made.pid, AsyncContext(self, made.ctx, made.cid) if made.ctx else None)


def _fail_all(asked: Iterable[_Asked], error: ConnectionLost) -> None:
    for each in asked:
        if not each.answer.done():
            each.answer.set_exception(error)


class AsyncContext:
    """A context of this connection.  With `async with` it is released at the end."""

    def __init__(self, client: AsyncClient, handle: int, cid: int) -> None:
        self.client: Final = client
        self.cid: Final = cid
        self._handle: Final = handle

    @property
    def handle(self) -> int:
        """What stands for it on the present connection; no handle at all when it went with an earlier one."""
        return self.client._handles.now(self.cid, self._handle)

    def __repr__(self) -> str:
        return f"<context {self.cid}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.client._lost is None:
            await self.release()

    async def append(
        self, text: str = "", *, tokens: Tokens = b"", messages: Messages = (), more: bool = False
    ) -> c.AppendResult:
        """Add plain text, token ids or chat messages.

        more: a generate, forward or score on it follows at once, whose pass computes them too; nothing begins before.
        """
        return await self.client.append(self.handle, as_bytes(tokens), text, as_messages(messages), more)

    async def fork(self, n: int = 1) -> list[AsyncContext]:
        """`n` contexts that share this one's blocks, all or none."""
        made = await self.client.fork(self.handle, n)
        return [AsyncContext(self.client, *pair) for pair in zip(made.ctxs, made.cids, strict=True)]

    async def truncate(self, length: int) -> int:
        """Cut the log to its first `length` tokens; the length now."""
        return (await self.client.truncate(self.handle, length)).tokens

    async def release(self) -> None:
        """Give the context back."""
        await self.client.release(self.handle)

    async def publish(self, name: str, replace: bool = False) -> None:
        """Give it a name; it outlives this connection and the daemon from now on."""
        await self.client.publish(self.handle, name, replace)

    async def detach(self) -> None:
        """Let it outlive this connection and the daemon without a name."""
        await self.client.detach(self.handle)

    async def stat(self) -> c.ContextRow:
        """State, size, sharing and usage."""
        return await self.client.stat(self.handle)

    async def pagemap(self) -> c.PagemapResult:
        """The page table."""
        return await self.client.pagemap(self.handle)

    def generate(self, max_tokens: int = 256, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Generate: `async for` its notifications or `await` the whole.  Options: `generate` in docs/syscalls.md."""
        return self.client._stream("generate", generate_args(self.handle, max_tokens, options))

    def reattach(self, tokens: Tokens = b"") -> AsyncStream:
        """Go on with the generation on it that lost its client; `tokens` is what the caller has of it."""
        args = c.ReattachArgs(self.handle, as_bytes(tokens))
        stream = self.client._stream("reattach", args)
        stream._asked.got += args.tokens
        return stream

    async def forward(self, top_k: int = 20, allowed: bytes = b"", tokens: Tokens = b"") -> list[tuple[int, float]]:
        """The likeliest next tokens with their log-probabilities, likeliest first.

        allowed  a bit per token id, lowest bit first: only these; empty: all
        tokens   appended first
        """
        return as_pairs(await self.client.forward(self.handle, top_k, allowed, as_bytes(tokens)))

    async def score(self, tokens: Tokens) -> list[float]:
        """The log-probability of each of `tokens` as the continuation."""
        return unpack_floats((await self.client.score(self.handle, as_bytes(tokens))).logprobs)

    async def wait_tool(self, tool: str, eta: float | None = None, deadline: float | None = None) -> c.WaitToolResult:
        """It waits for a tool from now on: `eta` and `deadline` in seconds from now.  `resume` ends that."""
        return await self.client.wait_tool(self.handle, tool, as_ms(eta), as_ms(deadline))

    async def resume(
        self, text: str = "", *, tokens: Tokens = b"", messages: Messages = (), wait: int = 0, more: bool = False
    ) -> c.ResumeResult:
        """The tool has answered; `wait` as `wait_tool` gave it, `more` as of `append`.

        Error: StaleHandle when that wait is over already.
        """
        return await self.client.resume(self.handle, wait, as_bytes(tokens), text, as_messages(messages), more=more)

    async def inject(self, text: str = "", *, tokens: Tokens = b"") -> c.InjectResult:
        """Deliver tokens into the generation that runs on it."""
        return await self.client.inject(self.handle, as_bytes(tokens), text)


class AsyncProcess:
    """A process made by this connection.  `context` is the fork that it was spawned with."""

    def __init__(self, client: AsyncClient, pid: int, context: AsyncContext | None) -> None:
        self.client: Final = client
        self.pid: Final = pid
        self.context: Final = context

    def __repr__(self) -> str:
        return f"<process {self.pid}>"

    async def alloc_context(self, device: str = "", domain: str = "") -> AsyncContext:
        """A new empty context in this process."""
        return await self.client.alloc_context(self.pid, device, domain)

    async def kill(self, signum: int = signal.SIGTERM) -> None:
        """Send SIGTERM, SIGKILL, SIGSTOP or SIGCONT."""
        await self.client.kill(self.pid, int(signum))

    async def exit(self, code: int = 0) -> None:
        """End it; it stays a zombie until `wait`."""
        await self.client.exit(self.pid, code)

    async def wait(self, timeout_ms: int = -1) -> c.WaitResult:
        """Wait until it has ended."""
        return await self.client.wait(self.pid, timeout_ms)

    async def setpriority(self, nice: int, oom_score_adj: int = OOM_ADJ_AS_IS) -> None:
        """Set its nice value, and how willingly it is ended when memory runs out (as it is, unless given)."""
        await self.client.setpriority(self.pid, nice, oom_score_adj)

    async def getrusage(self) -> c.Usage:
        """What it has cost."""
        return await self.client.getrusage(self.pid)
