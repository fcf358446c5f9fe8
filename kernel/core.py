"""The core in C, behind exactly the interface of its specification, `twin.TwinCore`.

This is a thin wrapper: it turns bytes into pointers and results into the twin's tuples, and errors into the same
exceptions.  What each call means is said in the twin; csrc/core.h has the C side.

Cost of one call is a few hundred nanoseconds, whatever it does, so calls are batches.  The interpreter lock is released
around each (cffi always does), which is why the kernel's process has one Python thread (DESIGN.md §10.21).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any, Final

from ._core import ffi, lib
from .batch import SEQ_BYTES
from .coreapi import check_shape
from .errors import Panic
from .geometry import RowLayout
from .records import OK, PREFILL, Account, Admit, Advance, Commit, Counters, Plan, Prefix, SlotRow

_ROOT_BYTES: Final = 16
_COUNTERS: Final = len(Counters._fields)
_ROW_FIELDS: Final = len(SlotRow._fields)
_NUMBERS: Final = 14  # int32 fields of CoreOut from `status` to `nlist`

_new = tuple.__new__
_unpack = ffi.unpack
_buffer = ffi.buffer
_admit = lib.core_admit
_advance = lib.core_advance
_append = lib.core_append
_commit = lib.core_commit
_evict = lib.core_evict
_fork = lib.core_fork
_oldest = lib.core_oldest
_open_slot = lib.core_open_slot
_plan = lib.core_plan
_slot_row = lib.core_slot_row


class Core:
    """See TwinCore.  ValueError: an argument that names nothing; Panic: a requirement does not hold; MemoryError."""

    def __init__(
        self, secret: bytes, block_tokens: int, layout: RowLayout, capacities: list[int], rows: list[memoryview],
        hash_bits: int = 128,
    ) -> None:  # fmt: skip
        check_shape(secret, block_tokens, layout, capacities, rows, hash_bits)
        if sum(capacities) >= 1 << 29 or layout.entries * block_tokens >= 1 << 28 or layout.slots >= 1 << 24:
            raise ValueError("core: at most 2^29 frames, 2^28 tokens in a row and 2^24 slots")
        self.block_tokens = block_tokens
        self.layout = layout
        core = lib.core_new(
            secret, block_tokens, layout.slots, layout.entries, len(capacities), len(rows), capacities, hash_bits
        )
        if core == ffi.NULL:
            raise MemoryError(f"core: no memory for {sum(capacities)} frames")
        self._c: Any = ffi.gc(core, lib.core_free)
        self._rows = [ffi.from_buffer("uint8_t[]", memoryview(r).cast("B"), require_writable=True) for r in rows]
        for device, base in enumerate(self._rows):
            if int(ffi.cast("uintptr_t", base)) % 8:
                raise ValueError("core: row buffers must be aligned to 8 bytes")
            at = [base + o for o in (layout.frame_offset, layout.shift_offset, layout.count_offset)]
            lib.core_attach_rows(self._c, device, *at, base + layout.generation_offset)
        self._out: Any = lib.core_out(self._c)
        self.compute_devices = len(rows)
        self._devices = len(capacities)
        self._numbers: Any = ffi.addressof(self._out, "status")
        self._position: Any = ffi.addressof(self._out, "computed")
        self._row: Any = ffi.new("int64_t[]", max(_ROW_FIELDS, _COUNTERS))

    @property
    def now_ns(self) -> int:
        now: int = self._out.now_ns
        return now

    @now_ns.setter
    def now_ns(self, now_ns: int) -> None:
        self._out.now_ns = now_ns

    def _error(self, code: int) -> Exception:
        message = ffi.string(lib.core_message(self._c)).decode()
        if code == lib.CORE_NOMEM:
            return MemoryError(message)
        return ValueError(message) if code == lib.CORE_INVALID else Panic(message)

    def _checked(self, result: int) -> int:
        if result <= lib.CORE_NOMEM:
            raise self._error(result)
        return result

    def _list(self, count: int) -> list[int]:
        result: list[int] = _unpack(self._out.list, self._checked(count))
        return result

    # -- keys, slots and logs -------------------------------------------------------------------------------------

    def hash(self, data: bytes) -> bytes:
        digest = ffi.new("uint8_t[16]")
        lib.core_hash(self._c, data, len(data), digest)
        return bytes(digest)

    def open_slot(self, device: int, domain: int, root: bytes) -> int:
        if len(root) != _ROOT_BYTES:
            raise ValueError(f"core: a root key has 16 bytes, not {len(root)}")
        slot: int = _open_slot(self._c, device, domain, root)
        return slot if slot >= 0 else self._checked(slot)

    def close_slot(self, s: int) -> None:
        self._checked(lib.core_close_slot(self._c, s))

    def append(self, s: int, tokens: bytes) -> int:
        length: int = _append(self._c, s, tokens, _count_tokens(tokens))
        return length if length >= 0 else self._checked(length)

    def token_range(self, tokens: bytes) -> tuple[int, int]:
        pair = ffi.new("int32_t[2]")
        lib.core_token_range(tokens, _count_tokens(tokens), pair)
        return pair[0], pair[1]

    def read_log(self, s: int, start: int, end: int) -> bytes:
        length = ffi.new("int32_t *")
        log = lib.core_log(self._c, s, length)
        if length[0] < 0:
            raise ValueError(f"core: slot {s} is not open")
        start, end, _ = slice(start, end).indices(length[0])
        return bytes(_buffer(log + start, 4 * (end - start))) if end > start else b""

    def truncate(self, s: int, length: int) -> None:
        self._checked(lib.core_truncate(self._c, s, length))

    def drop(self, s: int) -> None:
        self._checked(lib.core_drop(self._c, s))

    def fork(self, s: int, n: int) -> list[int]:
        return self._list(_fork(self._c, s, n))

    # -- frames ---------------------------------------------------------------------------------------------------

    def admit(
        self, s: int, reserve_frames: int, sources: int = 0, first_load: int = 0, partial_tokens: int = 0
    ) -> Admit:
        code = _admit(self._c, s, reserve_frames, sources, first_load, partial_tokens)
        if code < 0:
            raise self._error(code)
        return _new(Admit, _unpack(self._numbers, 6))

    def loads(self) -> list[int]:
        return self._list(lib.core_loads(self._c))

    def hit_blocks(self) -> list[int]:
        return self._list(lib.core_hit_blocks(self._c))

    def oldest(self, device: int, want: int) -> list[int]:
        count = self._checked(_oldest(self._c, device, want))
        numbers = array(
            "i"
        )  # faster than ffi.unpack, and so is struct below than a list given to cffi: a third of the cost
        numbers.frombytes(_buffer(self._out.list, 4 * count))
        return numbers.tolist()

    def evict(self, device: int, blocks: list[int]) -> int:
        return self._checked(_evict(self._c, device, *_ints(blocks)))

    # -- generations ----------------------------------------------------------------------------------------------

    def set_generation(
        self, s: int, template: bytes, stops: bytes, max_tokens: int, limit: int, conn: int, request: int
    ) -> None:
        if len(template) != SEQ_BYTES:
            raise ValueError(f"core: a template is one SEQ of {SEQ_BYTES} bytes")
        count = _count_tokens(stops)
        self._checked(lib.core_set_generation(self._c, s, template, stops, count, max_tokens, limit, conn, request))

    def start_running(self, s: int) -> None:
        self._checked(lib.core_start_running(self._c, s))

    def stop_running(self, s: int) -> None:
        self._checked(lib.core_stop_running(self._c, s))

    def discard(self, s: int) -> None:
        self._checked(lib.core_discard(self._c, s))

    def advance(self, s: int) -> Advance:
        code = _advance(self._c, s)
        if code < 0:
            raise self._error(code)
        return _new(Advance, _unpack(self._position, 3))

    def steal(self, s: int) -> None:
        self._checked(lib.core_steal(self._c, s))

    # -- passes ---------------------------------------------------------------------------------------------------

    def plan(self, device: int, max_sequences: int, prefill: bytes) -> Plan:
        count, rest = divmod(len(prefill), PREFILL.size)
        if rest:
            raise ValueError(f"core: PREFILL records have {PREFILL.size} bytes")
        code = _plan(self._c, device, max_sequences, prefill, count)
        if code < 0:
            raise self._error(code)
        status, shortage, _, _, _, group, sequences, histories, samples, ntokens, ncopies, _, _, _ = _unpack(
            self._numbers, _NUMBERS
        )
        if status != OK:
            return Plan(status, shortage, 0, b"", b"", b"", 0, 0, group)
        out = self._out
        return Plan(
            OK, 0, sequences, _buffer(out.seqs, SEQ_BYTES * sequences)[:] if sequences else b"",
            _buffer(out.tokens, 4 * ntokens)[:] if ntokens else b"",
            _buffer(out.copies, 4 * ncopies)[:] if ncopies else b"", histories, samples,
        )  # fmt: skip

    def commit(self, device: int, sampled: bytes, logprobs: bytes) -> Commit:
        count = _count_tokens(sampled)
        if len(logprobs) != len(sampled):
            raise Panic(f"commit: device {device} sampled {count} tokens for another number of sequences")
        code = _commit(self._c, device, sampled, logprobs, count)
        if code < 0:
            raise self._error(code)
        out = self._out
        kept = out.nkept
        ended = out.nfinished
        pairs = _unpack(out.finished, 2 * ended) if ended else ()
        finished = tuple(zip(pairs[::2], pairs[1::2], strict=True))
        if not kept:
            return Commit(b"", b"", b"", b"", finished)
        return Commit(
            _buffer(out.streams, 16 * kept)[:], _buffer(out.tokens, 4 * kept)[:], _buffer(out.logprobs, 4 * kept)[:],
            _buffer(out.kept, 4 * kept)[:], finished,
        )  # fmt: skip

    def rollback(self, device: int) -> list[int]:
        return self._list(lib.core_rollback(self._c, device))

    def lose(self, device: int) -> None:
        self._checked(lib.core_lose(self._c, device))

    # -- looking --------------------------------------------------------------------------------------------------

    def free_frames(self, device: int) -> int:
        return self._checked(lib.core_free_frames(self._c, device))

    def reclaimable_frames(self, device: int) -> int:
        return self._checked(lib.core_reclaimable_frames(self._c, device))

    def mapped_or_cached_frames(self, device: int) -> int:
        return self._checked(lib.core_capacity(self._c, device)) - self.free_frames(device)

    def wired_frames(self, device: int) -> int:
        return self._checked(lib.core_wired_frames(self._c, device))

    def run_length(self, device: int) -> int:
        return self._checked(lib.core_run_length(self._c, device))

    def run_slots(self, device: int) -> list[int]:
        return self._list(lib.core_run_slots(self._c, device))

    def flight_length(self, device: int) -> int:
        return self._checked(lib.core_flight_length(self._c, device))

    def is_running(self, s: int) -> bool:
        return bool(lib.core_is_running(self._c, s))

    def in_flight(self, s: int) -> bool:
        return bool(lib.core_in_flight(self._c, s))

    def slot_row(self, s: int) -> SlotRow:
        code = _slot_row(self._c, s, self._row)
        if code < 0:
            raise self._error(code)
        return _new(SlotRow, _unpack(self._row, _ROW_FIELDS))

    def pagemap(self, s: int) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes]:
        n = self._checked(lib.core_entries(self._c, s))
        frames, counts, sharers, flags, hits = (bytearray(size * n) for size in (4, 2, 4, 1, 4))
        types = ("int32_t[]", "int16_t[]", "int32_t[]", "uint8_t[]", "int32_t[]")
        arrays = (frames, counts, sharers, flags, hits)
        lib.core_pagemap(self._c, s, *[ffi.from_buffer(t, a) for t, a in zip(types, arrays, strict=True)])
        return bytes(frames), bytes(4 * n), bytes(counts), bytes(sharers), bytes(flags), bytes(hits)

    def counters(self) -> Counters:
        lib.core_counters(self._c, self._row)
        return _new(Counters, _unpack(self._row, _COUNTERS))

    def frame_table(self, device: int) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes]:
        n = self._checked(lib.core_capacity(self._c, device))
        types = ("uint8_t[]", "int32_t[]", "int32_t[]", "int32_t[]", "uint64_t[]", "int32_t[]")
        arrays = [ffi.new(t, n) for t in types]
        lib.core_frame_table(self._c, device, *arrays)
        state, refs, wired, block, stamp, filler = (bytes(_buffer(a)) for a in arrays)
        return state, refs, wired, block, stamp, filler

    def block_table(self) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]:
        n = lib.core_blocks(self._c)
        types = ("int32_t[]",) * 4 + ("uint8_t[]",) * 2 + ("int32_t[]",) * 3
        sizes = (n, n, n, n, n, 16 * n, n * self._devices, n * self._devices, 2 * n)
        arrays = [ffi.new(t, size) for t, size in zip(types, sizes, strict=True)]
        lib.core_block_table(self._c, *arrays)
        parent, domain, depth, hits, indexed, keys, copies, children, family = (bytes(_buffer(a)) for a in arrays)
        return parent, domain, depth, hits, indexed, keys, copies, children, family

    def block_tokens_of(self, b: int) -> bytes:
        tokens = ffi.new("int32_t[]", self.block_tokens)
        count = self._checked(lib.core_block_tokens_of(self._c, b, tokens))
        return bytes(_buffer(tokens, 4 * count)) if count else b""

    def key_of(self, s: int, i: int) -> bytes:
        key = ffi.new("uint8_t[16]")
        self._checked(lib.core_key_of(self._c, s, i, key))
        return bytes(key)

    def find_key(self, key: bytes) -> int:
        return int(lib.core_find_key(self._c, key)) if len(key) == _ROOT_BYTES else -1

    def pending_copy(self, s: int) -> int:
        return self._checked(lib.core_pending_copy(self._c, s))

    def slots_used(self) -> list[int]:
        return self._list(lib.core_slots_used(self._c))

    def slot_device(self, s: int) -> int:
        return self._checked(lib.core_slot_device(self._c, s))

    # -- tiers ----------------------------------------------------------------------------------------------------

    def set_capacity(self, device: int, frames: int) -> None:
        self._checked(lib.core_set_capacity(self._c, device, frames))
        self._devices = max(self._devices, device + 1)

    def begin_copy(self, source: int, target: int, blocks: Sequence[int]) -> list[int]:
        return self._list(lib.core_begin_copy(self._c, source, target, *_ints(blocks)))

    def save_tail(self, s: int, target: int) -> list[int]:
        return self._list(lib.core_save_tail(self._c, s, target))

    def skip_loading(self, s: int) -> None:
        self._checked(lib.core_skip_loading(self._c, s))

    def wire(self, device: int, frames: Sequence[int]) -> None:
        self._checked(lib.core_wire(self._c, device, *_ints(frames)))

    def unwire(self, device: int, frames: Sequence[int]) -> None:
        self._checked(lib.core_unwire(self._c, device, *_ints(frames)))

    def landed(self, device: int, frames: Sequence[int], good: bytes) -> None:
        if len(good) != len(frames):
            raise ValueError(f"core: {len(good)} verdicts for {len(frames)} frames")
        self._checked(lib.core_landed(self._c, device, *_ints(frames), good))

    def forget_copies(self, device: int, blocks: Sequence[int]) -> int:
        return self._checked(lib.core_forget_copies(self._c, device, *_ints(blocks)))

    def forget_tail(self, s: int) -> None:
        self._checked(lib.core_forget_tail(self._c, s))

    def touch(self, device: int, blocks: Sequence[int]) -> None:
        self._checked(lib.core_touch(self._c, device, *_ints(blocks)))

    def claim(self, device: int, frames: Sequence[int]) -> None:
        self._checked(lib.core_claim(self._c, device, *_ints(frames)))

    def unclaim(self, device: int, f: int) -> None:
        self._checked(lib.core_unclaim(self._c, device, f))

    def adopt(self, device: int, f: int, domain: int, root: bytes, parent: int, tokens: bytes, group: int = 0) -> int:
        if len(root) != _ROOT_BYTES:
            raise ValueError(f"core: a root key has 16 bytes, not {len(root)}")
        return self._checked(
            lib.core_adopt(self._c, device, f, domain, root, parent, tokens, _count_tokens(tokens), group)
        )  # fmt: skip

    def residency(self, s: int) -> bytes:
        return self._bytes(lib.core_residency(self._c, s))

    def loading(self, s: int) -> int:
        return self._checked(lib.core_loading(self._c, s))

    def row_blocks(self, s: int) -> list[int]:
        return self._list(lib.core_row_blocks(self._c, s))

    def row_entries(self, s: int) -> list[int]:
        return self._list(lib.core_row_entries(self._c, s))

    def log_blocks(self, s: int) -> list[int]:
        return self._list(lib.core_log_blocks(self._c, s))

    def prefix(self, s: int) -> Prefix:
        return Prefix(*self._list(lib.core_prefix(self._c, s)))

    def tail_of(self, s: int) -> tuple[int, int]:
        block, end = self._list(lib.core_tail_of(self._c, s))
        return block, end

    def copied(self, blocks: Sequence[int], devices: int) -> bytes:
        return self._bytes(lib.core_copied(self._c, *_ints(blocks), devices))

    def copies_of(self, b: int) -> list[int]:
        return self._list(lib.core_copies_of(self._c, b))

    def refs_of(self, device: int, f: int) -> int:
        return self._checked(lib.core_refs_of(self._c, device, f))

    def describe(self, blocks: Sequence[int]) -> bytes:
        return self._bytes(lib.core_describe(self._c, *_ints(blocks)))

    def facts(self, blocks: Sequence[int]) -> bytes:
        return self._bytes(lib.core_facts(self._c, *_ints(blocks)))

    def note(self, s: int, kind: int, turn: int, due_ns: int) -> None:
        self._checked(lib.core_note(self._c, s, kind, turn, due_ns))

    def prioritise(self, s: int, start: int, end: int, priority: int) -> int:
        return self._checked(lib.core_prioritise(self._c, s, start, end, priority))

    def sample(self, device: int, want: int, seed: int) -> list[int]:
        return self._list(lib.core_sample(self._c, device, want, seed & 0xFFFFFFFFFFFFFFFF))

    def evictable(self, device: int, blocks: Sequence[int], want: int) -> list[int]:
        return self._list(lib.core_evictable(self._c, device, *_ints(blocks), want))

    def chain(self, device: int, leaf: int, want: int) -> list[int]:
        return self._list(lib.core_chain(self._c, device, leaf, want))

    def key_heads(self, blocks: Sequence[int]) -> list[int]:
        raw = self._bytes(lib.core_key_heads(self._c, *_ints(blocks)))
        return list(struct.unpack(f"<{len(raw) // 8}Q", raw))

    def ghosts(self) -> int:
        return int(lib.core_ghosts(self._c))

    # -- groups ---------------------------------------------------------------------------------------------------

    def define_group(self, group: int, above: int) -> None:
        self._checked(lib.core_define_group(self._c, group, above))

    def set_group(self, s: int, group: int) -> None:
        self._checked(lib.core_set_group(self._c, s, group))

    def set_bounds(self, device: int, group: int, soft: int, hard: int) -> None:
        self._checked(lib.core_set_bounds(self._c, device, group, soft, hard))

    def account(self, device: int, group: int) -> Account:
        return Account(*self._list(lib.core_account(self._c, device, group)))

    def served(self, group: int) -> int:
        return int(lib.core_served(self._c, group))

    def frame_owners(self, device: int) -> bytes:
        return self._bytes(lib.core_frame_owners(self._c, device))

    def spare_frames(self, device: int, group: int) -> int:
        return self._checked(lib.core_spare_frames(self._c, device, group))

    def restrict(self, requester: int, only: int) -> None:
        self._checked(lib.core_restrict(self._c, requester, only))

    def unrestrict(self) -> None:
        lib.core_unrestrict(self._c)

    def owners(self, device: int, blocks: Sequence[int]) -> list[int]:
        return self._list(lib.core_owners(self._c, device, *_ints(blocks)))

    def group_tree(self) -> list[int]:
        return self._list(lib.core_group_tree(self._c))

    def disown(self, device: int, group: int) -> int:
        return self._checked(lib.core_disown(self._c, device, group))

    def _bytes(self, count: int) -> bytes:
        n = self._checked(count)
        return bytes(_buffer(self._out.bytes, n)) if n else b""


def _ints(numbers: Sequence[int]) -> tuple[Any, int]:
    """As C takes a list of blocks or frames.  ValueError: one of them is no int32."""
    try:
        packed = struct.pack(f"{len(numbers)}i", *numbers)  # a third of the cost of a list given to cffi
    except struct.error as error:
        raise ValueError(f"core: a block or frame that does not exist: {error}") from None
    return ffi.from_buffer("int32_t[]", packed), len(numbers)


def _count_tokens(tokens: bytes) -> int:
    """int32 items of `tokens`.  ValueError: not a whole number of them."""
    if len(tokens) % 4:
        raise ValueError(f"core: {len(tokens)} bytes are not int32 tokens")
    return len(tokens) // 4
