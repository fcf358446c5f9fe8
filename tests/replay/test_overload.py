"""Ten minutes of up to four times what a machine can do."""

from __future__ import annotations

import json

import pytest

from attnix.replay.profile import PROFILES
from attnix.study_overload import CONTROLS, LOADS, Setup, capacity_s, main, overload, poisson, quantile

SETUP = Setup(
    profile="laptop",
    seconds=600,
    prompt_tokens=1200,
    output_tokens=40,
    contexts=8,
    step_tokens=512,
    ttft_s=20,
    tpot_s=2,
)
PROFILE = PROFILES["laptop"]
TARGET, BOOT, OFF = CONTROLS


def test_arrivals_are_poisson_at_the_rate_asked_for() -> None:
    asked = poisson(SETUP, 10.0)
    assert asked == poisson(SETUP, 10.0) and asked != poisson(SETUP, 10.1)
    assert abs(len(asked) - 6000) < 4 * 6000**0.5  # four standard deviations
    for mean, found in ((1200, [r.prompt_tokens for r in asked]), (40, [r.output_tokens for r in asked])):
        assert abs(sum(found) / len(found) - mean) < 0.05 * mean
        assert max(found) <= 4 * mean


def test_capacity_is_no_more_than_the_prompts_alone_allow() -> None:
    """In passes of at most 512 tokens, each token costs `a` and each pass `k` at least."""
    token_ns = PROFILE.a_ns + PROFILE.k_ns / SETUP.step_tokens
    measured = capacity_s(SETUP, PROFILE, 60)
    assert 0.4 < measured / (1e9 / (SETUP.prompt_tokens * token_ns)) < 1.15  # the sample's mean is not quite 1200


def test_at_four_times_its_capacity_a_machine_does_what_it_can() -> None:
    capacity = capacity_s(SETUP, PROFILE, 90)
    short = Setup(**{**vars(SETUP), "seconds": 150})
    rows = {load: overload(SETUP if load > 1 else short, PROFILE, capacity, load, TARGET) for load in LOADS}
    best = max(row.good_s for row in rows.values())
    assert rows[4.0].good_s >= 0.9 * best and best > 0.8 * capacity
    for load, row in rows.items():
        assert row.served + row.refused == row.offered
        assert row.without_retry == 0, "a refusal that does not say when to come again"
        assert row.preemptions <= 0.05 * row.served, f"{load}x: {row.preemptions} preemptions of {row.served}"
        assert "oom_kills" not in row.counters
    assert rows[0.5].refused == 0 < rows[4.0].refused
    assert rows[4.0].ttft_p99_s < 1.1 * SETUP.ttft_s  # the bound is a prediction
    assert 0 < rows[4.0].retry_after_p50_s < SETUP.ttft_s
    control = overload(short, PROFILE, capacity, 4.0, OFF)
    assert control.good_s < 0.5 * best, "without the bound everybody is late, so the test means something"


def test_as_it_is_shipped_the_wait_is_bounded_and_who_can_be_served_is_not_refused() -> None:
    """The default order overtakes long prompts, so the bound is one for most: half wait no longer, hardly anybody twice as long
    and half again."""
    capacity, short = capacity_s(SETUP, PROFILE, 90), Setup(**{**vars(SETUP), "seconds": 150})
    bound_s = int(BOOT.sysctl["sched.max_wait_ms"]) / 1000
    at, over = (overload(short, PROFILE, capacity, load, BOOT) for load in (1.0, 4.0))
    assert at.refused == 0 < over.refused and over.without_retry == 0
    assert bound_s / 2 < over.ttft_p50_s < 1.1 * bound_s and over.ttft_p99_s < 2.5 * bound_s
    assert over.preemptions <= 0.05 * over.served
    assert over.served > 0.9 * at.served


def test_the_study_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--profile laptop --seconds 5 --prompt-tokens 200 --output-tokens 10 --contexts 8 --step-tokens 256"
    assert main([*arguments.split(), "--control", "boot", "--sysctl", "sched.growth_permille=700"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(row["control"], row["load"]) for row in document["rows"]] == [("boot", load) for load in LOADS]
    assert document["frames"] == 8 * 14  # 210 tokens in blocks of 16
    assert document["setup"]["settings"] == [["sched.growth_permille", "700"]]
    with pytest.raises(SystemExit):
        main([*arguments.split(), "--sysctl", "sched.growth=700"])
    assert "no sysctl is called" in capsys.readouterr().err


def test_quantiles_are_nearest_rank() -> None:
    assert quantile([], 500) == 0.0 and quantile([3.0, 1.0, 2.0], 500) == 2.0 and quantile([3.0, 1.0, 2.0], 990) == 3.0
