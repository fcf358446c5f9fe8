"""Keep, demote or drop: the policies as functions of numbers, against hand calculation and brute force."""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnix.kernel.wait.cachettl import CacheTtl, benefit_ns, best_ttl, time_to_live
from attnix.kernel.wait.calendar import Calendar
from attnix.kernel.wait.cost import Cost, kept_ns
from attnix.kernel.wait.lru import Lru
from attnix.kernel.wait.memory import Memory
from attnix.kernel.wait.protocol import Outlook
from attnix.kernel.wait.ttl import Ttl

MS, S = 1_000_000, 1_000_000_000


def outlook(**more: object) -> Outlook:
    plain: dict[str, object] = {
        "frames": 100, "others": 400, "expected_ns": S, "distribution": [float(S)], "out_ns": 20.0 * MS, "back_ns": 30.0 * MS,
        "compute_ns": 500.0 * MS, "queue_ns": 0.0, "memoryfulness": 1.0, "fixed_ns": 2 * S,
    }  # fmt: skip
    return Outlook(**{**plain, **more})  # type: ignore[arg-type]


# -- CacheTTL ---------------------------------------------------------------------------------------------------------


def test_tau_by_hand() -> None:
    """Calls of 1, 1, 2 and 10 s.  With B = 4 s: P*B - tau is 0 at 0, 2-1 = 1 at 1 s, 3-2 = 1 at 2 s, 4-10 at 10 s; the
    shortest of the best is 1 s.  With B = 6 s: 3-1 = 2, 4.5-2 = 2.5, 6-10: 2 s.  With B = 1 s nothing gains."""
    calls = [1.0 * S, 1.0 * S, 2.0 * S, 10.0 * S]
    assert best_ttl(calls, 4.0 * S) == 1 * S
    assert best_ttl(calls, 6.0 * S) == 2 * S
    assert best_ttl(calls, 1.0 * S) == 0
    assert best_ttl(calls, 100.0 * S) == 10 * S


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(0, 3000))
def test_tau_against_brute_force(calls: list[int], benefit: int) -> None:
    calls.sort()

    def gain(tau: int) -> float:
        return sum(1 for d in calls if d <= tau) / max(1, len(calls)) * benefit - tau

    candidates = [0, *calls]
    best = best_ttl([float(d) for d in calls], float(benefit))
    assert best in candidates
    # P(d <= 0) counts at tau = 0 too, which holding for no time at all cannot gain: calls of 0 ns gain by tau = 0 anyway.
    assert gain(int(best)) == pytest.approx(max(gain(tau) for tau in candidates))
    assert all(gain(tau) < gain(int(best)) for tau in candidates if tau < best)


def test_without_any_call_the_prior_decides() -> None:
    """(1 - exp(-tau)) * B - tau is largest where exp(-tau) * B = 1."""
    for benefit in (1.5, 3.0, 20.0):
        tau = time_to_live((), benefit * S) / S
        assert tau == pytest.approx(log(benefit))
        gain = [(1 - exp(-t)) * benefit - t for t in (tau, tau + 0.01, tau - 0.01)]
        assert gain[0] == max(gain)
    assert time_to_live((), 0.9 * S) == 0


def test_what_a_return_costs() -> None:
    assert benefit_ns(outlook()) == 30 * MS, "loading is the cheaper way back"
    assert benefit_ns(outlook(out_ns=-1.0)) == 500 * MS, "with nowhere to copy it to, it is computed"
    assert benefit_ns(outlook(queue_ns=200.0 * MS, memoryfulness=0.5)) == 130 * MS
    decision = CacheTtl().decide(outlook(distribution=[10.0 * MS] * 9 + [5.0 * S]))
    assert (decision.what, decision.keep_ns) == ("demote", 10 * MS)
    nowhere = outlook(out_ns=-1.0, back_ns=-1.0)
    assert CacheTtl().decide(nowhere)[:2] == ("drop", 0), "a second is longer than the 500 ms that it saves"
    assert CacheTtl().decide(nowhere._replace(compute_ns=-1.0))[:2] == ("keep", 0), "nothing is known"


# -- the three wastes -------------------------------------------------------------------------------------------------


def test_the_least_waste_by_hand() -> None:
    """100 frames, 400 of others.  Demote: 100 * (20 + 30) ms = 5,000 frame-ms.  Drop: 500 * 500 ms = 250,000 frame-ms.
    Kept for a call that surely takes 10 ms: 1,000 frame-ms."""
    cost = Cost()
    short = cost.decide(outlook(distribution=[10.0 * MS], fixed_ns=0))
    assert (short.what, short.keep_ns) == ("keep", 10 * MS)
    assert "keep 1000.0, demote 5000.0, drop 250000.0 frame-ms" in short.why
    assert cost.decide(outlook()).what == "demote", "a second is too long: 100,000 frame-ms"
    alone = cost.decide(outlook(distribution=[100.0 * MS], out_ns=-1.0, back_ns=-1.0, fixed_ns=0))
    assert (alone.what, alone.keep_ns) == ("keep", 100 * MS), "with no tier below: 10,000 against 250,000 frame-ms"
    assert cost.decide(outlook(others=0, compute_ns=10.0 * MS)).what == "drop"
    assert cost.decide(outlook(out_ns=-1.0, compute_ns=-1.0)).keep_ns == 2 * S, "nothing is known"


