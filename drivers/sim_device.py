"""A simulated accel inside the calling process: frames, page-table rows and the hash model, no clock and no torch.

It reads and writes KV the way a real accel does: only through the page-table row that a sequence names, entry by entry,
`count` tokens from the start of each frame.  It checks a whole pass before it touches a byte, so a refused pass leaves
the frames as they were.

Stricter than a real accel in one point: what a sequence reads of the tokens before its pass is taken before anything is
written.  A pass whose sequences depend on one another's new KV is a mistake of the kernel, and shows as one.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from attnix.kernel.batch import ALLOWED, FORWARD, HISTORY, SAMPLE, SCORE, SEQ_BYTES, Seq, unpack_seqs
from attnix.kernel.errors import E
from attnix.kernel.events import Exec, ExecDone, ExecFailed, Transfer, TransferDone
from attnix.kernel.geometry import RowLayout
from attnix.kernel.tag import GATE_FAILED, gate_value

from .sim_model import DEFAULT_VOCAB, KV_BYTES, Distribution, Trail, sample, scripted
from .stored import Gates, StoredFormat, errors

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap

_PAIR: Final = struct.Struct("<ii")


class _Refused(Exception):
    """The pass cannot be run as asked; nothing has been touched."""

    def __init__(self, code: E, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class _Work(NamedTuple):
    """One sequence of a pass, checked."""

    seq: Seq
    tokens: Sequence[int]  # the new ones
    history: Sequence[int]
    prefix: list[tuple[int, int]]  # (first byte, bytes) of the entries before `start`, in logical order
    places: list[int]  # byte offset of each new token's entry
    homes: list[int]  # home position of each new token
    allowed: bytes  # tokens that may be among its alternatives; empty: all


class SimDevice:
    """Execute passes on simulated frames.

    capacity_frames  frames of the arena
    row_layout, rows the page-table rows, any buffer; only read
    arena            the frames; allocated here when not given.  Frame f is bytes [f * frame_bytes, (f+1) * frame_bytes)
    vocab            vocabulary size
    model            name that keys the hash: two models never agree
    script           tokens to emit instead of the model's, by index after the prompt (`Seq.prompt_tokens`)
    ns_per_token, ns_per_pass  what a pass is said to cost; `wait`, when given, is called with the sum, and may sleep
    layers, identity  of stored frames: in how many parts a frame is checksummed, and 16 bytes for their headers
    gates            int64 array (kernel/tag.py) that passes with gates look at

    Counters: passes, computed_tokens, copied_frames, refused, dropped_frames, sealed_frames (copied out to dram),
    unsealed_frames (copied in from it), corrupt (of those, refused).
    computed is a log of (context, start, ntokens), one per sequence of every pass, for tests that count prefill; callers
    that run for ever clear it.
    """

    def __init__(
        self,
        capacity_frames: int,
        row_layout: RowLayout,
        rows: Buffer,
        block_tokens: int,
        vocab: int = DEFAULT_VOCAB,
        *,
        arena: Buffer | None = None,
        model: str = "sim",
        script: Sequence[int] = (),
        ns_per_token: int = 0,
        ns_per_pass: int = 0,
        wait: Callable[[int], None] | None = None,
        layers: int = 1,
        identity: bytes = bytes(16),
        gates: Buffer | None = None,
    ) -> None:
        self.capacity_frames = capacity_frames
        self.block_tokens = block_tokens
        self.frame_bytes = block_tokens * KV_BYTES
        self.vocab = vocab
        self.model = model
        self.script = tuple(script)
        self.ns_per_token = ns_per_token
        self.ns_per_pass = ns_per_pass
        self._wait = wait
        self.format = StoredFormat(self.frame_bytes, layers, block_tokens, identity)
        self.gates = None if gates is None else Gates(gates)
        n_bytes = capacity_frames * self.frame_bytes
        self.arena = memoryview(bytearray(n_bytes) if arena is None else arena).cast("B")
        if len(self.arena) < n_bytes:
            raise ValueError(
                f"an arena of {len(self.arena)} bytes cannot hold {capacity_frames} frames ({n_bytes} bytes)"
            )
        self._layout = row_layout
        table = memoryview(rows).cast("B")
        if len(table) < row_layout.total_bytes:
            raise ValueError(f"rows of {len(table)} bytes, the layout needs {row_layout.total_bytes}")
        cells = row_layout.slots * row_layout.entries
        self._frame = table[row_layout.frame_offset :][: 4 * cells].cast("i")
        self._shift = table[row_layout.shift_offset :][: 4 * cells].cast("i")
        self._count = table[row_layout.count_offset :][: 2 * cells].cast("h")
        self._generation = table[row_layout.generation_offset :][: 4 * row_layout.slots].cast("I")
        self.computed: list[tuple[int, int, int]] = []
        self.passes = 0
        self.computed_tokens = 0
        self.copied_frames = 0
        self.refused = 0
        self.dropped_frames = 0
        self.sealed_frames = 0
        self.unsealed_frames = 0
        self.corrupt = 0

    @property
    def fingerprint(self) -> str:
        """Digest of everything that decides what a token's KV is."""
        return hashlib.blake2b(f"attnix-sim-1/{self.model}/{self.vocab}".encode(), digest_size=16).hexdigest()

    def frame(self, index: int) -> memoryview:
        """The bytes of one frame, writable: tests corrupt them here."""
        return self.arena[index * self.frame_bytes :][: self.frame_bytes]

    def drop(self, frames: Sequence[int]) -> None:
        """Scrub frames: their content must not be readable by whoever gets them next.  Error: ValueError."""
        if any(not 0 <= index < self.capacity_frames for index in frames):
            raise ValueError(f"a frame outside 0..{self.capacity_frames - 1}")
        for index in frames:
            self.frame(index)[:] = bytes(self.frame_bytes)
        self.dropped_frames += len(frames)

    def execute(self, effect: Exec) -> ExecDone | ExecFailed:
        """Run one pass (kernel/batch.py) to its end.  ExecFailed means that no frame was touched."""
        try:
            self._check_gates(effect)
            copies, works = self._decode(effect)
        except _Refused as refusal:
            self.refused += 1
            return ExecFailed(effect.device, effect.seq, refusal.code, str(refusal))
        return self._invoke(effect, copies, works)

    def identify(self, identity: bytes) -> None:
        """What goes into the headers of frames copied out from now on, and is compared when copying in."""
        self.format = StoredFormat(self.frame_bytes, self.format.layers, self.block_tokens, identity)

    def is_open(self, effect: Exec) -> bool:
        """Whether every load that the pass must not overtake has ended, well or not: `execute` does not wait."""
        return all(value >= gate_value(ticket, self.format.layers) for value, ticket in self._gates_of(effect))

    def _gates_of(self, effect: Exec) -> list[tuple[int, int]]:
        """(value, ticket) of each gate of a pass."""
        pairs = memoryview(effect.gates).cast("q").tolist()
        if not pairs:
            return []
        if self.gates is None:
            raise ValueError("a pass with gates for a device without")
        return [(self.gates.load(gate), ticket) for gate, ticket in zip(pairs[::2], pairs[1::2], strict=True)]

    def _check_gates(self, effect: Exec) -> None:
        for value, ticket in self._gates_of(effect):
            if value < gate_value(ticket, self.format.layers) or value == gate_value(ticket, GATE_FAILED):
                raise _Refused(E.EIO, f"load {ticket} of this pass is at {value >> 10}, layer {value & 1023}")

    def transfer(self, effect: Transfer, dram: Buffer) -> TransferDone:
        """Copy frames out to a dram arena ("read": header and checksums are made) or in from it ("write": verified)."""
        items = len(effect.pairs) // _PAIR.size
        if effect.verb == "read":
            failed = errors(self.format.seal(self.arena, dram, effect.pairs, effect.tags))
            self.sealed_frames += items - len(failed)
        else:
            failed = errors(self.format.unseal(self.arena, dram, effect.pairs, effect.tags))
            self.unsealed_frames += items - len(failed)
        self.corrupt += sum(code == E.ECORRUPT for _, code in failed)
        if effect.gate >= 0 and self.gates is not None:
            self.gates.store(effect.gate, effect.ticket, GATE_FAILED if failed else self.format.layers)
        moved_bytes = (items - len(failed)) * self.frame_bytes
        return TransferDone(effect.device, effect.seq, tuple(failed), moved_bytes, 0)

    # -- decode: check everything, change nothing -----------------------------------------------------------------

    def _decode(self, effect: Exec) -> tuple[list[tuple[int, int]], list[_Work]]:
        if len(effect.seqs) % SEQ_BYTES or len(effect.tokens) % 4 or len(effect.copies) % _PAIR.size:
            raise _Refused(E.EINVAL, "seqs, tokens or copies are not whole records")
        copies: list[tuple[int, int]] = []
        for source, destination in _PAIR.iter_unpack(effect.copies):
            self._check_frame(source)
            self._check_frame(destination)
            copies.append((source, destination))
        tokens = array("i", effect.tokens)
        if len(tokens) and (min(tokens) < 0 or max(tokens) >= self.vocab):
            raise _Refused(E.EINVAL, f"a token id is outside the vocabulary of {self.vocab}")
        histories, masks = iter(effect.histories), iter(effect.allowed)
        works: list[_Work] = []
        written: dict[int, int] = {}  # frame -> slot that writes it
        for seq in unpack_seqs(effect.seqs):
            work = self._decode_seq(seq, tokens, histories, masks)
            for position, place in enumerate(work.places, seq.start):
                if position >= seq.write_from:
                    index = place // self.frame_bytes
                    if written.setdefault(index, seq.slot) != seq.slot:
                        raise _Refused(E.EINVAL, f"slots {written[index]} and {seq.slot} both write frame {index}")
            works.append(work)
        if next(histories, None) is not None:
            raise _Refused(E.EINVAL, "more histories than sequences with the HISTORY flag")
        if next(masks, None) is not None:
            raise _Refused(E.EINVAL, "more masks than sequences with the ALLOWED flag")
        return copies, works

    def _check_frame(self, index: int) -> None:
        if not 0 <= index < self.capacity_frames:
            raise _Refused(E.EINVAL, f"frame {index} of {self.capacity_frames}")

    def _decode_seq(self, seq: Seq, tokens: Sequence[int], histories: Iterator[bytes], masks: Iterator[bytes]) -> _Work:
        layout = self._layout
        if not 0 <= seq.slot < layout.slots or not 1 <= seq.entries <= layout.entries:
            raise _Refused(E.EINVAL, f"slot {seq.slot} with {seq.entries} entries is outside the rows")
        if self._generation[seq.slot] != seq.generation:
            raise _Refused(
                E.ESTALE, f"slot {seq.slot} has generation {self._generation[seq.slot]}, not {seq.generation}"
            )
        if seq.start < 0 or seq.ntokens < 1 or not 0 <= seq.token_offset <= len(tokens) - seq.ntokens:
            raise _Refused(
                E.EINVAL, f"slot {seq.slot}: {seq.ntokens} tokens from {seq.token_offset}, start {seq.start}"
            )
        new = tokens[seq.token_offset : seq.token_offset + seq.ntokens]
        prefix: list[tuple[int, int]] = []
        places: list[int] = []
        homes: list[int] = []
        position, end = 0, seq.start + seq.ntokens
        cells = slice(seq.slot * layout.entries, seq.slot * layout.entries + seq.entries)
        for index, shift, count in zip(
            self._frame[cells].tolist(), self._shift[cells].tolist(), self._count[cells].tolist(), strict=True
        ):
            self._check_frame(index)
            if not 1 <= count <= self.block_tokens:
                raise _Refused(E.EINVAL, f"slot {seq.slot}: an entry of {count} tokens")
            base = index * self.frame_bytes
            before = min(count, max(0, seq.start - position))
            if before:
                prefix.append((base, before * KV_BYTES))
            for offset in range(before, min(count, end - position)):
                places.append(base + offset * KV_BYTES)
                homes.append(position + offset - shift)
            position += count
        if position < end:
            raise _Refused(
                E.EINVAL, f"slot {seq.slot}: {seq.entries} entries map {position} tokens, the pass needs {end}"
            )
        history: Sequence[int] = ()
        if seq.flags & HISTORY:
            history = array("i", next(histories, b""))
            if len(history) != end or history[seq.start :] != new:
                raise _Refused(E.EINVAL, f"slot {seq.slot}: the history is not the {end} tokens of the context")
        allowed = next(masks, b"") if seq.flags & ALLOWED else b""
        if seq.flags & ALLOWED and len(allowed) != -(-self.vocab // 8):
            raise _Refused(E.EINVAL, f"slot {seq.slot}: a mask of {len(allowed)} bytes for {self.vocab} tokens")
        return _Work(seq, new, history, prefix, places, homes, allowed)

    # -- invoke: cannot fail --------------------------------------------------------------------------------------

    def _invoke(self, effect: Exec, copies: list[tuple[int, int]], works: list[_Work]) -> ExecDone:
        for source, destination in copies:
            self.frame(destination)[:] = self.frame(source)
        trails: list[tuple[Trail, list[bytes]]] = []
        for work in works:
            trail = Trail(self.model)
            for first, n_bytes in work.prefix:
                trail.absorb(self.arena[first : first + n_bytes])
            unwritten = max(0, min(work.seq.ntokens, work.seq.write_from - work.seq.start))
            found = [bytes(self.arena[place : place + KV_BYTES]) for place in work.places[:unwritten]]
            trails.append((trail, found))

        sampled, logprobs = array("i"), array("f")
        tops: list[tuple[bytes, bytes]] = []
        scores: list[bytes] = []
        for work, (trail, found) in zip(works, trails, strict=True):
            seq = work.seq
            score = array("f")
            for n, (token, place, home) in enumerate(zip(work.tokens, work.places, work.homes, strict=True)):
                if seq.flags & SCORE and n and seq.start + n >= seq.score_from:
                    score.append(trail.distribution(work.tokens[n - 1], self.vocab).logprob(token))
                if n >= len(found):
                    self.arena[place : place + KV_BYTES] = trail.entry(token, home)
                    # Read back, never kept: what attention sees is what lies in the frame.
                    trail.absorb(self.arena[place : place + KV_BYTES])
                else:
                    trail.absorb(found[n])
            if seq.flags & (SAMPLE | FORWARD):
                says, token = self._next(trail, work)
                if seq.flags & SAMPLE:
                    sampled.append(token)
                    logprobs.append(says.logprob(token))
                if seq.has_top:
                    top_tokens, top_logprobs = says.top(seq.logprobs, work.allowed)
                    tops.append((array("i", top_tokens).tobytes(), array("f", top_logprobs).tobytes()))
            if seq.flags & SCORE:
                scores.append(score.tobytes())
            self.computed.append((seq.context, seq.start, seq.ntokens))

        n_tokens = sum(work.seq.ntokens for work in works)
        compute_ns = self.ns_per_pass + self.ns_per_token * n_tokens
        self.passes += 1
        self.computed_tokens += n_tokens
        self.copied_frames += len(copies)
        if self._wait is not None and compute_ns:
            self._wait(compute_ns)
        return ExecDone(
            effect.device,
            effect.seq,
            sampled.tobytes(),
            logprobs.tobytes(),
            tuple(tops),
            tuple(scores),
            n_tokens,
            compute_ns,
        )

    def _next(self, trail: Trail, work: _Work) -> tuple[Distribution, int]:
        """What follows the last token of this pass, and the token drawn from it."""
        says = trail.distribution(work.tokens[-1], self.vocab)
        position = work.seq.start + work.seq.ntokens
        index = position - work.seq.prompt_tokens
        if 0 <= index < len(self.script):
            return scripted(says, self.script[index]), self.script[index]
        return says, sample(says, work.seq, position, work.history, work.seq.prompt_tokens)
