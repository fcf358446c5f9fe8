"""The simulated devices by themselves, against times worked out by hand."""

from __future__ import annotations

import struct

from attnix.kernel.batch import SAMPLE, SEQ
from attnix.kernel.events import Exec
from attnix.replay.device import TimedAccel, TimedLink
from attnix.replay.profile import Link
from attnix.replay.workload import STOP_TOKEN

from .paper import PROFILE, K, R, decode, prefill

NEVER = 1 << 60
LAYERS = PROFILE.kv.layers


def work(*seqs: tuple[int, int, int, int], gates: bytes = b"") -> Exec:
    """A pass of (slot, start, ntokens, flags)."""
    records = b"".join(SEQ.pack(s, 0, start, n, start, 1, 0, flags, *[0] * 14) for s, start, n, flags in seqs)
    return Exec(0, 1, records, bytes(4 * sum(n for _, _, n, _ in seqs)), b"", (), gates)


def test_a_prompt_and_its_first_token() -> None:
    accel = TimedAccel(PROFILE, 4)
    accel.begin(2, 12, 3, 77)
    first = accel.start(work((2, 0, 8, 0)), 100, NEVER)
    assert (first.end_ns - 100, first.firsts, first.done.tokens) == (K + prefill(8), (), b"")
    last = accel.start(work((2, 8, 4, SAMPLE)), first.end_ns, NEVER)
    assert (last.end_ns - first.end_ns, last.firsts) == (K + prefill(4, 8), (2,))
    assert last.done.tokens == struct.pack("<i", 77)
    assert accel.computed[2] == 12


def test_decoding_alone_runs_to_the_end_of_the_shortest_answer() -> None:
    accel = TimedAccel(PROFILE, 4)
    accel.begin(0, 4, 6, 70)
    accel.begin(1, 8, 9, 71)
    accel.start(work((0, 3, 1, SAMPLE), (1, 7, 1, SAMPLE)), 0, NEVER)  # their first tokens
    stride = accel.start(work((0, 4, 1, SAMPLE), (1, 8, 1, SAMPLE)), 0, NEVER)
    assert stride.end_ns == sum(K + R * (5 + i) + R * (9 + i) for i in range(5))
    assert stride.done.tokens == struct.pack("<2i", STOP_TOKEN, 71)
    assert stride.done.computed_tokens == 2  # what the kernel sent
    alone = accel.start(work((1, 9, 1, SAMPLE)), 0, NEVER)
    assert alone.end_ns == sum(decode(14 + i) for i in range(3))
    assert alone.done.tokens == struct.pack("<i", STOP_TOKEN)


def test_a_stride_ends_at_the_first_step_after_somebody_acts() -> None:
    steps = [decode(5 + i) for i in range(20)]
    for arrival in (1, steps[0] - 1, steps[0], steps[0] + 1, sum(steps[:7]), sum(steps[:7]) + 1, sum(steps[:12]) - 1):
        accel = TimedAccel(PROFILE, 1)
        accel.begin(0, 4, 100, 70)
        accel.start(work((0, 3, 1, SAMPLE)), 0, NEVER)
        end = accel.start(work((0, 4, 1, SAMPLE)), 0, arrival).end_ns
        ends = [sum(steps[: i + 1]) for i in range(20)]
        assert end == next(e for e in ends if e >= arrival)


def test_a_pass_that_waits_for_loads_overlaps_all_but_its_last_layer() -> None:
    spent = K + prefill(8)
    for loaded_ns, end_ns in ((0, spent), (spent // 2, spent), (10 * spent, 10 * spent + spent // LAYERS)):
        accel = TimedAccel(PROFILE, 1)
        accel.begin(0, 8, 1, 70)
        done = accel.start(work((0, 0, 8, SAMPLE)), 0, NEVER, loaded_ns)
        assert done.end_ns == end_ns
        assert done.done.waited_ns == end_ns - spent


def test_a_link_serves_one_transfer_at_a_time() -> None:
    link = TimedLink(Link(2e9, 1000))
    assert link.start(4000, 0) == (3000, 3000)
    assert link.start(2000, 500) == (5000, 2000)  # 3000 + 1000 + 2000 / 2
    assert link.start(0, 9000) == (10_000, 1000)
    assert link.moved_bytes == 6000
