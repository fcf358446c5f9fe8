"""`wait` on every way in which a child, a parent or another waiter can end: each wait gets one answer, never none."""

from __future__ import annotations

import time

import pytest

from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.simulated import SimulatedClient, SimulatedSystem, ints


@pytest.fixture
def system() -> SimulatedSystem:
    return SimulatedSystem(core=Core, frames=16, block_tokens=4)


def code_of(client: SimulatedClient, request: int) -> int:
    return int(client.replies[request].code)


def test_two_waits_for_one_child_one_gets_it_and_the_other_hears_that_it_is_gone(system: SimulatedSystem) -> None:
    client = system.connect()
    child = client.call("spawn", "child")
    first, second = client.post("wait", child.pid), client.post("wait", child.pid)
    client.call("exit", child.pid, 3)
    assert client.result(first).code == 3
    assert code_of(client, second) == E.ENOENT


def test_a_wait_for_any_child_ends_when_the_last_one_went_to_another_waiter(system: SimulatedSystem) -> None:
    client = system.connect()
    one, two = (client.call("spawn", name).pid for name in ("one", "two"))
    named, anyone = client.post("wait", one), client.post("wait", 0)
    third = client.post("wait", 0)
    client.call("exit", one, 1)
    assert client.result(named).pid == one
    assert anyone not in client.replies and third not in client.replies, "the other child is still there"
    client.call("kill", two, 15)
    assert client.result(anyone).pid == two
    assert code_of(client, third) == E.ENOENT


def test_a_wait_that_only_looks_takes_the_child_from_one_that_waits_for_nobody_else(system: SimulatedSystem) -> None:
    client = system.connect()
    one, two = (client.call("spawn", name).pid for name in ("one", "two"))
    client.call("exit", one)
    waiting = client.post("wait", two)
    assert client.call("wait", 0, 0).pid == one
    assert waiting not in client.replies
    client.call("exit", two)
    assert client.result(waiting).pid == two


def test_waits_of_a_process_that_is_killed_are_answered(system: SimulatedSystem) -> None:
    """By another connection of the same uid, and by itself."""
    client, other = system.connect(), system.connect()
    own = client.call("ps").processes[0].pid
    child = client.call("spawn", "child").pid
    request, timed = client.post("wait", child), client.post("wait", 0, 1000)
    other.call("kill", own, 9)
    assert code_of(client, request) == E.ECANCELED
    assert code_of(client, timed) == E.ECANCELED
    system.advance(2_000_000_000)
    client.call("exit", child)
    assert not system.double_replies
    with pytest.raises(Errno) as error:
        client.call("wait", child)
    assert error.value.code is E.ENOENT


def test_a_cancelled_and_a_late_wait_are_answered_once(system: SimulatedSystem) -> None:
    client = system.connect()
    child = client.call("spawn", "child").pid
    cancelled, late, last = client.post("wait", child), client.post("wait", child, 10), client.post("wait", 0, 20)
    client.call("cancel", cancelled)
    assert code_of(client, cancelled) == E.ECANCELED
    system.advance(11_000_000)
    assert code_of(client, late) == E.ETIMEDOUT and last not in client.replies
    client.call("exit", child, 7)
    assert client.result(last).code == 7
    system.advance(60_000_000)
    assert not system.double_replies


def test_answered_waits_leave_no_timers_behind(system: SimulatedSystem) -> None:
    """A program that waits an hour for each of its tools, which take a moment."""
    client = system.connect()
    for _ in range(2000):
        child = client.call("spawn", "tool").pid
        request = client.post("wait", child, 3_600_000)
        client.call("exit", child)
        assert client.result(request).pid == child
    assert len(system.timers) < 100


def test_prefetches_that_are_done_leave_no_timers_behind(system: SimulatedSystem) -> None:
    """What is resident is answered at once, however far its deadline."""
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(range(8)))
    for _ in range(500):
        assert client.call("prefetch", ctx, "hbm", 2**40).failed_blocks == 0
    assert len(system.timers) < 100


def test_rates_that_are_set_again_leave_no_timers_behind(system: SimulatedSystem) -> None:
    """A group that owes two minutes' worth of tokens is let go, again and again."""
    client = system.connect()
    pid = client.call("spawn", "p", 0, 0, "uid:1000/slow").pid
    for k in range(200):
        client.call("setlimit", "uid:1000/slow", "tokens_s", -1, 1)
        ctx = client.call("alloc_context", pid).ctx
        client.call("append", ctx, ints([k, *range(9)]))
        system.run()
        client.call("setlimit", "uid:1000/slow", "tokens_s", -1, 0)
        client.call("release", ctx)
    assert system.kernel.machine.counters["throttles"] == 200
    assert len(system.timers) < 100


def test_timeouts_beyond_any_clock(system: SimulatedSystem) -> None:
    client = system.connect()
    child = client.call("spawn", "child").pid
    request = client.post("wait", child, 2**64 - 1)
    soon = client.post("wait", child, 5)
    system.advance(6_000_000)
    assert code_of(client, soon) == E.ETIMEDOUT and request not in client.replies
    client.call("exit", child)
    assert client.result(request).pid == child


def test_ten_thousand_processes_cost_no_more_each_than_ten() -> None:
    system = SimulatedSystem(core=Core, frames=16, check=False)
    client = system.connect()
    for _ in range(10_000):
        client.post("spawn", "p")
    began = time.process_time()
    for _ in range(200):
        client.post("wait", 0, 0)
    system.disconnect(client)
    assert time.process_time() - began < 1.0  # 0.1 s here; it was 5 s when each end looked at every process
    assert not system.kernel.machine.processes
