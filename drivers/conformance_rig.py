"""What the conformance suite stands on: one driver process, its memory, and passes written by hand.

The rig plays the daemon's part without any kernel: it writes page-table rows, sends messages, waits with a deadline, and
after every pass looks at the whole arena.  A driver is judged by what it answers and by which bytes changed.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from attnix.kernel.batch import SAMPLE, SEQ, Seq
from attnix.kernel.events import Exec, ExecDone
from attnix.kernel.geometry import RowLayout

from .channel import BadMessage
from .conformance_process import DriverProcess, Nonconformance, require
from .memfd import create_memfd, map_shared, reopen_read_only
from .messages import decode_done, exec_message, expected_results
from .protocol import ExecStats
from .spec import DriverSpec

_PAIR: Final = struct.Struct("<ii")
OLD_CONTENT: Final = 0x5A  # frames begin with this, so that reading an unwritten one differs from reading zeros


@dataclass
class PassSeq:
    """One sequence of a hand-written pass; the rest of its record takes values that mean "off"."""

    slot: int
    start: int
    tokens: Sequence[int]
    write_from: int = 0
    flags: int = SAMPLE
    generation: int | None = None  # None: the row's own
    entries: int | None = None  # None: as many as cover the tokens
    temperature: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    logprobs: int = 0
    score_from: int = 0
    prompt_tokens: int = 0
    history: Sequence[int] = ()
    allowed: bytes = b""


@dataclass
class Answer:
    """A completed pass, unpacked; two are equal when they say the same, however long they took."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[tuple[list[int], list[float]]]
    scores: list[list[float]]
    stats: ExecStats = field(compare=False)


