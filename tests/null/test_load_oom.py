"""The last resort: who is ended, when, and that it is hardly ever anybody."""

from __future__ import annotations

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.calls import OomNote
from attnix.kernel.context import Context
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno, Panic
from attnix.kernel.events import Timer
from attnix.kernel.ids import Cid
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of

S, MINUTE = 1_000_000_000, 60_000_000_000
NVME = 2


def fire(system: SimulatedSystem, ns: int) -> None:
    """Let time pass, each timer at its time; compute devices work, tiers hang."""
    end = system.now_ns + ns
    while due := sorted(t for t in system.timers if t[0] <= end):
        system.timers.remove(due[0])
        system.now_ns = max(system.now_ns, due[0][0])
        system.step(Timer(due[0][1]))
    system.now_ns = max(system.now_ns, end)


def compute(system: SimulatedSystem) -> None:
    while system.tick(0):
        pass


def row(client: SimulatedClient, pid: int) -> object:
    return client.call("ps", pid).processes[0]


# -- the score ------------------------------------------------------------------------------------------------------


def test_the_score_by_hand() -> None:
    """Ten frames.  A process with three and a half of them: three of its own and one that it shares with another's."""
    system = SimulatedSystem(core=Core, frames=10, block_tokens=4)
    client = system.connect()
    root = client.call("alloc_context").ctx
    client.call("append", root, ints(range(4)))
    system.run()
    child = client.call("spawn", "child", 0, root)
    client.call("append", child.ctx, ints(range(10, 22)))
    system.run()
    assert row(client, child.pid).oom_score == 350  # type: ignore[attr-defined]
    client.call("setpriority", child.pid, 10)
    assert row(client, child.pid).oom_score == 400  # type: ignore[attr-defined]
    client.call("setpriority", child.pid, -20, 100)
    assert row(client, child.pid).oom_score == 350  # type: ignore[attr-defined]
    system.advance(7 * MINUTE)
    assert row(client, child.pid).oom_score == 343  # type: ignore[attr-defined]
    system.advance(500 * MINUTE)
    assert row(client, child.pid).oom_score == 300  # type: ignore[attr-defined]
    client.call("setpriority", child.pid, 0, 1000)
    assert row(client, child.pid).oom_score == 1300  # type: ignore[attr-defined]
    client.call("setpriority", child.pid, 0, -1000)  # uid 1000 is the daemon's own
    shown = row(client, child.pid)
    assert (shown.oom_score, shown.oom_score_adj) == (0, -1000)  # type: ignore[attr-defined]


def test_only_administrators_make_a_process_less_likely_to_be_ended() -> None:
    system = SimulatedSystem(core=Core)
    user = system.connect(uid=1001)
    pid = user.call("ps").processes[0].pid
    with pytest.raises(Errno) as error:
        user.call("setpriority", pid, 5, -1)
    assert error.value.code is E.EACCES
    assert user.call("ps", pid).processes[0].nice == 0, "an errno means that nothing was done"
    for bad in (-1002, 1001):
        with pytest.raises(Errno) as error:
            user.call("setpriority", pid, 5, bad)
        assert error.value.code is E.EINVAL
    user.call("setpriority", pid, 0, 300)
    user.call("setpriority", pid, 3)  # leaves it
    assert user.call("ps", pid).processes[0].oom_score_adj == 300
    user.call("setpriority", pid, 3, 0)  # nobody's harm but one's own, taken back
    root = system.connect(uid=0)
    root.call("setpriority", pid, 0, -500)
    user.call("setpriority", pid, 0, -400)
    with pytest.raises(Errno):
        user.call("setpriority", pid, 0, -401)


# -- the fuse -------------------------------------------------------------------------------------------------------


def stuck(**more: object) -> tuple[SimulatedSystem, SimulatedClient, int, SimulatedClient, int]:
    """Eight frames.  The older context, of five blocks, was admitted and waits for a load from a tier that hangs: four
    frames are under I/O and one is its own.  The younger one needs four and three are free."""
    system = SimulatedSystem(core=Core, frames=8, dram=16, nvme=40, direct=True, block_tokens=4, **more)  # type: ignore[arg-type]
    old, young = system.connect(), system.connect(uid=1001)
    ctx = old.call("alloc_context").ctx
    old.call("append", ctx, ints(range(16)))
    system.run()
    old.call("demote", ctx, "nvme")
    system.core.evict(1, system.core.log_blocks(system.kernel.machine.contexts[Cid(1)].slot))
    old.post("append", ctx, ints(range(16, 19)))
    first = old.post("generate", ctx, 3)
    assert system.pending[NVME] and not system.pending[0], "it waits for the nvme"
    other = young.call("alloc_context").ctx
    young.post("append", other, ints(range(100, 114)))
    second = young.post("generate", other, 2)
    compute(system)
    assert system.available() == 3 and second not in young.replies
    return system, old, first, young, second


