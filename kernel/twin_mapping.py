"""The twin core's memory: logs and what is mapped for them, sharing, copy-on-write, frames and their eviction (admission
is twin_admission.py).

twin.py's text explains the ideas and the words.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque

from .errors import Panic
from .records import FILLING, FREE, LOADING, VALID
from .twin_groups import TwinGroups
from .twin_tables import ROOTS, PoolState, SlotState


class TwinMapping(TwinGroups):
    """Everything that maps, unmaps, shares and frees."""

    # -- slots and logs -----------------------------------------------------------------------------------------

    def open_slot(self, device: int, domain: int, root: bytes) -> int:
        """A fresh slot on `device`, or -1 when all are taken.  root: 16 bytes, key[-1] of the domain."""
        if self._pool(device).rows is None:
            raise ValueError(f"core: device {device} is a tier, nothing runs there")
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
        self._leave_tail(slot)
        slot.used = False
        slot.log = array("i")
        slot.keys = []
        slot.stops = ()
        offset = self.layout.generation_offset + 4 * s
        rows = self._rows(slot.device)
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
        if slot.tail_end > length:
            self._leave_tail(slot)
        self._unmap(s, length)
        last = length // size
        if length % size and len(slot.frames) > last:
            frame = self._pools[slot.device].frames[slot.frames[last]]
            block = self._blocks[frame.block]
            if frame.state == LOADING or (frame.state == FILLING and (block.indexed or frame.known)):
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
            child.group = parent.group
            child.log = parent.log[:]
            child.keys = parent.keys[:]
            child.computed = parent.computed
            child.highwater = parent.computed
            if parent.tail_block >= 0:
                child.tail_block = parent.tail_block
                child.tail_end = parent.tail_end
                self._blocks[child.tail_block].owners += 1
            for i, f in enumerate(parent.frames):
                count = parent.counts[i]
                if not self._blocks[pool.frames[f].block].indexed:
                    count = min(count, parent.computed - i * size)
                    if pool.frames[f].state == LOADING:  # not here yet, though the parent's passes may count on it
                        child.computed = min(child.computed, i * size)
                        break
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

    def _find(self, slot: SlotState, i: int, parent: int) -> int:
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
            frame.block = other
            self._add_copy(other, slot.device, f)
        else:
            block.key = key
            block.tokens = slot.log[i * size : (i + 1) * size].tobytes()
            block.parent = parent
            block.domain = slot.domain
            block.depth = i * size
            block.indexed = True
            block.used_ns = self.now_ns
            self._index[key] = frame.block
            self._indexed += 1
            if parent >= 0:
                above = self._blocks[parent]
                above.nchildren += 1
                above.children[slot.device] += 1
                block.sibling, above.child = above.child, frame.block
            else:
                block.sibling = self._newest_root[slot.domain % ROOTS]
                self._newest_root[slot.domain % ROOTS] = frame.block

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
        rows = self._rows(slot.device)
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
        struct.pack_into("<h", self._rows(slot.device), self.layout.count_offset + 2 * at, count)

    def _unmap(self, s: int, keep_tokens: int) -> None:
        """Drop the entries that hold nothing of `keep_tokens`, deepest first: a leaf is older in the ring than its parent."""
        slot = self._slots[s]
        pool = self._pools[slot.device]
        rows = self._rows(slot.device)
        keep = -(-keep_tokens // self.block_tokens)
        while len(slot.frames) > keep:
            i = len(slot.frames) - 1
            if i == slot.pending_entry:
                pool.frames[slot.frames[i]].known = 0  # the copy was never made
                self._settle_copy(slot, pool)
            f = slot.frames.pop()
            slot.counts.pop()
            at = s * self.layout.entries + i
            struct.pack_into("<i", rows, self.layout.frame_offset + 4 * at, -1)
            struct.pack_into("<h", rows, self.layout.count_offset + 2 * at, 0)
            self._put(pool, f, s)

    # -- frames -------------------------------------------------------------------------------------------------

    def _alloc_frame(self, pool: PoolState, s: int) -> int:
        """A frame for slot s, with a block of its own that nobody can find yet."""
        if not self._free_blocks:
            self._sweep()
        if not self._free_blocks:
            raise Panic("no free block where one was counted")
        b = self._free_blocks.pop()
        f = self._alloc_copy(pool, b, self._slots[s].group)
        frame = pool.frames[f]
        frame.refs = 1
        frame.filler = s
        return f

    def _alloc_copy(self, pool: PoolState, b: int, owner: int) -> int:
        """A frame for block b, which has none on this device.  Nobody maps it yet."""
        f = pool.free.pop()
        frame = pool.frames[f]
        frame.state = FILLING
        frame.filler = -1
        frame.known = 0
        frame.block = b
        self._own(pool, frame, owner)
        self._add_copy(b, pool.device, f)
        return f

    def _add_copy(self, b: int, device: int, f: int) -> None:
        block = self._blocks[b]
        if block.ncopies == 0 and block.indexed:
            self._ghosts -= 1
        block.copies[device] = f
        block.ncopies += 1
        if block.parent >= 0:
            self._blocks[block.parent].children[device] += 1

    def _free_block(self, b: int) -> None:
        """Nobody has or wants it: forget it, and with it every ghost that was only kept for its sake."""
        while b >= 0:
            block = self._blocks[b]
            parent = block.parent
            if block.indexed:
                del self._index[block.key]
            block.reset()
            self._free_blocks.append(b)
            if parent < 0:
                return
            above = self._blocks[parent]
            above.nchildren -= 1
            if above.nchildren or above.ncopies:
                return
            self._ghosts -= 1
            b = parent

    def _take(self, pool: PoolState, f: int) -> None:
        frame = pool.frames[f]
        frame.refs += 1
        if frame.stamp:
            self._unstamp(pool, frame)

    def _put(self, pool: PoolState, f: int, s: int) -> None:
        """One page-table entry less names frame f."""
        frame = pool.frames[f]
        if frame.refs < 1:
            raise Panic(f"I3: frame {f} has no reference to give back")
        frame.refs -= 1
        if frame.filler == s:
            frame.filler = -1
        if frame.refs == 0 and frame.wired == 0:
            self._retire(pool, f)

    def _retire(self, pool: PoolState, f: int) -> None:
        """No entry names frame f: keep it as cache if it can be found, or is a saved tail; free it otherwise."""
        frame = pool.frames[f]
        block = self._blocks[frame.block]
        if frame.state == VALID and (block.indexed or block.owners):
            if block.indexed:
                block.used_ns = self.now_ns
            self._count_reclaimable(pool, frame.owner, 1)
            self._stamp(pool, f)
        else:
            self._free_frame(pool, f)

    def _stamp(self, pool: PoolState, f: int) -> None:
        """Make a reclaimable frame the most recently used one."""
        self._clock += 1
        pool.frames[f].stamp = self._clock
        pool.ring.append((f, self._clock))
        if len(pool.ring) >= 2 * len(pool.frames) + 16:
            pool.ring = deque(e for e in pool.ring if pool.frames[e[0]].stamp == e[1])

    def _free_frame(self, pool: PoolState, f: int) -> None:
        frame = pool.frames[f]
        b = frame.block
        block = self._blocks[b]
        if block.parent >= 0:
            self._blocks[block.parent].children[pool.device] -= 1
        block.copies[pool.device] = -1
        block.ncopies -= 1
        if block.ncopies == 0:
            if block.owners:
                self._forget_tail(b)
            if block.nchildren:
                self._ghosts += 1
            else:
                self._free_block(b)
        if frame.stamp:
            self._unstamp(pool, frame)
        self._charge(pool.device, frame.owner, -1)
        frame.owner = 0
        frame.state = FREE
        frame.block = -1
        frame.filler = -1
        frame.known = 0
        pool.free.append(f)
        self._freed += 1

    def _sweep(self) -> None:
        """Too many ghosts: give up what continues them in the tiers, and with that the ghosts themselves."""
        doomed: dict[int, bool] = {-1: False}
        for b in range(len(self._blocks)):
            path = []
            while b not in doomed:
                path.append(b)
                block = self._blocks[b]
                if block.ncopies == 0 and block.nchildren:
                    doomed[b] = True
                else:
                    b = block.parent
            for x in path:
                doomed[x] = doomed[b]
        for pool in self._pools:
            for f, frame in enumerate(pool.frames):
                if frame.stamp and frame.wired == 0 and doomed.get(frame.block, False):
                    self._free_frame(pool, f)

    # -- saved tails ----------------------------------------------------------------------------------------------

    def _leave_tail(self, slot: SlotState) -> None:
        """The slot will not come back to its saved tail."""
        b = slot.tail_block
        slot.tail_block, slot.tail_end = -1, 0
        if b < 0:
            return
        block = self._blocks[b]
        block.owners -= 1
        if block.owners == 0:
            for pool, f in zip(self._pools, block.copies[:], strict=False):
                if f >= 0 and pool.frames[f].wired == 0:
                    self._free_frame(pool, f)
                elif f >= 0 and pool.frames[f].stamp:  # no cache any more: freed when its transfer has ended
                    self._unstamp(pool, pool.frames[f])

    def _forget_tail(self, b: int) -> None:
        """Saved tail b has no copy left: the slots that counted on it compute it again."""
        for slot in self._slots:
            if slot.used and slot.tail_block == b:
                slot.tail_block, slot.tail_end = -1, 0
        self._blocks[b].owners = 0

    def _writable(self, s: int, i: int) -> bool:
        """I5: entry i may be written if this slot alone names it and nobody can find it or has yet to copy it, or if
        this slot is the one that fills it for all."""
        slot = self._slots[s]
        frame = self._pools[slot.device].frames[slot.frames[i]]
        if self._blocks[frame.block].indexed:
            return frame.state != VALID and frame.filler == s
        if frame.state == LOADING:
            return frame.refs == 1 and frame.filler == s
        return frame.refs == 1 and frame.wired == 0

    def _open_entry(self, s: int, i: int) -> None:
        """Make entry i one that this slot may write.  Requires: a free frame if it is not `_writable`."""
        slot = self._slots[s]
        frame = self._pools[slot.device].frames[slot.frames[i]]
        if not self._writable(s, i):
            self._copy_on_write(s, i)
        elif (
            not self._blocks[frame.block].indexed and frame.state != LOADING
        ):  # it may be VALID: a private block that was cut
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

    def _settle_copy(self, slot: SlotState, pool: PoolState) -> None:
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
            if pool.frames[f].stamp == stamp and self._may_go(pool, pool.frames[f]):
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
            free = frame.stamp and frame.refs == 0 and frame.wired == 0 and self._blocks[b].children[device] == 0
            if free and self._may_go(pool, frame):
                self._free_frame(pool, f)
                self._evictions += 1
                done += 1
        return done
