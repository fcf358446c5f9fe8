"""Copies between this device's frames and the dram arena, beside the passes (DESIGN.md section 10, items 4 and 8).

One thread works transfers off in their order, on a stream per direction.  "write" (arena -> frames) verifies on the host,
where the bytes lie, and then has the device read them; a load that a pass may follow goes by groups of layers, each verified
before it is issued, with an event behind it that the compute stream waits for.  "read" (frames -> arena) voids the stored
frames, has the device write their payloads, waits, and seals them: checksums and headers are those of drivers/stored.py.

The arena is registered as pinned, so the device reads and writes it in place.  Where that is refused the copies go
through pageable memory: slower, and one by one; the driver says so at its start.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from attnix.kernel.errors import E
from attnix.kernel.events import Transfer, TransferDone
from attnix.kernel.tag import GATE_FAILED, Tag

from ...stored import Gates, Placed, StoredFormat, errors
from ..model import I64
from ..transfers import Speed
from .arena import StoredArena
from .checks import Mask
from .device import Device, Stream
from .errors import end_driver, is_out_of_memory
from .frames import DeviceFrames
from .moving import Moving
from .ops import Ops

_TEST_BYTES: Final = 32 << 20  # moved by the self-test


class DeviceCarrier:
    """Error at construction: ValueError, a dram arena without room for a stored frame."""

    def __init__(
        self,
        frames: DeviceFrames,
        block_tokens: int,
        dram: Any,
        device_number: int,
        gates: Any,
        device: Device,
        ops: Ops,
        threads: int,
    ) -> None:
        self._shape = (frames.frame_bytes, frames.layers, block_tokens)
        self._format = StoredFormat(*self._shape, bytes(16))
        self._identified = False
        self._frames, self._device, self._ops = frames, device, ops
        self._number = device_number
        self._gates = None if gates is None else Gates(gates)
        if memoryview(dram).nbytes < self._format.stored_bytes:
            raise ValueError(f"a dram arena of {memoryview(dram).nbytes} bytes cannot hold a stored frame")
        refused = device.register(dram)
        if refused:
            print(
                f"attnix.drivers.accel: the dram arena stays pageable, copies will be slower: {refused}",
                file=sys.stderr,
            )
        self._arena = StoredArena(dram, self._format.frame_bytes, not refused)
        self._in, self._out = device.stream(), device.stream()
        self._work: queue.SimpleQueue[Moving | None] = queue.SimpleQueue()
        self._flying: dict[int, Moving] = {}  # by seq
        self._done: list[TransferDone] = []
        self._lock = threading.Lock()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.counters = {
            "read_frames": 0, "written_frames": 0, "moved_bytes": 0, "moving_ns": 0, "corrupt_frames": 0,
            "pinned_bytes": 0 if refused else memoryview(dram).nbytes,
        }  # fmt: skip
        threading.Thread(target=self._mover, daemon=True, name="attnix-move").start()

    @property
    def stored_bytes(self) -> int:
        return self._format.stored_bytes

    def identify(self, digest: bytes) -> None:
        self._format = StoredFormat(*self._shape, digest)
        self._identified = True

    # -- the driver's thread ------------------------------------------------------------------------------------------

    def run(self, transfer: Transfer) -> TransferDone | None:
        """Begin it.  What cannot be begun is answered at once."""
        items = len(transfer.pairs) // 8
        code = self._refusal(transfer, items)
        if code is not None:
            failed = tuple((item, int(code)) for item in range(items))
            self._report(transfer, True)
            return TransferDone(transfer.device, transfer.seq, failed, 0, 0)
        self._frames.pull()
        moving = Moving(transfer, self._frames.layers, self._frames.layer_bytes)
        with self._lock:
            self._flying[transfer.seq] = moving
        self._work.put(moving)
        return None

    def fileno(self) -> int:
        return self._ready

    def completed(self) -> list[TransferDone]:
        with self._lock:
            done, self._done = self._done, []
        if done:
            os.eventfd_read(self._ready)
            self._frames.show()
        return done

    def settle(self, frames: I64, followed: Sequence[tuple[int, int]] = ()) -> None:
        """Wait for every transfer under way that touches these frames, but those at the gates (gate, ticket) of `followed`."""
        with self._lock:
            flying = list(self._flying.values())
        for moving in flying:
            at = (moving.transfer.gate, moving.transfer.ticket)
            if moving.touches(frames) and not (moving.transfer.verb == "write" and at in followed):
                moving.wait()

    def following(self, gate: int, ticket: int) -> Moving | None:
        """The load under way that reports at this gate."""
        with self._lock:
            for moving in self._flying.values():
                if (moving.transfer.gate, moving.transfer.ticket, moving.transfer.verb) == (gate, ticket, "write"):
                    return moving
        return None

    def measure(self) -> Speed:
        """Self-test with an arena of its own; the frames hold nothing yet, and zeros afterwards."""
        items = max(1, min(self._frames.capacity, _TEST_BYTES // self._format.frame_bytes))
        with self._device.computing():  # for its errors, here and below
            memory = self._device.staging((items * self._format.stored_bytes,), torch.uint8)
        arena = StoredArena(memory.numpy(), self._format.frame_bytes, True)
        tag = Tag(bytes(16), bytes(16), bytes(16), 0, 1, 0, b"", bytes(4)).pack(self._shape[2])

        def ns_of(verb: str, n: int) -> int:
            pairs = np.repeat(np.arange(n, dtype=np.int32), 2).tobytes()
            moving = Moving(
                Transfer(0, 0, verb, 0, pairs, tag * n, -1, 0), self._frames.layers, self._frames.layer_bytes
            )
            began_ns = time.perf_counter_ns()
            self._move(moving, arena)
            return max(1, time.perf_counter_ns() - began_ns)

        with self._device.computing():
            read_ns = min(ns_of("read", items) for _ in range(2))
            write_ns = min(ns_of("write", items) for _ in range(2))
            single_ns = min(ns_of("read", 1) for _ in range(8))
            self._in.run(self._frames.wipe)
            self._in.mark().synchronize()
        total = items * self._format.frame_bytes
        return Speed(
            total * 1_000_000_000 // read_ns, total * 1_000_000_000 // write_ns, max(0, single_ns - read_ns // items)
        )

    def close(self) -> None:
        """End the mover; what is under way is finished first."""
        self._work.put(None)

    def _refusal(self, transfer: Transfer, items: int) -> E | None:
        whole = len(transfer.pairs) == 8 * items and len(transfer.tags) == items * self._format.tag_bytes
        if not whole or transfer.verb not in ("read", "write") or transfer.arena != self._number:
            return E.EINVAL
        return None if self._identified else E.EIO

    # -- the mover's thread -------------------------------------------------------------------------------------------

    def _mover(self) -> None:
        while (moving := self._work.get()) is not None:
            transfer = moving.transfer
            began_ns = time.perf_counter_ns()
            try:
                failed = self._move(moving, self._arena)
            except Exception as error:  # whatever it is, the transfer is answered and the next one has its turn
                lacks_memory = is_out_of_memory(error)
                if isinstance(error, torch.AcceleratorError) and not lacks_memory:
                    end_driver(error)
                print(f"attnix.drivers.accel: {transfer.verb}: {type(error).__name__}: {error}", file=sys.stderr)
                failed = [(item, int(E.ENOMEM if lacks_memory else E.EIO)) for item in range(len(moving))]
                for stream in (self._in, self._out):  # once it is answered its frames are somebody else's
                    stream.mark().synchronize()
            elapsed_ns = time.perf_counter_ns() - began_ns
            moved = len(moving) - len(failed)
            self._report(transfer, bool(failed))
            moving.end(bool(failed))
            with self._lock:
                self.counters["read_frames" if transfer.verb == "read" else "written_frames"] += moved
                self.counters["moved_bytes"] += moved * self._format.frame_bytes
                self.counters["moving_ns"] += elapsed_ns
                self.counters["corrupt_frames"] += sum(code == E.ECORRUPT for _, code in failed)
                del self._flying[transfer.seq]
                self._done.append(
                    TransferDone(
                        transfer.device, transfer.seq, tuple(failed), moved * self._format.frame_bytes, elapsed_ns
                    )
                )
                os.eventfd_write(self._ready, 1)

    def _report(self, transfer: Transfer, failed: bool) -> None:
        if self._gates is not None and transfer.gate >= 0:
            self._gates.store(transfer.gate, transfer.ticket, GATE_FAILED if failed else self._format.layers)

    def _move(self, moving: Moving, arena: StoredArena) -> list[tuple[int, int]]:
        """Move every item that can be; those that failed, with their errno."""
        exists = (moving.bare >= 0) & (moving.bare < self._frames.capacity)
        index = np.flatnonzero(exists)
        size = self._format.tag_bytes
        tags = b"".join(moving.transfer.tags[size * item : size * (item + 1)] for item in index)
        items = _Items(moving.bare[index], moving.stored[index], moving.transfer.verb == "read")
        failed = [(int(item), int(E.EINVAL)) for item in np.flatnonzero(~exists)]
        if failed and moving.transfer.gate >= 0:
            moving.end(True)
        if len(index):
            placed = self._format.placed(arena.buffer, items.stored.tobytes(), tags)
            if items.is_read:
                self._read(items, arena, placed)
            else:
                self._write(moving, items, arena, placed)
            failed += [(int(index[item]), code) for item, code in errors(placed.failures)]
        return sorted(failed)

    def _write(self, moving: Moving, items: _Items, arena: StoredArena, placed: Placed) -> None:
        good = np.ones(len(items.bare), np.bool_)
        for first, layers in moving.groups:
            if not placed.verify_layers(first, layers):
                good[[item for item, _ in placed.failures]] = False
                if moving.transfer.gate >= 0:
                    moving.end(True)  # who follows it must not go on; the other items are completed all the same
            self._copy(self._in, items, arena, good, first, layers)
            event = self._in.mark()
            moving.issued(event)
        event.synchronize()

    def _read(self, items: _Items, arena: StoredArena, placed: Placed) -> None:
        good = np.ones(len(items.bare), np.bool_)
        if not placed.void():
            good[[item for item, _ in placed.failures]] = False
        self._copy(self._out, items, arena, good, 0, self._frames.layers)
        self._out.mark().synchronize()
        placed.seal()

    def _copy(self, stream: Stream, items: _Items, arena: StoredArena, good: Mask, first: int, layers: int) -> None:
        """Have the device copy some layers of the good items."""
        if not good.any():
            return
        bare, stored = items.bare[good], items.stored[good]
        verb: Literal["read", "write"] = "read" if items.is_read else "write"
        stream.run(arena.copies(verb, self._frames, bare, stored, self._device, self._ops, first, layers))


class _Items(NamedTuple):
    """Of a transfer, what exists on this side: bare, stored [n], and which way they go."""

    bare: I64
    stored: np.ndarray[tuple[int], np.dtype[np.int32]]
    is_read: bool