def test_frames_are_taken_by_force_before_anybody_is_ended() -> None:
    system, old, first, young, second = stuck(sysctl={"tier.gates": 0, "oom.after_ms": 5000})
    fire(system, 4 * S)
    compute(system)
    assert second not in young.replies
    fire(system, 2 * S)
    compute(system)
    assert tokens_of(young.result(second).tokens) == reference_tokens([*range(100, 114)], 2)
    assert not old.notices and system.kernel.machine.counters["oom_kills"] == 0
    assert system.kernel.machine.counters["oom_dropped_frames"] == 5
    system.run()  # the tier answers after all
    assert tokens_of(old.result(first).tokens) == reference_tokens([*range(19)], 3)


def test_a_shorter_fuse_counts_at_once() -> None:
    system, old, _, young, second = stuck(sysctl={"tier.gates": 0, "oom.after_ms": 60_000})
    old.call("sysctl", "oom.after_ms", 2000)
    fire(system, 3 * S)
    compute(system)
    assert tokens_of(young.result(second).tokens) == reference_tokens([*range(100, 114)], 2)


def test_without_the_fuse_it_waits_until_the_tier_answers_or_its_driver_is_killed() -> None:
    system, old, first, young, second = stuck(sysctl={"tier.gates": 0, "oom.after_ms": 0})
    fire(system, 1000 * S)
    assert second not in young.replies and not system.timers
    system.kill_driver(NVME)
    system.run()
    assert tokens_of(young.result(second).tokens) == reference_tokens([*range(100, 114)], 2)
    assert tokens_of(old.result(first).tokens) == reference_tokens([*range(19)], 3)


def keep_from_being_dropped(system: SimulatedSystem, cids: set[int]) -> None:
    """As a guarantee would: the pager may not take these, whatever happens."""
    pager = system.kernel.machine.schedulers[0].pager
    before = pager._can_drop

    def allowed(context: Context) -> bool:
        return context.cid not in cids and before(context)

    pager._can_drop = allowed  # type: ignore[method-assign]


def test_when_force_does_not_help_the_one_whose_end_is_enough_goes() -> None:
    """Ten frames, and nothing may be dropped.  X has one, Y four, Z two; an admitted context waits for its load with two
    under I/O.  Who waits needs three and one is free.  X would be the first by its score but gives too little; Y's end
    is enough, and so is no other's."""
    system = SimulatedSystem(
        core=Core,
        frames=10,
        dram=16,
        nvme=40,
        direct=True,
        block_tokens=4,
        sysctl={"tier.gates": 0, "oom.after_ms": 5000},
    )
    people = [system.connect(uid=1001 + n) for n in range(5)]
    x, y, z, loader, waiter = people
    held = {}
    for client, blocks, adjust in ((x, 1, 700), (y, 4, 0), (z, 2, 0)):
        ctx = client.call("alloc_context")
        client.call("append", ctx.ctx, ints(range(10 * client.conn, 10 * client.conn + 4 * blocks)))
        system.run()
        pid = client.call("ps").processes[0].pid
        client.call("setpriority", pid, 0, adjust)
        held[ctx.cid] = client
    loading = loader.call("alloc_context")
    loader.call("append", loading.ctx, ints(range(150, 158)))
    system.run()
    loader.call("demote", loading.ctx, "nvme")
    system.core.evict(1, system.core.log_blocks(system.kernel.machine.contexts[loading.cid].slot))
    keep_from_being_dropped(system, set(held) | {loading.cid})
    loader.post("generate", loading.ctx, 1)
    assert system.pending[NVME] and system.available() == 1
    ctx = waiter.call("alloc_context").ctx
    waiter.post("append", ctx, ints(range(200, 210)))
    request = waiter.post("generate", ctx, 2)
    fire(system, 9 * S)
    assert not any(client.notices for client in people), "first by force, and that for as long again"
    fire(system, 2 * S)
    compute(system)
    assert tokens_of(waiter.result(request).tokens) == reference_tokens([*range(200, 210)], 2)
    assert [bool(client.notices) for client in people] == [False, True, False, False, False]
    ((kind, note),) = y.notices
    assert kind == "oom" and isinstance(note, OomNote)
    assert (note.score, note.cid in held) == (400, True)
    assert "4 frames" in note.message and note.message.endswith("so that another user can go on")
    said = note.message.replace(
        "another user", f"context {system.kernel.machine.last_ids()[1]} of process {waiter.call('ps').processes[0].pid}"
    )
    assert said in [r.text for r in system.kernel.machine.dmesg.since(0)]
    assert not y.call("ps").processes and system.kernel.machine.counters["oom_kills"] == 1
    fire(system, 1000 * S)
    assert system.kernel.machine.counters["oom_kills"] == 1


