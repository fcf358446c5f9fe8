"""What is done once, before serving: read every slot's header, and measure the device."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

from attnix.kernel.tag import HEADER_BYTES, PRIVATE, TAG_OFFSET

from .._stored import ffi, lib
from .engine import Engine, Operation, Region, Verb, new_region
from .slot_file import SlotFile

PROBE_BYTES: Final = 16 << 20  # moved per direction by the self-test, at most; more would delay every start
_GENERATION: Final = struct.Struct("<Q")
_FLAGS: Final = struct.Struct("<I")
_GENERATION_OFFSET: Final = 16
_FLAGS_OFFSET: Final = TAG_OFFSET + 56
_KEY_BYTES: Final = 16


class Found(NamedTuple):
    """slots: packed tag of each slot whose block may be used, by slot; valid: slots with any valid header."""

    slots: dict[int, bytes]
    valid: set[int]
    highest_generation: int


class Measured(NamedTuple):
    read_bytes_s: int
    write_bytes_s: int
    latency_ns: int


def scan(engine: Engine, file: SlotFile, heads: Region, depth: int) -> Found:
    """Read all headers, `depth` at a time.

    Of several slots with one key the newest counts.  Private blocks are of a context that is gone: they are not listed.
    """
    newest: dict[bytes, tuple[int, int, bytes]] = {}  # by key: generation, slot, tag
    valid: set[int] = set()
    highest = 0

    pages = list(range(depth))

    def note(operation: Operation, result: int) -> None:
        if result == HEADER_BYTES:
            look(operation.item, heads.pointer + operation.start)
        pages.append(operation.start // HEADER_BYTES)

    def look(slot: int, header: Any) -> None:
        nonlocal highest
        if lib.ax_header_check(file.format.c, header, ffi.NULL):
            return
        valid.add(slot)
        page = ffi.buffer(header, HEADER_BYTES)
        (generation,) = _GENERATION.unpack_from(page, _GENERATION_OFFSET)
        highest = max(highest, generation)
        if _FLAGS.unpack_from(page, _FLAGS_OFFSET)[0] & PRIVATE:
            return
        tag = bytes(page[TAG_OFFSET : TAG_OFFSET + file.format.tag_bytes])
        key = tag[:_KEY_BYTES]
        if key not in newest or newest[key][0] < generation:
            newest[key] = (generation, slot, tag)

    def operations() -> Iterator[Operation]:
        for slot in range(file.capacity_frames):
            start = pages.pop() * HEADER_BYTES  # there is one: no more than `depth` are under way
            yield Operation(None, Verb.READ, heads, start, HEADER_BYTES, file.offset(slot), slot)

    _run(engine, depth, operations(), note)
    return Found({slot: tag for _, slot, tag in sorted(newest.values(), key=lambda row: row[1])}, valid, highest)


def measure(engine: Engine, file: SlotFile, found: Found, depth: int) -> Measured:
    """Read slots, and write zeros to empty ones: some tens of milliseconds on a fast device.

    Zero where it could not be told: a full file is not written to.
    """
    n_bytes = file.stored_bytes
    count = max(1, min(PROBE_BYTES // n_bytes, file.capacity_frames, depth))
    empty = [slot for slot in range(file.capacity_frames) if slot not in found.valid][:count]
    slots = empty if len(empty) == count else list(range(count))
    memory = new_region(count * n_bytes)
    failed = False

    def move(verb: Verb, slots: list[int], at_once: int) -> int:
        nonlocal failed

        def note(operation: Operation, result: int) -> None:
            nonlocal failed
            failed = failed or result != n_bytes

        operations = (
            Operation(None, verb, memory, item * n_bytes, n_bytes, file.offset(slot), item)
            for item, slot in enumerate(slots)
        )
        began = time.perf_counter_ns()
        _run(engine, at_once, operations, note)
        return time.perf_counter_ns() - began

    write_ns = move(Verb.WRITE, empty, depth) if empty else 0
    read_ns = move(Verb.READ, slots, depth)
    if failed:
        return Measured(0, 0, 0)
    read_bytes_s = len(slots) * n_bytes * 10**9 // max(1, read_ns)
    write_bytes_s = len(empty) * n_bytes * 10**9 // max(1, write_ns)
    return Measured(read_bytes_s, write_bytes_s, _latency_ns(engine, file, memory))


def _latency_ns(engine: Engine, file: SlotFile, memory: Region) -> int:
    """The least that one small read takes."""
    least = 1 << 62
    for slot in range(min(8, file.capacity_frames)):
        began = time.perf_counter_ns()
        engine.submit([Operation(None, Verb.READ, memory, 0, HEADER_BYTES, file.offset(slot))])
        engine.wait()
        least = min(least, time.perf_counter_ns() - began)
    return least


def _run(
    engine: Engine, depth: int, operations: Iterator[Operation], ended: Callable[[Operation, int], object]
) -> None:
    """Run operations to the end, `depth` at once; each is made when there is room for it."""
    under_way = 0
    more = True
    while more or under_way:
        batch = list(islice(operations, depth - under_way))
        more = bool(batch)
        if batch:
            engine.submit(batch)
            under_way += len(batch)
        if under_way:
            results = engine.wait()
            under_way -= len(results)
            for operation, result in results:
                ended(operation, result)
