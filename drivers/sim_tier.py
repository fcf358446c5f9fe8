"""A simulated memory tier behind the whole driver protocol: as slow, as full and as unreliable as it is told to be.

    python -m attnix.drivers.sim_tier --channel FD --arena FD --rows FD --config JSON

Its slots are ordinary memory, or a file when `path` is given, in which case they outlive it.  Transfers run one after
another in the order of their messages, really copied and really verified; then they are held back until the time that
`latency_ns` and the bandwidths say is over.  Straight into hbm it goes layer by layer, and tells the gate.

Settings beyond the daemon's (drivers/protocol.py):

    read_bytes_s, write_bytes_s, latency_ns   0: as fast as memory
    path           a file for the slots
    enospc_after   frames that can be written until ENOSPC; -1: all
    fail_items, flip_items, lose_items   numbers of items, counted from 0 over all transfers of a life: EIO; one bit of the
                   stored frame flipped before it is read; the stored frame gone
    engine         name to report

Deaths, hangs and answers that come late, twice or never are injected from outside (drivers/faulty.py).
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from attnix.kernel.errors import E
from attnix.kernel.events import Transfer, TransferDone
from attnix.kernel.tag import CHECKSUM_OFFSET, GATE_FAILED, HEADER_BYTES, PRIVATE, TAG_HEAD, TAG_OFFSET

from .memfd import advise_huge_pages, map_shared
from .protocol import PROTOCOL_VERSION, Probe
from .serve import ConfigError, DriverArguments, run_driver
from .sim_memory import Item, items_of
from .stored import Gates, StoredFormat, copy_crc32c

_GIVEN: Final = frozenset({"stored_bytes", "dram_fd", "dram_device", "dram_frames", "gates_fd", "hbm_fds"})
_NUMBERS: Final = {"read_bytes_s": 0, "write_bytes_s": 0, "latency_ns": 0, "enospc_after": -1}
_LISTS: Final = ("fail_items", "flip_items", "lose_items")
_REQUIRED: Final = ("frame_bytes", "layers", "block_tokens", "capacity_frames")
_PORTION_ROWS: Final = 4096


class SimTierBackend:
    """The tier; see the module for what it can be told."""

    def __init__(self, config: dict[str, Any], dram_fd: int) -> None:
        """Error: ConfigError."""
        _check(config)
        self._format = StoredFormat(
            config["frame_bytes"], config["layers"], config["block_tokens"], bytes.fromhex(config["identity"])
        )
        self._capacity: int = config["capacity_frames"]
        size = self._capacity * self._format.stored_bytes
        self._map = _map_slots(config.get("path", ""), size)
        self._slots = memoryview(self._map)
        self._dram_device: int = config["dram_device"]
        self._dram = memoryview(map_shared(dram_fd))
        self._hbm = {int(d): memoryview(map_shared(fd)) for d, fd in config.get("hbm_fds", {}).items()}
        self._gates = Gates(map_shared(config["gates_fd"])) if "gates_fd" in config else None
        self._read_bytes_s: int = config.get("read_bytes_s", 0)
        self._write_bytes_s: int = config.get("write_bytes_s", 0)
        self._latency_ns: int = config.get("latency_ns", 0)
        self._engine: str = config.get("engine", "sim/memory")
        self._room: int = config.get("enospc_after", -1)
        self._faults = {name: frozenset(config.get(name, ())) for name in _LISTS}
        self._items = 0
        self._counts = dict.fromkeys(
            (
                "transfers",
                "read_frames",
                "written_frames",
                "direct_frames",
                "failed_items",
                "corrupt",
                "dropped_frames",
            ),
            0,
        )
        self._busy_until_ns = 0

    # -- what every driver says -----------------------------------------------------------------------------------

    def probe(self) -> Probe:
        return Probe(
            protocol=PROTOCOL_VERSION,
            kind="sim",
            pid=os.getpid(),
            fingerprint="",
            capabilities=("read", "write", "drop", "direct"),
            capacity_frames=self._capacity,
            frame_bytes=self._format.frame_bytes,
            alignment_bytes=1,
            vocab_tokens=0,
            numerics="",
            engine=self._engine,
            model="",
            stored_bytes=self._format.stored_bytes,
            read_bytes_s=self._read_bytes_s,
            write_bytes_s=self._write_bytes_s,
            latency_ns=self._latency_ns,
        )

    def inventory(self) -> Iterator[bytes]:
        rows = bytearray()
        row_bytes = 4 + self._format.tag_bytes
        for frame in range(self._capacity):
            header = self._slot(frame)[:HEADER_BYTES]
            if header[0] and not self._format.check_header(header) and not _is_private(header):
                rows += frame.to_bytes(4, "little") + self._format.header_tag(header)
            if len(rows) == _PORTION_ROWS * row_bytes:
                yield bytes(rows)
                rows.clear()
        if rows:
            yield bytes(rows)

    def health(self) -> dict[str, int]:
        measured = {
            "read_bytes_s": self._read_bytes_s, "write_bytes_s": self._write_bytes_s, "latency_ns": self._latency_ns
        }  # fmt: skip
        return self._counts | measured

    def drop(self, frames: Sequence[int]) -> None:
        for frame in frames:
            self._slot(frame)[:HEADER_BYTES] = bytes(HEADER_BYTES)
        self._counts["dropped_frames"] += len(frames)

    # -- transfers ------------------------------------------------------------------------------------------------

    def transfer(self, effect: Transfer) -> TransferDone:
        began_ns = time.monotonic_ns()
        self._busy_until_ns = max(self._busy_until_ns, began_ns) + self._latency_ns
        items = list(items_of(effect))
        codes = [self._planned(effect.verb, item) for item in items]
        if effect.arena == self._dram_device:
            self._move(effect, items, codes)
        elif effect.verb == "read" and effect.arena in self._hbm:
            self._read_direct(effect, items, codes, self._hbm[effect.arena])
        else:
            codes = [int(E.EINVAL)] * len(items)
        failed = tuple((at, code) for at, code in enumerate(codes) if code)
        if failed and effect.gate >= 0 and self._gates is not None:
            self._gates.store(effect.gate, effect.ticket, GATE_FAILED)
        complete = len(items) - len(failed)
        self._counts["transfers"] += 1
        self._counts["read_frames" if effect.verb == "read" else "written_frames"] += complete
        self._counts["failed_items"] += len(failed)
        self._counts["corrupt"] += sum(code == E.ECORRUPT for code in codes)
        item_bytes = self._format.stored_bytes if effect.arena == self._dram_device else self._format.frame_bytes
        return TransferDone(
            effect.device, effect.seq, failed, complete * item_bytes, time.monotonic_ns() - began_ns
        )  # fmt: skip

    def _planned(self, verb: str, item: Item) -> int:
        """Count the item; the errno that it is planned to meet, or 0.  What is to rot or vanish does so here."""
        number, self._items = self._items, self._items + 1
        if not 0 <= item.own < self._capacity:
            return int(E.EINVAL)
        if number in self._faults["flip_items"]:
            self._slot(item.own)[HEADER_BYTES + number % self._format.frame_bytes] ^= 1 << number % 8
        if number in self._faults["lose_items"]:
            self.drop([item.own])
        return int(E.EIO) if number in self._faults["fail_items"] else 0

    def _move(self, effect: Transfer, items: list[Item], codes: list[int]) -> None:
        size = self._format.stored_bytes
        rate = self._read_bytes_s if effect.verb == "read" else self._write_bytes_s
        for at, item in enumerate(items):
            if codes[at]:
                continue
            far = self._dram[item.far * size : (item.far + 1) * size]
            if len(far) < size:
                codes[at] = int(E.EINVAL)
            elif effect.verb == "read":
                codes[at] = self._read(item, far)
            else:
                codes[at] = self._write(item, far)
            self._hold(size, rate)
        if effect.gate >= 0 and self._gates is not None and not any(codes):
            self._gates.store(effect.gate, effect.ticket, self._format.layers)

    def _read(self, item: Item, far: memoryview) -> int:
        slot = self._slot(item.own)
        if not slot[0]:
            return int(E.ENOENT)
        far[:] = slot
        return int(E.ECORRUPT) if self._format.verify(far, bytes(4), item.tag) else 0

    def _write(self, item: Item, far: memoryview) -> int:
        if self._room == 0:
            return int(E.ENOSPC)
        if self._format.verify(far, bytes(4), item.tag):
            return int(E.ECORRUPT)
        self._room -= self._room > 0
        self._slot(item.own)[:] = far
        return 0

    def _read_direct(self, effect: Transfer, items: list[Item], codes: list[int], hbm: memoryview) -> None:
        """In layer order over all items, so that layer 0 of the last block comes before layer 1 of the first."""
        layer_bytes, frame_bytes = self._format.layer_bytes, self._format.frame_bytes
        checksums: list[tuple[int, ...]] = []
        for at, item in enumerate(items):
            slot = self._slot(item.own) if 0 <= item.own < self._capacity else memoryview(b"")
            checksums.append(())
            if codes[at]:
                continue
            if not 0 <= item.far < len(hbm) // frame_bytes:
                codes[at] = int(E.EINVAL)
            elif not slot[0]:
                codes[at] = int(E.ENOENT)
            elif self._format.check_header(slot[:HEADER_BYTES], item.tag):
                codes[at] = int(E.ECORRUPT)
            else:
                checksums[at] = struct.unpack_from(f"<{self._format.layers}I", slot, CHECKSUM_OFFSET)
        for layer in range(self._format.layers):
            for at, item in enumerate(items):
                if codes[at]:
                    continue
                source = HEADER_BYTES + layer * layer_bytes
                to = item.far * frame_bytes + layer * layer_bytes
                payload = self._slot(item.own)[source : source + layer_bytes]
                if copy_crc32c(hbm[to : to + layer_bytes], payload) != checksums[at][layer]:
                    codes[at] = int(E.ECORRUPT)
            self._hold(layer_bytes * len(items), self._read_bytes_s)
            if effect.gate >= 0 and self._gates is not None and not any(codes):
                self._gates.store(effect.gate, effect.ticket, layer + 1)
        self._counts["direct_frames"] += codes.count(0)

    def _hold(self, n_bytes: int, bytes_s: int) -> None:
        """Sleep until a device of that bandwidth, busy since the last call, would have moved so much."""
        if bytes_s:
            self._busy_until_ns += n_bytes * 1_000_000_000 // bytes_s
        left_ns = self._busy_until_ns - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)

    def _slot(self, frame: int) -> memoryview:
        size = self._format.stored_bytes
        return self._slots[frame * size : (frame + 1) * size]


def _is_private(header: memoryview) -> bool:
    """Of a context that is gone: nobody can use it."""
    return bool(TAG_HEAD.unpack_from(header, TAG_OFFSET)[5] & PRIVATE)


def _map_slots(path: str, size: int) -> mmap.mmap:
    if not path:
        slots = mmap.mmap(-1, size)
        advise_huge_pages(slots)
        return slots
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"path {path}: {error.strerror}") from error


def _check(config: dict[str, Any]) -> None:
    known = {*_GIVEN, *_NUMBERS, *_LISTS, *_REQUIRED, "identity", "path", "engine"}
    unknown = sorted(set(config) - known)
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    for name in (*_REQUIRED, *_NUMBERS):
        value = config.get(name, _NUMBERS.get(name, 0))
        if not isinstance(value, int) or isinstance(value, bool) or (name in _REQUIRED and value <= 0):
            raise ConfigError(
                f"setting {name!r} must be a {'positive ' if name in _REQUIRED else ''}integer, not {value!r}"
            )
    for name in _LISTS:
        numbers = config.get(name, ())
        if not isinstance(numbers, (list, tuple)) or not all(isinstance(number, int) for number in numbers):
            raise ConfigError(f"setting {name!r} is a list of item numbers")
    if not isinstance(config.get("dram_device"), int) or not isinstance(config.get("identity"), str):
        raise ConfigError("the settings dram_device and identity are required")


def make_backend(arguments: DriverArguments) -> SimTierBackend:
    """Build the tier that the command line describes.  Error: ConfigError."""
    try:
        return SimTierBackend(arguments.config, arguments.arena_fd)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> None:
    run_driver("attnix.drivers.sim_tier", make_backend, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    main()