def test_when_nobodys_end_would_give_a_frame_back_nobody_is_ended_and_it_is_said_once() -> None:
    """All eight frames are under I/O of a tier that hangs: they return when its driver is reaped, not before."""
    system = SimulatedSystem(
        core=Core,
        frames=8,
        dram=16,
        nvme=40,
        direct=True,
        block_tokens=4,
        sysctl={"tier.gates": 0, "oom.after_ms": 5000},
    )
    old, young = system.connect(), system.connect()
    ctx = old.call("alloc_context").ctx
    old.call("append", ctx, ints(range(32)))
    system.run()
    old.call("demote", ctx, "nvme")
    system.core.evict(1, system.core.log_blocks(system.kernel.machine.contexts[Cid(1)].slot))
    first = old.post("generate", ctx, 1)
    assert system.pending[NVME] and system.available() == 0
    other = young.call("alloc_context").ctx
    young.post("append", other, ints([7] * 6))
    second = young.post("generate", other, 2)
    fire(system, 1000 * S)
    assert not system.timers, "there is nothing more to try"
    said = [r.text for r in system.kernel.machine.dmesg.since(0) if "nobody's end" in r.text]
    assert len(said) == 1 and system.kernel.machine.counters["oom_kills"] == 0
    system.kill_driver(NVME)
    system.run()
    assert tokens_of(old.result(first).tokens) == reference_tokens([*range(32)], 1)
    assert tokens_of(young.result(second).tokens) == reference_tokens([7] * 6, 2)


# -- who runs and cannot grow ---------------------------------------------------------------------------------------


def growing(protected: int) -> tuple[SimulatedSystem, SimulatedClient, SimulatedClient, int]:
    """Six frames, and nobody may be dropped: one has four, the other two and wants a third."""
    system = SimulatedSystem(core=Core, frames=6, block_tokens=4)
    large, small = system.connect(uid=1001), system.connect(uid=1002)
    ctx = large.call("alloc_context")
    large.call("append", ctx.ctx, ints([1] * 16))
    system.run()
    root = system.connect(uid=0)
    for pid in range(1, 1 + protected):
        root.call("setpriority", pid, 0, -1000)
    other = small.call("alloc_context")
    small.post("append", other.ctx, ints([2] * 6))
    keep_from_being_dropped(system, {ctx.cid, other.cid})
    return system, large, small, small.post("generate", other.ctx, 8)


def test_the_largest_goes_when_who_runs_cannot_grow() -> None:
    system, large, small, request = growing(protected=0)
    system.run()
    assert tokens_of(small.result(request).tokens) == reference_tokens([2] * 6, 8)
    assert [kind for kind, _ in large.notices] == ["oom"] and not small.notices


def test_who_may_never_be_ended_is_not() -> None:
    system, large, small, request = growing(protected=1)
    system.run()
    assert small.result(request).reason == "killed" and not large.notices
    assert (
        tokens_of(small.result(request).tokens) == reference_tokens([2] * 6, 8)[:3]
    )  # two blocks, and a last one needs no frame


def test_with_nobody_to_end_it_is_a_broken_invariant() -> None:
    system, *_ = growing(protected=2)
    with pytest.raises(Panic, match="nobody can be preempted"):
        system.run()


def test_stopped_paused_pinned_and_idle_contexts_never_lead_here() -> None:
    """A context of the whole pool comes after one of each kind that holds frames: it runs, and nobody is ended."""
    system = SimulatedSystem(core=Core, frames=8, block_tokens=4, sysctl={"pin.share_permille": 1000})
    client = system.connect()
    stopped = client.call("spawn", "stopped").pid
    contexts = [client.call("alloc_context", pid).ctx for pid in (stopped, 0, 0)]
    for n, ctx in enumerate(contexts):
        client.post("append", ctx, ints([n] * 7))
    held = client.post("generate", contexts[0], 20)
    system.run(until=lambda: len(client.streamed.get(held, [])) > 1)
    client.call("kill", stopped, 19)
    client.call("pin", contexts[1])
    whole = client.call("alloc_context").ctx
    client.post("append", whole, ints([9] * 31))
    request = client.post("generate", whole, 2)
    compute(system)
    assert tokens_of(client.result(request).tokens) == reference_tokens([9] * 31, 2)
    assert system.kernel.machine.counters["oom_kills"] == 0 == system.kernel.machine.counters["oom_dropped_frames"]
