"""The daemon's side of the text process: starts it, keeps it alive, and hands it one job after another.

A job whose worker died is done again by the next one.  A job that is at the head each time its worker dies, or takes
too long, is the culprit: it fails with EIO after three tries and the others go on.
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
    Error: TextUnavailable.
    """

    def __init__(self, path: str, *, log: Log | None = None) -> None:
        self._path: Final = path
        self.log: Log = log or (lambda level, text: None)
        self._jobs: dict[int, _Job] = {}  # in order; the first is the one being worked on
        self._last_job = 0
        self._deaths = 0  # in a row, without a job done
        self._channel: _Channel | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._closed = False
        self._process, self._socket = self._spawn()
        described = self._first_message()
        self.table: Final = TokenTable(described["pieces"], described["special_ids"])
        self.stop_ids: Final = tuple(described["stop_ids"])
        self.prefix_ids: Final = tuple(described["prefix_ids"])
        self.tokenizer_path: Final = str(described["path"])
        self.has_template: Final = bool(described["has_template"])

    @property
    def worker_pid(self) -> int:
        return self._process.pid

    async def start(self) -> None:
        """Take the worker into the running event loop."""
        self._channel = await self._connect()

    def encode(self, text: str, context_tokens: int, done: TextDone) -> None:
        self._submit(["text", text, context_tokens], done)

    def encode_messages(self, messages: tuple[Message, ...], tail: bytes, context_tokens: int, done: TextDone) -> None:
        self._submit(["messages", messages, tail, context_tokens], done)

    async def close(self) -> None:
        """Stop the worker.  Jobs not done are dropped: whoever waits for them is leaving too."""
        self._closed = True
        self._jobs.clear()
        self._set_deadline()
        if self._channel is not None:
            self._channel.transport.abort()
        self._socket.close()
        self._reap()

    # -- the process -------------------------------------------------------------------------------------------

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [sys.executable, "-m", "attnix.syscalls.textworker", str(theirs.fileno()), self._path]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        return process, ours

    def _first_message(self) -> dict[str, Any]:
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
                self._socket.close()
                self._reap()

    def _reap(self) -> None:
        self._process.kill()
        self._process.wait()

    async def _connect(self) -> _Channel:
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: _Channel(self), sock=self._socket)
        return channel

    def _worker_lost(self) -> None:
        if self._closed:
            return
        self._channel = None
        self._set_deadline()
        self._reap()
        self._deaths += 1
        self.log("warning", f"text worker {self._process.pid} ended ({self._process.returncode}); starting another")
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
            self.log("error", "the text worker keeps ending; failing what waits for it")
            for request in list(self._jobs):
                self._finish(request, Failure(E.EIO, {"message": "the text worker cannot be kept running"}))
        delay = BACKOFF_SECONDS[min(self._deaths, len(BACKOFF_SECONDS)) - 1]
        asyncio.get_running_loop().call_later(delay, lambda: asyncio.ensure_future(self._restart()))

    async def _restart(self) -> None:
        if self._closed:
            return
        try:
            self._process, self._socket = self._spawn()
        except OSError as error:  # no descriptors, no memory: what waits must not wait for ever
            self._deaths += 1
            self.log("error", f"the text worker cannot be started: {error.strerror}")
            self._after_death()
            return
        self._socket.setblocking(False)
        self._channel = await self._connect()
        for job in self._jobs.values():
            self._channel.transport.write(job.message)
        self._set_deadline()

    # -- jobs --------------------------------------------------------------------------------------------------

    def _submit(self, job: list[Any], done: TextDone) -> None:
        self._last_job += 1
        body = msgspec.msgpack.encode([self._last_job, *job])
        message = header(len(body)) + body
        self._jobs[self._last_job] = _Job(message, done)
        if self._channel is not None:
            self._channel.transport.write(message)
            if len(self._jobs) == 1:
                self._set_deadline()

    def _answered(self, request: int, code: int, result: bytes | str) -> None:
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

    def _set_deadline(self) -> None:
        """The job at the head has its time from now on."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._jobs and self._channel is not None:
            self._deadline = asyncio.get_running_loop().call_later(JOB_SECONDS, self._too_slow)

    def _too_slow(self) -> None:
        self.log("warning", f"the text worker took over {JOB_SECONDS:.0f} s for one request; killing it")
        self._process.kill()  # its channel closes, and the rest follows from that


class _Channel(asyncio.Protocol):
    def __init__(self, service: TextService) -> None:
        self._service = service
        self._splitter = Splitter()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._splitter.split(data):
            message = msgspec.msgpack.decode(cast(bytes, body))
            if isinstance(message, list):  # a restarted worker describes the model again: nothing new
                self._service._answered(*message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._service._worker_lost()
