"""How a file tier reads and writes: operations go in in batches and come back in any order.

`Engine` is the protocol; the pool of threads here works everywhere, ring_engine.py is io_uring.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, Protocol

from attnix.kernel.tag import HEADER_BYTES

from .._stored import ffi

THREADS: Final = 16


class Verb(IntEnum):
    READ = 0
    WRITE = 1
    SYNC = 2


class Region:
    """Memory that operations read into or write from: a mapping, with its address.

    fd       of the file that is mapped; -1: memory whose pages are all there already
    buffers  indices of its registered buffers, piece by piece (ring_engine.py); -1 for one that is not registered
    """

    def __init__(self, mapping: mmap.mmap, fd: int = -1) -> None:
        self.view = memoryview(mapping)
        self.pointer: Any = ffi.from_buffer("char[]", mapping, require_writable=True)
        self.address = int(ffi.cast("uintptr_t", self.pointer))
        self.n_bytes = len(mapping)
        self.buffers: list[int] = []
        self._fd = fd

    def is_populated(self) -> bool:
        """Whether its pages exist: whoever needs one that does not waits until the system has made it."""
        return self._fd < 0 or os.fstat(self._fd).st_blocks * 512 >= self.n_bytes


def new_region(n_bytes: int) -> Region:
    """Fresh page-aligned memory."""
    return Region(mmap.mmap(-1, n_bytes))


class Operation:
    """One read or write of consecutive bytes of the file.

    owner   whose it is (jobs.py); `item` and `part` are the owner's own
    start   first byte of the payload in `region`
    n_bytes of the payload
    offset  in the file
    staged  it needs a place of its own in the driver's memory while it is under way: the owner's `stage` is told which
    place   that place, -1 while it has none
    head    a header is written right before the payload, out of this page of the heads' region; -1: none
    """

    __slots__ = ("head", "item", "n_bytes", "offset", "owner", "part", "place", "region", "staged", "start", "verb")

    def __init__(
        self,
        owner: Any,
        verb: Verb,
        region: Region,
        start: int,
        n_bytes: int,
        offset: int,
        item: int = 0,
        part: int = 0,
    ) -> None:
        self.owner = owner
        self.verb = verb
        self.region = region
        self.start = start
        self.n_bytes = n_bytes
        self.offset = offset
        self.item = item
        self.part = part
        self.staged = False
        self.place = -1
        self.head = -1

    @property
    def total_bytes(self) -> int:
        """What its result must be."""
        return self.n_bytes + (HEADER_BYTES if self.head >= 0 else 0)


class Engine(Protocol):
    """Runs operations on one file.  A result is a number of bytes (0 for SYNC) or a negative errno."""

    name: str

    def use(self, fd: int) -> None:
        """Operations submitted from now on are on this descriptor."""
        ...

    def submit(self, operations: Sequence[Operation]) -> None:
        """Begin them.  The caller keeps to the depth."""
        ...

    def reap(self) -> list[tuple[Operation, int]]:
        """What has ended, without waiting."""
        ...

    def wait(self) -> list[tuple[Operation, int]]:
        """What has ended; waits for one when nothing has.  Something must be under way."""
        ...

    def fileno(self) -> int:
        """Polls readable when `reap` has something."""
        ...

    def close(self) -> None: ...


class ThreadEngine:
    """preadv and pwritev by a pool of threads, which are daemons: a stuck device does not keep the process from ending."""

    name = "threads"

    def __init__(self, heads: Region, depth: int) -> None:
        self._heads = heads.view
        self._fd = -1
        self._work: queue.SimpleQueue[tuple[Operation, int] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[Operation, int]] = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(min(depth, THREADS))]
        for thread in self._threads:
            thread.start()

    def use(self, fd: int) -> None:
        self._fd = fd

    def submit(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self._work.put((operation, self._fd))

    def reap(self) -> list[tuple[Operation, int]]:
        ended: list[tuple[Operation, int]] = []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)  # before the queue is emptied: what ends later rings again
        with contextlib.suppress(queue.Empty):
            while True:
                ended.append(self._ended.get_nowait())
        return ended

    def wait(self) -> list[tuple[Operation, int]]:
        first = self._ended.get()
        return [first, *self.reap()]

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._event)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            operation, fd = work
            try:
                result = self._perform(operation, fd)
            except OSError as error:
                result = -(error.errno or 5)
            self._ended.put((operation, result))
            os.eventfd_write(self._event, 1)

    def _perform(self, operation: Operation, fd: int) -> int:
        if operation.verb is Verb.SYNC:
            os.fdatasync(fd)
            return 0
        start = operation.start
        buffers = [operation.region.view[start : start + operation.n_bytes]]
        if operation.head >= 0:
            at = operation.head * HEADER_BYTES
            buffers.insert(0, self._heads[at : at + HEADER_BYTES])
        if operation.verb is Verb.READ:
            return os.preadv(fd, buffers, operation.offset)
        return os.pwritev(fd, buffers, operation.offset)
