"""One transfer as operations on the file: which there are, and what their results mean for its items.

A job hands out its operations one by one, as there is room for them, and is told each result.  Items fail one by one,
with an errno; what was checked first is kept.

    StoredRead   slot -> arena, whole stored frames: header, tag and all layers are verified after they have landed
    StoredWrite  arena -> slot: the same is verified before, so that nothing wrong is stored under a right name
    DirectRead   slot -> hbm, payload only, group of layers by group of layers over all items, each verified as it lands
                 It lands in our memory and is copied on in one pass with its checksums: hbm has none that would show what
                 an operation did that was still under way when this process was killed and the frame was given to others
    Scrub        make slots empty
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from attnix.kernel.errors import E
from attnix.kernel.events import Transfer, TransferDone
from attnix.kernel.tag import GATE_FAILED, HEADER_BYTES

from .._stored import ffi, lib
from ..stored import Gates, Reason, StoredFormat, errno_of
from .engine import Operation, Region, Verb
from .slot_file import SlotFile

CHUNK_BYTES: Final = 1 << 20  # larger frames are moved in operations of this size
WHOLE_BYTES: Final = CHUNK_BYTES + CHUNK_BYTES // 2  # up to here a frame is one operation
GROUP_BYTES: Final = 64 << 10  # a group of layers read directly is at least this
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOTHING: Final = bytes(8)


class Job:
    """What all jobs share.

    slots, frames  of each item, in the file and in the arena
    codes          errno of each item, 0 while nothing is wrong with it
    under_way      operations handed out whose results are not in
    exhausted      whether all have been handed out
    """

    verb = Verb.READ

    def __init__(self, effect: Transfer, file: SlotFile, arena: Region) -> None:
        self.effect = effect
        self.file = file
        self.arena = arena
        self.format: StoredFormat = file.format
        numbers = memoryview(effect.pairs).cast("i").tolist()
        self.slots: list[int] = numbers[0::2]
        self.frames: list[int] = numbers[1::2]
        self.codes = [0] * len(self.slots)
        self.under_way = 0
        self.exhausted = False
        self.first_ns = 0
        self.sync_wanted = False
        self._tags: Any = ffi.from_buffer("char[]", effect.tags)
        self._operations = self._plan()

    @property
    def ended(self) -> bool:
        return self.exhausted and self.under_way == 0

    def next(self) -> Operation | None:
        """The next operation, or None: there are no more."""
        operation = next(self._operations, None)
        if operation is None:
            self.exhausted = True
            return None
        self.under_way += 1
        self.first_ns = self.first_ns or time.perf_counter_ns()
        return operation

    def stage(self, operation: Operation, place: int) -> None:
        """An operation that is `staged` is about to begin and has its place."""

    def result(self, operation: Operation, result: int) -> None:
        """The result of an operation is in; it still has its place."""
        self.under_way -= 1
        if operation.verb is Verb.SYNC:
            if result < 0:
                self.codes = [code or int(E.EIO) for code in self.codes]
        elif result != operation.total_bytes:
            self.fail(operation.item, E.ENOSPC if -result in _FULL else E.EIO)
        else:
            self._landed(operation)

    def fail(self, item: int, code: int) -> None:
        self.codes[item] = self.codes[item] or int(code)

    def sync(self) -> Operation:
        """The operation that makes what was written survive a power failure; asked for once, when all others ended."""
        self.sync_wanted = False
        self.under_way += 1
        return Operation(self, Verb.SYNC, self.arena, 0, 0, 0)

    def done(self) -> TransferDone:
        """The answer."""
        failed = tuple((item, code) for item, code in enumerate(self.codes) if code)
        moved_bytes = (len(self.codes) - len(failed)) * self._item_bytes()
        elapsed_ns = time.perf_counter_ns() - self.first_ns if self.first_ns else 0
        return TransferDone(0, self.effect.seq, failed, moved_bytes, elapsed_ns)

    def report(self, gates: Gates | None) -> None:
        """Tell the transfer's gate, if it has one, how it ended."""
        if gates is not None and self.effect.gate >= 0:
            layers = GATE_FAILED if any(self.codes) else self.format.layers
            gates.store(self.effect.gate, self.effect.ticket, layers)

    def _item_bytes(self) -> int:
        return self.format.stored_bytes

    def _plan(self) -> Iterator[Operation]:
        raise NotImplementedError

    def _landed(self, operation: Operation) -> None:
        """A complete operation."""

    def _tag(self, item: int) -> Any:
        return self._tags + item * self.format.tag_bytes

    def _chunks(self, item: int, skip: int) -> Iterator[Operation]:
        """The operations that move bytes skip.. of an item's stored frame."""
        total = self.format.stored_bytes
        step = total if total <= WHOLE_BYTES else CHUNK_BYTES
        start, offset = self.frames[item] * total, self.file.offset(self.slots[item])
        for at in range(skip, total, step):
            n_bytes = min(step, total - at)
            yield Operation(self, self.verb, self.arena, start + at, n_bytes, offset + at, item)


