"""Agents that wait for tools, small enough to be worked out on paper: who loses its frames, and what that costs it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from attnix.kernel.evict.protocol import KIND_TOOL, KIND_TURN
from attnix.replay import waits
from attnix.replay.engine import Frames, Replay, Waits
from attnix.replay.workload import Session, Turn, Workload, from_requests
from attnix.study_agents import Plan, agents, stateless_tokens, study
from attnix.traces import TOOL, TURN, Request

from .paper import BLOCK, PROFILE, K, decode, prefill, request

S = 1_000_000
TOKENS = 18  # four blocks and two tokens


def called(at_us: int, blocks: list[int], tokens: int, session: int, tool_us: int, ends: str = TOOL) -> Request:
    made = request(at_us, blocks, tokens, 1, session=session, turn=1, think_us=tool_us, ends=ends)
    return made._replace(tool="job")


def three_agents() -> list[Request]:
    """B calls a tool of 20 s; then A one of 60 s; then C comes, and there are frames for two: whom it takes them from is the
    question.  C is gone when B's answer comes."""
    a, b, c = list(range(4)), list(range(10, 14)), list(range(20, 24))
    return [
        called(0, b, TOKENS, 1, -1), called(1 * S, a, TOKENS, 2, -1), called(2 * S, c, TOKENS, 3, -1, TURN),
        called(20 * S, b, TOKENS, 1, 20 * S, TURN), called(60 * S, a, TOKENS, 2, 60 * S, TURN),
    ]  # fmt: skip


def run(variant: Waits | None, frames: int = 12, dram: int = 0) -> Replay:
    made = Replay(
        from_requests("paper", three_agents(), BLOCK), PROFILE, Frames(frames, dram), "lru", waits=variant, check=True
    )
    made.run()
    return made


def test_an_oracle_keeps_the_one_that_is_back_first() -> None:
    """What is found are the four full blocks; the two tokens in no block are different in every prompt.  C needs three frames
    more than are free: the last three of the one that loses them, which are two full blocks and the tail."""
    whole, tail = K + prefill(10, 8) + decode(TOKENS), K + prefill(2, 16) + decode(TOKENS)
    for variant in (None, Waits("lru")):
        assert [round(s * 1e9) for s in run(variant).tool_ttfts_s] == [whole, tail], "B has lost them, A has not"
    oracle = run(Waits("cost", "exact"))
    assert [round(s * 1e9) for s in oracle.tool_ttfts_s] == [tail, whole], "A has lost them, B has not"
    assert oracle.kernel.machine.counters["tool_waits_answered"] == 2


def test_with_room_for_all_it_makes_no_difference() -> None:
    jobs = [run(variant, frames=30).jobs_s for variant in (None, *waits.VARIANTS.values())]
    assert all(each == jobs[0] for each in jobs) and len(jobs[0]) == 3


def test_with_a_tier_below_both_are_back_in_time() -> None:
    """Told when, the kernel has A's blocks in hbm again before its answer: as if it had never lost them."""
    tail = K + prefill(2, 16) + decode(TOKENS)
    oracle = run(Waits("cost", "exact"), dram=30)
    assert [round(s * 1e9) for s in oracle.tool_ttfts_s] == [tail, tail]
    assert oracle.result.again_tokens == 0
    counters = oracle.kernel.machine.counters
    assert counters["wait_prefetches"] == 1 and counters["tool_answers_resident"] == 2
    lru = run(Waits("lru"), dram=30)
    assert "wait_prefetches" not in lru.kernel.machine.counters, "a control fetches nothing by itself"
    assert lru.kernel.machine.counters["loaded_blocks_dram"] > 0


