"""The core in plain Python: the executable specification of `csrc/core.c`.

Everything that runs per block per step lives in the core: block keys, the key index, frames with reference counts,
the recency ring, page-table rows, and the bookkeeping of one forward pass.  The C core must agree with this twin on
every return value and every array, for any sequence of calls (tests/diff); the kernel runs on either.

How it fits together
    A *slot* is a context seen from here: a token log, the keys of its full blocks, and a page-table row.
    A *block* is KV of B tokens; a *copy* of it lies in a frame of a device.  `frames[d].block` and `block.copies[d]`
    point at each other.  Reference counts are kept per frame, since a row names a frame.
    A full block whose tokens are known is *indexed* at once, before it is computed: its frame is FILLING and has a
    *filler*, the slot that will compute it.  A second prompt with the same tokens maps the same frames and waits.
    Such a block is mapped whole or not at all, and only its filler may have computed a part of it: a filler that leaves
    (truncate, drop, close, steal) takes its part along, so whoever fills it next begins at its first token.
    A frame with no references that is VALID and indexed is *reclaimable*: it stays as cache, in the recency ring, until
    its frame is needed.  The ring deletes lazily: an entry counts only while its stamp is the frame's stamp.
    A pass is planned (`plan`), runs outside, and is then committed (`commit`) or rolled back (`rollback`).  Nothing
    is marked computed before the commit; copy-on-write copies stay pending until it, so a rollback loses nothing.
    The source of a pending copy is wired: nobody writes it, not even a slot that is alone on it.

Block keys are chained (DESIGN.md §3): key[i] = SipHash-2-4-128(secret; key[i-1] || tokens of block i).
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from typing import Final, NamedTuple

from .batch import HISTORY, SAMPLE, SEQ, SEQ_BYTES
from .errors import Panic
from .geometry import RowLayout
from .params import MAX_DEVICES
from .siphash import siphash128

FREE: Final = 0
FILLING: Final = 1
VALID: Final = 2

# status of admit and plan
OK: Final = 0
EVICT: Final = 1  # evict `shortage` frames, then call again: it will succeed
NOROOM: Final = 2  # even with every reclaimable frame evicted, `shortage` frames are missing

# why a generation finished, as commit reports it
RUNNING: Final = 0
STOP: Final = 1
LENGTH: Final = 2

PREFILL: Final = struct.Struct("<iiiiii")  # slot, start, ntokens, flags, score_from, prompt_left

_FULL, _INDEXED, _VALID, _WIRED = 1, 2, 4, 8  # flags of pagemap


class Admit(NamedTuple):
    status: int  # OK | EVICT | NOROOM
    shortage_frames: int
    mapped_frames: int  # found in the index by this call
    new_frames: int


class Plan(NamedTuple):
    """One forward pass, ready to send; or a shortage and nothing done."""

    status: int
    shortage_frames: int
    sequences: int
    seqs: bytes
    tokens: bytes
    copies: bytes
    histories: int  # sequences with the HISTORY flag
    samples: int  # sequences with the SAMPLE flag: what `commit` expects


class Advance(NamedTuple):
    computed: int  # tokens of the slot whose KV is valid, after skipping blocks that others computed
    ready: int  # tokens that may be computed next, from there
    blocked_by: int  # slot that is filling the block at `computed`, or -1


class Commit(NamedTuple):
    streams: bytes  # int64 pairs (conn, request) of the tokens kept
    tokens: bytes  # int32
    logprobs: bytes  # float32
    kept: bytes  # int32: index of each among the sampled tokens of the pass
    finished: tuple[tuple[int, int], ...]  # (slot, STOP | LENGTH)


class SlotRow(NamedTuple):
    tokens: int
    computed: int
    entries: int
    shared: int  # entries whose frame another entry names too
    share_millionths: int  # sum over entries of 1,000,000 // sharers
    computed_total: int
    hit_total: int
    recomputed_total: int
    generated_total: int


class Counters(NamedTuple):
    lookup_hits: int  # full blocks that an admission found in the index
    lookup_misses: int  # full blocks that a successful admission did not find and gave a frame
    evictions: int
    collisions: int  # equal keys, unequal content: the key function is broken
    cow_copies: int
    merged: int  # full blocks found to exist already when they were sealed
    indexed: int
    freed: int


class _Frame:
    __slots__ = ("block", "children", "filler", "refs", "stamp", "state", "wired")

    def __init__(self) -> None:
        self.state = FREE
        self.refs = 0
        self.wired = 0
        self.filler = -1
        self.block = -1
        self.stamp = 0
        self.children = 0  # indexed blocks whose parent is this one, with a copy on the same device


class _Block:
    __slots__ = ("copies", "depth", "domain", "hits", "indexed", "key", "ncopies", "parent", "tokens")

    def __init__(self, devices: int) -> None:
        self.copies = [-1] * devices
        self.reset()

    def reset(self) -> None:
        self.key = b""
        self.tokens = b""
        self.parent = -1
        self.domain = 0
        self.depth = 0
        self.hits = 0
        self.indexed = False
        self.ncopies = 0


class _Slot:
    __slots__ = (
        "computed", "computed_total", "conn", "counts", "device", "discard", "domain", "frames", "generated",
        "generated_total", "highwater", "hit_total", "in_flight", "keys", "limit", "log", "max_tokens", "pending_entry",
        "pending_src", "recomputed_total", "request", "root", "running", "stops", "template", "used",
    )  # fmt: skip

    def __init__(self) -> None:
        self.used = False
        self.reset(0, 0, b"")

    def reset(self, device: int, domain: int, root: bytes) -> None:
        self.device = device
        self.domain = domain
        self.root = root
        self.log = array("i")
        self.keys: list[bytes] = []
        self.frames: list[int] = []
        self.counts: list[int] = []
        self.computed = 0
        self.highwater = 0  # most tokens that were ever computed: below it, computing is recomputing
        self.pending_src = -1  # frame to copy into that of entry `pending_entry` before it may be written
        self.pending_entry = -1
        self.in_flight = False
        self.discard = False
        self.running = False
        self.template = bytes(SEQ_BYTES)
        self.stops: tuple[int, ...] = ()
        self.max_tokens = 0
        self.generated = 0
        self.limit = 0
        self.conn = 0
        self.request = 0
        self.computed_total = self.hit_total = self.recomputed_total = self.generated_total = 0


class _Pool:
    """Frames of one device."""

    __slots__ = ("flight", "frames", "free", "reclaimable", "ring", "rows", "run")

    def __init__(self, capacity: int, rows: memoryview) -> None:
        self.frames = [_Frame() for _ in range(capacity)]
        self.free = list(range(capacity - 1, -1, -1))
        self.ring: deque[tuple[int, int]] = deque()
        self.reclaimable = 0
        self.run: list[int] = []  # slots that decode, in the order in which they began
        self.flight: list[tuple[int, int, int, int]] = []  # slot, start, ntokens, flags
        self.rows = rows


class TwinCore:
    """Requires: calls from one thread; slots and devices that exist; `plan` only when no pass of that device is in flight.

    secret       16 bytes, key of the keyed hash
    capacities   frames per device
    rows         per device, a writable buffer of RowLayout(slots, entries).total_bytes
    hash_bits    128; a test may truncate the key to see verification catch it (0 = constant)
    """

    def __init__(
        self, secret: bytes, block_tokens: int, layout: RowLayout, capacities: list[int], rows: list[memoryview],
        hash_bits: int = 128,
    ) -> None:  # fmt: skip
        if len(secret) != 16 or not 1 <= len(capacities) <= MAX_DEVICES or len(rows) != len(capacities):
            raise ValueError("core: 16-byte secret and 1..8 devices with one row buffer each")
        if not 1 <= block_tokens <= 32767 or not 0 <= hash_bits <= 128 or min(capacities) < 1 or min(layout) < 1:
            raise ValueError("core: block_tokens 1..32767, hash_bits 0..128, at least one frame, slot and entry")
        if any(memoryview(r).nbytes < layout.total_bytes for r in rows):
            raise ValueError(f"core: a row buffer is smaller than {layout.total_bytes} bytes")
        self.block_tokens = block_tokens
        self.layout = layout
        self._secret = secret
        self._mask = ((1 << hash_bits) - 1).to_bytes(16, "little")
        self._pools = [_Pool(c, memoryview(r).cast("B")) for c, r in zip(capacities, rows, strict=True)]
        self._blocks = [_Block(len(capacities)) for _ in range(sum(capacities))]
        self._free_blocks = list(range(len(self._blocks) - 1, -1, -1))
        self._slots = [_Slot() for _ in range(layout.slots)]
        self._free_slots = list(range(layout.slots - 1, -1, -1))
        self._index: dict[bytes, int] = {}
        self._clock = 0
        self._hits = self._misses = self._evictions = self._collisions = 0
        self._cow = self._merged = self._indexed = self._freed = 0
        frames_bytes = 4 * layout.slots * layout.entries
        for pool in self._pools:
            pool.rows[layout.frame_offset : layout.frame_offset + frames_bytes] = b"\xff" * frames_bytes

    # -- keys ---------------------------------------------------------------------------------------------------

    def hash(self, data: bytes) -> bytes:
        """SipHash-2-4-128 of `data` under the secret, truncated to hash_bits."""
        digest = siphash128(self._secret, data)
        return bytes(a & b for a, b in zip(digest, self._mask, strict=True))

    def _extend_keys(self, slot: _Slot) -> None:
        size = self.block_tokens
        while (len(slot.keys) + 1) * size <= len(slot.log):
            i = len(slot.keys)
            previous = slot.keys[-1] if slot.keys else slot.root
            slot.keys.append(self.hash(previous + slot.log[i * size : (i + 1) * size].tobytes()))

    # -- slots and logs -----------------------------------------------------------------------------------------

    def open_slot(self, device: int, domain: int, root: bytes) -> int:
        """A fresh slot on `device`, or -1 when all are taken.  root: 16 bytes, key[-1] of the domain."""
        self._pool(device)
        if len(root) != 16:
            raise ValueError(f"core: a root key has 16 bytes, not {len(root)}")
        if not self._free_slots:
            return -1
        s = self._free_slots.pop()
        slot = self._slots[s]
        slot.reset(device, domain, root)
        slot.used = True
        return s

    def close_slot(self, s: int) -> None:
        """Unmap everything, forget the log, change the row's generation.  Requires: not in flight."""
        slot = self._slot(s)
        self._need_idle(slot)
        self.stop_running(s)
        self._unmap(s, 0)
        slot.used = False
        slot.log = array("i")
        slot.keys = []
        slot.stops = ()
        offset = self.layout.generation_offset + 4 * s
        rows = self._pools[slot.device].rows
        (generation,) = struct.unpack_from("<I", rows, offset)
        struct.pack_into("<I", rows, offset, (generation + 1) & 0xFFFFFFFF)
        self._free_slots.append(s)

    def append(self, s: int, tokens: bytes) -> int:
        """Add int32 tokens to the log; returns its new length.  No frame moves."""
        slot = self._slot(s)
        slot.log.frombytes(tokens)
        self._extend_keys(slot)
        return len(slot.log)

    def token_range(self, tokens: bytes) -> tuple[int, int]:
        """Least and greatest of the int32 ids; (0, 0) when there are none."""
        ids = array("i", tokens)
        return (min(ids), max(ids)) if ids else (0, 0)

    def read_log(self, s: int, start: int, end: int) -> bytes:
        return self._slot(s).log[start:end].tobytes()

    def truncate(self, s: int, length: int) -> None:
        """Keep the first `length` tokens of the log and what is mapped for them.  Requires: not in flight.

        Admit again before computing: a block that is cut while it is being filled is not kept, since others may wait
        for the whole of it.
        """
        slot = self._slot(s)
        if length < 0:
            raise ValueError(f"core: a log cannot be cut to {length} tokens")
        self._need_idle(slot)
        if length >= len(slot.log):
            return
        size = self.block_tokens
        del slot.log[length:]
        del slot.keys[length // size :]
        slot.computed = min(slot.computed, length)
        slot.highwater = min(slot.highwater, length)
        self._unmap(s, length)
        last = length // size
        if length % size and len(slot.frames) > last:
            frame = self._pools[slot.device].frames[slot.frames[last]]
            if frame.state == FILLING and self._blocks[frame.block].indexed:
                slot.computed = min(slot.computed, last * size)
                self._unmap(s, last * size)
            elif slot.counts[last] > length % size:
                self._set_count(s, last, length % size)

    def drop(self, s: int) -> None:
        """Preempt: unmap every block and leave the decode set; the log stays, so everything can be computed again.

        Requires: not in flight.
        """
        slot = self._slot(s)
        self._need_idle(slot)
        self.stop_running(s)
        self._unmap(s, 0)
        slot.computed = 0

    def fork(self, s: int, n: int) -> list[int]:
        """n slots with the same log that share every frame; [] when there are not n free slots.

        The partial tail is shared too and copied by whoever writes it first.  Tokens that are not computed yet in a
        private tail are not mapped in the children: they compute them for themselves.
        """
        parent = self._slot(s)
        if n < 0:
            raise ValueError(f"core: fork makes {n} slots")
        if len(self._free_slots) < n:
            return []
        pool = self._pools[parent.device]
        size = self.block_tokens
        children = []
        for _ in range(n):
            c = self.open_slot(parent.device, parent.domain, parent.root)
            child = self._slots[c]
            child.log = parent.log[:]
            child.keys = parent.keys[:]
            child.computed = parent.computed
            child.highwater = parent.computed
            for i, f in enumerate(parent.frames):
                count = parent.counts[i]
                if not self._blocks[pool.frames[f].block].indexed:
                    count = min(count, parent.computed - i * size)
                    if count <= 0:
                        break
                    if i == parent.pending_entry:
                        f = parent.pending_src
                elif pool.frames[f].state != VALID:  # the child waits for its filler, or fills it from the start
                    child.computed = min(child.computed, i * size)
                pool.frames[f].refs += 1
                self._map(c, i, f, count)
            children.append(c)
        return children

    # -- mapping ------------------------------------------------------------------------------------------------

    def admit(self, s: int, reserve_frames: int) -> Admit:
        """Map frames for the whole log, all or nothing.  Requires: not in flight.

        Full blocks found in the index are shared (also while FILLING: the slot then waits for their filler).  The rest
        is allocated; full ones are indexed at once with this slot as filler.  `reserve_frames` must stay available
        (free or reclaimable) afterwards.  EVICT: the shared blocks are mapped already, so they cannot be the victims.
        """
        slot = self._slot(s)
        self._need_idle(slot)
        pool = self._pools[slot.device]
        size = self.block_tokens
        needed = -(-len(slot.log) // size)
        if needed > self.layout.entries:
            raise ValueError(f"core: {len(slot.log)} tokens do not fit a row of {self.layout.entries} entries")
        tail = self._tail(slot)  # index of the first entry that is missing or partly filled
        hits, held = self._lookup(slot, tail)
        keeps_tail = not hits and tail < len(slot.frames)
        fresh = needed - tail - len(hits) - (1 if keeps_tail else 0)
        if keeps_tail and self._tail_written(slot) and not self._writable(s, tail):
            fresh += 1
        available = len(pool.free) + pool.reclaimable - held
        if hits and tail < len(slot.frames) and slot.frames[tail] != hits[0]:
            old = pool.frames[slot.frames[tail]]
            available += 1 if old.refs == 1 and old.wired == 0 else 0  # the partial tail that a whole block replaces
        if fresh and fresh + reserve_frames > available:
            return Admit(NOROOM, fresh + reserve_frames - available, 0, 0)
        mapped = len(hits)
        if hits:
            for f in hits:  # before anything is unmapped: it may be the last reference
                self._take(pool, f)
                self._blocks[pool.frames[f].block].hits += 1
            if pool.frames[hits[0]].state != VALID:  # what this slot had computed of that block lies elsewhere
                slot.computed = min(slot.computed, tail * size)
            self._unmap(s, tail * size)
            for i, f in enumerate(hits, tail):
                self._map(s, i, f, size)
            self._hits += mapped
        if fresh > len(pool.free):
            return Admit(EVICT, fresh - len(pool.free), mapped, 0)
        self._misses += len(slot.keys) - tail - mapped
        self._fill(s, tail + mapped, keeps_tail)
        return Admit(OK, 0, mapped, fresh)

    def _tail_written(self, slot: _Slot) -> bool:
        """Will computing the rest of the log write the row's last entry, which is partial?"""
        i = len(slot.frames) - 1
        if len(slot.log) > i * self.block_tokens + slot.counts[i]:
            return True
        frame = self._pools[slot.device].frames[slot.frames[i]]
        return frame.state != VALID and len(slot.log) > slot.computed

    def _tail(self, slot: _Slot) -> int:
        tail = len(slot.frames)
        if tail and slot.counts[tail - 1] < self.block_tokens:
            tail -= 1
        return tail

    def _lookup(self, slot: _Slot, tail: int) -> tuple[list[int], int]:
        """Frames of the indexed blocks that continue the row at `tail`, and how many of them are reclaimable now."""
        pool = self._pools[slot.device]
        hits: list[int] = []
        held = 0
        parent = -1
        if tail:
            parent = pool.frames[slot.frames[tail - 1]].block
            if not self._blocks[parent].indexed:
                return hits, held
        for i in range(tail, len(slot.keys)):
            b = self._find(slot, i, parent)
            f = self._blocks[b].copies[slot.device] if b >= 0 else -1
            if f < 0:
                break
            if pool.frames[f].stamp:
                held += 1
            hits.append(f)
            parent = b
        return hits, held

    def _find(self, slot: _Slot, i: int, parent: int) -> int:
        """The block indexed under key i, verified: parent, domain and tokens must be equal too (I6)."""
        b = self._index.get(slot.keys[i], -1)
        if b < 0:
            return -1
        block = self._blocks[b]
        size = self.block_tokens
        same = block.parent == parent and block.domain == slot.domain
        if not same or block.tokens != slot.log[i * size : (i + 1) * size].tobytes():
            self._collisions += 1
            return -1
        return b

    def _fill(self, s: int, first: int, keeps_tail: bool) -> None:
        """Allocate entries from `first` on for the rest of the log.  Requires: enough free frames."""
        slot = self._slots[s]
        pool = self._pools[slot.device]
        size = self.block_tokens
        n = len(slot.log)
        for i in range(first, -(-n // size)):
            count = min(size, n - i * size)
            if keeps_tail and i == first:
                if self._tail_written(slot):
                    self._open_entry(s, i)
                self._set_count(s, i, count)
            else:
                f = self._alloc_frame(pool, s)
                self._map(s, i, f, count)
            if count == size:
                self._index_entry(s, i)

    def _index_entry(self, s: int, i: int) -> None:
        """Make entry i, a full and unindexed block of this slot alone, findable under its key (if its parent is)."""
        slot = self._slots[s]
        pool = self._pools[slot.device]
        f = slot.frames[i]
        frame = pool.frames[f]
        block = self._blocks[frame.block]
        if block.indexed:
            return
        parent = -1
        if i:
            parent = pool.frames[slot.frames[i - 1]].block
            if not self._blocks[parent].indexed:
                return
        size = self.block_tokens
        key = slot.keys[i]
        other = self._index.get(key, -1)
        if other >= 0:
            if self._find(slot, i, parent) < 0:
                return  # a colliding key: this block stays private
            known = self._blocks[other]
            if known.copies[slot.device] >= 0:
                self._merge(s, i, known.copies[slot.device])
                return
            self._free_block(frame.block)  # the block exists on another device: this frame becomes its copy here
            known.copies[slot.device] = f
            known.ncopies += 1
            frame.block = other
        else:
            block.key = key
            block.tokens = slot.log[i * size : (i + 1) * size].tobytes()
            block.parent = parent
            block.domain = slot.domain
            block.depth = i * size
            block.indexed = True
            self._index[key] = frame.block
            self._indexed += 1
        if parent >= 0:
            pool.frames[slot.frames[i - 1]].children += 1

    def _merge(self, s: int, i: int, f: int) -> None:
        """The block of entry i exists already in frame f.  Name that one instead, unless it is still being filled."""
        slot = self._slots[s]
        pool = self._pools[slot.device]
        if pool.frames[f].state != VALID or slot.computed < (i + 1) * self.block_tokens:
            return
        self._take(pool, f)
        own = slot.frames[i]
        self._map(s, i, f, self.block_tokens)
        self._put(pool, own, s)
        self._merged += 1

    def _map(self, s: int, i: int, f: int, count: int) -> None:
        slot = self._slots[s]
        at = s * self.layout.entries + i
        rows = self._pools[slot.device].rows
        struct.pack_into("<i", rows, self.layout.frame_offset + 4 * at, f)
        struct.pack_into("<i", rows, self.layout.shift_offset + 4 * at, 0)
        struct.pack_into("<h", rows, self.layout.count_offset + 2 * at, count)
        if i == len(slot.frames):
            slot.frames.append(f)
            slot.counts.append(count)
        else:
            slot.frames[i] = f
            slot.counts[i] = count

    def _set_count(self, s: int, i: int, count: int) -> None:
        slot = self._slots[s]
        slot.counts[i] = count
        at = s * self.layout.entries + i
        struct.pack_into("<h", self._pools[slot.device].rows, self.layout.count_offset + 2 * at, count)

    def _unmap(self, s: int, keep_tokens: int) -> None:
        """Drop the entries that hold nothing of `keep_tokens`, deepest first: a leaf is older in the ring than its parent."""
        slot = self._slots[s]
        pool = self._pools[slot.device]
        keep = -(-keep_tokens // self.block_tokens)
        while len(slot.frames) > keep:
            i = len(slot.frames) - 1
            if i == slot.pending_entry:
                self._settle_copy(slot, pool)
            f = slot.frames.pop()
            slot.counts.pop()
            at = s * self.layout.entries + i
            struct.pack_into("<i", pool.rows, self.layout.frame_offset + 4 * at, -1)
            struct.pack_into("<h", pool.rows, self.layout.count_offset + 2 * at, 0)
            self._put(pool, f, s)

    # -- frames -------------------------------------------------------------------------------------------------

    def _alloc_frame(self, pool: _Pool, s: int) -> int:
        f = pool.free.pop()
        frame = pool.frames[f]
        frame.state = FILLING
        frame.refs = 1
        frame.filler = s
        frame.block = self._free_blocks.pop()
        block = self._blocks[frame.block]
        block.reset()
        block.copies[self._pools.index(pool)] = f
        block.ncopies = 1
        return f

    def _free_block(self, b: int) -> None:
        block = self._blocks[b]
        block.copies = [-1] * len(self._pools)
        block.reset()
        self._free_blocks.append(b)

    def _take(self, pool: _Pool, f: int) -> None:
        frame = pool.frames[f]
        frame.refs += 1
        if frame.stamp:
            frame.stamp = 0
            pool.reclaimable -= 1

    def _put(self, pool: _Pool, f: int, s: int) -> None:
        """One page-table entry less names frame f."""
        frame = pool.frames[f]
        if frame.refs < 1:
            raise Panic(f"I3: frame {f} has no reference to give back")
        frame.refs -= 1
        if frame.filler == s:
            frame.filler = -1
        if frame.refs == 0 and frame.wired == 0:
            self._retire(pool, f)

    def _retire(self, pool: _Pool, f: int) -> None:
        """No entry names frame f: keep it as cache if it can be found, free it otherwise."""
        frame = pool.frames[f]
        if frame.state == VALID and self._blocks[frame.block].indexed:
            self._clock += 1
            frame.stamp = self._clock
            pool.ring.append((f, frame.stamp))
            pool.reclaimable += 1
            if len(pool.ring) >= 2 * len(pool.frames) + 16:
                pool.ring = deque(e for e in pool.ring if pool.frames[e[0]].stamp == e[1])
        else:
            self._free_frame(pool, f)

    def _free_frame(self, pool: _Pool, f: int) -> None:
        frame = pool.frames[f]
        device = self._pools.index(pool)
        b = frame.block
        block = self._blocks[b]
        if block.indexed and block.parent >= 0:
            parent = self._blocks[block.parent].copies[device]
            if parent >= 0:
                pool.frames[parent].children -= 1
        block.copies[device] = -1
        block.ncopies -= 1
        if block.ncopies == 0:
            if block.indexed:
                del self._index[block.key]
            self._free_block(b)
        if frame.stamp:
            frame.stamp = 0
            pool.reclaimable -= 1
        frame.state = FREE
        frame.block = -1
        frame.filler = -1
        frame.children = 0
        pool.free.append(f)
        self._freed += 1

    def _writable(self, s: int, i: int) -> bool:
        """I5: entry i may be written if this slot alone names it and nobody can find it or has yet to copy it, or if
        this slot is the one that fills it for all."""
        slot = self._slots[s]
        frame = self._pools[slot.device].frames[slot.frames[i]]
        if self._blocks[frame.block].indexed:
            return frame.state == FILLING and frame.filler == s
        return frame.refs == 1 and frame.wired == 0

    def _open_entry(self, s: int, i: int) -> None:
        """Make entry i one that this slot may write.  Requires: a free frame if it is not `_writable`."""
        slot = self._slots[s]
        frame = self._pools[slot.device].frames[slot.frames[i]]
        if not self._writable(s, i):
            self._copy_on_write(s, i)
        elif not self._blocks[frame.block].indexed:  # it may be VALID: a private block that was cut
            frame.state = FILLING
            frame.filler = s

    def _copy_on_write(self, s: int, i: int) -> None:
        """Give entry i a frame of its own; the copy itself is made by the next pass.  Requires: a free frame."""
        slot = self._slots[s]
        pool = self._pools[slot.device]
        src = slot.frames[i]
        self._map(s, i, self._alloc_frame(pool, s), slot.counts[i])
        if slot.computed > i * self.block_tokens and slot.pending_entry != i:
            # (when it is i, the entry still waits for its content, which lies where that copy comes from)
            if slot.pending_src >= 0:
                raise Panic(f"slot {s} waits for two copies")
            slot.pending_src = src
            slot.pending_entry = i
            pool.frames[src].wired += 1
        self._put(pool, src, s)
        self._cow += 1

    def _settle_copy(self, slot: _Slot, pool: _Pool) -> None:
        """The pending copy is made, or is needed no longer: let its source go."""
        f = slot.pending_src
        if f < 0:
            return
        slot.pending_src = slot.pending_entry = -1
        frame = pool.frames[f]
        frame.wired -= 1
        if frame.refs == 0 and frame.wired == 0:
            self._retire(pool, f)

    # -- eviction -----------------------------------------------------------------------------------------------

    def oldest(self, device: int, want: int) -> list[int]:
        """Up to `want` reclaimable blocks of `device`, least recently released first.  Nothing changes."""
        pool = self._pool(device)
        while pool.ring and pool.frames[pool.ring[0][0]].stamp != pool.ring[0][1]:
            pool.ring.popleft()
        found: list[int] = []
        for f, stamp in pool.ring:
            if len(found) == want:
                break
            if pool.frames[f].stamp == stamp:
                found.append(pool.frames[f].block)
        return found

    def evict(self, device: int, blocks: list[int]) -> int:
        """Free the frames of these blocks on `device`, in order.  Skips any that is mapped, wired or has a child there."""
        pool = self._pool(device)
        done = 0
        if any(not 0 <= b < len(self._blocks) for b in blocks):
            raise ValueError("core: evict names a block that does not exist")
        for b in blocks:
            f = self._blocks[b].copies[device]
            if f < 0:
                continue
            frame = pool.frames[f]
            if frame.stamp and frame.refs == 0 and frame.wired == 0 and frame.children == 0:
                self._free_frame(pool, f)
                self._evictions += 1
                done += 1
        return done

    # -- generations --------------------------------------------------------------------------------------------

    def set_generation(
        self, s: int, template: bytes, stops: bytes, max_tokens: int, limit: int, conn: int, request: int
    ) -> None:
        """What `plan` and `commit` need to run slot s as a generation.

        template  one packed SEQ whose sampling fields are used
        stops     int32 ids that end it
        limit     most tokens the log may reach
        """
        slot = self._slot(s)
        if len(template) != SEQ_BYTES:
            raise ValueError(f"core: a template is one SEQ of {SEQ_BYTES} bytes")
        slot.template = template
        slot.stops = tuple(array("i", stops))
        slot.max_tokens = max_tokens
        slot.generated = 0
        slot.limit = limit
        slot.conn = conn
        slot.request = request

    def start_running(self, s: int) -> None:
        """Put the slot into its device's decode set (at the end)."""
        slot = self._slot(s)
        if not slot.running:
            slot.running = True
            self._pools[slot.device].run.append(s)

    def stop_running(self, s: int) -> None:
        slot = self._slot(s)
        if slot.running:
            slot.running = False
            self._pools[slot.device].run.remove(s)

    def discard(self, s: int) -> None:
        """A token that a pass in flight will sample for this slot is not wanted any more."""
        slot = self._slot(s)
        if slot.in_flight:
            slot.discard = True

    def advance(self, s: int) -> Advance:
        """Skip blocks that others have computed, and say how many tokens this slot may compute next.  Requires: admitted."""
        slot = self._slot(s)
        pool = self._pools[slot.device]
        size = self.block_tokens
        n = len(slot.log)
        if n > self._mapped_tokens(slot):
            raise Panic(f"advance: slot {s} has {n} tokens, {self._mapped_tokens(slot)} of them mapped")
        while slot.computed < n:
            i = slot.computed // size
            if pool.frames[slot.frames[i]].state != VALID:
                break
            skipped = min((i + 1) * size, n) - slot.computed
            slot.computed += skipped
            slot.hit_total += skipped
        slot.highwater = max(slot.highwater, slot.computed)
        end = slot.computed
        while end < n:
            frame = pool.frames[slot.frames[end // size]]
            if frame.state == VALID:
                break
            if self._blocks[frame.block].indexed and frame.filler != s:
                if frame.filler >= 0:
                    if end == slot.computed:
                        return Advance(end, 0, frame.filler)
                    break
                frame.filler = s
            end = min((end // size + 1) * size, n)
        return Advance(slot.computed, end - slot.computed, -1)

    def steal(self, s: int) -> None:
        """Make slot s the filler of the block it waits for.  Requires: the present filler neither has a pass in flight
        nor decodes.

        That one loses what it had computed of that block, since s will write all of it.
        """
        slot = self._slot(s)
        size = self.block_tokens
        i = slot.computed // size
        if i >= len(slot.frames):
            return
        pool = self._pools[slot.device]
        frame = pool.frames[slot.frames[i]]
        if frame.state != FILLING or not self._blocks[frame.block].indexed or frame.filler == s:
            return
        if frame.filler >= 0:
            other = self._slots[frame.filler]
            self._need_idle(other)
            if other.pending_entry == i:
                self._settle_copy(other, pool)
            other.computed = min(other.computed, i * size)
        frame.filler = s

    # -- passes -------------------------------------------------------------------------------------------------

    def plan(self, device: int, max_sequences: int, prefill: bytes) -> Plan:
        """The next pass: one token of each slot in the decode set, then the given PREFILL records.

        Grows each decoding slot by the frame it needs, all or nothing.  When the decode set is longer than
        max_sequences, those that go are moved behind the others, so each gets its turn.
        """
        pool = self._pool(device)
        if pool.flight:
            raise Panic(f"plan: device {device} has a pass in flight")
        if len(prefill) % PREFILL.size:
            raise ValueError(f"core: PREFILL records have {PREFILL.size} bytes")
        chunks = list(PREFILL.iter_unpack(prefill))
        decode = pool.run[: max(0, max_sequences - len(chunks))]
        fresh = 0
        for s in decode:
            fresh += self._growth(s)
        seen = set(decode)
        for s, start, ntokens, _flags, _from, _left in chunks:
            self._check_chunk(device, s, start, ntokens)
            if s in seen:
                raise Panic(f"plan: slot {s} is twice in one pass")
            seen.add(s)
            fresh += self._chunk_growth(s, start + ntokens)
        if fresh > len(pool.free):
            shortage = fresh - len(pool.free)
            status = EVICT if shortage <= pool.reclaimable else NOROOM
            return Plan(status, shortage - (pool.reclaimable if status == NOROOM else 0), 0, b"", b"", b"", 0, 0)
        if len(decode) < len(pool.run):
            pool.run = pool.run[len(decode) :] + decode
        seqs = bytearray()
        tokens = array("i")
        copies = array("i")
        histories = 0
        for s in decode:
            self._grow(s)
            histories += self._emit(s, len(self._slots[s].log) - 1, 1, SAMPLE, -1, 0, seqs, tokens, copies)
        for s, start, ntokens, flags, score_from, left in chunks:
            if self._chunk_growth(s, start + ntokens):
                self._copy_on_write(s, self._slots[s].computed // self.block_tokens)
            histories += self._emit(s, start, ntokens, flags, score_from, left, seqs, tokens, copies)
        samples = sum(1 for f in pool.flight if f[3] & SAMPLE)
        return Plan(OK, 0, len(pool.flight), bytes(seqs), tokens.tobytes(), copies.tobytes(), histories, samples)

    def _growth(self, s: int) -> int:
        """Frames a decoding slot needs before its last token can be computed: 0 or 1."""
        slot = self._slots[s]
        n = len(slot.log)
        if n == 0 or slot.computed < n - 1:
            raise Panic(f"plan: slot {s} decodes with {slot.computed} of {n} tokens computed")
        if slot.computed == n:
            return 0
        i = (n - 1) // self.block_tokens
        if i >= self.layout.entries:
            raise Panic(f"plan: slot {s} has {n} tokens, more than its row can hold")
        if i >= len(slot.frames):
            return 1
        return 0 if self._writable(s, i) else 1

    def _grow(self, s: int) -> None:
        slot = self._slots[s]
        n = len(slot.log)
        if slot.computed == n:
            return
        i = (n - 1) // self.block_tokens
        count = n - i * self.block_tokens
        if i >= len(slot.frames):
            self._map(s, i, self._alloc_frame(self._pools[slot.device], s), count)
            return
        self._open_entry(s, i)
        self._set_count(s, i, count)

    def _check_chunk(self, device: int, s: int, start: int, ntokens: int) -> None:
        """A PREFILL record must begin where the slot is computed to, and write only what the slot may write (I5)."""
        slot = self._slot(s)
        end = start + ntokens
        if slot.device != device or ntokens < 1 or not 0 <= start <= slot.computed or end > self._mapped_tokens(slot):
            raise Panic(f"plan: slot {s} cannot compute {ntokens} tokens from {start}, {slot.computed} are computed")
        size = self.block_tokens
        for i in range(slot.computed // size, -(-end // size)) if end > slot.computed else ():
            frame = self._pools[device].frames[slot.frames[i]]
            if frame.state == VALID or (self._blocks[frame.block].indexed and frame.filler != s):
                raise Panic(f"I5: slot {s} would write frame {slot.frames[i]}, which is full or another's to fill")

    def _chunk_growth(self, s: int, end: int) -> int:
        """1 if the chunk goes on in a tail that was shared (fork) since the slot was admitted; later entries cannot be."""
        slot = self._slots[s]
        partly = slot.computed % self.block_tokens and end > slot.computed
        return 1 if partly and not self._writable(s, slot.computed // self.block_tokens) else 0

    def _emit(
        self, s: int, start: int, ntokens: int, flags: int, score_from: int, left: int,
        seqs: bytearray, tokens: array[int], copies: array[int],
    ) -> int:  # fmt: skip
        slot = self._slots[s]
        pool = self._pools[slot.device]
        record = list(SEQ.unpack(slot.template))
        history = record[7] & HISTORY if flags & SAMPLE else 0
        (generation,) = struct.unpack_from("<I", pool.rows, self.layout.generation_offset + 4 * s)
        entries = -(-(start + ntokens) // self.block_tokens)
        record[0:8] = [s, generation, start, ntokens, slot.computed, entries, len(tokens), flags | history]
        record[17] = score_from
        record[20] = left
        record[21] = 0
        seqs += SEQ.pack(*record)
        tokens.extend(slot.log[start : start + ntokens])
        if slot.pending_src >= 0:
            copies.extend((slot.pending_src, slot.frames[slot.pending_entry]))
        slot.in_flight = True
        pool.flight.append((s, start, ntokens, flags))
        return 1 if history else 0

    def commit(self, device: int, sampled: bytes, logprobs: bytes) -> Commit:
        """The pass came back: its KV is valid, full blocks can be found, sampled tokens join their logs.

        A stop token is not kept.  Finished slots leave the decode set; a slot that sampled and goes on is in it.
        """
        pool = self._pool(device)
        ids = array("i", sampled)
        lps = array("f", logprobs)
        streams = array("q")
        kept_tokens = array("i")
        kept_lps = array("f")
        kept = array("i")
        finished: list[tuple[int, int]] = []
        at = 0
        flight, pool.flight = pool.flight, []
        if sum(1 for f in flight if f[3] & SAMPLE) != len(ids) or len(ids) != len(lps):
            pool.flight = flight
            raise Panic(f"commit: device {device} sampled {len(ids)} tokens for another number of sequences")
        for s, start, ntokens, flags in flight:
            slot = self._slots[s]
            slot.in_flight = False
            self._settle_copy(slot, pool)
            self._computed(s, start + ntokens)
            if not flags & SAMPLE:
                continue
            token, lp, which = ids[at], lps[at], at
            at += 1
            if slot.discard:
                slot.discard = False
                continue
            if token in slot.stops:
                finished.append((s, STOP))
                self.stop_running(s)
                continue
            slot.log.append(token)
            self._extend_keys(slot)
            slot.generated += 1
            slot.generated_total += 1
            streams.extend((slot.conn, slot.request))
            kept_tokens.append(token)
            kept_lps.append(lp)
            kept.append(which)
            if slot.generated >= slot.max_tokens or len(slot.log) >= slot.limit:
                finished.append((s, LENGTH))
                self.stop_running(s)
            else:
                self.start_running(s)
        for s, _, _, _ in flight:
            self._slots[s].discard = False
        return Commit(streams.tobytes(), kept_tokens.tobytes(), kept_lps.tobytes(), kept.tobytes(), tuple(finished))

    def _computed(self, s: int, end: int) -> None:
        """Positions up to `end` are computed: validate frames that this fills, index and seal full blocks."""
        slot = self._slots[s]
        pool = self._pools[slot.device]
        size = self.block_tokens
        begin = slot.computed
        if end <= begin:
            slot.computed_total += 1  # only the last token again, for its logits
            return
        slot.computed_total += end - begin
        slot.recomputed_total += max(0, min(end, slot.highwater) - begin)
        slot.computed = end
        slot.highwater = max(slot.highwater, end)
        for i in range(begin // size, end // size):
            frame = pool.frames[slot.frames[i]]
            if frame.state == FILLING:
                frame.state = VALID
                frame.filler = -1
            self._index_entry(s, i)

    def rollback(self, device: int) -> list[int]:
        """The pass is lost (failed, or its driver died): as if it had never been planned.  Returns its slots."""
        pool = self._pool(device)
        slots = [f[0] for f in pool.flight]
        pool.flight = []
        for s in slots:
            self._slots[s].in_flight = False
            self._slots[s].discard = False
        return slots

    def lose(self, device: int) -> None:
        """Every frame of the device is void (its memory did not survive): drop all its slots, evict all its cache."""
        pool = self._pool(device)
        self.rollback(device)
        for s, slot in enumerate(self._slots):
            if slot.used and slot.device == device:
                self.drop(s)
        while pool.reclaimable:
            if not self.evict(device, self.oldest(device, pool.reclaimable)):
                raise Panic("lose: reclaimable blocks form a cycle")

    # -- looking ------------------------------------------------------------------------------------------------

    def free_frames(self, device: int) -> int:
        return len(self._pool(device).free)

    def reclaimable_frames(self, device: int) -> int:
        return self._pool(device).reclaimable

    def mapped_or_cached_frames(self, device: int) -> int:
        return len(self._pool(device).frames) - len(self._pools[device].free)

    def wired_frames(self, device: int) -> int:
        """Frames that may not move now: named by a slot in flight, or source of a pending copy."""
        pool = self._pool(device)
        wired = {f for f, frame in enumerate(pool.frames) if frame.wired}
        for s, _, _, _ in pool.flight:
            wired.update(self._slots[s].frames)
        return len(wired)

    def run_length(self, device: int) -> int:
        return len(self._pool(device).run)

    def run_slots(self, device: int) -> list[int]:
        return self._pool(device).run[:]

    def flight_length(self, device: int) -> int:
        return len(self._pool(device).flight)

    def is_running(self, s: int) -> bool:
        return 0 <= s < len(self._slots) and self._slots[s].running

    def in_flight(self, s: int) -> bool:
        return 0 <= s < len(self._slots) and self._slots[s].in_flight

    def slot_row(self, s: int) -> SlotRow:
        slot = self._slot(s)
        pool = self._pools[slot.device]
        refs = [pool.frames[f].refs for f in slot.frames]
        return SlotRow(
            len(slot.log), slot.computed, len(slot.frames), sum(1 for r in refs if r > 1),
            sum(1_000_000 // r for r in refs), slot.computed_total, slot.hit_total, slot.recomputed_total,
            slot.generated_total,
        )  # fmt: skip

    def pagemap(self, s: int) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes]:
        """frames int32, shifts int32, counts int16, sharers int32, flags uint8, hits int32: one per entry."""
        slot = self._slot(s)
        pool = self._pools[slot.device]
        frames = [pool.frames[f] for f in slot.frames]
        blocks = [self._blocks[f.block] for f in frames]
        flags = bytearray()
        for i, (f, b) in enumerate(zip(frames, blocks, strict=True)):
            flag = _FULL if slot.counts[i] == self.block_tokens else 0
            flag |= _INDEXED if b.indexed else 0
            flag |= _VALID if f.state == VALID or slot.computed >= i * self.block_tokens + slot.counts[i] else 0
            flag |= _WIRED if f.wired or slot.in_flight else 0
            flags.append(flag)
        return (
            array("i", slot.frames).tobytes(), array("i", [0] * len(frames)).tobytes(),
            array("h", slot.counts).tobytes(), array("i", [f.refs for f in frames]).tobytes(), bytes(flags),
            array("i", [b.hits for b in blocks]).tobytes(),
        )  # fmt: skip

    def counters(self) -> Counters:
        return Counters(
            self._hits, self._misses, self._evictions, self._collisions, self._cow, self._merged, self._indexed,
            self._freed,
        )  # fmt: skip

    def frame_table(self, device: int) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes]:
        """For fsck and policies: state uint8, refs int32, wired int32, block int32, stamp uint64, children int32."""
        frames = self._pool(device).frames
        return (
            bytes(f.state for f in frames), array("i", [f.refs for f in frames]).tobytes(),
            array("i", [f.wired for f in frames]).tobytes(), array("i", [f.block for f in frames]).tobytes(),
            array("Q", [f.stamp for f in frames]).tobytes(), array("i", [f.children for f in frames]).tobytes(),
        )  # fmt: skip

    def block_table(self) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]:
        """parent int32, domain int32, depth int32, hits int32, indexed uint8, keys 16 bytes each, copies int32 [blocks, devices]."""
        blocks = self._blocks
        copies = array("i")
        for b in blocks:
            copies.extend(b.copies)
        return (
            array("i", [b.parent for b in blocks]).tobytes(), array("i", [b.domain for b in blocks]).tobytes(),
            array("i", [b.depth for b in blocks]).tobytes(), array("i", [b.hits for b in blocks]).tobytes(),
            bytes(1 if b.indexed else 0 for b in blocks), b"".join(b.key or bytes(16) for b in blocks),
            copies.tobytes(),
        )  # fmt: skip

    def block_tokens_of(self, b: int) -> bytes:
        """The tokens an indexed block stands for; empty otherwise."""
        if not 0 <= b < len(self._blocks):
            raise ValueError(f"core: block {b} does not exist")
        return self._blocks[b].tokens

    def key_of(self, s: int, i: int) -> bytes:
        keys = self._slot(s).keys
        if not 0 <= i < len(keys):
            raise ValueError(f"core: slot {s} has no full block {i}")
        return keys[i]

    def find_key(self, key: bytes) -> int:
        """The block indexed under `key`, or -1; for fsck."""
        return self._index.get(key, -1)

    def pending_copy(self, s: int) -> int:
        return self._slot(s).pending_src

    def slots_used(self) -> list[int]:
        return [s for s, slot in enumerate(self._slots) if slot.used]

    def slot_device(self, s: int) -> int:
        return self._slot(s).device

    def _pool(self, device: int) -> _Pool:
        if not 0 <= device < len(self._pools):
            raise ValueError(f"core: device {device} does not exist")
        return self._pools[device]

    def _slot(self, s: int) -> _Slot:
        if not 0 <= s < len(self._slots) or not self._slots[s].used:
            raise ValueError(f"core: slot {s} is not open")
        return self._slots[s]

    def _mapped_tokens(self, slot: _Slot) -> int:
        return (len(slot.frames) - 1) * self.block_tokens + slot.counts[-1] if slot.frames else 0

    @staticmethod
    def _need_idle(slot: _Slot) -> None:
        if slot.in_flight:
            raise Panic("I4: a slot in flight may not change what it maps")
