"""io_uring through our own few lines of C over liburing (csrc/uring.c): one call submits a batch, one reaps it.

Reads into an arena use registered buffers where the system lets us register it: its pages are then looked up once and not
for each read, which saves a quarter of the processor time.  That is done in pieces, while nothing else is to do, and only
when the arena's pages exist: making them takes seconds per GiB, and the daemon does that beside its work.  A read across
the border of two pieces goes without.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from attnix.kernel.tag import HEADER_BYTES

from .engine import Operation, Region, Verb

try:
    from ._uring import ffi, lib
except ImportError as error:  # not built, or liburing is not installed where we run
    _missing = str(error)
else:
    _missing = ""

PIECE_BYTES: Final = 256 << 20  # registering one takes about 30 ms; the system allows up to 1 GiB
MAX_PIECES: Final = 1024


class RingUnavailable(Exception):
    """This build or this system has no io_uring; the message says which."""


class RingEngine:
    """Error at construction: RingUnavailable."""

    name = "uring"

    def __init__(self, heads: Region, depth: int) -> None:
        if _missing:
            raise RingUnavailable(f"not built with liburing ({_missing})")
        code = ffi.new("int *")
        self._ring = lib.ax_ring_open(depth, code)
        if self._ring == ffi.NULL:
            raise RingUnavailable(f"the system refuses it ({os.strerror(code[0])})")
        self._heads = heads.address
        self._fd = -1
        self._depth = depth
        self._batch: Any = ffi.new("ax_io[]", depth)
        self._users: Any = ffi.new("uint64_t[]", depth)
        self._results: Any = ffi.new("int32_t[]", depth)
        self._under_way: list[Operation | None] = [None] * depth
        self._free = list(range(depth))
        self._pieces: list[tuple[int, tuple[Region, int]]] = []  # not registered yet

    def offer(self, regions: Sequence[Region]) -> str:
        """Say what is to be registered, piece by piece, by `register_next`.  "" or why nothing can be."""
        pieces = [(region, at) for region in regions for at in range(0, region.n_bytes, PIECE_BYTES)][:MAX_PIECES]
        failed = lib.ax_ring_table(self._ring, len(pieces))
        if failed:
            return os.strerror(-failed)
        for region in regions:
            region.buffers = [-1] * -(-region.n_bytes // PIECE_BYTES)
        self._pieces = list(enumerate(pieces))
        return ""

    @property
    def next_region(self) -> Region | None:
        """The memory of which `register_next` would register a piece; None when it is all done."""
        return self._pieces[0][1][0] if self._pieces else None

    def register_next(self) -> str:
        """Register one more piece.  "" when done, else why not, and then the rest is not tried either."""
        index, (region, at) = self._pieces.pop(0)
        n_bytes = min(PIECE_BYTES, region.n_bytes - at)
        failed = lib.ax_ring_register(self._ring, index, region.address + at, n_bytes)
        if failed:
            self._pieces.clear()
            return os.strerror(-failed)
        region.buffers[at // PIECE_BYTES] = index
        return ""

    def use(self, fd: int) -> None:
        self._fd = fd

    def submit(self, operations: Sequence[Operation]) -> None:
        for n, operation in enumerate(operations):
            user = self._free.pop()
            self._under_way[user] = operation
            io = self._batch[n]
            region = operation.region
            io.user = user
            io.address = region.address + operation.start
            io.head = self._heads + operation.head * HEADER_BYTES if operation.head >= 0 else 0
            io.offset = operation.offset
            io.bytes = operation.n_bytes
            io.verb = int(operation.verb)
            io.fd = self._fd
            io.buffer = -1
            if region.buffers and operation.verb is Verb.READ:
                piece = operation.start // PIECE_BYTES
                if (operation.start + operation.n_bytes - 1) // PIECE_BYTES == piece:
                    io.buffer = region.buffers[piece]
        failed = lib.ax_ring_submit(self._ring, self._batch, len(operations))
        if failed:
            raise OSError(-failed, f"io_uring takes nothing more: {os.strerror(-failed)}")

    def reap(self) -> list[tuple[Operation, int]]:
        return self._reap(0)

    def wait(self) -> list[tuple[Operation, int]]:
        return self._reap(1)

    def fileno(self) -> int:
        return int(lib.ax_ring_fd(self._ring))

    def close(self) -> None:
        lib.ax_ring_close(self._ring)

    def _reap(self, wait: int) -> list[tuple[Operation, int]]:
        n = lib.ax_ring_reap(self._ring, self._users, self._results, self._depth, wait)
        if n < 0:
            raise OSError(-n, f"io_uring: {os.strerror(-n)}")
        ended: list[tuple[Operation, int]] = []
        for i in range(n):
            user = self._users[i]
            operation = self._under_way[user]
            assert operation is not None
            self._under_way[user] = None
            self._free.append(user)
            ended.append((operation, self._results[i]))
        return ended
