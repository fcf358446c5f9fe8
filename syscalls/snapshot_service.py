"""The daemon's side of snapshots: one worker process per job, jobs in order, answers as events."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from attnix.kernel.errors import E
from attnix.kernel.events import Event, ReadSnapshot, SnapshotRead, SnapshotWritten, WriteSnapshot

from .snapshot_worker import Answer, Job
from .snapshots import Snapshot, sweep

JOB_SECONDS: Final = 120.0


class SnapshotService:
    """A `SnapshotPort` over `directory`, which is swept of what a crash left there.  feed: where answers go."""

    def __init__(self, directory: Path, log: Callable[[str, str], None]) -> None:
        self._directory: Final = directory
        self._feed: Callable[[Event], None] = lambda event: None
        self._jobs: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        swept = sweep(directory)
        if swept:
            log("info", f"snapshots: {swept} that were cut short are removed")

    def connect(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed

    def perform(self, effect: WriteSnapshot | ReadSnapshot) -> None:
        """SnapshotWritten or SnapshotRead will be fed."""
        task = asyncio.ensure_future(self._perform(effect))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _perform(self, effect: WriteSnapshot | ReadSnapshot) -> None:
        verb, snapshot = "read", None
        if isinstance(effect, WriteSnapshot):
            verb, snapshot = "write", Snapshot(effect.identity, effect.token_bytes, effect.entries)
        async with self._turn:
            answer = await self._run(Job(verb, str(self._directory), effect.uid, effect.name, snapshot))
        conn, request, found = effect.conn, effect.request, answer.snapshot
        if isinstance(effect, WriteSnapshot):
            self._feed(SnapshotWritten(conn, request, answer.code, answer.detail, answer.file_bytes))
        elif found is None:
            self._feed(SnapshotRead(conn, request, answer.code or E.EIO, answer.detail))
        else:
            self._feed(SnapshotRead(conn, request, 0, {}, found.identity, found.entries))

    async def _run(self, job: Job) -> Answer:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", f"{__package__}.snapshot_worker",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                async with asyncio.timeout(JOB_SECONDS):
                    said, _ = await process.communicate(msgspec.msgpack.encode(job))
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            return msgspec.msgpack.decode(said, type=Answer)
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            text = f"the snapshot {job.name!r} failed: its worker died or took too long ({type(error).__name__})"
            return Answer(int(E.EIO), {"message": text})

    async def close(self) -> None:
        """Wait for what is under way."""
        while self._jobs:
            await asyncio.wait(self._jobs)
