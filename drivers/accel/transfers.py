"""Copies between this accel's frames and the dram arena: it is the one that reads and writes both (DESIGN.md section 10,
item 4).

"read" seals: header, tag and one checksum per layer are made while a frame is copied out.  "write" unseals: header, tag
and identity are compared first, every layer's checksum while it is copied in.  What does not fit fails item by item.

A transfer is cut into shares that the threads take one after the other: two threads fill a memory bus that one does not,
and when a neighbour has a core the other thread does the rest.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol

from attnix.kernel.errors import E
from attnix.kernel.events import Transfer, TransferDone
from attnix.kernel.tag import GATE_FAILED, Tag, stored_bytes

from ..stored import Failure, Gates, StoredFormat, errors

MAX_THREADS: Final = 2  # more than fill the bus of a socket only with many channels; they would take cores from passes
SHARE_BYTES: Final = 2 << 20  # what a thread takes at a time; less than this is not worth waking another
_TEST_BYTES: Final = 32 << 20  # moved by the self-test: more than most second-level caches hold


class Speed(NamedTuple):
    """Measured by moving frames between buffers of our own: the arenas hold what must not be overwritten."""

    read_bytes_s: int
    write_bytes_s: int
    latency_ns: int  # of a transfer of one frame, beyond its bytes


class _Batch(Protocol):
    def __call__(self, bare: Any, stored: Any, pairs: bytes, tags: bytes) -> list[Failure]: ...


class Transfers:
    """The transfers of one accel with one dram arena.  Error at construction: ValueError, numbers that do not fit.

    frames  this accel's arena, dram the other: writable buffers of whole frames (what is left over at the end is not used)
    device  the dram's device number
    gates   shared memory of the gates, or None
    """

    def __init__(
        self,
        frame_bytes: int,
        layers: int,
        block_tokens: int,
        frames: Any,
        dram: Any,
        device: int,
        gates: Any,
        threads: int,
    ) -> None:
        self._shape = (frame_bytes, layers, block_tokens)
        self._format = StoredFormat(*self._shape, bytes(16))
        self._identified = False
        self._frames, self._dram, self._device = frames, dram, device
        self._gates = None if gates is None else Gates(gates)
        if memoryview(dram).nbytes < self._format.stored_bytes:
            raise ValueError(f"a dram arena of {memoryview(dram).nbytes} bytes cannot hold a stored frame")
        self._helpers = min(threads, MAX_THREADS) - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), "attnix-move")
        self.counters = {"read_frames": 0, "written_frames": 0, "moved_bytes": 0, "moving_ns": 0, "corrupt_frames": 0}

    @property
    def stored_bytes(self) -> int:
        return self._format.stored_bytes

    def identify(self, digest: bytes) -> None:
        """The 16 bytes that every header carries and must carry.  Before they are known every transfer fails (EIO)."""
        self._format = StoredFormat(*self._shape, digest)
        self._identified = True

    def run(self, transfer: Transfer) -> TransferDone:
        """Move everything, then report at the gate.  Every item that `failed` does not name is complete and verified."""
        began_ns = time.perf_counter_ns()
        items = len(transfer.pairs) // 8
        failed = self._move(transfer, items)
        if self._gates is not None and transfer.gate >= 0:
            self._gates.store(transfer.gate, transfer.ticket, GATE_FAILED if failed else self._format.layers)
        moved = items - len(failed)
        elapsed_ns = time.perf_counter_ns() - began_ns
        self.counters["read_frames" if transfer.verb == "read" else "written_frames"] += moved
        self.counters["moved_bytes"] += moved * self._format.frame_bytes
        self.counters["moving_ns"] += elapsed_ns
        self.counters["corrupt_frames"] += sum(code == E.ECORRUPT for _, code in failed)
        return TransferDone(
            transfer.device, transfer.seq, tuple(failed), moved * self._format.frame_bytes, elapsed_ns
        )  # fmt: skip

    def _move(self, transfer: Transfer, items: int) -> list[tuple[int, int]]:
        whole = len(transfer.pairs) == 8 * items and len(transfer.tags) == items * self._format.tag_bytes
        if not whole or transfer.verb not in ("read", "write") or transfer.arena != self._device:
            return [(item, int(E.EINVAL)) for item in range(items)]
        if not self._identified:
            return [(item, int(E.EIO)) for item in range(items)]
        batch = self._format.seal if transfer.verb == "read" else self._format.unseal
        return errors(self._shared_out(batch, self._frames, self._dram, transfer.pairs, transfer.tags))

    def _shared_out(self, batch: _Batch, bare: Any, stored: Any, pairs: bytes, tags: bytes) -> list[Failure]:
        """Run a batch on this thread and the helpers; failures in the order of the items."""
        items, tag_bytes = len(pairs) // 8, self._format.tag_bytes
        share = max(1, SHARE_BYTES // self._format.frame_bytes)
        starts = itertools.count(0, share)  # next() of it is one step of the interpreter: every thread gets another
        failures: list[Failure] = []

        def work() -> None:
            for first in iter(starts.__next__, None):
                if first >= items:
                    return
                end = min(first + share, items)
                part = batch(bare, stored, pairs[8 * first : 8 * end], tags[tag_bytes * first : tag_bytes * end])
                failures.extend(Failure(first + item, code) for item, code in part)

        helpers = [self._pool.submit(work) for _ in range(min(self._helpers, (items - 1) // share))]
        work()
        for helper in helpers:
            helper.result()
        return sorted(failures)

    def measure(self) -> Speed:
        """Self-test: the second of two rounds each way (the first takes the page faults), then single frames."""
        shape = self._format
        items = max(1, _TEST_BYTES // shape.frame_bytes)
        bare, stored = bytearray(items * shape.frame_bytes), bytearray(items * stored_bytes(shape.frame_bytes))
        pairs = b"".join(item.to_bytes(4, "little") * 2 for item in range(items))
        tags = Tag(bytes(16), bytes(16), bytes(16), 0, 1, 0, b"", bytes(4)).pack(shape.block_tokens) * items

        def ns_of(batch: _Batch, n: int) -> int:
            began_ns = time.perf_counter_ns()
            self._shared_out(batch, bare, stored, pairs[: 8 * n], tags[: n * shape.tag_bytes])
            return max(1, time.perf_counter_ns() - began_ns)

        read_ns = min(ns_of(shape.seal, items) for _ in range(2))
        write_ns = min(ns_of(shape.unseal, items) for _ in range(2))
        single_ns = min(ns_of(shape.seal, 1) for _ in range(8))
        total = items * shape.frame_bytes
        return Speed(
            total * 1_000_000_000 // read_ns, total * 1_000_000_000 // write_ns, max(0, single_ns - read_ns // items)
        )