def test_a_noisy_eta_is_within_half_and_the_same_each_time() -> None:
    said: list[list[int]] = []
    for _ in range(2):
        made = Replay(
            from_requests("paper", three_agents(), BLOCK), PROFILE, Frames(30), "lru", waits=Waits("cost", "noisy")
        )
        etas: list[int] = []
        call = made._call

        def spy(name: str, args: tuple[object, ...], etas: list[int] = etas, call: object = call) -> object:
            if name == "wait_tool":
                etas.append(int(args[2]))  # type: ignore[call-overload]
            return call(name, args)  # type: ignore[operator]

        made._call = spy  # type: ignore[method-assign]
        made.run()
        said.append(etas)
    assert said[0] == said[1] and len(said[0]) == 2
    assert all(0.5 * ms <= eta <= 1.5 * ms and eta != ms for eta, ms in zip(said[0], (20_000, 60_000), strict=True))


def test_the_comparison_counts_what_is_closed() -> None:
    workload = from_requests("paper", three_agents(), BLOCK)
    rows = {row.variant: row for row in waits.compare([workload, workload], PROFILE, ["12"], ["lru", "cost", "oracle"])}
    assert rows["lru"].against_lru == 0 and rows["lru"].closed in (0, None)
    single = {name: run(waits.VARIANTS[name]).jobs_s for name in rows}
    for name, row in rows.items():
        assert row.job_s.mean == pytest.approx(sum(single[name]) / 3, abs=1e-6), "twice the same sessions"
    with pytest.raises(KeyError):
        waits.compare([workload], PROFILE, ["12"], ["clairvoyant"])


def follower(turns: int = 3) -> Workload:
    none = np.zeros(0, np.int64)
    made = [
        Turn(n, none, 100 * n, 10 if n == 0 else 3, 2, S * 1000 if n else 0, KIND_TOOL if n < turns - 1 else KIND_TURN)
        for n in range(turns)
    ]
    return Workload("follows", BLOCK, [Session(0, made)], 0, 0, True, follows=True)


def test_prompts_that_follow_and_a_server_that_keeps_nothing() -> None:
    """An answer of 2 leaves one token in the log (the stop token is not there): logs are 10, 11 + 3 and 15 + 3 long."""
    kept = Replay(follower(), PROFILE, Frames(30), "lru", waits=Waits("cost"), check=True, exact=True)
    kept.run()
    assert kept.result.prompt_tokens == 10 + 14 + 18 and kept.result.again_tokens <= 2
    nothing = Replay(follower(), PROFILE, Frames(30), "lru", stateless=True, check=True, exact=True)
    nothing.run()
    assert nothing.result.prompt_tokens == kept.result.prompt_tokens
    assert nothing.result.hit_ratio == 0
    assert nothing.kernel.machine.counters["computed_tokens"] - kept.kernel.machine.counters["computed_tokens"] in (
        11 + 15 - 2, 11 + 15 - 1, 11 + 15,
    )  # fmt: skip  # the last token of a prompt may run twice, once for its KV


def test_many_agents_in_small() -> None:
    """Forty agents with hbm for three: all finish, most wait at any time, nothing is computed twice that a tier holds."""
    plan = Plan(40, 2048, 512, 2, 20, 5, 400.0, 4000.0, "exact", 512)
    frame = 512
    workload = agents(plan)
    assert workload.turns == 120 and workload.longest_tokens == 2048 + 2 * 20 + 3 * 5
    assert [len(s.turns[0].blocks) for s in workload.sessions] == [512 // frame] * 40
    profile = dataclasses.replace(PROFILE, name="paper")
    found = study(plan, profile, Frames(16, 200), "cost")
    assert (found["finished"], found["requests"], found["refused"]) == (40, 120, 0)
    assert found["waiting"]["most"] >= 36 and found["waiting"]["mean"] > 10
    assert found["tokens"]["stateless"] == stateless_tokens(plan) == 40 * sum(2048 + 24 * call for call in range(3))
    assert found["tokens"]["recomputed"] <= 40 * 2 * 2 and found["tokens"]["loaded"]["dram"] > 0
    assert found["kernel"]["steps"] > 120 and found["kernel"]["peak_bytes"] > 0
