"""The simulated accel against its oracle, and the control: every mistake in a mapping changes the stream."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from attnix.drivers.faulty import Fault, FaultPlan, FaultyDevice
from attnix.drivers.sim import (
    GREEDY,
    SamplingChoice,
    SimDevice,
    reference_distribution,
    reference_entries,
    reference_scores,
    reference_tokens,
)
from attnix.kernel.batch import FORWARD, HISTORY, SAMPLE, SCORE, SEQ, Seq
from attnix.kernel.errors import E
from attnix.kernel.events import Exec, ExecDone, ExecFailed
from attnix.kernel.geometry import RowLayout

LAYOUT = RowLayout(4, 16)
B = 4
PROMPT = [17, 3, 99, 3, 250, 0, 41]


class Bench:
    """A device and hand-written rows."""

    def __init__(self, **settings: object) -> None:
        self.rows = bytearray(LAYOUT.total_bytes)
        self.device = SimDevice(64, LAYOUT, self.rows, B, **settings)  # type: ignore[arg-type]
        view = memoryview(self.rows)
        cells = LAYOUT.slots * LAYOUT.entries
        self.frame = view[LAYOUT.frame_offset :][: 4 * cells].cast("i")
        self.shift = view[LAYOUT.shift_offset :][: 4 * cells].cast("i")
        self.count = view[LAYOUT.count_offset :][: 2 * cells].cast("h")

    def map_row(self, slot: int, frames: Sequence[int], counts: Sequence[int] = (), shift: int = 0) -> None:
        for entry, frame in enumerate(frames):
            cell = slot * LAYOUT.entries + entry
            self.frame[cell] = frame
            self.count[cell] = counts[entry] if counts else B
            self.shift[cell] = shift

    def effect(
        self, seqs: Sequence[tuple[Seq, Sequence[int]]], copies: Sequence[int] = (), histories: tuple[bytes, ...] = ()
    ) -> Exec:
        tokens: list[int] = []
        records = b""
        for seq, new in seqs:
            records += SEQ.pack(*seq._replace(token_offset=len(tokens)))
            tokens += new
        return Exec(0, 1, records, array("i", tokens).tobytes(), array("i", copies).tobytes(), histories)

    def run(
        self, *seqs: tuple[Seq, Sequence[int]], copies: Sequence[int] = (), histories: tuple[bytes, ...] = ()
    ) -> ExecDone:
        outcome = self.device.execute(self.effect(seqs, copies, histories))
        assert isinstance(outcome, ExecDone), outcome
        return outcome

    def generate(
        self, slot: int, tokens: list[int], start: int, n: int, choice: SamplingChoice = GREEDY, entries: int = 0
    ) -> list[int]:
        """Prefill tokens[start:], then decode, one pass a token, with the history when penalties are on."""
        tokens = list(tokens)
        prompt_tokens = len(tokens)
        penalised = choice.repetition_penalty != 1 or choice.presence_penalty != 0 or choice.frequency_penalty != 0
        for _ in range(n):
            seq = make_seq(slot, start, tokens, choice, prompt_tokens=prompt_tokens, entries=entries)
            histories: tuple[bytes, ...] = ()
            if penalised:
                seq = seq._replace(flags=SAMPLE | HISTORY)
                histories = (array("i", tokens).tobytes(),)
            done = self.run((seq, tokens[start:]), histories=histories)
            start = len(tokens)
            tokens += array("i", done.tokens)
        return tokens[prompt_tokens:]


def make_seq(
    slot: int,
    start: int,
    tokens: Sequence[int],
    choice: SamplingChoice = GREEDY,
    *,
    flags: int = SAMPLE,
    write_from: int = 0,
    prompt_tokens: int = 0,
    logprobs: int = 0,
    score_from: int = 0,
    entries: int = 0,
) -> Seq:
    return Seq(
        slot, 0, start, len(tokens) - start, write_from, entries or -(-len(tokens) // B), 0, flags, choice.temperature,
        choice.top_p, choice.min_p, choice.top_k, choice.seed, choice.repetition_penalty, choice.presence_penalty,
        choice.frequency_penalty, logprobs, score_from, prompt_tokens, slot + 10, 0, 0,
    )  # fmt: skip


CHOICES = [
    GREEDY,
    SamplingChoice(temperature=1.0, seed=5),
    SamplingChoice(temperature=2.0, seed=2**64 - 1, top_k=9),
    SamplingChoice(temperature=0.5, seed=6, top_p=0.75, min_p=0.125),
    SamplingChoice(repetition_penalty=1.5),
    SamplingChoice(temperature=1.0, seed=9, presence_penalty=0.5, frequency_penalty=0.25),
]


@pytest.mark.parametrize("choice", CHOICES)
def test_the_stream_is_the_oracles(choice: SamplingChoice) -> None:
    bench = Bench()
    frames = random.Random(1).sample(range(64), 16)
    bench.map_row(2, frames)
    assert bench.generate(2, PROMPT, 0, 40, choice) == reference_tokens(PROMPT, 40, choice=choice)


def test_choices_matter() -> None:
    """Else the test above would compare one stream with itself six times."""
    streams = [tuple(reference_tokens(PROMPT, 40, choice=choice)) for choice in CHOICES]
    assert len(set(streams)) == len(streams)
    assert reference_tokens(PROMPT, 8, model="other") != reference_tokens(PROMPT, 8)
    assert max(reference_tokens(PROMPT, 200, vocab=10)) < 10


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7])
def test_chunks_of_any_size(chunk: int) -> None:
    bench = Bench()
    bench.map_row(0, [9, 4, 7, 1])
    start = 0
    while start + chunk < len(PROMPT):
        part = PROMPT[: start + chunk]
        assert bench.run((make_seq(0, start, part, flags=0), part[start:])).tokens == b""
        start += chunk
    assert bench.generate(0, PROMPT, start, 6) == reference_tokens(PROMPT, 6)
    assert bench.device.computed[0] == (10, 0, min(chunk, len(PROMPT)))
    assert bench.device.computed_tokens == len(PROMPT) + 5


def test_frames_hold_what_the_oracle_says() -> None:
    bench = Bench()
    bench.map_row(0, [5, 2])
    bench.run((make_seq(0, 0, PROMPT), PROMPT))
    assert bytes(bench.device.frame(5)) + bytes(bench.device.frame(2))[:24] == b"".join(reference_entries(PROMPT))


def test_forward_and_score() -> None:
    bench = Bench()
    bench.map_row(0, [5, 2])
    done = bench.run((make_seq(0, 0, PROMPT, flags=FORWARD | SCORE, logprobs=40, score_from=3), PROMPT))
    ids, logprobs = reference_distribution(PROMPT).top(40)
    assert list(array("i", done.tops[0][0])) == ids
    assert list(array("f", done.tops[0][1])) == pytest.approx(logprobs, rel=1e-6)
    assert list(array("f", done.scores[0])) == pytest.approx(reference_scores(PROMPT, 3), rel=1e-6)
    assert len(done.scores[0]) == 4 * (len(PROMPT) - 3)
    # A later chunk cannot score its own first token: the distribution before it belongs to the pass before.
    later = bench.run((make_seq(0, 4, PROMPT, flags=SCORE), PROMPT[4:]))
    assert list(array("f", later.scores[0])) == pytest.approx(reference_scores(PROMPT, 5), rel=1e-6)
    total = sum(2.718281828459045**logprob for logprob in reference_distribution(PROMPT).top(256)[1])
    assert total == pytest.approx(1.0, abs=1e-9)


STREAM = reference_tokens(PROMPT, 12)


def prefilled() -> Bench:
    """PROMPT's first 7 tokens in frames 8 and 3; the next step decodes from position 7."""
    bench = Bench()
    bench.map_row(0, [8, 3, 6, 11, 12])
    bench.run((make_seq(0, 0, PROMPT, flags=0), PROMPT))
    return bench


