"""Traces small enough to be worked out on paper: what is found, what it takes, and what could be found at best."""

from __future__ import annotations

import random

import pytest

from attnix.kernel.evict.protocol import KIND_TOOL, KIND_TURN
from attnix.replay import engine
from attnix.replay.metrics import quantiles
from attnix.traces import TOOL, TURN

from .paper import B, K, decode, prefill, replay, request, us

US = 1000


def test_one_request_alone() -> None:
    """`append` starts the prompt before `generate` comes, so its last token runs a second time, for its logits."""
    result = replay([request(0, [0, 1], 10, 3)])
    first = K + prefill(10) + decode(10)
    assert us(result.ttft_s.p50) * US == first
    assert us(result.answer_s.p50) * US == us(result.makespan_s) * US == first + decode(11) + decode(12)
    assert (result.requests, result.prompt_tokens, result.output_tokens) == (1, 10, 3)
    assert (result.computed_tokens, result.first_tokens, result.recomputed_tokens) == (10, 10, 0)
    assert (result.hit_ratio, result.bound_hit_ratio, result.busy) == (0.0, 0.0, 1.0)


def test_the_same_prompt_again_is_found_whole() -> None:
    """Full blocks only: of 10 tokens, 8 are found and 2 are in no block; a prompt of whole blocks computes nothing anew."""
    result = replay([request(0, [0, 1], 10, 1), request(5000, [0, 1], 10, 1), request(10_000, [0, 1], 8, 1)])
    assert result.hit_tokens == {"hbm": 16}
    assert result.hit_ratio == pytest.approx(16 / 28, abs=1e-6)
    assert result.bound_hit_ratio == pytest.approx(16 / 28, abs=1e-6)
    assert result.computed_tokens == 12
    times = sorted([K + prefill(10) + decode(10), K + prefill(2, 8) + decode(10), decode(8)])
    assert [us(result.ttft_s.p50) * US, us(result.ttft_s.p99) * US] == times[1:]


def test_two_at_once_share_passes() -> None:
    """The second arrives while the first is in its first pass; both get their first token from the second pass."""
    result = replay([request(0, [0, 1], 8, 1), request(1, [2, 3], 8, 1)])
    end = K + prefill(8) + K + prefill(8) + (decode(8) - K)
    assert us(result.ttft_s.p99) * US == end
    assert us(result.ttft_s.p50) * US == end - 1 * US
    assert us(result.makespan_s) * US == end


def test_a_session_keeps_its_context_and_pauses_between_turns() -> None:
    turns = [
        request(0, [0, 1], 10, 2, session=0, turn=1),
        request(
            999, [0, 1, 2], 12, 1, session=0, turn=2, think_us=700
        ),  # the recorded time plays no part: the pause does
        request(999, [0, 3], 8, 1, session=0, turn=3, think_us=300),  # cut back to its first block
    ]
    result = replay(turns)
    first = K + prefill(10) + decode(10) + decode(11)
    second = K + prefill(4, 8) + decode(12)
    third = K + prefill(4, 4) + decode(8)
    assert result.hit_tokens == {"hbm": 8 + 4}
    assert us(result.job_s.p50) * US == first + second + third
    assert us(result.makespan_s) * US == first + second + third + 1000 * US
    assert us(result.answer_s.p99) * US == first


def test_the_oldest_goes_first_and_belady_would_have_kept_it() -> None:
    """Prompts of two full blocks and one token in a third frame, one after the other: A B C A.

    5 frames: A leaves 2, B brings them to 4, C needs 3 and has 1 free, so both of A's go.  6: only A's leaf goes.  7: none.
    """
    requests = [request(5000 * i, [2 * n, 2 * n + 1], 9, 1) for i, n in enumerate([0, 1, 2, 0])]
    result = replay(requests, frames=5)
    assert result.hit_tokens == {"hbm": 0}
    assert result.recomputed_tokens == 8
    assert replay(requests, frames=6).hit_tokens == {"hbm": 4}
    assert replay(requests, frames=7).hit_tokens == {"hbm": 8}
    for frames in (5, 6, 7):
        assert replay(requests, frames=frames).bound_hit_ratio == pytest.approx(8 / 36, abs=1e-6)


def test_what_cannot_fit_is_left_out() -> None:
    result = replay([request(0, [0, 1, 2], 12, 1), request(0, [3], 4, 2)], frames=3)
    assert (result.requests, result.refused, result.prompt_tokens) == (1, 1, 4)


def test_strides_change_no_time() -> None:
    """Token by token and in strides: the same answers at the same times, in a tenth of the passes."""
    draw = random.Random(7)
    requests = []
    at_us = 0
    for _ in range(40):
        at_us += draw.randrange(20_000)
        first = draw.randrange(4) * 8
        length = draw.randrange(1, 8)
        requests.append(
            request(at_us, range(first, first + length), 4 * length + draw.randrange(4), draw.randrange(1, 60))
        )
    strides, exact = replay(requests, 400), replay(requests, 400, exact=True, check=False)
    assert exact.passes == exact.steps == strides.steps > 2 * strides.passes
    ours, theirs = strides.as_json(), exact.as_json()
    for row in (ours, theirs):
        del row["passes"], row["counters"]
    assert ours == theirs
    assert us(strides.ttft_s.p99) > us(strides.ttft_s.p50) > 0


def test_nobody_is_answered_before_its_time() -> None:
    """A bound from below that needs no replay: a first token takes at least the pass that computes what was not found."""
    result = replay([request(100 * i, [i], 4, 5) for i in range(20)])
    assert us(result.ttft_s.p50) * US >= K + prefill(4)
    assert us(result.makespan_s) * US >= 20 * (prefill(4) - B)


def test_hints_say_when_a_tool_will_answer_and_nothing_of_people(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is told how each turn but the last ended; with hints, also when the next one comes if a tool was called."""
    noted: list[tuple[int, int]] = []
    monkeypatch.setattr(engine, "note_turn", lambda kernel, context, kind, due_ns: noted.append((kind, due_ns)))
    turns = [
        request(0, [0], 4, 1, session=0, turn=1, ends=TOOL),
        request(0, [0, 1], 8, 1, session=0, turn=2, think_us=700, ends=TURN),
        request(0, [0, 1, 2], 12, 1, session=0, turn=3, think_us=300),
    ]
    first = K + prefill(4) + decode(4)
    replay(turns, hints=True)
    replay(turns)
    assert noted == [(KIND_TOOL, first + 700 * US), (KIND_TURN, 0), (KIND_TOOL, 0), (KIND_TURN, 0)]


def test_percentiles_are_nearest_rank() -> None:
    """Of 1..100 the value that 90 of 100 do not exceed is 90; of four values p50 is the second."""
    hundred = quantiles([float(n) for n in range(100, 0, -1)])
    assert (hundred.p50, hundred.p90, hundred.p99) == (50.0, 90.0, 99.0)
    assert quantiles([4.0, 1.0, 3.0, 2.0]).p50 == 2.0
    assert quantiles([]).p99 == 0.0
