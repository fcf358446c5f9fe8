"""The daemon's side of the text process: starts it, keeps it alive, and hands it one job after another.

A job whose worker died is done again by the next one.  A job that is at the head each time its worker dies, or takes
too long, is the culprit: it fails with EIO after three tries and the others go on.

Long texts, which take from tenths of a second to many seconds, go to a second process, so that nobody's sentence waits for
somebody's book.  It is there only while there are some.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

from attnix.kernel.calls import Message
from attnix.kernel.errors import E

from .framing import Splitter, header
from .ports import Failure, TextDone
from .text.detokenize import TokenTable
from .text.tokenizer import LONG_CHARS

START_SECONDS: Final = 120.0  # to load the tokenizer
JOB_SECONDS: Final = 60.0  # one job
TRIES: Final = 3  # for a job whose worker dies
BACKOFF_SECONDS: Final = (0.0, 0.1, 0.5, 2.0, 5.0)  # before the n-th restart in a row
_RECEIVE_BYTES: Final = 1 << 18

Log = Callable[[str, str], None]  # (level, text)


class TextUnavailable(Exception):
    """The model's tokenizer cannot be loaded; the message says why."""


class _Job:
    __slots__ = ("done", "message", "tries")

    def __init__(self, message: bytes, done: TextDone) -> None:
        self.message = message
        self.done = done
        self.tries = 0


class TextService:
    """A `TextPort`.  The constructor blocks until the worker has loaded the tokenizer; `start` begins to take jobs.

    table, stop_ids, prefix_ids, tokenizer_path, has_template  what the worker said of the model
    worker_pid                                                 the process that does the work now
    long_pid                                                   the one that does long texts; 0: there is none
    Error: TextUnavailable.
    """

    def __init__(self, path: str, *, log: Log | None = None) -> None:
        self._path: Final = path
        self._log: Final[Log] = log or (lambda level, text: None)
        self._worker: Final = _Worker(path, self._log, lambda: None)
        self._long: _Worker | None = None
        described = self._worker.load()
        self.table: Final = TokenTable(described["pieces"], described["special_ids"])
        self.stop_ids: Final = tuple(described["stop_ids"])
        self.prefix_ids: Final = tuple(described["prefix_ids"])
        self.tokenizer_path: Final = str(described["path"])
        self.has_template: Final = bool(described["has_template"])

    @property
    def worker_pid(self) -> int:
        return self._worker.pid

    @property
    def long_pid(self) -> int:
        return self._long.pid if self._long is not None else 0

    async def start(self) -> None:
        """Take the worker into the running event loop."""
        await self._worker.connect()

    def encode(self, text: str, context_tokens: int, done: TextDone) -> None:
        self._for(len(text)).submit(["text", text, context_tokens], done)

    def encode_messages(self, messages: tuple[Message, ...], tail: bytes, context_tokens: int, done: TextDone) -> None:
        chars = sum(len(message.content) for message in messages)
        self._for(chars).submit(["messages", messages, tail, context_tokens], done)

    async def close(self) -> None:
        """Stop the workers.  Jobs not done are dropped: whoever waits for them is leaving too."""
        self._worker.close()
        self._end_long()

    def _for(self, chars: int) -> _Worker:
        if chars < LONG_CHARS:
            return self._worker
        if self._long is None:
            self._long = _Worker(self._path, self._log, self._end_long)
            self._long.begin()
        return self._long

    def _end_long(self) -> None:
        if self._long is not None:
            self._long.close()
            self._long = None