def go_on(bench: Bench, entries: int = 0) -> list[int]:
    """The rest of the stream, after its first token has been sampled elsewhere."""
    return bench.generate(0, [*PROMPT, STREAM[0]], len(PROMPT), len(STREAM) - 1, entries=entries)


def test_control_without_a_mistake() -> None:
    assert go_on(prefilled()) == STREAM[1:]


@pytest.mark.parametrize("byte", [0, 7, 8, 31])
@pytest.mark.parametrize("frame", [8, 3])
def test_control_one_bit_of_any_mapped_entry(frame: int, byte: int) -> None:
    bench = prefilled()
    if frame == 3 and byte == 31:  # position 7 is written by the decode itself: flipped before, it must not matter
        bench.device.frame(3)[31] ^= 1
        assert go_on(bench) == STREAM[1:]
        return
    bench.device.frame(frame)[byte] ^= 1
    assert go_on(bench) != STREAM[1:]


def test_control_mistaken_rows() -> None:
    swapped = prefilled()
    swapped.map_row(0, [3, 8])
    assert go_on(swapped) != STREAM[1:]
    elsewhere = prefilled()
    elsewhere.map_row(0, [8, 4])
    assert go_on(elsewhere) != STREAM[1:]
    shifted = prefilled()
    shifted.map_row(0, [8, 3], shift=1)
    assert go_on(shifted) != STREAM[1:], "home positions are part of KV"
    miscounted = prefilled()
    miscounted.map_row(0, [8, 3, 6], counts=[3, 4, 4])
    assert go_on(miscounted, entries=5) != STREAM[1:]