class Rig(DriverProcess):
    """An accel driver process under test.

    spec, layout, block_tokens  how it is started and what its configuration says about rows and blocks
    deadline_s                  longest wait for any one answer; the first, which follows loading, may take START_S
    """

    def __init__(self, spec: DriverSpec, layout: RowLayout, block_tokens: int, *, deadline_s: float = 30.0) -> None:
        self.layout = layout
        self.block_tokens = block_tokens
        self._seq = 0
        arena_fd = create_memfd("conformance-arena", spec.arena_bytes)
        rows_fd = create_memfd("conformance-rows", max(spec.rows_bytes, layout.total_bytes))
        rows_read_only_fd = reopen_read_only(rows_fd)
        self.arena = map_shared(arena_fd)
        self.arena[:] = bytes([OLD_CONTENT]) * len(self.arena)
        self._rows = map_shared(rows_fd)
        try:
            super().__init__(spec, arena_fd, rows_read_only_fd, deadline_s=deadline_s)
        finally:
            for fd in (arena_fd, rows_fd, rows_read_only_fd):
                os.close(fd)

    def close(self) -> None:
        super().close()
        self.arena.close()
        self._rows.close()

    # -- frames and rows ------------------------------------------------------------------------------------------

    def frame(self, index: int) -> bytes:
        return bytes(self.arena[index * self.probe.frame_bytes : (index + 1) * self.probe.frame_bytes])

    def set_frame(self, index: int, content: bytes) -> None:
        self.arena[index * self.probe.frame_bytes : (index + 1) * self.probe.frame_bytes] = content

    def spoil(self, frames: Sequence[int]) -> None:
        """Give frames the content they had at the start."""
        for index in frames:
            self.set_frame(index, bytes([OLD_CONTENT]) * self.probe.frame_bytes)

    def digests(self) -> list[bytes]:
        """A digest of every frame, and of what lies behind the last one."""
        view = memoryview(self.arena)
        step = self.probe.frame_bytes
        ends = [*range(0, self.probe.capacity_frames * step + 1, step), len(view)]
        found = [
            hashlib.blake2b(view[a:b], digest_size=16).digest() for a, b in itertools.pairwise(ends)
        ]  # fmt: skip
        view.release()
        return found

    def map_row(self, slot: int, frames: Sequence[int], tokens: int, *, generation: int = 1) -> None:
        """Make row `slot` map `tokens` tokens into `frames`, full blocks first; the rest of the row is unmapped."""
        n = self.layout.entries
        full = [-1] * n
        full[: len(frames)] = frames
        left = [min(self.block_tokens, max(0, tokens - i * self.block_tokens)) for i in range(n)]
        struct.pack_into(f"<{n}i", self._rows, self.layout.frame_offset + 4 * n * slot, *full)
        struct.pack_into(f"<{n}i", self._rows, self.layout.shift_offset + 4 * n * slot, *([0] * n))
        struct.pack_into(f"<{n}h", self._rows, self.layout.count_offset + 2 * n * slot, *left)
        struct.pack_into("<I", self._rows, self.layout.generation_offset + 4 * slot, generation)

    def row_frames(self, slot: int) -> list[int]:
        n = self.layout.entries
        return list(struct.unpack_from(f"<{n}i", self._rows, self.layout.frame_offset + 4 * n * slot))

    def row_generation(self, slot: int) -> int:
        return int(struct.unpack_from("<I", self._rows, self.layout.generation_offset + 4 * slot)[0])

    # -- passes ---------------------------------------------------------------------------------------------------

    def effect(self, seqs: Sequence[PassSeq], copies: Sequence[tuple[int, int]] = ()) -> Exec:
        """Pack a pass, with the next seq number."""
        self._seq += 1
        tokens: list[int] = []
        records: list[bytes] = []
        for seq in seqs:
            end = seq.start + len(seq.tokens)
            entries = -(-end // self.block_tokens) if seq.entries is None else seq.entries
            generation = self.row_generation(seq.slot) if seq.generation is None else seq.generation
            record = Seq(
                seq.slot, generation, seq.start, len(seq.tokens), seq.write_from, entries, len(tokens), seq.flags,
                seq.temperature, 1.0, 0.0, 0, seq.seed, 1.0, seq.presence_penalty, 0.0, seq.logprobs, seq.score_from,
                seq.prompt_tokens, seq.slot + 1, 0, 0,
            )  # fmt: skip
            records.append(SEQ.pack(*record))
            tokens += seq.tokens
        histories = tuple(array("i", seq.history).tobytes() for seq in seqs if seq.history)
        packed_copies = b"".join(_PAIR.pack(*pair) for pair in copies)
        masks = tuple(seq.allowed for seq in seqs if seq.allowed)
        packed = array("i", tokens).tobytes()
        return Exec(0, self._seq, b"".join(records), packed, packed_copies, histories, b"", masks)

    def run(self, seqs: Sequence[PassSeq], copies: Sequence[tuple[int, int]] = ()) -> Answer:
        """Run a pass that must succeed, and hold it to everything that is true of every pass.

        It is answered once and before anything sent later, its counts are right, and no frame changed but those it had
        to write.
        """
        effect = self.effect(seqs, copies)
        allowed = {destination for _, destination in copies}
        for seq in seqs:
            frames = self.row_frames(seq.slot)
            for position in range(max(seq.start, seq.write_from), seq.start + len(seq.tokens)):
                allowed.add(frames[position // self.block_tokens])
        before = self.digests()
        self.send(exec_message(effect))
        answers = self.until_health()
        self.require_unchanged(before, allowed)
        require(
            len(answers) == 1, f"a pass was answered {len(answers)} times before a later message was: {answers!r:.300}"
        )
        message = answers[0]
        require(message[0] == "done", f"a valid pass was not done: {message!r:.300}")
        try:
            done, stats = decode_done(message, 0, expected_results(effect.seqs))
        except BadMessage as error:
            raise Nonconformance(str(error)) from error
        require(done.seq == effect.seq, f"pass {effect.seq} was answered as {done.seq}")
        n_tokens = sum(len(seq.tokens) for seq in seqs)
        counted = (stats.computed_tokens, stats.sequences, stats.copied_frames)
        require(counted == (n_tokens, len(seqs), len(copies)), f"a pass of {n_tokens} tokens counted as {stats}")
        return _unpack(done, stats)

    def refused(self, message: list[Any]) -> int:
        """Send an `exec` that must be refused without a trace; the errno of its answer."""
        before = self.digests()
        self.send(message)
        answers = self.until_health()
        self.require_unchanged(before, set())
        require(len(answers) == 1 and answers[0][0] == "failed", f"a wrong pass was answered with {answers!r:.300}")
        answer = answers[0]
        well_formed = len(answer) == 4 and answer[1] == message[1] and isinstance(answer[2], int) and answer[3]
        require(bool(well_formed), f"not a proper refusal of pass {message[1]}: {answer!r:.300}")
        return int(answer[2])

    def require_unchanged(self, before: list[bytes], allowed: set[int]) -> None:
        """Error: Nonconformance when a frame outside `allowed` is not as it was."""
        after = self.digests()
        changed = [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b and n not in allowed]
        require(not changed, f"frames {changed} changed; only {sorted(allowed)} may")


def _unpack(done: ExecDone, stats: ExecStats) -> Answer:
    return Answer(
        list(array("i", done.tokens)),
        list(array("f", done.logprobs)),
        [(list(array("i", ids)), list(array("f", logprobs))) for ids, logprobs in done.tops],
        [list(array("f", scores)) for scores in done.scores],
        stats,
    )
