"""A simulated memory tier: stored frames in ordinary memory, transfers that complete when they are told to.

`SimTier` runs inside the calling process, for kernel tests and replay.  It does what the driver of a real tier does:
copies whole stored frames between its slots and a dram arena, and checks every frame it hands out against the tag that
the kernel asked for, header checksum and each layer's checksum included.  So a mapping error, a frame that was reused too
early, or a bit that a test flipped shows as ECORRUPT, as it would on a disk.

    tier = SimTier(capacity_frames=24, frame_bytes=32, block_tokens=4)
    done = tier.transfer(effect, dram)          # dram: a buffer of stored frames, written by SimDevice.transfer
    tier.frames[3][5000] ^= 1                   # rot
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from attnix.kernel.errors import E
from attnix.kernel.events import Found, Transfer, TransferDone
from attnix.kernel.tag import GATE_FAILED, HEADER_BYTES

from .stored import Gates, StoredFormat

_PAIR: Final = struct.Struct("<ii")


_FIRST: Final = bytes(4)  # one int32: the only frame of a buffer


class Item(NamedTuple):
    """One item of a transfer: `own` is a frame of the device that does it, `far` one of the other end's."""

    own: int
    far: int
    tag: bytes


def items_of(effect: Transfer) -> Iterator[Item]:
    """The items of a transfer, in order."""
    pairs = list(_PAIR.iter_unpack(effect.pairs))
    size = len(effect.tags) // len(pairs)
    for at, (own, far) in enumerate(pairs):
        yield Item(own, far, effect.tags[at * size : (at + 1) * size])


def run_items(effect: Transfer, move: Callable[[Item], int], item_bytes: int) -> TransferDone:
    """Do a transfer item by item; `move` returns an errno, or 0 when the item is complete and verified."""
    failed: list[tuple[int, int]] = []
    moved_bytes = 0
    for at, item in enumerate(items_of(effect)):
        code = move(item)
        if code:
            failed.append((at, int(code)))
        else:
            moved_bytes += item_bytes
    return TransferDone(effect.device, effect.seq, tuple(failed), moved_bytes, 0)


class SimTier:
    """One tier of `capacity_frames` stored frames.

    frame_bytes, layers, block_tokens  geometry of a block's KV
    identity        16 bytes: goes into headers, and is compared
    read_bytes_s, write_bytes_s, latency_ns  what a transfer is said to take (0 bandwidth: nothing)
    fault           asked before each item (verb, own frame): an errno to fail it with, or 0
    gates           int64 array (kernel/tag.py) where transfers with a gate report that they ended

    frames          stored frames by number; a frame that was never written, or lost, is absent
    Counters: transfers, read_frames, written_frames, corrupt (items refused because content or tag was wrong).
    """

    def __init__(
        self,
        capacity_frames: int,
        frame_bytes: int,
        block_tokens: int,
        *,
        layers: int = 1,
        identity: bytes = bytes(16),
        read_bytes_s: int = 0,
        write_bytes_s: int = 0,
        latency_ns: int = 0,
        fault: Callable[[str, int], int] | None = None,
        gates: bytearray | memoryview | None = None,
    ) -> None:
        self.capacity_frames = capacity_frames
        self.format = StoredFormat(frame_bytes, layers, block_tokens, identity)
        self.frame_bytes = frame_bytes
        self.stored_bytes = self.format.stored_bytes
        self.read_bytes_s = read_bytes_s
        self.write_bytes_s = write_bytes_s
        self.latency_ns = latency_ns
        self.fault = fault
        self.gates = None if gates is None else Gates(gates)
        self.frames: dict[int, bytearray] = {}
        self.transfers = 0
        self.read_frames = 0
        self.written_frames = 0
        self.corrupt = 0

    def transfer(self, effect: Transfer, dram: bytearray | memoryview) -> TransferDone:
        """Move stored frames between this tier and a dram arena."""
        arena = memoryview(dram).cast("B")
        size = self.stored_bytes

        def read(item: Item) -> int:
            stored = self.frames.get(item.own)
            if stored is None:
                return E.ENOENT
            if not self._is_sound(stored, item.tag):
                return E.ECORRUPT
            arena[item.far * size : (item.far + 1) * size] = stored
            return 0

        def write(item: Item) -> int:
            stored = bytearray(arena[item.far * size : (item.far + 1) * size])
            if not self._is_sound(stored, item.tag):
                return E.ECORRUPT
            self.frames[item.own] = stored
            return 0

        return self._run(effect, read if effect.verb == "read" else write, len(arena) // size)

    def transfer_direct(self, effect: Transfer, hbm: bytearray | memoryview) -> TransferDone:
        """Read payloads straight into hbm frames; there is no direct write, since it would have no checksums."""
        arena = memoryview(hbm).cast("B")
        size = self.frame_bytes

        def read(item: Item) -> int:
            stored = self.frames.get(item.own)
            if stored is None:
                return E.ENOENT
            if not self._is_sound(stored, item.tag):
                return E.ECORRUPT
            arena[item.far * size : (item.far + 1) * size] = stored[HEADER_BYTES : HEADER_BYTES + size]
            return 0

        return self._run(effect, read if effect.verb == "read" else lambda item: E.EINVAL, len(arena) // size)

    def _is_sound(self, stored: bytearray, tag: bytes) -> bool:
        return not self.format.verify(stored, _FIRST, tag)

    def drop(self, frames: list[int]) -> None:
        """Forget frames."""
        for frame in frames:
            self.frames.pop(frame, None)

    def found(self, device: int, epoch: int) -> Found:
        """The inventory that its driver would report at its start: frames whose header is sound."""
        rows = bytearray()
        for frame, stored in sorted(self.frames.items()):
            if not self.format.check_header(stored):
                rows += frame.to_bytes(4, "little") + self.format.header_tag(stored)
        return Found(device, epoch, bytes(rows))

    def transfer_ns(self, effect: Transfer) -> int:
        """What a transfer is said to take."""
        bandwidth = self.read_bytes_s if effect.verb == "read" else self.write_bytes_s
        n_bytes = len(effect.pairs) // 8 * self.stored_bytes
        return self.latency_ns + (n_bytes * 1_000_000_000 // bandwidth if bandwidth else 0)

    def _run(self, effect: Transfer, move: Callable[[Item], int], far_frames: int) -> TransferDone:
        def checked(item: Item) -> int:
            if not (0 <= item.own < self.capacity_frames and 0 <= item.far < far_frames):
                return E.EINVAL
            return (self.fault(effect.verb, item.own) if self.fault else 0) or move(item)

        done = run_items(effect, checked, self.stored_bytes)
        self.transfers += 1
        complete = len(effect.pairs) // 8 - len(done.failed)
        if effect.verb == "read":
            self.read_frames += complete
        else:
            self.written_frames += complete
        self.corrupt += sum(code == E.ECORRUPT for _, code in done.failed)
        if effect.gate >= 0 and self.gates is not None:
            self.gates.store(effect.gate, effect.ticket, GATE_FAILED if done.failed else self.format.layers)
        return done._replace(elapsed_ns=self.transfer_ns(effect))