class _Worker:
    """One text process after another, and the jobs for them.  idle: called when none is left."""

    def __init__(self, path: str, log: Log, idle: Callable[[], None]) -> None:
        self._path: Final = path
        self._log: Final = log
        self._idle: Final = idle
        self._jobs: dict[int, _Job] = {}  # in order; the first is the one being worked on
        self._last_job = 0
        self._deaths = 0  # in a row, without a job done
        self._channel: _Channel | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._restarting: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def load(self) -> dict[str, Any]:
        """Start the first process and wait until it has loaded the tokenizer; what it says of it.  Error: TextUnavailable."""
        self._spawn()
        assert self._socket is not None
        splitter = Splitter()
        self._socket.settimeout(START_SECONDS)
        try:
            while data := self._socket.recv(_RECEIVE_BYTES):
                for body in splitter.split(data):
                    described = msgspec.msgpack.decode(cast(bytes, body))
                    if "error" in described:
                        raise TextUnavailable(described["error"])
                    self._socket.setblocking(False)
                    return cast("dict[str, Any]", described)
            raise TextUnavailable(f"the text worker for {self._path} ended before it had loaded the tokenizer")
        except TimeoutError:
            raise TextUnavailable(f"loading the tokenizer of {self._path} took over {START_SECONDS:.0f} s") from None
        finally:
            if self._socket.gettimeout() != 0:  # not handed on: the worker is of no use
                self.close()

    async def connect(self) -> None:
        """Take the process that was started last into the running event loop."""
        loop = asyncio.get_running_loop()
        _, self._channel = await loop.create_unix_connection(lambda: _Channel(self), sock=self._socket)

    def begin(self) -> None:
        """Start a process, the first or another one, and wait for nothing."""
        self._restarting = asyncio.ensure_future(self._restart())

    def close(self) -> None:
        """Stop the process and drop the jobs."""
        self._closed = True
        self._jobs.clear()
        self._set_deadline()
        if self._channel is not None:
            self._channel.transport.abort()
        if self._socket is not None:
            self._socket.close()
        self._reap()

    # -- the process -------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-m", "attnix.syscalls.textworker", str(theirs.fileno()), self._path]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        self._socket = ours

    def _reap(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def lost(self) -> None:
        """Its channel has closed."""
        if self._closed:
            return
        self._channel = None
        self._set_deadline()
        self._reap()
        self._deaths += 1
        assert self._process is not None
        self._log("warning", f"text worker {self._process.pid} ended ({self._process.returncode}); starting another")
        if self._jobs:
            request, job = next(iter(self._jobs.items()))
            job.tries += 1
            if job.tries >= TRIES:
                self._finish(
                    request, Failure(E.EIO, {"message": f"the text worker died {TRIES} times on this request"})
                )
        self._after_death()

    def _after_death(self) -> None:
        if self._deaths >= len(BACKOFF_SECONDS):
            self._log("error", "the text worker keeps ending; failing what waits for it")
            for request in list(self._jobs):
                self._finish(request, Failure(E.EIO, {"message": "the text worker cannot be kept running"}))
        if self._closed:  # nobody waits for it any more
            return
        delay = BACKOFF_SECONDS[min(self._deaths, len(BACKOFF_SECONDS)) - 1]
        asyncio.get_running_loop().call_later(delay, self.begin)

    async def _restart(self) -> None:
        if self._closed:
            return
        try:
            self._spawn()
        except OSError as error:  # no descriptors, no memory: what waits must not wait for ever
            self._deaths += 1
            self._log("error", f"the text worker cannot be started: {error.strerror}")
            self._after_death()
            return
        assert self._socket is not None
        self._socket.setblocking(False)
        try:
            await self.connect()
        except OSError:
            if not self._closed:
                raise
            return
        assert self._channel is not None
        if self._closed:
            self._channel.transport.abort()
            return
        for job in self._jobs.values():
            self._channel.transport.write(job.message)
        self._set_deadline()

    # -- jobs --------------------------------------------------------------------------------------------------

    def submit(self, job: list[Any], done: TextDone) -> None:
        self._last_job += 1
        body = msgspec.msgpack.encode([self._last_job, *job])
        message = header(len(body)) + body
        self._jobs[self._last_job] = _Job(message, done)
        if self._channel is not None:
            self._channel.transport.write(message)
            if len(self._jobs) == 1:
                self._set_deadline()

    def answered(self, request: int, code: int, result: bytes | str) -> None:
        """What the process says of a job."""
        self._deaths = 0
        if code or isinstance(result, str):
            self._finish(request, Failure(E(code), {"message": str(result)}))
        else:
            self._finish(request, result)

    def _finish(self, request: int, outcome: bytes | Failure) -> None:
        job = self._jobs.pop(request, None)
        self._set_deadline()
        if job is not None:
            job.done(outcome)
            if not self._jobs:
                self._idle()

    def _set_deadline(self) -> None:
        """The job at the head has its time from now on."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._jobs and self._channel is not None:
            self._deadline = asyncio.get_running_loop().call_later(JOB_SECONDS, self._too_slow)

    def _too_slow(self) -> None:
        self._log("warning", f"the text worker took over {JOB_SECONDS:.0f} s for one request; killing it")
        if self._process is not None:
            self._process.kill()  # its channel closes, and the rest follows from that


class _Channel(asyncio.Protocol):
    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._splitter = Splitter()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._splitter.split(data):
            message = msgspec.msgpack.decode(cast(bytes, body))
            if isinstance(message, list):  # a restarted worker describes the model again: nothing new
                self._worker.answered(*message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.lost()