def test_control_a_block_computed_before_its_prefix() -> None:
    """The second block is prefilled while the first frame still holds something else; then the first becomes right."""
    bench = Bench()
    bench.map_row(0, [8, 3, 6, 11, 12])
    bench.run((make_seq(0, 4, PROMPT, flags=0), PROMPT[4:]))
    bench.run((make_seq(0, 0, PROMPT[:4], flags=0), PROMPT[:4]))
    assert go_on(bench) != STREAM[1:]


def test_control_a_pass_that_depends_on_itself() -> None:
    """Two sequences of one pass, the second reading a block that the first writes: refused by way of a wrong stream."""
    bench = Bench()
    bench.map_row(0, [8])
    bench.map_row(1, [8, 3])
    done = bench.run((make_seq(0, 0, PROMPT[:4], flags=0), PROMPT[:4]), (make_seq(1, 4, PROMPT), PROMPT[4:]))
    assert list(array("i", done.tokens)) != STREAM[:1]


def test_lost_copy_on_write() -> None:
    """A fork whose tail was not copied writes into its parent's frame; copied, both go on rightly."""
    for copies, is_right in (((3, 20), True), ((), False)):
        bench = prefilled()
        bench.map_row(1, [8, 20 if copies else 3, 21, 22, 23])
        other = [*PROMPT, 200]
        fork = bench.run((make_seq(1, 7, other), other[7:]), copies=copies)
        assert list(array("i", fork.tokens)) == reference_tokens(other, 1)
        # The parent wrote its own position 7 before the fork; without a copy the fork wrote over it.
        bench.run((make_seq(0, 7, [*PROMPT, STREAM[0]]), [STREAM[0]]))
        fork = bench.run((make_seq(1, 8, [*other, 5]), [5]))
        assert (list(array("i", fork.tokens)) == reference_tokens([*other, 5], 1)) is is_right


def test_write_from_leaves_frames_and_reads_them() -> None:
    bench = prefilled()
    before = bytes(bench.device.arena)
    done = bench.run((make_seq(0, 6, PROMPT, write_from=7), PROMPT[6:]))
    assert list(array("i", done.tokens)) == STREAM[:1]
    assert bytes(bench.device.arena) == before
    bench.device.frame(3)[2 * 8] ^= 1  # the entry of position 6 itself
    done = bench.run((make_seq(0, 6, PROMPT, write_from=7), PROMPT[6:]))
    assert list(array("i", done.tokens)) != STREAM[:1]


def test_script() -> None:
    script = [68, 69, 70]
    bench = Bench(script=script)
    bench.map_row(0, [1, 2, 3, 4, 5])
    stream = bench.generate(0, PROMPT, 0, 5)
    assert stream[:3] == script
    assert stream == reference_tokens(PROMPT, 5, script=script)


