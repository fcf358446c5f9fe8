"""fsck finds what it says it finds: every invariant is broken on purpose, in the twin's own tables, and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnix.kernel.context import Job, JobKind
from attnix.kernel.interrupts import Interrupt
from attnix.kernel.lifetimes import Wait
from attnix.kernel.records import FILLING, FREE, VALID
from attnix.kernel.twin import TwinCore
from attnix.simulated import SimulatedSystem, ints, tokens_of


def busy_system() -> tuple[SimulatedSystem, TwinCore]:
    """Two contexts that share a prefix, one in flight, one reclaimable block, some free frames."""
    system = SimulatedSystem(frames=16, block_tokens=4)
    client = system.connect()
    gone = client.call("alloc_context").ctx
    client.call("append", gone, ints([9] * 4))
    system.run()
    client.call("release", gone)
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(range(10)))
    system.run()
    fork = client.call("fork", ctx).ctxs[0]
    client.post("generate", fork, 5)
    system.tick()  # its first pass only recomputes the last token; the one in flight now writes
    assert isinstance(system.core, TwinCore)
    assert system.kernel.fsck() == []
    return system, system.core


def _free_in_use(core: TwinCore) -> None:
    pool = core._pools[0]
    pool.frames[pool.free[-1]].refs = 1


def _lost_frame(core: TwinCore) -> None:
    core._pools[0].free.pop()


def _free_twice(core: TwinCore) -> None:
    core._pools[0].free.append(core._pools[0].free[-1])


def _block_names_another(core: TwinCore) -> None:
    frame = next(f for f in core._pools[0].frames if f.state == VALID)
    core._blocks[frame.block].copies[0] = -1


def _refs_too_high(core: TwinCore) -> None:
    next(f for f in core._pools[0].frames if f.refs > 1).refs += 1


def _refs_too_low(core: TwinCore) -> None:
    next(f for f in core._pools[0].frames if f.refs > 1).refs -= 1


def _wired_for_nobody(core: TwinCore) -> None:
    next(f for f in core._pools[0].frames if f.refs > 0).wired += 1


def _reclaimable_but_mapped(core: TwinCore) -> None:
    next(f for f in core._pools[0].frames if f.refs > 0 and f.state == VALID).stamp = 99


def _leaked(core: TwinCore) -> None:
    frame = next(f for f in core._pools[0].frames if f.stamp)
    frame.stamp = 0
    core._pools[0].reclaimable -= 1


def _key_finds_nothing(core: TwinCore) -> None:
    core._index.popitem()


def _shared_tail_written(core: TwinCore) -> None:
    """The fork in flight got a tail of its own; let the parent read from that one what is being written."""
    writer = core._slots[core._pools[0].flight[0][0]]
    frame = core._pools[0].frames[writer.frames[-1]]
    frame.refs += 1
    reader = next(s for s in core._slots if s.used and s is not writer)
    core._pools[0].frames[reader.frames[-1]].refs -= 1
    reader.frames[-1] = writer.frames[-1]
    reader.counts[-1] = writer.counts[-1]


def _computed_beyond_map(core: TwinCore) -> None:
    next(s for s in core._slots if s.used).computed = 13


def _orphan(core: TwinCore) -> None:
    block = next(b for b in core._blocks if b.indexed and b.parent >= 0)
    block.parent = next(i for i, b in enumerate(core._blocks) if not b.indexed)


def _charged_too_little(core: TwinCore) -> None:
    core._accounts[0, 1][0] -= 1


def _cache_of_nobody(core: TwinCore) -> None:
    core._accounts[0, 1][1] += 1


def _owner_changed(core: TwinCore) -> None:
    next(f for f in core._pools[0].frames if f.refs).owner = 0


def _over_its_limit(core: TwinCore) -> None:
    core._accounts[0, 1][3] = 1


def _free_but_charged(core: TwinCore) -> None:
    core._pools[0].frames[core._pools[0].free[-1]].owner = 1


@pytest.mark.parametrize(
    ("named", "damage"),
    [
        ("I1", _free_in_use),
        ("I1", _lost_frame),
        ("I1", _free_twice),
        ("I1", _reclaimable_but_mapped),
        ("I1", _leaked),
        ("I2", _block_names_another),
        ("I3", _refs_too_high),
        ("I3", _refs_too_low),
        ("I4", _wired_for_nobody),
        ("I5", _shared_tail_written),
        ("I6", _key_finds_nothing),
        ("I6", _orphan),
        ("I7", _computed_beyond_map),
        ("I8", _charged_too_little),
        ("I8", _cache_of_nobody),
        ("I8", _owner_changed),
        ("I8", _over_its_limit),
        ("I8", _free_but_charged),
    ],
)
def test_each_invariant_is_named_when_it_is_broken(named: str, damage: Callable[[TwinCore], None]) -> None:
    system, core = busy_system()
    damage(core)
    problems = system.kernel.fsck()
    assert any(p.startswith(named) for p in problems), f"{damage.__name__}: {problems}"


def test_i8_a_group_that_miscounts_its_contexts() -> None:
    system, _ = busy_system()
    group = system.kernel.machine.groups.of_uid(1000)
    group.contexts -= 1
    assert any(p.startswith("I8") for p in system.kernel.fsck())
    group.contexts += 1
    group.limits["contexts"] = (0, 1)
    assert any(p.startswith("I8") for p in system.kernel.fsck())


def test_i9_a_request_that_nobody_would_answer() -> None:
    system, _ = busy_system()
    connection = next(iter(system.kernel.machine.connections.values()))
    connection.requests.clear()
    assert any(p.startswith("I9") for p in system.kernel.fsck())


def test_a_generation_that_ends_after_its_context_was_given_to_another() -> None:
    """The pass in flight is to come back first; who asked is answered then, though another client has the context."""
    system = SimulatedSystem(frames=16, block_tokens=4)
    client, other = system.connect(), system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(range(6)))
    client.call("publish", ctx, "shared")
    request = client.post("generate", ctx, 5)
    client.post("release", ctx)
    assert system.pending[0] and request not in client.replies
    mine = other.call("open", "shared").ctx
    assert system.kernel.fsck() == []
    system.run()
    assert client.result(request).reason == "cancelled"
    assert len(tokens_of(other.call("generate", mine, 3).tokens)) == 3


def test_a_stopped_process_that_is_run_all_the_same() -> None:
    system, _ = busy_system()
    process = next(iter(system.kernel.machine.processes.values()))
    process.stopped = True
    assert any("is held and will be run" in problem for problem in system.kernel.fsck())


def test_i10_everything_returns_to_baseline() -> None:
    system, core = busy_system()
    for client in list(system.clients.values()):
        system.disconnect(client)
    system.run()
    assert system.available() == 16
    core.evict(0, list(core.oldest(0, 16)))
    assert core.free_frames(0) == 16
    assert system.kernel.fsck() == []
    assert {f.state for f in core._pools[0].frames} == {FREE} and FILLING not in {
        f.state for f in core._pools[0].frames
    }


# -- contexts that wait for a tool ------------------------------------------------------------------------------------


def waiting_system() -> tuple[SimulatedSystem, Wait]:
    """A context that waits with a deadline, is kept, and another that lost its frames and is to be brought back."""
    system = SimulatedSystem(frames=8, dram=8, block_tokens=4, sysctl={"wait.policy": "ttl"})
    client = system.connect()
    first, second = (client.call("alloc_context").ctx for _ in range(2))
    for ctx in (first, second):
        client.call("append", ctx, ints(range(ctx & 7, 12)))
        system.run()
    client.call("wait_tool", first, "search", 5000, 9000)
    client.call("sysctl", "wait.policy", "cost")  # the others bring nothing back
    client.call("wait_tool", second, "search", 6000)
    machine = system.kernel.machine
    wait, other = (c.wait for c in machine.contexts.values())
    assert wait is not None and other is not None
    machine.schedulers[0].pager.forget(other.context)
    assert other.fetch_ns and system.kernel.fsck() == []
    return system, wait


def _forgotten_deadline(system: SimulatedSystem, wait: Wait) -> None:
    system.kernel.machine.lifetimes._deadlines._heap.clear()


def _deadline_of_nobody(system: SimulatedSystem, wait: Wait) -> None:
    wait.deadline_ns = 0


def _miscounted(system: SimulatedSystem, wait: Wait) -> None:
    system.kernel.machine.lifetimes.waiting += 1


def _foretold_by_nobody(system: SimulatedSystem, wait: Wait) -> None:
    wait.foretold = False


def _waits_and_runs(system: SimulatedSystem, wait: Wait) -> None:
    system.kernel.machine.start(wait.context, Job(JobKind.FORWARD, 1))


def _wait_of_another(system: SimulatedSystem, wait: Wait) -> None:
    wait.context.waited += 1


def _kept_for_ever(system: SimulatedSystem, wait: Wait) -> None:
    system.kernel.machine.schedulers[0].idle._ends.clear()


def _due_and_not_in_line(system: SimulatedSystem, wait: Wait) -> None:
    wait.keep_until_ns = 0
    system.kernel.machine.schedulers[0].idle.add(wait.context)
    system.kernel.machine.schedulers[0].idle._late.clear()


def _never_brought_back(system: SimulatedSystem, wait: Wait) -> None:
    system.kernel.machine.lifetimes.returning._alarms._heap.clear()


def _taken_by_nobody(system: SimulatedSystem, wait: Wait) -> None:
    system.kernel.machine.schedulers[0].idle.remove(wait.context)


@pytest.mark.parametrize(
    ("said", "damage"),
    [
        ("deadline of wait", _forgotten_deadline),
        ("deadline of wait", _deadline_of_nobody),
        ("the count says", _miscounted),
        ("said when they are back", _foretold_by_nobody),
        ("waits for a tool and runs a forward", _waits_and_runs),
        ("is not of the context", _wait_of_another),
        ("is kept and nothing ends that", _kept_for_ever),
        ("is due and not among", _due_and_not_in_line),
        ("no alarm says when", _never_brought_back),
        ("cannot be taken", _taken_by_nobody),
    ],
)
def test_a_wait_that_is_broken_is_named(said: str, damage: Callable[[SimulatedSystem, Wait], None]) -> None:
    system, wait = waiting_system()
    damage(system, wait)
    problems = system.kernel.fsck()
    assert any(said in p for p in problems), f"{damage.__name__}: {problems}"


def test_interrupts_that_nobody_would_deliver() -> None:
    system, _ = busy_system()
    machine = system.kernel.machine
    context = next(c for c in machine.contexts.values() if c.job is not None)
    assert context.job is not None
    idle = next(c for c in machine.contexts.values() if c.job is None)
    machine.interrupts.pending[idle] = [Interrupt(1, 99, b"")]
    assert any(p.startswith("I9") and "interrupts" in p for p in system.kernel.fsck())
    machine.interrupts.pending.clear()
    context.job.injected = ((50, 2),)
    assert any("injected" in p for p in system.kernel.fsck())
