"""The twin core's tiers: copies of blocks in several devices, and the frames that transfers read and write.

A transfer is the kernel's affair; the core only keeps its frames in place.  A frame that a transfer reads or writes is
*wired*: it is neither freed nor given to anybody else before `unwire` or `landed`, whatever happens to its contexts (I4).

    begin_copy   frames in the target for blocks that have none there; both ends wired
    save_tail    the same for the partial block at the end of a slot
    landed       the written frames are complete, or void
    unwire       the read frames are free to move
    claim, adopt what a tier's driver found in its slots when it started becomes copies again

A frame of a tier is never mapped, so its `refs` are 0: it is reclaimable whenever it is whole and not wired.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from .errors import Panic
from .params import MAX_DEVICES
from .records import FACT, FILLING, FREE, LOADING, NO_COPY, VALID, Prefix
from .twin_admission import TwinAdmission
from .twin_tables import PoolState

MAX_TURN = 65535


class TwinTiers(TwinAdmission):
    """Copies, transfers, and what policies are told."""

    # -- capacity -----------------------------------------------------------------------------------------------

    def set_capacity(self, device: int, frames: int) -> None:
        """A tier gets its frames, or loses them (0), or a new tier joins under the next number.  Requires: all are free."""
        if not self.compute_devices <= device <= len(self._pools) or device >= MAX_DEVICES or frames < 0:
            raise ValueError(f"core: device {device} is no tier, or there are too many")
        if device == len(self._pools):
            self._pools.append(PoolState(device, 0, None))
        pool = self._pools[device]
        if len(pool.free) != len(pool.frames):
            raise Panic(f"set_capacity: device {device} has frames in use")
        self._pools[device] = PoolState(device, frames, None)
        self._more_blocks()

    # -- transfers ----------------------------------------------------------------------------------------------

    def begin_copy(self, source: int, target: int, blocks: Sequence[int]) -> list[int]:
        """Start copying blocks from one device to another: (block, source frame, target frame), one after the other, for
        those that have a VALID copy here and none there, as long as the target has free frames.  Skips what its owner's limit
        there does not allow.

        The target frames are LOADING until `landed`; both ends are wired.
        """
        here, there = self._pool(source), self._pool(target)
        self._need_blocks(blocks, "begin_copy")
        begun: list[int] = []
        for b in blocks:
            f = self._blocks[b].copies[source]
            if f < 0 or here.frames[f].state != VALID or self._blocks[b].copies[target] >= 0:
                continue
            if not self._blocks[b].indexed and not self._blocks[b].owners:
                continue  # a private block: nobody could find the copy
            if not there.free:
                break
            if not self._fits(target, here.frames[f].owner, 1):
                continue
            g = self._alloc_copy(there, b, here.frames[f].owner)
            there.frames[g].state = LOADING
            there.frames[g].wired = 1
            here.frames[f].wired += 1
            begun += (b, f, g)
        return begun

    def save_tail(self, s: int, target: int) -> list[int]:
        """Start copying the computed part of the slot's partial last entry to a private block in `target`, which the slot
        comes back to when it is admitted again: (block, source frame, target frame), or [] when there is nothing to
        save, it is saved already, or there is no room.  Requires: not in flight.
        """
        slot = self._slot(s)
        self._need_idle(slot)
        there = self._pool(target)
        size = self.block_tokens
        i = slot.computed // size
        n = slot.computed - i * size
        if not n or i >= len(slot.frames) or slot.pending_entry == i or slot.tail_end == slot.computed:
            return []
        pool = self._pools[slot.device]
        f = slot.frames[i]
        state = pool.frames[f].state
        if state == LOADING or not there.free or not self._free_blocks or not self._fits(target, slot.group, 1):
            return []
        if state == FILLING and self._blocks[pool.frames[f].block].indexed:
            return []  # whoever fills it next writes it from its first token on, and need not wait for a copy
        self._leave_tail(slot)
        b = self._free_blocks.pop()
        g = self._alloc_copy(there, b, slot.group)
        block = self._blocks[b]
        block.owners = 1
        block.ntokens = n
        block.depth = i * size
        block.domain = slot.domain
        block.tokens = slot.log[i * size : i * size + n].tobytes()
        slot.tail_block = b
        slot.tail_end = slot.computed
        there.frames[g].state = LOADING
        there.frames[g].wired = 1
        pool.frames[f].wired += 1
        return [b, f, g]

    def wire(self, device: int, frames: Sequence[int]) -> None:
        """A transfer is going to read these frames."""
        pool = self._pool(device)
        self._need_frames(pool, frames, "wire")
        for f in frames:
            pool.frames[f].wired += 1

    def unwire(self, device: int, frames: Sequence[int]) -> None:
        """A transfer has read these frames, or will not."""
        pool = self._pool(device)
        self._need_frames(pool, frames, "unwire")
        for f in frames:
            self._unwire(pool, f)

    def _unwire(self, pool: PoolState, f: int) -> None:
        frame = pool.frames[f]
        if frame.wired < 1:
            raise Panic(f"I4: frame {f} of device {pool.device} is not wired")
        frame.wired -= 1
        if frame.wired == 0 and frame.refs == 0 and not frame.stamp:
            self._retire(pool, f)

    def landed(self, device: int, frames: Sequence[int], good: bytes) -> None:
        """Transfers into these frames have ended; good: one byte each, 1 = complete.

        A frame that failed is freed, or, when a row names it, left to be computed by whoever needs it first.
        """
        pool = self._pool(device)
        self._need_frames(pool, frames, "landed")
        for f, ok in zip(frames, good, strict=True):
            frame = pool.frames[f]
            if frame.state != LOADING:
                raise Panic(f"landed: frame {f} of device {device} is not loading")
            size = self.block_tokens
            if ok and (not frame.known or frame.known == size):
                frame.state = VALID
                frame.filler = -1
                frame.known = 0
            else:
                frame.state = FILLING
                if not ok:
                    self._void(pool, f)
        for f in reversed(frames):  # blocks come parents first, and a leaf must be older in the ring than its parent
            self._unwire(pool, f)

    def _void(self, pool: PoolState, f: int) -> None:
        """The content of frame f did not come: slots that counted on it have computed less than they thought."""
        pool.frames[f].known = 0
        if not pool.frames[f].refs:
            return
        for slot in self._slots:
            if not slot.used or slot.device != pool.device or f not in slot.frames:
                continue
            slot.computed = min(slot.computed, slot.frames.index(f) * self.block_tokens)

    def forget_copies(self, device: int, blocks: Sequence[int]) -> int:
        """Free the frames of these blocks whatever continues them, since their content is wrong or not wanted.  Skips any
        that is mapped or wired; how many were freed."""
        pool = self._pool(device)
        self._need_blocks(blocks, "forget_copies")
        done = 0
        for b in blocks:
            f = self._blocks[b].copies[device]
            if f >= 0 and pool.frames[f].stamp and pool.frames[f].wired == 0:
                self._free_frame(pool, f)
                done += 1
        return done

    def forget_tail(self, s: int) -> None:
        """The slot's saved tail is of no use."""
        self._leave_tail(self._slot(s))

    def touch(self, device: int, blocks: Sequence[int]) -> None:
        """Make these reclaimable blocks the most recently used of their device, the last one the most."""
        pool = self._pool(device)
        self._need_blocks(blocks, "touch")
        for b in blocks:
            f = self._blocks[b].copies[device]
            if f >= 0 and pool.frames[f].stamp:
                self._stamp(pool, f)
                self._blocks[b].used_ns = self.now_ns

    # -- what a driver found at its start -----------------------------------------------------------------------

    def claim(self, device: int, frames: Sequence[int]) -> None:
        """Take these free frames of a tier: each is then adopted, or given back with `unclaim`."""
        pool = self._pool(device)
        wanted = set(frames)
        if len(wanted) != len(frames) or any(
            not 0 <= f < len(pool.frames) or pool.frames[f].state != FREE for f in frames
        ):
            raise ValueError("core: claim names a frame that is not free, or one twice")
        pool.free = [f for f in pool.free if f not in wanted]
        for f in frames:
            pool.frames[f].state = FILLING
            pool.frames[f].wired = 1

    def unclaim(self, device: int, f: int) -> None:
        pool = self._pool(device)
        frame = pool.frames[f]
        if frame.state != FILLING or frame.block >= 0:
            raise Panic(f"unclaim: frame {f} of device {device} was not claimed")
        frame.state = FREE
        frame.wired = 0
        pool.free.append(f)

    def adopt(self, device: int, f: int, domain: int, root: bytes, parent: int, tokens: bytes, group: int = 0) -> int:
        """A claimed frame holds the block of these tokens after block `parent` (-1: it begins the domain): make it a
        copy of that group's, VALID and reclaimable, and return the block.  -1: there is such a copy already, or no room.
        """
        pool = self._pool(device)
        frame = pool.frames[f]
        if frame.state != FILLING or frame.block >= 0 or len(tokens) != 4 * self.block_tokens:
            raise Panic(f"adopt: frame {f} of device {device} was not claimed, or the block is not full")
        self._need_group(group)
        above = self._blocks[parent] if parent >= 0 else None
        if (above is not None and not above.indexed) or not self._fits(device, group, 1):
            return -1
        key = self.hash((above.key if above is not None else root) + tokens)
        b = self._index.get(key, -1)
        if b >= 0:
            known = self._blocks[b]
            if known.parent != parent or known.domain != domain or known.tokens != tokens or known.copies[device] >= 0:
                return -1
        elif not self._free_blocks:
            return -1
        else:
            b = self._free_blocks.pop()
            block = self._blocks[b]
            block.key = key
            block.tokens = tokens
            block.parent = parent
            block.domain = domain
            block.depth = above.depth + self.block_tokens if above is not None else 0
            block.indexed = True
            block.used_ns = self.now_ns
            self._index[key] = b
            self._indexed += 1
            if above is not None:
                above.nchildren += 1
            self._ghosts += 1  # until its copy is added
        frame.block = b
        self._add_copy(b, device, f)
        frame.state = VALID
        frame.wired = 0
        self._own(pool, frame, group)
        self._count_reclaimable(pool, group, 1)
        self._stamp(pool, f)
        return b

    # -- looking ------------------------------------------------------------------------------------------------

    def residency(self, s: int) -> bytes:
        """Per block of the log, the fastest device that has a whole copy of it (the slot's own row first), or NO_COPY; the
        last one, if partial, counts when the row or the saved tail has any of it.  Devices are numbered fast to slow.
        """
        slot = self._slot(s)
        frames = self._pools[slot.device].frames
        size = self.block_tokens
        found = bytearray()
        parent = -1
        for i in range(-(-len(slot.log) // size)):
            b = -1
            if i < len(slot.frames):
                if frames[slot.frames[i]].state == VALID or slot.computed > i * size:
                    b = frames[slot.frames[i]].block
                    found.append(slot.device)
                    parent = b if self._blocks[b].indexed and slot.counts[i] == size else -1
                    continue
                b = frames[slot.frames[i]].block
                b = b if self._blocks[b].indexed else -1
            elif i < len(slot.keys) and (i == 0 or parent >= 0):
                b = self._find(slot, i, parent)
            parent = b
            if b < 0 and slot.tail_block >= 0 and i * size < slot.tail_end <= (i + 1) * size:
                b = slot.tail_block
            found.append(self._fastest(b, slot.device) if b >= 0 else NO_COPY)
        return bytes(found)

    def _fastest(self, b: int, own: int) -> int:
        copies = self._blocks[b].copies
        order = (own, *(d for d in range(len(self._pools)) if d != own))
        for d in order:
            if copies[d] >= 0 and self._pools[d].frames[copies[d]].state == VALID:
                return d
        return NO_COPY

    def loading(self, s: int) -> int:
        """Entries of the slot's row that are LOADING."""
        slot = self._slot(s)
        frames = self._pools[slot.device].frames
        return sum(1 for f in slot.frames if frames[f].state == LOADING)

    def evictable(self, device: int, blocks: Sequence[int], want: int) -> list[int]:
        """Those of `blocks` that could go from the device if they went in this order, the first `want` of them."""
        pool = self._pool(device)
        self._need_blocks(blocks, "evictable")
        found: list[int] = []
        gone: dict[int, int] = {}
        for b in blocks:
            if len(found) == want:
                break
            if b in found:
                continue
            block = self._blocks[b]
            f = block.copies[device]
            if f >= 0 and self._can_go(pool, f) and block.children[device] == gone.get(b, 0):
                found.append(b)
                gone[block.parent] = gone.get(block.parent, 0) + 1
        return found

    def chain(self, device: int, leaf: int, want: int) -> list[int]:
        """`leaf`, its parent, and so on: up to `want` blocks that could go from the device in this order."""
        pool = self._pool(device)
        self._need_blocks((leaf,), "chain")
        found: list[int] = []
        b = leaf
        while b >= 0 and len(found) < want:
            block = self._blocks[b]
            f = block.copies[device]
            if f < 0 or not self._can_go(pool, f) or block.children[device] != (1 if found else 0):
                break
            found.append(b)
            b = block.parent
        return found

    def _can_go(self, pool: PoolState, f: int) -> bool:
        frame = pool.frames[f]
        return bool(frame.stamp) and frame.wired == 0 and self._may_go(pool, frame)

    def key_heads(self, blocks: Sequence[int]) -> list[int]:
        """The first 64 bits of each block's key, little-endian; 0 for a private block."""
        self._need_blocks(blocks, "key_heads")
        return [int.from_bytes(self._blocks[b].key[:8], "little") for b in blocks]

    def row_blocks(self, s: int) -> list[int]:
        """The slot's full, computed and findable blocks that its row maps, the deepest first."""
        slot = self._slot(s)
        frames = self._pools[slot.device].frames
        whole = [frames[f] for f, count in zip(slot.frames, slot.counts, strict=True) if count == self.block_tokens]
        return [f.block for f in reversed(whole) if f.state == VALID and self._blocks[f.block].indexed]

    def row_entries(self, s: int) -> list[int]:
        """(block, frame) of every entry of the slot's row, in order and whatever its state."""
        slot = self._slot(s)
        frames = self._pools[slot.device].frames
        return [number for f in slot.frames for number in (frames[f].block, f)]

    def log_blocks(self, s: int) -> list[int]:
        """The known blocks of the slot's log, wherever they lie, from its start; they end where the first is unknown."""
        slot = self._slot(s)
        found: list[int] = []
        parent = -1
        for i in range(len(slot.keys)):
            b = self._find(slot, i, parent)
            if b < 0:
                break
            found.append(b)
            parent = b
        return found

    def prefix(self, s: int) -> Prefix:
        """How far the slot's log is known, and where it lies.  Only keys are compared: it is a hint."""
        slot = self._slot(s)
        here = coming = awaited = stored = 0
        parent = -1
        for key in slot.keys:
            b = self._index.get(key, -1)
            if b < 0 or self._blocks[b].parent != parent or self._blocks[b].domain != slot.domain:
                break
            parent = b
            own = self.copied((b,), 1 << slot.device)[0]
            f = self._blocks[b].copies[slot.device]
            frame = self._pools[slot.device].frames[f] if f >= 0 else None
            computing = frame is not None and frame.state == FILLING and frame.filler not in (s, -1)
            if own == 2 and not coming and not awaited and not stored:
                here += 1
            elif own and not awaited and not stored:
                coming += 1
            elif (own or computing) and not stored:
                awaited += 1
            elif 2 in self.copied((b,), -1):
                stored += 1
            else:
                break
        return Prefix(here, coming, awaited, stored)

    def tail_of(self, s: int) -> tuple[int, int]:
        """(block, tokens before its end) of the saved tail, or (-1, 0)."""
        slot = self._slot(s)
        return slot.tail_block, slot.tail_end

    def copied(self, blocks: Sequence[int], devices: int) -> bytes:
        """Per block: 2 when a device of the bit mask has a VALID copy, 1 when one is on its way there, 0 otherwise."""
        self._need_blocks(blocks, "copied")
        states = bytearray()
        for b in blocks:
            state = 0
            for d, f in enumerate(self._blocks[b].copies):
                if f >= 0 and devices >> d & 1:
                    frame = self._pools[d].frames[f]
                    state = max(state, 2 if frame.state == VALID else 1 if frame.state == LOADING else 0)
            states.append(state)
        return bytes(states)

    def copies_of(self, b: int) -> list[int]:
        """The block's frame per device, -1 where it has none."""
        self._need_blocks((b,), "copies_of")
        return self._blocks[b].copies[: len(self._pools)]

    def refs_of(self, device: int, f: int) -> int:
        """How many page-table entries name this frame."""
        pool = self._pool(device)
        self._need_frames(pool, (f,), "refs_of")
        return pool.frames[f].refs

    def describe(self, blocks: Sequence[int]) -> bytes:
        """Per block what its tag needs: key 16, parent key 16 (zero for the first of a domain and for private blocks), then
        int32 domain, depth, tokens in it, 1 if private; then block_tokens int32 tokens, zero beyond."""
        self._need_blocks(blocks, "describe")
        out = bytearray()
        for b in blocks:
            block = self._blocks[b]
            above = self._blocks[block.parent].key if block.parent >= 0 else bytes(16)
            n = self.block_tokens if block.indexed else block.ntokens
            out += (block.key or bytes(16)) + above
            out += array("i", (block.domain, block.depth, n, 0 if block.indexed else 1)).tobytes()
            out += block.tokens.ljust(4 * self.block_tokens, b"\0")
        return bytes(out)

    def facts(self, blocks: Sequence[int]) -> bytes:
        """One FACT record per block."""
        self._need_blocks(blocks, "facts")
        out = bytearray()
        for b in blocks:
            x = self._blocks[b]
            mask = sum(1 << d for d, f in enumerate(x.copies) if f >= 0 and self._pools[d].frames[f].state == VALID)
            out += FACT.pack(
                x.used_ns, x.due_ns, x.depth, x.hits, x.turn, x.nchildren, x.domain, x.kind, x.priority, mask,
                1 if x.indexed else 0,
            )  # fmt: skip
        return bytes(out)

    def note(self, s: int, kind: int, turn: int, due_ns: int) -> None:
        """The slot's turn ended so: remembered at each known block of its log, and at its saved tail."""
        for b in self._noted(s):
            block = self._blocks[b]
            block.kind, block.turn, block.due_ns = kind, min(turn, MAX_TURN), due_ns

    def prioritise(self, s: int, start: int, end: int, priority: int) -> int:
        """Set the priority (0..100) of the known blocks that lie wholly in tokens [start, end); how many."""
        size = self.block_tokens
        blocks = self.log_blocks(s)[-(-max(0, start) // size) : max(0, end) // size]
        for b in blocks:
            self._blocks[b].priority = priority
        return len(blocks)

    def _noted(self, s: int) -> list[int]:
        slot = self._slot(s)
        return self.log_blocks(s) + ([slot.tail_block] if slot.tail_block >= 0 else [])

    def sample(self, device: int, want: int, seed: int) -> list[int]:
        """Up to `want` different reclaimable leaves of the device, picked by xorshift64 (Marsaglia, 2003) from `seed`; at most
        eight picks per leaf wanted, so fewer when few frames are reclaimable."""
        pool = self._pool(device)
        n = len(pool.frames)
        found: list[int] = []
        seen: set[int] = set()
        state = (seed ^ 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF or 1
        for _ in range(8 * want if n else 0):
            if len(found) == want:
                break
            state ^= state << 13 & 0xFFFFFFFFFFFFFFFF
            state ^= state >> 7
            state ^= state << 17 & 0xFFFFFFFFFFFFFFFF
            f = (state >> 32) * n >> 32
            frame = pool.frames[f]
            if self._can_go(pool, f) and f not in seen and self._blocks[frame.block].children[device] == 0:
                seen.add(f)
                found.append(frame.block)
        return found

    def ghosts(self) -> int:
        return self._ghosts

    def _need_blocks(self, blocks: Sequence[int], what: str) -> None:
        if any(not 0 <= b < len(self._blocks) for b in blocks):
            raise ValueError(f"core: {what} names a block that does not exist")

    @staticmethod
    def _need_frames(pool: PoolState, frames: Sequence[int], what: str) -> None:
        if any(not 0 <= f < len(pool.frames) for f in frames):
            raise ValueError(f"core: {what} names a frame that does not exist")
