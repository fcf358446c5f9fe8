"""Pressure stall information: averages, windows and notifications; expected values worked out by hand."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnix.kernel.calls import PressureNote
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.kernel.events import Timer
from attnix.kernel.psi import Average, Window
from attnix.simulated import SimulatedClient, SimulatedSystem, ints

S, MS = 1_000_000_000, 1_000_000


def test_averages_are_exponential_and_do_not_mind_how_often_they_are_looked_at() -> None:
    once, often = Average(), Average()
    once.add(10 * S, True)
    for _ in range(1000):
        often.add(10 * MS, True)
    assert once.permille() == (632, 154, 33)  # 1 - e^-1, 1 - e^-(1/6), 1 - e^-(1/30)
    assert often.permille() == once.permille()
    once.add(10 * S, False)
    assert once.permille()[0] == 233  # (1 - e^-1) e^-1
    assert once.total_ns == often.total_ns == 10 * S


def test_a_window_by_hand() -> None:
    """1,600 ms in 16 parts of 100."""
    window = Window(1600 * MS)
    window.add(0, 400 * MS)
    assert [window.permille(t * MS) for t in (400, 1000, 1600, 1800, 1950, 2000)] == [250, 250, 250, 125, 31, 0]
    window.add(2000 * MS, 9000 * MS)  # far longer than the window
    assert window.permille(9000 * MS) == 1000


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=30), st.integers(0, 400))
def test_a_window_is_off_by_less_than_a_part(stalls: list[tuple[int, int]], later: int) -> None:
    """Against the overlap of each stall with the last 1,600 ms.  (pause, stall) in ms."""
    window, spans, now = Window(1600 * MS), [], 0
    for pause, length in stalls:
        spans.append((now + pause, now + pause + length))
        now += pause + length
        window.add(spans[-1][0] * MS, spans[-1][1] * MS)
    now += later
    true = sum(max(0, min(now, end) - max(now - 1600, start)) for start, end in spans)
    assert abs(window.stalled_ns(now * MS) / MS - true) <= 100


def stalling(uid: int = 1000) -> tuple[SimulatedSystem, SimulatedClient, int, int]:
    """Eight frames.  The first context has five, the second wants five: it waits until the first is done."""
    system = SimulatedSystem(core=Core, frames=8, block_tokens=4)
    client = system.connect(uid)
    first, second = (client.call("alloc_context").ctx for _ in range(2))
    client.post("append", first, ints([1] * 18))
    generation = client.post("generate", first, 4)
    system.run(until=lambda: len(client.streamed.get(generation, [])) > 0)
    client.post("append", second, ints([2] * 18))
    return system, client, generation, client.post("generate", second, 2)


def test_nothing_is_lost_while_everybody_has_frames() -> None:
    system = SimulatedSystem(core=Core, frames=8, block_tokens=4)
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.post("append", ctx, ints([1] * 18))
    system.advance(5 * S)  # it computes for so long
    other = client.call("alloc_context").ctx
    client.post("append", other, ints([2] * 4))
    system.advance(5 * S)  # this one waits for the pass, not for frames
    told = client.call("pressure")
    assert (told.some_ns, told.full_ns, told.some_permille, told.admitted_limit) == (0, 0, (0, 0, 0), 0)
    assert told.free_frames == 8 - 5


def test_who_waits_for_frames_counts_from_the_step_in_which_it_was_refused() -> None:
    system, client, _, _ = stalling()
    assert client.call("pressure").some_ns == 0  # the device is busy with the first: nobody has tried yet
    system.tick()  # the first has all its tokens but one, the second is refused
    system.advance(10 * S)
    told = client.call("pressure")
    assert abs(told.some_ns - 10 * S) < 1000 and told.full_ns == 0
    assert told.some_permille == (632, 154, 33)
    system.run()
    assert 0 <= client.call("pressure").some_ns - told.some_ns < 100  # a step takes 1 ns here
    system.advance(10 * S)
    assert client.call("pressure").some_permille[0] == round(1000 * (1 - exp(-1)) * exp(-1))


def test_everybody_waits_when_the_only_one_waits_for_its_load() -> None:
    system = SimulatedSystem(core=Core, frames=8, dram=16, block_tokens=4)
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(range(17)))
    client.call("demote", ctx, "dram")
    client.post("generate", ctx, 3)
    system.advance(10 * S)  # the load does not end
    told = client.call("pressure")
    assert told.some_permille[0] == told.full_permille[0] == 632


def fire(system: SimulatedSystem, ns: int) -> None:
    """Let time pass, each timer at its time."""
    end = system.now_ns + ns
    while due := sorted(t for t in system.timers if t[0] <= end):
        system.timers.remove(due[0])
        system.now_ns = max(system.now_ns, due[0][0] - 1)
        system.step(Timer(due[0][1]))
    system.now_ns = end


def test_a_subscriber_is_told_once_per_crossing_and_timers_run_only_meanwhile() -> None:
    system, client, generation, _ = stalling(1001)
    watcher = system.connect(uid=1001)  # nobody's administrator
    watcher.call("pressure", 250, 1600)
    assert not system.timers
    system.tick()
    assert generation not in client.replies
    began = system.now_ns
    fire(system, 300 * MS)
    assert not watcher.notices
    fire(system, 200 * MS)
    ((kind, note),) = watcher.notices
    assert kind == "pressure" and isinstance(note, PressureNote)
    assert note.some_permille == 250 and note.full_permille == 0
    assert system.now_ns >= began + 400 * MS
    fire(system, 5 * S)
    assert len(watcher.notices) == 1, "it is above all the time"
    system.run()
    system.timers.clear()
    system.advance(5 * S)
    assert not system.timers, "nobody stalls"


def test_a_subscription_is_armed_again_when_its_window_has_been_below() -> None:
    system = SimulatedSystem(core=Core, frames=8, block_tokens=4)
    client = system.connect()
    client.call("pressure", 500, 1600)
    for number in range(1, 4):
        first, second = (client.call("alloc_context").ctx for _ in range(2))
        client.post("append", first, ints([number] * 18))
        generation = client.post("generate", first, 4)
        system.run(until=lambda: len(client.streamed.get(generation, [])) > 0)  # noqa: B023
        client.post("append", second, ints([9 + number] * 18))
        system.tick()
        fire(system, 1 * S)
        assert len(client.notices) == number
        system.run()
        client.call("release", first)
        client.call("release", second)
        fire(system, 2 * S)
    client.call("pressure", 1001)
    assert not system.kernel.machine.psi._subscriptions


def test_what_pressure_refuses() -> None:
    system = SimulatedSystem()
    client = system.connect()
    for bad in ((-2, 2000), (1002, 2000), (100, 99), (100, 60_001)):
        with pytest.raises(Errno) as error:
            client.call("pressure", *bad)
        assert error.value.code is E.EINVAL


def test_a_subscription_goes_with_its_connection() -> None:
    system = SimulatedSystem()
    client = system.connect()
    client.call("pressure", 10)
    system.disconnect(client)
    assert not system.kernel.machine.psi._subscriptions