def test_every_wait_is_kept_for_wait_ttl_ms_first() -> None:
    """Whatever the wastes say comes after that; where its frames take longer to have again than that, for as long as they do."""
    cost = Cost()
    assert cost.decide(outlook())[:2] == ("demote", 2 * S)
    assert cost.decide(outlook(others=0, compute_ns=10.0 * MS))[:2] == ("drop", 2 * S)
    assert cost.decide(outlook(distribution=[10.0 * MS]))[:2] == ("keep", 2 * S)
    long = outlook(distribution=[3.0 * S], out_ns=-1.0, back_ns=-1.0, compute_ns=5.0 * S)
    assert cost.decide(long)[:2] == ("keep", 5 * S), "300,000 against 2,500,000 frame-ms"
    assert cost.decide(long._replace(distribution=[60.0 * S]))[:2] == ("drop", 5 * S), (
        "6,000,000 frame-ms, but who knows"
    )
    assert cost.decide(long._replace(fixed_ns=0))[:2] == ("keep", 3 * S), "nothing first"


def test_what_is_held_when_the_answer_may_be_late() -> None:
    """Half of the calls take 10 ms, half 100 ms, given up after 10: 10 ms held, half of them late."""
    assert kept_ns(outlook(distribution=[10.0 * MS, 100.0 * MS]), 10.0 * MS) == (10 * MS, 0.5)
    assert kept_ns(outlook(distribution=[10.0 * MS, 100.0 * MS]), 100.0 * MS) == (55 * MS, 0.0)
    held, late = kept_ns(outlook(distribution=()), 1.0 * S)
    assert held / S == pytest.approx(1 - exp(-1)) and late == pytest.approx(exp(-1))


def test_the_controls() -> None:
    assert Lru().decide(outlook()).keep_ns == 0 and not Lru().ranks
    assert Ttl().decide(outlook()).keep_ns == 2 * S and not Ttl().ranks and not CacheTtl().ranks and Cost().ranks


# -- memoryfulness ----------------------------------------------------------------------------------------------------


def test_memoryfulness_against_its_definition() -> None:
    equal = Memory()
    for _ in range(6):
        equal.ended(10)
    assert equal.of == pytest.approx(1.0), "all programs have ten turns: what is left follows from what is done"
    lengths = [1, 2, 4, 7, 12, 30]
    memory = Memory()
    weight, total = 1.0, []
    for n in lengths:
        memory.ended(n)
    for n in reversed(lengths):
        total += [(k, n - k, weight) for k in range(1, n + 1)]
        weight *= 0.99
    w = sum(t[2] for t in total)
    mean_k, mean_r = (sum(t[i] * t[2] for t in total) / w for i in (0, 1))
    cov = sum((k - mean_k) * (r - mean_r) * v for k, r, v in total) / w
    var_k, var_r = (sum((t[i] - m) ** 2 * t[2] for t in total) / w for i, m in ((0, mean_k), (1, mean_r)))
    assert memory.of == pytest.approx(min(1.0, max(0.0, -cov / (var_k * var_r) ** 0.5)))
    assert Memory().of == 1.0


# -- the calendar -----------------------------------------------------------------------------------------------------


def test_loads_that_end_together_begin_one_before_the_other() -> None:
    calendar = Calendar()
    assert [calendar.book(k, 1000, 100) for k in range(4)] == [900, 800, 700, 600]
    assert calendar.book(9, 500, 100) == 400, "an earlier one is not in their way"
    calendar.cancel(1)
    assert calendar.book(5, 1000, 100) == 800, "the gap is used again"
    assert calendar.book(5, 5000, 100) == 4900, "booked again, it moves"
    calendar.cancel(77)
    assert len(calendar) == 5


@given(st.lists(st.tuples(st.integers(100, 400), st.integers(1, 30)), max_size=20))
def test_no_two_loads_overlap(wanted: list[tuple[int, int]]) -> None:
    calendar, booked = Calendar(), []
    for number, (end, load) in enumerate(wanted):
        start = calendar.book(number, end, load)
        assert start + load <= end
        booked.append((start, start + load))
    booked.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(booked))


def test_who_says_when_the_answer_comes_is_kept_until_then_or_stays_in_line() -> None:
    """Learnt, 10 ms is no reason to keep for less than wait.ttl_ms.  Said by the caller it is none either, since callers
    are wrong; 1.9 s are kept for, and a fifth more; three seconds are a place in line and no time."""
    soon = outlook(distribution=[10.0 * MS], expected_ns=10 * MS)
    assert Cost().decide(soon)[:2] == ("keep", 2 * S)
    assert Cost().decide(soon._replace(by_eta=True))[:2] == ("keep", 2 * S)
    assert Cost().decide(soon._replace(by_eta=True, expected_ns=1900 * MS))[:2] == ("keep", 2280 * MS)
    later = outlook(distribution=[3.0 * S], expected_ns=3 * S, by_eta=True)
    assert Cost().decide(later).keep_ns == 0
    dear = later._replace(out_ns=-1.0, back_ns=-1.0, compute_ns=5.0 * S)
    assert Cost().decide(dear).keep_ns == 5 * S, "sooner than its frames would be computed again"
    assert Cost().decide(dear._replace(compute_ns=2.9 * S)).keep_ns == 0
