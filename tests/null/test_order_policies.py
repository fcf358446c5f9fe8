"""Scheduling policies: the order that each gives, and that none lets a job starve.

The policies are functions of plain facts, so what is checked here needs no kernel: tests/null/test_order_kernel.py has that.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnix.kernel.order import registry
from attnix.kernel.order.deadline import Deadline
from attnix.kernel.order.line import arranged
from attnix.kernel.order.protocol import Forecast, Waiting
from attnix.kernel.params import NICE_JOBS

S = 1_000_000_000


def job(order: int, **facts: Any) -> Waiting:
    nice = facts.pop("nice", 0)
    base = Waiting(
        order=order, place=order + NICE_JOBS * nice, nice=nice, program=order, birth=order, served=0, left=100, resident=0,
        arriving=0, awaited=0, stored=0, waited_ns=0, since_ns=0, due_ns=0, token_ns=0, passed=0, admitted=False, begun=False,
    )  # fmt: skip
    return base._replace(**facts)


def served(policy: str, *jobs: Waiting) -> list[int]:
    return [jobs[i].order for i in arranged(registry.make(policy), jobs)]


def test_first_come_first_served_with_nice_as_64_arrivals() -> None:
    assert served("fcfs", job(3), job(1), job(2)) == [1, 2, 3]
    assert served("fcfs", job(1), job(64, nice=-1)) == [64, 1]  # at 64 - 64
    assert served("fcfs", job(1), job(66, nice=-1)) == [1, 66]


def test_priority_ages_by_a_step_a_second() -> None:
    assert served("priority", job(1), job(2, nice=-1)) == [2, 1]
    assert served("priority", job(1, waited_ns=2 * S), job(2, nice=-1)) == [1, 2]
    assert served("priority", job(1, nice=19, waited_ns=40 * S), job(2, nice=-20)) == [1, 2]


def test_longest_prefix_counts_what_is_there_comes_or_is_awaited() -> None:
    jobs = (job(1), job(2, resident=64), job(3, resident=32, arriving=64))
    assert served("longest_prefix", *jobs) == [3, 2, 1]
    assert served("longest_prefix", *jobs, job(4, resident=32, awaited=65)) == [4, 3, 2, 1]
    assert served("longest_prefix", *jobs, job(4, awaited=64)) == [3, 2, 4, 1]


def test_shortest_prefill_and_nice_as_a_factor() -> None:
    assert served("shortest_prefill", job(1, left=300), job(2, left=30), job(3, left=200)) == [2, 3, 1]
    # 1.25 ** 5 is 3.05: with the token that is computed in any case, 99 count as 302.1 and 98 as 299.1, against 301
    assert served("shortest_prefill", job(1, left=300), job(2, left=98, nice=5)) == [1, 2]
    assert served("shortest_prefill", job(1, left=300), job(2, left=97, nice=5)) == [2, 1]


def test_a_program_keeps_the_place_of_its_first_job() -> None:
    assert served("program_fcfs", job(5, birth=5), job(9, birth=1), job(7, birth=7)) == [9, 5, 7]


def test_least_attained_service_in_queues() -> None:
    old = job(9, birth=1, served=100_000)
    assert served("least_attained", old, job(12, birth=12, served=100)) == [12, 9]
    # 2,048 and 8,192 bound the first queues; within one the older program is first though it had more
    assert served("least_attained", job(9, birth=1, served=8191), job(12, birth=12, served=2048)) == [9, 12]
    assert served("least_attained", job(9, birth=1, served=8192), job(12, birth=12, served=2048)) == [12, 9]
    # the last queue is the eighth: 28 seconds bring a job from it into the first
    most = old._replace(served=1 << 40)
    assert served("least_attained", most._replace(waited_ns=27 * S), job(12, birth=12)) == [12, 9]
    assert served("least_attained", most._replace(waited_ns=28 * S), job(12, birth=12)) == [9, 12]


def test_earliest_deadline_first_and_those_without_one_last() -> None:
    assert served("deadline", job(1), job(2, due_ns=9 * S), job(3, due_ns=5 * S)) == [3, 2, 1]
    reader = job(4, begun=True, token_ns=50_000_000)
    assert served("deadline", job(3, due_ns=5 * S), reader) == [4, 3]


def test_a_deadline_is_refused_by_as_much_as_it_would_be_missed() -> None:
    policy = Deadline()
    asked = job(1, since_ns=10 * S, due_ns=12 * S)  # two seconds
    assert policy.late_ns(asked, Forecast(2 * S, 0, 0)) == 0
    assert policy.late_ns(asked, Forecast(5 * S, 0, 0)) == 3 * S
    assert policy.late_ns(asked._replace(waited_ns=S), Forecast(2 * S, 0, 0)) == S
    reader = job(1, token_ns=40_000_000)
    assert policy.late_ns(reader, Forecast(0, 40_000_000, S)) == 0
    assert policy.late_ns(reader, Forecast(0, 41_000_000, S)) == S  # when one of those that decode is done
    assert policy.late_ns(job(1), Forecast(99 * S, S, S)) == 0  # it asked for nothing


FACTS = st.fixed_dictionaries(
    {
        "nice": st.integers(-20, 19),
        "birth": st.integers(0, 40),
        "served": st.sampled_from([0, 3000, 10**6]),
        "left": st.integers(1, 5000),
        "resident": st.integers(0, 5000),
        "awaited": st.sampled_from([0, 0, 64]),
        "due_ns": st.integers(0, 9 * S),
        "begun": st.booleans(),
    }
)


@pytest.mark.parametrize("policy", registry.names())
@given(arrivals=st.lists(st.lists(FACTS, max_size=3), min_size=5, max_size=30))
def test_nobody_is_overtaken_more_than_so_often(policy: str, arrivals: list[list[dict[str, Any]]]) -> None:
    """Any jobs arrive, a few before each service; facts are as bad as may be.  The bound is 5 here, so that it is reached."""
    bound, line, number = 5, registry.make(policy), 0
    waiting: list[Waiting] = []
    for turn in [*arrivals, *([[]] * 200)]:
        for facts in turn:
            number += 1
            waiting.append(job(number, since_ns=number, **facts))
        if not waiting:
            continue
        first = waiting.pop(arranged(line, waiting, bound)[0])
        waiting = [w._replace(passed=w.passed + (first.place > w.place)) for w in waiting]
        assert all(w.passed <= bound for w in waiting)
    assert not waiting


def test_without_the_bound_a_short_job_would_starve_a_long_one() -> None:
    """That the test above can fail: the same with a bound that is never reached."""
    line = registry.make("shortest_prefill")
    waiting = [job(0, left=5000)]
    for number in range(1, 200):
        waiting.append(job(number, left=10))
        first = waiting.pop(arranged(line, waiting, 1 << 30)[0])
        waiting = [w._replace(passed=w.passed + (first.place > w.place)) for w in waiting]
    assert waiting[0].order == 0 and waiting[0].passed == 199


def test_policies_are_made_by_name_and_names_are_taken_once() -> None:
    assert set(registry.names()) == {
        "deadline", "fcfs", "least_attained", "longest_prefix", "priority", "program_fcfs", "shortest_prefill",
    }  # fmt: skip
    assert all(registry.make(name).name == name for name in registry.names())
    with pytest.raises(ValueError, match="already"):
        registry.register("fcfs", Deadline)
    with pytest.raises(KeyError):
        registry.make("nobody")
