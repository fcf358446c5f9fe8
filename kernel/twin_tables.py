"""The tables of the twin core: what a frame, a block, a slot and a device's pool are, and how they are looked at.

Nothing here moves a frame; twin_mapping.py does, and twin.py runs passes over what is mapped.
"""

from __future__ import annotations

from array import array
from collections import deque

from .batch import SEQ_BYTES
from .coreapi import check_shape
from .errors import Panic
from .geometry import RowLayout
from .params import MAX_DEVICES
from .records import FREE, VALID, Counters, SlotRow
from .siphash import siphash128

ROOTS = 1024

_FULL, _INDEXED, _VALID, _WIRED = 1, 2, 4, 8  # flags of pagemap


class FrameState:
    __slots__ = ("block", "filler", "known", "owner", "refs", "stamp", "state", "wired")

    def __init__(self) -> None:
        self.state = FREE
        self.refs = 0
        self.wired = 0
        self.filler = -1
        self.block = -1
        self.owner = 0  # group that it is charged to, 0: nobody
        self.stamp = 0
        self.known = 0  # FILLING or LOADING: first tokens that are valid, or will be when a copy or load has been made


class BlockState:
    __slots__ = (
        "child", "children", "copies", "depth", "domain", "due_ns", "hits", "indexed", "key", "kind", "nchildren", "ncopies",
        "ntokens", "owners", "parent", "priority", "sibling", "tokens", "turn", "used_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.copies = [-1] * MAX_DEVICES
        self.children = [0] * MAX_DEVICES  # blocks whose parent is this one, with a copy on that device
        self.nchildren = 0  # blocks whose parent is this one
        self.key = b""
        self.tokens = b""
        self.parent = -1
        self.child = self.sibling = -1  # latest child, next older sibling: hints, checked when used
        self.domain = 0
        self.depth = 0
        self.hits = 0
        self.indexed = False
        self.ncopies = 0
        self.ntokens = 0  # saved tail: tokens in it
        self.owners = 0  # saved tail: slots that may come back to it
        self.used_ns = self.due_ns = 0
        self.kind = self.turn = 0
        self.priority = 50


class SlotState:
    __slots__ = (
        "computed", "computed_total", "conn", "counts", "device", "discard", "domain", "frames", "generated",
        "generated_total", "group", "highwater", "hit_total", "in_flight", "keys", "limit", "log", "max_tokens", "pending_entry",
        "pending_src", "recomputed_total", "request", "root", "running", "stops", "tail_block", "tail_end", "template", "used",
    )  # fmt: skip

    def __init__(self) -> None:
        self.used = False
        self.reset(0, 0, b"")

    def reset(self, device: int, domain: int, root: bytes) -> None:
        self.device = device
        self.domain = domain
        self.group = 0
        self.root = root
        self.log = array("i")
        self.keys: list[bytes] = []
        self.frames: list[int] = []
        self.counts: list[int] = []
        self.computed = 0
        self.highwater = 0  # most tokens that were ever computed: below it, computing is recomputing
        self.pending_src = -1  # frame to copy into that of entry `pending_entry` before it may be written
        self.pending_entry = -1
        self.tail_block = -1  # saved tail: a private block in slower tiers with KV of the tokens before `tail_end`
        self.tail_end = 0
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


class PoolState:
    """Frames of one device.  rows: its page-table rows; None for a tier, whose frames nobody maps."""

    __slots__ = ("device", "flight", "frames", "free", "reclaimable", "ring", "rows", "run")

    def __init__(self, device: int, capacity: int, rows: memoryview | None) -> None:
        self.device = device
        self.frames = [FrameState() for _ in range(capacity)]
        self.free = list(range(capacity - 1, -1, -1))
        self.ring: deque[tuple[int, int]] = deque()
        self.reclaimable = 0
        self.run: list[int] = []  # slots that decode, in the order in which they began
        self.flight: list[tuple[int, int, int, int]] = []  # slot, start, ntokens, flags
        self.rows = rows


class TwinTables:
    """Requires: calls from one thread; slots and devices that exist; `plan` only when no pass of that device is in flight.

    secret       16 bytes, key of the keyed hash
    capacities   frames per device: the compute devices first, then the tiers (a tier may have none yet)
    rows         per compute device, a writable buffer of RowLayout(slots, entries).total_bytes
    hash_bits    128; a test may truncate the key to see verification catch it (0 = constant)
    """

    def __init__(
        self, secret: bytes, block_tokens: int, layout: RowLayout, capacities: list[int], rows: list[memoryview],
        hash_bits: int = 128,
    ) -> None:  # fmt: skip
        check_shape(secret, block_tokens, layout, capacities, rows, hash_bits)
        self.block_tokens = block_tokens
        self.layout = layout
        self._secret = secret
        self._mask = ((1 << hash_bits) - 1).to_bytes(16, "little")
        self.compute_devices = len(rows)
        self.now_ns = 0  # set by the kernel once a step; what `used_ns` of blocks is taken from
        self._pools = [
            PoolState(d, c, memoryview(rows[d]).cast("B") if d < len(rows) else None) for d, c in enumerate(capacities)
        ]
        self._blocks: list[BlockState] = []
        self._free_blocks: list[int] = []
        self._ghosts = 0  # blocks without a copy that have children
        self._newest_root = [-1] * ROOTS  # by domain modulo ROOTS: the block indexed last at depth 0, a hint
        self._loads: list[int] = []  # of the last admission: block, source device, source frame, frame
        self._hit_blocks: list[int] = []  # of the last admission
        self._partial_hits = self._partial_tokens = 0
        self._more_blocks()
        self._slots = [SlotState() for _ in range(layout.slots)]
        self._free_slots = list(range(layout.slots - 1, -1, -1))
        self._index: dict[bytes, int] = {}
        self._clock = 0
        self._hits = self._misses = self._evictions = self._collisions = 0
        self._cow = self._merged = self._indexed = self._freed = 0
        self._above: dict[int, int] = {0: 0}  # by group: the one that contains it, 0: none
        self._accounts: dict[tuple[int, int], list[int]] = {}  # by device and group: used, reclaimable, soft, hard
        self._served: dict[int, int] = {}
        self._restricted: tuple[int, int] | None = None  # of the eviction under way: for whom, whose blocks alone
        frames_bytes = 4 * layout.slots * layout.entries
        for pool in self._pools:
            if pool.rows is not None:
                pool.rows[layout.frame_offset : layout.frame_offset + frames_bytes] = b"\xff" * frames_bytes

    def _more_blocks(self) -> None:
        """Have a block for every frame, and some for ghosts when there are tiers."""
        frames = sum(len(pool.frames) for pool in self._pools)
        want = frames + (self._ghost_room(frames) if len(self._pools) > self.compute_devices else 0)
        have = len(self._blocks)
        self._blocks.extend(BlockState() for _ in range(have, want))
        self._free_blocks[:0] = range(want - 1, have - 1, -1)

    @staticmethod
    def _ghost_room(frames: int) -> int:
        return max(64, frames // 8)

    # -- keys ---------------------------------------------------------------------------------------------------

    def hash(self, data: bytes) -> bytes:
        """SipHash-2-4-128 of `data` under the secret, truncated to hash_bits."""
        digest = siphash128(self._secret, data)
        return bytes(a & b for a, b in zip(digest, self._mask, strict=True))

    def _extend_keys(self, slot: SlotState) -> None:
        size = self.block_tokens
        while (len(slot.keys) + 1) * size <= len(slot.log):
            i = len(slot.keys)
            previous = slot.keys[-1] if slot.keys else slot.root
            slot.keys.append(self.hash(previous + slot.log[i * size : (i + 1) * size].tobytes()))

    # -- the decode set -----------------------------------------------------------------------------------------

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
            self._freed, self._partial_hits, self._partial_tokens, self._ghosts,
        )  # fmt: skip

    def frame_table(self, device: int) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes]:
        """For fsck: state uint8, refs int32, wired int32, block int32, stamp uint64, filler int32."""
        frames = self._pool(device).frames
        return (
            bytes(f.state for f in frames), array("i", [f.refs for f in frames]).tobytes(),
            array("i", [f.wired for f in frames]).tobytes(), array("i", [f.block for f in frames]).tobytes(),
            array("Q", [f.stamp for f in frames]).tobytes(), array("i", [f.filler for f in frames]).tobytes(),
        )  # fmt: skip

    def block_table(self) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]:
        """parent int32, domain int32, depth int32, hits int32, indexed uint8, keys 16 bytes each, copies int32 [blocks, devices],
        children int32 [blocks, devices], and (nchildren, owners) int32 [blocks, 2]."""
        blocks = self._blocks
        devices = len(self._pools)
        copies, children, family = array("i"), array("i"), array("i")
        for b in blocks:
            copies.extend(b.copies[:devices])
            children.extend(b.children[:devices])
            family.extend((b.nchildren, b.owners))
        return (
            array("i", [b.parent for b in blocks]).tobytes(), array("i", [b.domain for b in blocks]).tobytes(),
            array("i", [b.depth for b in blocks]).tobytes(), array("i", [b.hits for b in blocks]).tobytes(),
            bytes(1 if b.indexed else 0 for b in blocks), b"".join(b.key or bytes(16) for b in blocks),
            copies.tobytes(), children.tobytes(), family.tobytes(),
        )  # fmt: skip

    def block_tokens_of(self, b: int) -> bytes:
        """The tokens an indexed block stands for; empty otherwise."""
        if not 0 <= b < len(self._blocks):
            raise ValueError(f"core: block {b} does not exist")
        return self._blocks[b].tokens if self._blocks[b].indexed else b""

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

    def _pool(self, device: int) -> PoolState:
        if not 0 <= device < len(self._pools):
            raise ValueError(f"core: device {device} does not exist")
        return self._pools[device]

    def _slot(self, s: int) -> SlotState:
        if not 0 <= s < len(self._slots) or not self._slots[s].used:
            raise ValueError(f"core: slot {s} is not open")
        return self._slots[s]

    def _rows(self, device: int) -> memoryview:
        rows = self._pools[device].rows
        if rows is None:
            raise ValueError(f"core: device {device} is a tier and has no rows")
        return rows

    def _mapped_tokens(self, slot: SlotState) -> int:
        return (len(slot.frames) - 1) * self.block_tokens + slot.counts[-1] if slot.frames else 0

    @staticmethod
    def _need_idle(slot: SlotState) -> None:
        if slot.in_flight:
            raise Panic("I4: a slot in flight may not change what it maps")
