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

from .batch import HISTORY, SAMPLE, SEQ, SEQ_BYTES
from .errors import Panic
from .records import (
    BLOCKED_BY_LOAD,
    EVICT,
    FILLING,
    LENGTH,
    LOADING,
    NOROOM,
    OK,
    OWN_EVICT,
    OWN_NOROOM,
    PREFILL,
    STOP,
    VALID,
    Advance,
    Commit,
    Plan,
)
from .twin_tables import FrameState, SlotState
from .twin_tiers import TwinTiers


class TwinCore(TwinTiers):
    """Requires: calls from one thread; slots and devices that exist; `plan` only when no pass of that device is in flight.

    The arguments are those of `TwinTables`.
    """

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

    def advance(self, s: int) -> Advance:
        """Skip blocks that others have computed, and say how many tokens this slot may compute next.  Requires: admitted."""
        slot = self._slot(s)
        size = self.block_tokens
        n = len(slot.log)
        self._skip(s, False)
        frames = self._pools[slot.device].frames
        end = slot.computed
        while end < n:
            frame = frames[slot.frames[end // size]]
            if frame.state == VALID:
                break
            if frame.state == LOADING:
                if end == slot.computed and not self._begun(slot, frame):
                    return Advance(end, 0, BLOCKED_BY_LOAD)
                if end > slot.computed:
                    break
            elif self._blocks[frame.block].indexed and frame.filler != s:
                if frame.filler >= 0:
                    if end == slot.computed:
                        return Advance(end, 0, frame.filler)
                    break
                frame.filler = s
            end = min((end // size + 1) * size, n)
        return Advance(slot.computed, end - slot.computed, -1)

    def skip_loading(self, s: int) -> None:
        """Count what is LOADING as computed: the next pass will wait, layer by layer, for those transfers (a gated pass)."""
        self._slot(s)
        self._skip(s, True)

    def _skip(self, s: int, gated: bool) -> None:
        """Move `computed` over what others have computed, or loaded, or are loading."""
        slot = self._slots[s]
        frames = self._pools[slot.device].frames
        size = self.block_tokens
        n = len(slot.log)
        if n > self._mapped_tokens(slot):
            raise Panic(f"advance: slot {s} has {n} tokens, {self._mapped_tokens(slot)} of them mapped")
        while slot.computed < n:
            i = slot.computed // size
            frame = frames[slot.frames[i]]
            if frame.state == VALID or (gated and frame.state == LOADING and not frame.known):
                to = min((i + 1) * size, n)
            elif (
                frame.known
                and slot.computed == i * size
                and frame.filler in (s, -1)
                and (frame.state == FILLING or (gated and frame.state == LOADING))
            ):
                to = min(i * size + frame.known, n)
                frame.filler = s
            else:
                break
            slot.hit_total += to - slot.computed
            slot.computed = to
        slot.highwater = max(slot.highwater, slot.computed)

    def _begun(self, slot: SlotState, frame: FrameState) -> bool:
        """The slot has gone past the known tokens of this LOADING frame (a gated pass)."""
        return frame.known > 0 and slot.computed % self.block_tokens >= frame.known

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
                frame.known = 0
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
        need: dict[int, int] = {}
        requester = -1
        for s in decode:
            more = self._growth(s)
            fresh += more
            requester = self._grows(device, s, more, need, requester)
        seen = set(decode)
        for s, start, ntokens, _flags, _from, _left in chunks:
            self._check_chunk(device, s, start, ntokens)
            if s in seen:
                raise Panic(f"plan: slot {s} is twice in one pass")
            seen.add(s)
            more = self._chunk_growth(s, start + ntokens)
            fresh += more
            requester = self._grows(device, s, more, need, requester)
        for g in sorted(need):
            used, own, _, hard = self._account(device, g)
            shortage = used + need[g] - hard
            if hard and shortage > 0:
                status = OWN_EVICT if shortage <= own else OWN_NOROOM
                return Plan(status, shortage - (own if status == OWN_NOROOM else 0), 0, b"", b"", b"", 0, 0, g)
        if fresh > len(pool.free):
            requester = max(0, requester)
            shortage = fresh - len(pool.free)
            spare = self._spare(pool, requester)
            status = EVICT if shortage <= spare else NOROOM
            return Plan(status, shortage - (spare if status == NOROOM else 0), 0, b"", b"", b"", 0, 0, requester)
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

    def _grows(self, device: int, s: int, more: int, need: dict[int, int], requester: int) -> int:
        """Slot s needs `more` frames (0 or 1); for whom room is to be made, if it must: the first group that has no guarantee
        to call on, else the first."""
        if not more or not any(soft or hard for (d, _), (_, _, soft, hard) in self._accounts.items() if d == device):
            return requester
        group = self._slots[s].group
        for g in self._chain(group):
            need[g] = need.get(g, 0) + 1
        if requester < 0 or (self._entitled(device, requester) and not self._entitled(device, group)):
            return group
        return requester

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
        (generation,) = struct.unpack_from("<I", self._rows(pool.device), self.layout.generation_offset + 4 * s)
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
        for g in self._chain(slot.group):
            self._served[g] = self.served(g) + max(1, end - begin)
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
                frame.known = 0
            elif frame.state == LOADING and frame.known:
                frame.known = size  # it will be whole when its load is reported
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
        """Every frame of the device is void (its memory did not survive): drop all its slots, forget all its copies.

        Requires: no transfer touches the device.
        """
        pool = self._pool(device)
        self.rollback(device)
        for s, slot in enumerate(self._slots):
            if slot.used and slot.device == device:
                self.drop(s)
        for f, frame in enumerate(pool.frames):
            if frame.stamp:
                if frame.wired:
                    raise Panic(f"lose: a transfer still uses frame {f} of device {device}")
                self._free_frame(pool, f)
