"""The twin core's admission: which frames a log gets, what it shares, what it waits for.

twin.py's text explains the ideas and the words.
"""

from __future__ import annotations

from array import array

from .records import EVICT, FILLING, LOADING, NOROOM, OK, OWN_EVICT, OWN_NOROOM, VALID, Admit
from .twin_mapping import TwinMapping
from .twin_tables import ROOTS, PoolState, SlotState

_ALIKE = 8  # blocks looked at for one that begins like the rest of a log


class TwinAdmission(TwinMapping):
    """`admit` and what it is made of."""

    def admit(
        self, s: int, reserve_frames: int, sources: int = 0, first_load: int = 0, partial_tokens: int = 0
    ) -> Admit:
        """Map frames for the whole log, all or nothing.  Requires: not in flight.

        Full blocks found in the index are shared (also while FILLING or LOADING: the slot then waits).  A block that has
        no copy on this device but one on a device of the bit mask `sources` gets a frame here that is LOADING: its
        transfer, named by `loads()`, must be made by the caller and reported with `landed`.  Blocks before `first_load`
        are computed rather than loaded.  When the known blocks end where this slot's saved tail begins, the tail is
        loaded too.  With partial_tokens > 0, the first tokens of a known block that begins like the rest of the log are
        used if they are at least that many: copied by the next pass, or loaded.  What remains is allocated; full blocks
        are indexed at once with this slot as filler.

        `reserve_frames` must stay available (free or reclaimable) afterwards.  EVICT: the shared blocks are mapped
        already, so they cannot be the victims.  OWN_EVICT, OWN_NOROOM: the same, of the frames charged to one group.
        """
        slot = self._slot(s)
        self._need_idle(slot)
        pool = self._pools[slot.device]
        size = self.block_tokens
        self._loads = []
        self._hit_blocks = []
        needed = -(-len(slot.log) // size)
        if needed > self.layout.entries:
            raise ValueError(f"core: {len(slot.log)} tokens do not fit a row of {self.layout.entries} entries")
        tail = self._tail(slot)  # index of the first entry that is missing or partly filled
        chain, hits, held = self._lookup(slot, tail)
        keeps_tail = not hits and tail < len(slot.frames)
        if keeps_tail:
            chain = []
        fresh = needed - tail - hits - (1 if keeps_tail else 0)
        if keeps_tail and self._tail_written(slot) and not self._writable(s, tail):
            fresh += 1
        over, missing = self._over_limit(slot, fresh, chain[:hits]) if fresh else (0, 0)
        if missing:
            return Admit(OWN_NOROOM, missing, 0, 0, 0, over)
        shared = [pool.frames[self._blocks[b].copies[slot.device]] for b in chain[:hits]] if held else []
        cached = [frame.owner for frame in shared if frame.stamp]
        for owner in cached:  # what it shares is no cache that could go for it
            self._count_reclaimable(pool, owner, -1)
        available = len(pool.free) + self._spare(pool, slot.group)
        for owner in cached:
            self._count_reclaimable(pool, owner, 1)
        if hits and tail < len(slot.frames) and slot.frames[tail] != self._blocks[chain[0]].copies[slot.device]:
            old = pool.frames[slot.frames[tail]]
            available += 1 if old.refs == 1 and old.wired == 0 else 0  # the partial tail that a whole block replaces
        if fresh and fresh + reserve_frames > available:
            return Admit(NOROOM, fresh + reserve_frames - available, 0, 0, 0, slot.group)
        here = chain[:hits]
        if here:
            frames = [self._blocks[b].copies[slot.device] for b in here]
            for f in frames:  # before anything is unmapped: it may be the last reference
                self._take(pool, f)
                self._blocks[pool.frames[f].block].hits += 1
            if pool.frames[frames[0]].state != VALID:  # what this slot had computed of that block lies elsewhere
                slot.computed = min(slot.computed, tail * size)
            self._unmap(s, tail * size)
            for i, f in enumerate(frames, tail):
                self._map(s, i, f, size)
            self._hits += hits
            self._hit_blocks = here
        for g in self._chain(slot.group) if over else ():  # what was unmapped may have made room
            used, _, _, hard = self._account(slot.device, g)
            if hard and used + fresh > hard:
                return Admit(OWN_EVICT, used + fresh - hard, hits, 0, 0, g)
        if fresh > len(pool.free):
            return Admit(EVICT, fresh - len(pool.free), hits, 0, 0, slot.group)
        self._misses += len(slot.keys) - tail - len(chain)
        first = tail + hits
        for b in chain[hits:]:
            present = self._blocks[b].copies[slot.device] >= 0
            loaded = self._bring(s, first, b, sources if first >= first_load else 0)
            self._hits += present
            self._misses += not (present or loaded)  # known, and computed all the same
            first += 1
        if not keeps_tail:
            first += self._resume(s, first, sources, partial_tokens)
        self._fill(s, first, keeps_tail)
        for k in range(len(self._loads) - 4, -1, -4):  # the sources have been used, a leaf before its parent
            source, g = self._pools[self._loads[k + 1]], self._loads[k + 2]
            if source.frames[g].stamp:
                self._stamp(source, g)
        return Admit(OK, 0, hits, fresh, len(self._loads) // 4, slot.group)

    def loads(self) -> list[int]:
        """Of the last admission that was OK: block, source device, source frame, frame here; one after the other.

        Both frames are wired.  The source may itself be LOADING still: then this load comes after that one.
        """
        return self._loads[:]

    def hit_blocks(self) -> list[int]:
        """Blocks that the last admission found on its own device."""
        return self._hit_blocks[:]

    def _bring(self, s: int, i: int, b: int, sources: int) -> bool:
        """Map known block b, which has no copy on this device, into a new frame of it: to be loaded (True), or computed by s."""
        slot = self._slots[s]
        pool = self._pools[slot.device]
        block = self._blocks[b]
        block.hits += 1
        f = block.copies[slot.device]
        if f >= 0:  # here, though a block before it is not
            self._take(pool, f)
            self._map(s, i, f, self.block_tokens)
            return False
        f = self._alloc_copy(pool, b, slot.group)
        pool.frames[f].refs = 1
        pool.frames[f].filler = s
        self._map(s, i, f, self.block_tokens)
        return self._load_from(b, sources, pool, f)

    def _load_from(self, b: int, sources: int, pool: PoolState, f: int) -> bool:
        """Make frame f wait for a copy of block b from the first device of `sources` that has one."""
        device, g = self._source_of(b, sources)
        if g < 0:
            return False
        frame = pool.frames[f]
        frame.state = LOADING
        frame.filler = -1
        frame.wired += 1
        self._pools[device].frames[g].wired += 1
        self._loads.extend((b, device, g, f))
        return True

    def _source_of(self, b: int, sources: int) -> tuple[int, int]:
        """(device, frame) of a copy that is there or on its way; one whose transfer failed is no source.  (-1, -1): none."""
        for pool, g in zip(self._pools, self._blocks[b].copies, strict=False):
            if g >= 0 and sources >> pool.device & 1 and pool.frames[g].state != FILLING:
                return pool.device, g
        return -1, -1

    def _resume(self, s: int, i: int, sources: int, partial_tokens: int) -> int:
        """Map entry i with some first tokens that are known: of the saved tail, or of a block that begins like it."""
        slot = self._slots[s]
        pool = self._pools[slot.device]
        size = self.block_tokens
        rest = len(slot.log) - i * size
        if rest <= 0:
            return 0
        if slot.tail_block >= 0 and i * size < slot.tail_end <= i * size + min(rest, size):
            if not self._borrow(s, i, slot.tail_block, slot.tail_end - i * size, sources):
                return 0
            if rest >= size:
                self._index_entry(s, i)
            return 1
        if partial_tokens <= 0 or len(slot.log) < 2:
            return 0
        b, n = self._alike(slot, i)
        if n < partial_tokens:
            return 0
        f = self._blocks[b].copies[slot.device]
        if f >= 0 and pool.frames[f].state == VALID and slot.pending_src < 0:
            own = self._alloc_frame(pool, s)
            self._map(s, i, own, min(size, rest))
            pool.frames[own].known = n
            slot.pending_src = f
            slot.pending_entry = i
            pool.frames[f].wired += 1
            if pool.frames[f].stamp:  # no victim before the copy is made
                self._unstamp(pool, pool.frames[f])
            self._cow += 1
        elif not self._borrow(s, i, b, n, sources):
            return 0
        self._partial_hits += 1
        self._partial_tokens += n
        if rest >= size:
            self._index_entry(s, i)
        return 1

    def _borrow(self, s: int, i: int, b: int, n: int, sources: int) -> bool:
        """Load the first n tokens of block b into a frame of this slot's own for entry i."""
        slot = self._slots[s]
        pool = self._pools[slot.device]
        if self._source_of(b, sources)[1] < 0:
            return False
        own = self._alloc_frame(pool, s)
        self._map(s, i, own, min(self.block_tokens, len(slot.log) - i * self.block_tokens))
        self._load_from(b, sources, pool, own)
        pool.frames[own].filler = s
        pool.frames[own].known = n
        return True

    def _alike(self, slot: SlotState, i: int) -> tuple[int, int]:
        """A block that continues the row's last block, or begins the domain, and shares most first tokens with entry i;
        and how many.  Looks at the eight that were indexed last.  (-1, 0): none."""
        size = self.block_tokens
        parent = -1
        if i:
            parent = self._pools[slot.device].frames[slot.frames[i - 1]].block
            if not self._blocks[parent].indexed:
                return -1, 0
        b = self._blocks[parent].child if i else self._newest_root[slot.domain % ROOTS]
        rest = slot.log[i * size : (i + 1) * size]
        best, most = -1, 0
        for _ in range(_ALIKE):
            if b < 0:
                break
            block = self._blocks[b]
            if not block.indexed or block.parent != parent or block.domain != slot.domain:
                break
            n = 0
            for x, y in zip(array("i", block.tokens), rest, strict=False):
                if x != y:
                    break
                n += 1
            if n > most and block.ncopies:
                best, most = b, n
            b = block.sibling
        return best, min(most, len(slot.log) - i * size - 1)  # the log's last token is always computed

    def _tail_written(self, slot: SlotState) -> bool:
        """Will computing the rest of the log write the row's last entry, which is partial?"""
        i = len(slot.frames) - 1
        if len(slot.log) > i * self.block_tokens + slot.counts[i]:
            return True
        frame = self._pools[slot.device].frames[slot.frames[i]]
        return frame.state != VALID and len(slot.log) > slot.computed

    def _tail(self, slot: SlotState) -> int:
        tail = len(slot.frames)
        if tail and slot.counts[tail - 1] < self.block_tokens:
            tail -= 1
        return tail

    def _lookup(self, slot: SlotState, tail: int) -> tuple[list[int], int, int]:
        """Known blocks that continue the row at `tail`, how many of them, from the first, have a frame on this device, and
        how many of those are reclaimable now."""
        pool = self._pools[slot.device]
        chain: list[int] = []
        hits = held = 0
        parent = -1
        if tail:
            parent = pool.frames[slot.frames[tail - 1]].block
            if not self._blocks[parent].indexed:
                return chain, hits, held
        for i in range(tail, len(slot.keys)):
            b = self._find(slot, i, parent)
            if b < 0:
                break
            f = self._blocks[b].copies[slot.device]
            if f >= 0 and hits == len(chain):
                hits += 1
                held += 1 if pool.frames[f].stamp else 0
            chain.append(b)
            parent = b
        return chain, hits, held

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
