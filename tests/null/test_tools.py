"""What is learnt about tools: pure arithmetic, against hand calculation and brute force."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise
from statistics import median_low

import pytest

from attnix.kernel.tools import DISTRIBUTION, JUDGED, MOST_TOOLS, OWN_SAMPLES, OfUids, Sample, Tools

S = 1_000_000_000


def test_a_sample_keeps_the_latest_and_sorts_them() -> None:
    rng = random.Random(5)
    sample, everything = Sample(20), []
    for _ in range(200):
        everything.append(float(rng.randrange(30)))
        sample.add(everything[-1])
        latest = everything[-20:]
        assert list(sample.latest) == latest and list(sample.by_size) == sorted(latest)
        assert sample.median() == median_low(latest)
        at = rng.randrange(32)
        above = [v for v in latest if v > at]
        assert sample.beyond(at) == (median_low(above) if above else 2 * at)


def test_quantiles_by_hand() -> None:
    sample = Sample(10)
    for value in (10, 40, 20, 30):
        sample.add(value)
    assert [sample.quantile(p) for p in (0, 100, 250, 500, 750, 1000)] == [10, 10, 10, 20, 30, 40]
    assert sample.spread() == (30 - 10) / 20


def test_nothing_is_known_of_the_first_call_and_little_of_a_new_tool() -> None:
    tools = Tools()
    assert tools.forecast("a") == (-1, -1, (), False)
    assert tools.remaining_ns("a", 5) == -1 == tools.remaining_ns("never heard of", 5)
    tools.learn("a", 8 * S)
    assert tools.forecast("b").expected_ns == 8 * S, "before it is known itself, a tool is like the others"
    for took in (1, 2, 3):
        tools.learn("b", took * S)
    assert tools.forecast("b").expected_ns == 2 * S, "three calls of its own count"
    assert list(tools.forecast("b").distribution) == [1 * S, 2 * S, 3 * S, 8 * S], "but not for the tails"


def test_a_hundred_calls_describe_a_tool_by_itself() -> None:
    tools = Tools()
    tools.learn("other", 50 * S)
    for k in range(DISTRIBUTION):
        assert 50 * S in tools.forecast("a").distribution
        tools.learn("a", (k + 1) * S)
    forecast = tools.forecast("a")
    assert list(forecast.distribution) == [k * S for k in range(1, 101)]
    assert (forecast.expected_ns, forecast.early_ns) == (50 * S, 10 * S)


def test_what_is_left_given_that_it_is_not_back() -> None:
    tools = Tools()
    for took in (1, 1, 1, 1, 9, 10, 11):
        tools.learn("a", took * S)
    assert tools.remaining_ns("a", 0) == 1 * S
    assert tools.remaining_ns("a", 2 * S) == 8 * S, "of those above 2: 9, 10, 11"
    assert tools.remaining_ns("a", 10 * S) == 1 * S
    assert tools.remaining_ns("a", 20 * S) == 20 * S, "nothing took that long: as long again"


def test_an_eta_is_believed_until_it_was_wrong_and_then_corrected() -> None:
    tools = Tools()
    assert tools.forecast("a", 4 * S) == (4 * S, 4 * S, (4.0 * S,), True)
    assert tools.remaining_ns("a", 1 * S, 4 * S) == 3 * S
    for k in range(1, JUDGED + 1):
        tools.learn("a", 2 * k * S, k * S)  # always twice as long as was said
    assert tools.forecast("a", 5 * S).expected_ns == 10 * S
    assert tools.remaining_ns("a", 5 * S, 5 * S) == 5 * S
    assert tools.forecast("new", 5 * S).expected_ns == 10 * S, "callers are alike until a tool is known"


def test_etas_that_say_nothing_are_not_used() -> None:
    """A tool that always takes a second, and callers who say anything."""
    tools = Tools()
    rng = random.Random(3)
    for _ in range(40):
        tools.learn("a", 1 * S, rng.randrange(S // 10, 20 * S))
    forecast = tools.forecast("a", 7 * S)
    assert (forecast.expected_ns, forecast.by_eta) == (1 * S, False)


def test_one_eta_that_was_absurd_changes_nothing() -> None:
    tools = Tools()
    for k in range(1, 20):
        tools.learn("a", k * S, k * S)
    tools.learn("a", 5 * S, 1)
    assert tools.forecast("a", 3 * S).expected_ns == 3 * S


def test_tools_are_bounded_and_the_least_recently_called_goes() -> None:
    tools = Tools()
    for k in range(MOST_TOOLS):
        tools.learn(f"t{k}", S)
    tools.named("t0")
    tools.learn("one more", S)
    assert len(tools) == MOST_TOOLS and tools.dropped == ["t1"]
    for k in range(3 * OWN_SAMPLES):
        tools.learn("t0", k)
    assert len(tools.named("t0").durations) == OWN_SAMPLES
    assert tools.named("t0").durations.by_size[0] == 2 * OWN_SAMPLES


def test_what_is_packed_is_restored() -> None:
    tools, again = Tools(), Tools()
    for took in (5, 3, 9):
        tool = tools.learn("a", took)
    packed = tools.packed(tool)
    assert array("q", packed).tolist() == [5, 3, 9]
    again.restore("a", packed)
    assert again.forecast("a") == tools.forecast("a")
    assert not again.unwritten() and not tools.unwritten()


def test_how_often_the_journal_hears_of_a_tool() -> None:
    tools, written = Tools(), []
    for call in range(1, 100):
        tool = tools.learn("a", call)
        if tools.due_for_journal(tool):
            tools.packed(tool)
            written.append(call)
    assert written[:4] == [1, 2, 3, 4] and len(written) < 18
    assert max(b - a for a, b in pairwise(written)) <= 16


@pytest.mark.parametrize("seed", range(3))
def test_the_same_calls_in_the_same_order_say_the_same(seed: int) -> None:
    said = []
    for _ in range(2):
        rng, tools = random.Random(seed), Tools()
        for _ in range(300):
            tools.learn(f"t{rng.randrange(5)}", rng.randrange(S), rng.choice([-1, rng.randrange(1, S)]))
        said.append([tools.forecast(f"t{k}", eta) for k in range(6) for eta in (-1, S // 3)])
    assert said[0] == said[1]


def test_what_is_known_is_written_down_and_found_again_uid_by_uid() -> None:
    """The owner's under the tool's name, as all were before uids were told apart; another's behind its uid."""
    uids = OfUids(1000)
    for uid, took_ns in ((1000, 5), (1001, 7)):
        uids.of(uid).learn("search", took_ns)
    assert len({tool.number for tool in uids.heard()}) == 2, "policies tell them apart"
    records = uids.unwritten()
    assert [(r.tool, array("q", r.durations).tolist()) for r in records] == [("search", [5]), ("1001\x1fsearch", [7])]
    assert uids.unwritten() == ()
    again = OfUids(1000)
    for record in records:
        again.restore(record)
    assert [again.of(uid).forecast("search").expected_ns for uid in (1000, 1001, 1002)] == [5, 7, -1]
