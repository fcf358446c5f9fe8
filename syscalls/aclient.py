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
from collections.abc import AsyncIterator, Generator
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack, cast

from attnix.kernel import calls as c
from attnix.kernel.params import ABI_VERSION

from .abi import Record
from .client import GenerateOptions, Messages, Tokens, as_bytes, as_messages, as_pairs, generate_args
from .exceptions import AttnixError, ConnectionLost
from .paths import default_socket_path
from .records import unpack_floats
from .session import Note, Session, outcome
from .stubs import AsyncCalls, AsyncPlainCalls

R = TypeVar("R", bound=tuple[Any, ...])


def aconnect(path: str | None = None, *, name: str = "python") -> AsyncClient:
    """A client that connects in `async with` (or by `await client.open()`)."""
    return AsyncClient(path, name=name)


def _look(answer: asyncio.Future[Record]) -> None:
    """Take note of an error that nobody waits for: asyncio would log it as forgotten."""
    if not answer.cancelled():
        answer.exception()


class _Wire(asyncio.Protocol):
    """Bytes in, messages to whom they belong.  Streams wait in memory, so read those you start."""

    def __init__(self) -> None:
        self.session: Final = Session()
        self.answers: dict[int, tuple[str, asyncio.Future[Record]]] = {}
        self.streams: dict[int, AsyncStream] = {}
        self.lost: ConnectionLost | None = None
        self.transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def send(self, name: str, args: Record) -> tuple[int, asyncio.Future[Record]]:
        if self.lost is not None:
            raise self.lost
        assert self.transport is not None
        request, message = self.session.request(name, args)
        answer: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_look)
        self.answers[request] = (name, answer)
        self.transport.write(message)
        return request, answer

    async def drain(self) -> None:
        await self._writable.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.session.receive(data):
                if isinstance(message, Note):
                    stream = self.streams.get(message.payload.request)
                    if stream is not None:
                        stream._push(message.payload)
                    continue
                name, answer = self.answers.pop(message.request, ("", None))
                self.streams.pop(message.request, None)
                if answer is None or answer.done():
                    continue
                try:
                    answer.set_result(outcome(name, message))
                except AttnixError as error:
                    answer.set_exception(error)
        except ConnectionLost as error:
            self.fail(error)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(ConnectionLost(f"the connection broke: {exc}" if exc else "the daemon closed the connection"))

    def fail(self, error: ConnectionLost) -> None:
        if self.lost is None:
            self.lost = error
        self._writable.set()
        if self.transport is not None:
            self.transport.close()
        answers, self.answers = self.answers, {}
        self.streams.clear()
        for _, answer in answers.values():
            if not answer.done():
                answer.set_exception(error)