def test_time_is_what_the_settings_say() -> None:
    waits: list[int] = []
    bench = Bench(ns_per_pass=1000, ns_per_token=10, wait=waits.append)
    bench.map_row(0, [1, 2])
    assert bench.run((make_seq(0, 0, PROMPT), PROMPT)).compute_ns == 1070
    assert waits == [1070]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"generation": 1}, E.ESTALE),
        ({"slot": 4}, E.EINVAL),
        ({"entries": 1}, E.EINVAL),
        ({"ntokens": 0}, E.EINVAL),
        ({"start": -1}, E.EINVAL),
    ],
)
def test_a_refused_pass_touches_nothing(change: dict[str, int], code: E) -> None:
    bench = prefilled()
    before = bytes(bench.device.arena)
    seq = make_seq(0, 0, PROMPT)._replace(**change)
    outcome = bench.device.execute(bench.effect([(seq, PROMPT)], copies=(8, 20)))
    assert isinstance(outcome, ExecFailed)
    assert outcome.code == code
    assert bytes(bench.device.arena) == before
    assert bench.device.computed == [(10, 0, 7)]


def test_two_writers_of_one_frame_are_refused() -> None:
    bench = Bench()
    bench.map_row(0, [8])
    bench.map_row(1, [8])
    effect = bench.effect([(make_seq(slot, 0, PROMPT[:3]), PROMPT[:3]) for slot in (0, 1)])
    outcome = bench.device.execute(effect)
    assert isinstance(outcome, ExecFailed)
    assert "both write frame 8" in outcome.reason


# -- the faulty wrapper inside a process ---------------------------------------------------------------------------


def test_planned_faults_in_process() -> None:
    bench = Bench()
    bench.map_row(0, [8, 3])
    plan = FaultPlan({
        (1, 0): Fault.FAIL, (1, 1): Fault.LATE, (1, 2): Fault.TWICE, (1, 3): Fault.LOSE, (1, 4): Fault.DIE_AFTER,
        (2, 0): Fault.FLIP, (2, 1): Fault.HANG, (3, 0): Fault.DIE_BEFORE,
    })  # fmt: skip
    faulty = FaultyDevice(bench.device, plan)

    def submit(seq: int) -> list[tuple[str, int]]:
        effect = bench.effect([(make_seq(0, 0, PROMPT), PROMPT)])._replace(seq=seq)
        return [(type(outcome).__name__, outcome.seq) for outcome in faulty.submit(effect)]

    assert submit(1) == [("ExecFailed", 1)]
    assert bench.device.passes == 0
    assert submit(2) == []
    assert submit(3) == [("ExecDone", 3), ("ExecDone", 3), ("ExecDone", 2)]
    assert submit(4) == []
    assert submit(5) == []
    assert faulty.dead
    assert bench.device.passes == 4, "the lost and the last pass were computed"
    assert submit(6) == []
    assert faulty.revive() == 2
    right = bytes(bench.device.arena)
    assert submit(7) == [("ExecDone", 7)]
    flipped = [a ^ b for a, b in zip(right, bytes(bench.device.arena), strict=True)]
    assert sum(byte.bit_count() for byte in flipped) == 1
    assert submit(8) == []
    assert faulty.dead
    assert faulty.revive() == 3
    passes = bench.device.passes
    assert submit(9) == []
    assert faulty.dead
    assert bench.device.passes == passes, "it died before it computed"
    assert [fault for _, _, fault in faulty.met] == list(plan.faults.values())


def test_random_faults_repeat_and_survive_json() -> None:
    plan = FaultPlan({(2, 7): Fault.SLOW}, seed=4, rate_permille=100, kinds=(Fault.FAIL, Fault.LOSE), slow_ns=5)
    drawn = [plan.fault_of(1, number) for number in range(2000)]
    assert FaultPlan.from_json(plan.to_json()) == plan
    assert [FaultPlan.from_json(plan.to_json()).fault_of(1, number) for number in range(2000)] == drawn
    assert 140 < sum(fault is not None for fault in drawn) < 260  # 200 expected, 13 is one standard deviation
    assert {Fault.FAIL, Fault.LOSE, None} == set(drawn)
    assert plan.fault_of(2, 7) is Fault.SLOW
    assert [plan._replace(seed=5).fault_of(1, number) for number in range(2000)] != drawn