class StoredRead(Job):
    def _plan(self) -> Iterator[Operation]:
        total = self.format.stored_bytes
        self._missing = [1 if total <= WHOLE_BYTES else -(-total // CHUNK_BYTES)] * len(self.slots)
        for item in range(len(self.slots)):
            if not self.codes[item]:
                yield from self._chunks(item, 0)

    def _landed(self, operation: Operation) -> None:
        item = operation.item
        self._missing[item] -= 1
        if self._missing[item] or self.codes[item]:
            return
        frame = self.arena.pointer + self.frames[item] * self.format.stored_bytes
        code = lib.ax_verify_one(self.format.c, frame, frame + HEADER_BYTES, self._tag(item))
        if code == Reason.OK:
            lib.ax_header_stamp(frame, 0)  # a generation is of a slot, and this is no slot
        else:
            self.fail(item, _refusal(code, ffi.buffer(frame, 8)))


class StoredWrite(Job):
    verb = Verb.WRITE

    def __init__(self, effect: Transfer, file: SlotFile, arena: Region, heads: Region, generation: int) -> None:
        """generation: of the first item; the next ones have the numbers after it."""
        self._heads = heads
        self._generation = generation
        super().__init__(effect, file, arena)

    def _plan(self) -> Iterator[Operation]:
        for item in range(len(self.slots)):
            if self.codes[item]:
                continue
            frame = self.arena.pointer + self.frames[item] * self.format.stored_bytes
            code = lib.ax_verify_one(self.format.c, frame, frame + HEADER_BYTES, self._tag(item))
            if code:
                self.fail(item, errno_of(code))
                continue
            for operation in self._chunks(item, HEADER_BYTES):
                if operation.offset == self.file.offset(self.slots[item]) + HEADER_BYTES:
                    # The header gets its generation in a page of its own: others may be reading the arena's.
                    operation.offset -= HEADER_BYTES
                    operation.staged = True
                yield operation

    def stage(self, operation: Operation, place: int) -> None:
        operation.head = place
        head = self._heads.pointer + place * HEADER_BYTES
        frame = self.arena.pointer + self.frames[operation.item] * self.format.stored_bytes
        ffi.memmove(head, frame, HEADER_BYTES)
        lib.ax_header_stamp(head, self._generation + operation.item)


class DirectRead(Job):
    """Whoever waits at the gate may use the first layers while the last ones are still under way.

    landing  memory of the driver, a place of `landing_bytes` for each operation that may be under way
    """

    def __init__(self, effect: Transfer, file: SlotFile, arena: Region, landing: Region, gates: Gates | None) -> None:
        self._landing = landing
        self._gates = gates
        self._group_layers = group_layers(file.format)
        self._groups = -(-file.format.layers // self._group_layers)
        n = len(effect.pairs) // 8
        self._headers: Any = ffi.new("char[]", n * HEADER_BYTES)
        self._checksums: Any = ffi.new("uint32_t[]", n * file.format.layers)
        self._have_header = bytearray(n)
        self._early: list[list[int]] = [[] for _ in range(n)]  # groups that landed before their header
        self._missing = [n] * self._groups
        self._complete = 0
        super().__init__(effect, file, arena)

    def fail(self, item: int, code: int) -> None:
        super().fail(item, code)
        self.report(self._gates)  # at once: nobody should wait for what cannot come

    def stage(self, operation: Operation, place: int) -> None:
        operation.start = place * landing_bytes(self.format) + (HEADER_BYTES if operation.part else 0)

    def _item_bytes(self) -> int:
        return HEADER_BYTES + self.format.frame_bytes

    def _plan(self) -> Iterator[Operation]:
        layer_bytes, frame_bytes = self.format.layer_bytes, self.format.frame_bytes
        for group in range(self._groups):
            at = group * self._group_layers * layer_bytes
            n_bytes = min(self._group_layers * layer_bytes, frame_bytes - at)
            if group == 0:
                n_bytes += HEADER_BYTES  # the header lies before the first layer
            else:
                at += HEADER_BYTES
            for item in range(len(self.slots)):
                if self.codes[item]:
                    continue
                offset = self.file.offset(self.slots[item]) + at
                operation = Operation(self, Verb.READ, self._landing, 0, n_bytes, offset, item, group)
                operation.staged = True
                yield operation

    def _landed(self, operation: Operation) -> None:
        item, group = operation.item, operation.part
        if self.codes[item]:
            return
        landed = self._landing.pointer + operation.start
        if group == 0:
            header = self._headers + item * HEADER_BYTES
            ffi.memmove(header, landed, HEADER_BYTES)
            code = lib.ax_header_check(self.format.c, header, self._tag(item))
            if code:
                self.fail(item, _refusal(code, ffi.buffer(header, 8)))
                return
            self._have_header[item] = 1
            landed += HEADER_BYTES
        first, count = self._layers(group)
        to = self.arena.pointer + self.frames[item] * self.format.frame_bytes + first * self.format.layer_bytes
        lib.ax_copy_layers(self.format.c, to, landed, count, self._checksums + item * self.format.layers + first)
        if not self._have_header[item]:
            self._early[item].append(group)
            return
        for arrived in (group, *self._early[item]):
            self._compare(item, arrived)
        self._early[item] = []
        self._advance()

    def _layers(self, group: int) -> tuple[int, int]:
        """The first layer of a group, and how many it has."""
        first = group * self._group_layers
        return first, min(self._group_layers, self.format.layers - first)

    def _compare(self, item: int, group: int) -> None:
        first, count = self._layers(group)
        checksums = self._checksums + item * self.format.layers + first
        code = lib.ax_compare_layers(self._headers + item * HEADER_BYTES, checksums, first, count)
        if code:
            self.fail(item, errno_of(code))
        else:
            self._missing[group] -= 1

    def _advance(self) -> None:
        """Tell the gate of the groups that are complete, in order and without gaps."""
        before = self._complete
        while self._complete < self._groups and self._missing[self._complete] == 0:
            self._complete += 1
        if self._complete > before and self._gates is not None and self.effect.gate >= 0:
            layers = min(self.format.layers, self._complete * self._group_layers)
            self._gates.store(self.effect.gate, self.effect.ticket, layers)


class Scrub(Job):
    """Slots without a valid header are empty: zeros over each header.  The payload is replaced before it can be read."""

    verb = Verb.WRITE

    def __init__(self, slots: Sequence[int], file: SlotFile, zeros: Region) -> None:
        pairs = b"".join(slot.to_bytes(4, "little") + bytes(4) for slot in slots)
        super().__init__(Transfer(0, -1, "drop", 0, pairs, b"", -1, 0), file, zeros)

    def _plan(self) -> Iterator[Operation]:
        for item, slot in enumerate(self.slots):
            yield Operation(self, Verb.WRITE, self.arena, 0, HEADER_BYTES, self.file.offset(slot), item)


def group_layers(format: StoredFormat) -> int:
    """Layers that are read directly in one operation: aligned, and large enough to be worth one; 0 when there is no way."""
    if format.frame_bytes % HEADER_BYTES:
        return 0
    for layers in range(1, format.layers):
        n_bytes = layers * format.layer_bytes
        if n_bytes >= GROUP_BYTES and n_bytes % HEADER_BYTES == 0:
            return layers
    return format.layers


def landing_bytes(format: StoredFormat) -> int:
    """Memory that one operation of a direct read needs: a header and a group of layers."""
    return HEADER_BYTES + group_layers(format) * format.layer_bytes


def _refusal(code: int, begins_with: Any) -> int:
    """The errno of what was read: a slot of zeros is one that was dropped or never written, so it is not there."""
    return int(E.ENOENT) if code == Reason.MAGIC and begins_with[:] == _NOTHING else errno_of(code)