class AsyncStream:
    """A generation under way: `async for` its notifications, or `await` its result, or both."""

    def __init__(self, client: AsyncClient, request: int, answer: asyncio.Future[Record]) -> None:
        self.request: Final = request
        self._client = client
        self._answer = answer
        self._notes: deque[c.TokensNote] = deque()
        self._news = asyncio.Event()
        answer.add_done_callback(lambda _: self._news.set())

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
    """A connection.  Closing it releases every context that it made."""

    def __init__(self, path: str | None = None, *, name: str = "python") -> None:
        self.path: Final = path or default_socket_path()
        self.sys: Final[AsyncCalls] = _Bound(self)
        self.server: c.HelloResult | None = None
        self._name = name
        self._wire = _Wire()

    async def open(self) -> Self:
        """Connect and say hello.  Error: ConnectionLost; InvalidArgument when the ABI versions differ."""
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self._wire, self.path)
        except OSError as error:
            raise ConnectionLost(
                f"no attnix at {self.path} ({error.strerror or error}); start one with `attnix boot`"
            ) from None
        try:
            self.server = await self.hello(self._name, ABI_VERSION)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End the connection; the kernel releases what it held."""
        self._wire.fail(ConnectionLost("this connection was closed"))

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def alloc_context(self, pid: int = 0, device: str = "") -> AsyncContext:
        """A new empty context."""
        return AsyncContext(self, *await self.sys.alloc_context(pid, device))

    async def spawn(self, name: str = "", nice: int = 0, fork_of: AsyncContext | None = None) -> AsyncProcess:
        """A child process; with `fork_of` it holds a fork of that context."""
        made = await self.sys.spawn(name, nice, fork_of.handle if fork_of else 0)
        return AsyncProcess(self, made.pid, AsyncContext(self, made.ctx, made.cid) if made.ctx else None)

    async def _invoke(self, name: str, args: Record, result: type[R]) -> R:
        _, answer = self._wire.send(name, args)
        await self._wire.drain()
        return cast(R, await answer)

    def _forget(self, name: str, args: Record) -> None:
        self._wire.send(name, args)

    def _stream(self, args: c.GenerateArgs) -> AsyncStream:
        request, answer = self._wire.send("generate", args)
        stream = self._wire.streams[request] = AsyncStream(self, request, answer)
        return stream


class AsyncContext:
    """A context of this connection.  With `async with` it is released at the end."""

    def __init__(self, client: AsyncClient, handle: int, cid: int) -> None:
        self.client: Final = client
        self.handle: Final = handle
        self.cid: Final = cid

    def __repr__(self) -> str:
        return f"<context {self.cid}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.client._wire.lost is None:
            await self.release()

    async def append(self, text: str = "", *, tokens: Tokens = b"", messages: Messages = ()) -> c.AppendResult:
        """Add plain text, token ids or chat messages."""
        return await self.client.append(self.handle, as_bytes(tokens), text, as_messages(messages))

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

    async def stat(self) -> c.ContextRow:
        """State, size, sharing and usage."""
        return await self.client.stat(self.handle)

    async def pagemap(self) -> c.PagemapResult:
        """The page table."""
        return await self.client.pagemap(self.handle)

    def generate(self, max_tokens: int = 256, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """Generate: `async for` its notifications or `await` the whole.  Options: `generate` in docs/syscalls.md."""
        return self.client._stream(generate_args(self.handle, max_tokens, options))

    async def forward(self, top_k: int = 20) -> list[tuple[int, float]]:
        """The likeliest next tokens with their log-probabilities, likeliest first."""
        return as_pairs(await self.client.forward(self.handle, top_k))

    async def score(self, tokens: Tokens) -> list[float]:
        """The log-probability of each of `tokens` as the continuation."""
        return unpack_floats((await self.client.score(self.handle, as_bytes(tokens))).logprobs)


class AsyncProcess:
    """A process made by this connection.  `context` is the fork that it was spawned with."""

    def __init__(self, client: AsyncClient, pid: int, context: AsyncContext | None) -> None:
        self.client: Final = client
        self.pid: Final = pid
        self.context: Final = context

    def __repr__(self) -> str:
        return f"<process {self.pid}>"

    async def alloc_context(self, device: str = "") -> AsyncContext:
        """A new empty context in this process."""
        return await self.client.alloc_context(self.pid, device)

    async def kill(self, signum: int = signal.SIGTERM) -> None:
        """Send SIGTERM, SIGKILL, SIGSTOP or SIGCONT."""
        await self.client.kill(self.pid, int(signum))

    async def exit(self, code: int = 0) -> None:
        """End it; it stays a zombie until `wait`."""
        await self.client.exit(self.pid, code)

    async def wait(self, timeout_ms: int = -1) -> c.WaitResult:
        """Wait until it has ended."""
        return await self.client.wait(self.pid, timeout_ms)

    async def setpriority(self, nice: int) -> None:
        """Set its nice value."""
        await self.client.setpriority(self.pid, nice)

    async def getrusage(self) -> c.Usage:
        """What it has cost."""
        return await self.client.getrusage(self.pid)
