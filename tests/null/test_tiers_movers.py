"""Who is carried first: what somebody waits for overtakes what nobody waits for, a long load does not hold up a short one,
and what nobody wants any more is not carried at all."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel import errands
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.kernel.events import Exec, Transfer
from attnix.kernel.machine import Machine
from attnix.kernel.movers import AT_ONCE, BATCH, BEHIND
from attnix.kernel.twin import TwinCore
from attnix.simulated import CoreMaker, SimulatedClient, SimulatedSystem, ints, tokens_of

CORES = pytest.mark.parametrize("core", [TwinCore, Core])
DRAM, NVME = 1, 2


def prompt(n: int, blocks: int) -> list[int]:
    """`blocks` blocks of four tokens; different n share nothing."""
    return [1 + n, *((7 * k + n * k * k) % 250 for k in range(4 * blocks - 1))]


def parked(client: SimulatedClient, tokens: list[int], tier: str = "dram") -> int:
    """A context of these tokens that lies in `tier` only."""
    ctx: int = client.call("alloc_context").ctx
    client.call("append", ctx, ints(tokens))
    client.call("forward", ctx, 1)
    down = client.call("demote", ctx, tier)
    assert (down.failed_blocks, client.call("stat", ctx).cached_tokens) == (0, 0)
    return ctx


def large(core: CoreMaker, **more: Any) -> SimulatedSystem:
    return SimulatedSystem(
        frames=3000, window_tokens=8000, core=core, check=False, sysctl={"sched.step_tokens": 4096}, **more
    )


def items(effect: object) -> int:
    assert isinstance(effect, Transfer)
    return len(effect.pairs) // 8


def ticks_until_a_pass(system: SimulatedSystem) -> int:
    """Transfers of hbm0 that end before the first pass can be sent."""
    done = 0
    while not any(isinstance(effect, Exec) for effect in system.pending[0]):
        assert system.tick(0)
        done += 1
    return done


def counters(system: SimulatedSystem) -> dict[str, int]:
    return dict(system.kernel.machine.counters)


@CORES
def test_a_demand_load_overtakes_queued_prefetches(core: CoreMaker) -> None:
    """A prefetch of 1,200 blocks goes in batches of 64, two at a time; a fault of 3 blocks is third."""
    system = large(core, dram=2500)
    client = system.connect()
    long, short = parked(client, prompt(0, 1200)), parked(client, prompt(1, 3))
    fetch = client.post("prefetch", long)
    assert [items(e) for e in system.pending[0]] == [BEHIND] * AT_ONCE
    request = client.post("generate", short, 1)
    assert ticks_until_a_pass(system) == AT_ONCE + 1, "two batches that were under way, and its own"
    system.run(until=lambda: request in client.replies)
    assert fetch not in client.replies
    assert tokens_of(client.result(request).tokens) == reference_tokens(prompt(1, 3), 1)
    system.run()
    assert client.result(fetch).resident_blocks == 1200
    assert client.call("stat", long).usage.dram_tokens == 4800


@CORES
def test_a_demand_load_overtakes_queued_demotions(core: CoreMaker) -> None:
    """Ends of turns write through to nvme in batches; a fault from nvme does not wait for all of them."""
    system = large(core, dram=2500, nvme=2500)
    client = system.connect()
    short = parked(client, prompt(1, 3), "nvme")
    system.connect(0).call("sysctl", "tier.write", "through")
    big = client.call("alloc_context").ctx
    client.call("append", big, ints(prompt(0, 1200)))
    client.call("generate", big, 1)
    while not system.pending[NVME]:
        system.tick(0)
    while system.pending[0]:
        system.tick(0)
    assert sum(items(e) for e in system.pending[NVME]) == AT_ONCE * BEHIND
    queued = sum(len(queue) for queue in system.kernel.machine.movers._waiting[NVME])
    assert queued >= 10, "the test needs a queue"
    request = client.post("generate", short, 1)
    for _ in range(AT_ONCE + 1):
        system.tick(NVME)
    system.run(until=lambda: request in client.replies or not system.pending[0])
    while system.pending[0]:
        system.tick(0)
    assert request in client.replies
    assert sum(len(queue) for queue in system.kernel.machine.movers._waiting[NVME]) >= queued - AT_ONCE - 1
    assert tokens_of(client.result(request).tokens) == reference_tokens(prompt(1, 3), 1)


@CORES
def test_a_long_load_does_not_hold_up_a_short_one(core: CoreMaker) -> None:
    """Both are demands; the long one came first, with more batches than may be under way."""
    system = large(core, dram=2500)
    client = system.connect()
    long, short = parked(client, prompt(0, 1200)), parked(client, prompt(1, 3))
    first = client.post("generate", long, 1)
    assert [items(e) for e in system.pending[0]] == [BATCH] * AT_ONCE
    second = client.post("generate", short, 1)
    assert ticks_until_a_pass(system) == AT_ONCE + 1
    system.run(until=lambda: second in client.replies)
    assert first not in client.replies
    assert tokens_of(client.result(second).tokens) == reference_tokens(prompt(1, 3), 1)
    system.run()
    assert tokens_of(client.result(first).tokens) == reference_tokens(prompt(0, 1200), 1)


@CORES
def test_a_prefetch_becomes_a_demand_when_its_context_is_used(core: CoreMaker) -> None:
    """Two prefetches are queued; a generate on the second makes it overtake the first."""
    system = large(core, dram=2500)
    client = system.connect()
    first, second = parked(client, prompt(0, 1000)), parked(client, prompt(1, 100))
    client.post("prefetch", first)
    client.post("prefetch", second)
    request = client.post("generate", second, 1)
    assert ticks_until_a_pass(system) == AT_ONCE + 2, "two batches of the first, and the second's two"
    system.run(until=lambda: request in client.replies)
    assert tokens_of(client.result(request).tokens) == reference_tokens(prompt(1, 100), 1)
    assert counters(system)["prefetch_late_blocks"] == 100


@CORES
def test_somebody_elses_prefetch_is_urgent_for_who_shares_it(core: CoreMaker) -> None:
    """The second context's prompt begins like the second half of what is being prefetched: no inversion of priority."""
    system = large(core, dram=2500, nvme=0)
    client = system.connect()
    shared = prompt(1, 100)
    first, second = parked(client, prompt(0, 1000)), parked(client, shared)
    client.post("prefetch", first)
    client.post("prefetch", second)
    other = client.call("alloc_context").ctx
    client.post("append", other, ints([*shared, 9]))
    request = client.post("generate", other, 1)
    assert ticks_until_a_pass(system) == AT_ONCE + 2
    system.run(until=lambda: request in client.replies)
    assert tokens_of(client.result(request).tokens) == reference_tokens([*shared, 9], 1)


@CORES
def test_a_prefetch_through_a_small_dram_leaves_room_for_a_fault(core: CoreMaker) -> None:
    """Everything from nvme comes through 16 frames of dram: a prefetch of 400 blocks, and a fault of 6 behind it."""
    system = large(core, dram=16, nvme=2500)
    client = system.connect()
    long, short = parked(client, prompt(0, 400), "nvme"), parked(client, prompt(1, 6), "nvme")
    fetch = client.post("prefetch", long)
    for _ in range(4):
        system.tick(NVME)
        system.tick(0)
    request = client.post("generate", short, 1)
    before = counters(system)["transfers"]
    rounds = 0
    while request not in client.replies:
        system.tick(NVME)
        system.tick(0)
        rounds += 1
    assert rounds <= 8, f"{counters(system)['transfers'] - before} transfers went before it"
    assert fetch not in client.replies
    assert tokens_of(client.result(request).tokens) == reference_tokens(prompt(1, 6), 1)
    system.run()
    assert client.result(fetch).resident_blocks == 400


# -- what nobody wants any more -----------------------------------------------------------------------------------------


@CORES
@pytest.mark.parametrize("tier", ["dram", "nvme"])
@pytest.mark.parametrize("target", ["hbm", "dram"])
def test_no_new_transfer_begins_for_a_context_that_is_released(core: CoreMaker, tier: str, target: str) -> None:
    if tier == target:
        return
    system = large(core, dram=1000, nvme=1000)
    system.check = True
    client = system.connect()
    ctx = parked(client, prompt(0, 300), tier)
    before = [system.available(d) for d in range(3)]
    fetch = client.post("prefetch", ctx, target)
    begun = counters(system)["transfers"]
    client.post("release", ctx)
    assert client.replies[fetch].code == E.ESTALE
    system.run()
    assert counters(system)["transfers"] <= begun + (AT_ONCE if (tier, target) == ("nvme", "hbm") else 0)
    assert not system.kernel.machine.movers.moving()
    assert [system.available(d) for d in range(3)] == before
    assert counters(system)["abandoned_loads"] >= 300 - AT_ONCE * BATCH
    again = client.call("alloc_context").ctx
    client.call("append", again, ints(prompt(0, 300)))
    assert tokens_of(client.call("generate", again, 2).tokens) == reference_tokens(prompt(0, 300), 2)


@CORES
def test_what_another_context_waits_for_is_carried_though_its_owner_goes(core: CoreMaker) -> None:
    system = large(core, dram=1000)
    system.check = True
    client = system.connect()
    tokens = prompt(0, 300)
    ctx = parked(client, tokens)
    client.post("prefetch", ctx)
    other = client.call("alloc_context").ctx
    client.post("append", other, ints([*tokens[:800], 3]))
    request = client.post("generate", other, 1)
    client.post("release", ctx)
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens([*tokens[:800], 3], 1)
    usage = client.call("stat", other).usage
    assert (usage.computed_tokens, usage.hit_tokens) == (1, 800)


@CORES
@pytest.mark.parametrize("target", ["hbm", "dram"])
def test_a_cancelled_prefetch_stops_and_what_it_was_for_still_works(core: CoreMaker, target: str) -> None:
    system = large(core, dram=1000, nvme=1000)
    system.check = True
    client = system.connect()
    ctx = parked(client, prompt(0, 300), "nvme")
    before = system.devices[NVME].read_frames
    fetch = client.post("prefetch", ctx, target)
    client.call("cancel", fetch)
    with pytest.raises(Errno) as error:
        client.result(fetch)
    assert error.value.code is E.ECANCELED
    system.run()
    assert system.devices[NVME].read_frames - before <= AT_ONCE * BATCH
    assert not system.kernel.machine.errands.open
    result = client.call("generate", ctx, 3)
    assert tokens_of(result.tokens) == reference_tokens(prompt(0, 300), 3)
    assert client.call("stat", ctx).usage.recomputed_tokens <= 4  # the last block at most: its logits were never kept


@CORES
def test_a_prefetch_that_is_too_late_begins_nothing_more(core: CoreMaker) -> None:
    system = large(core, dram=1000, nvme=1000)
    client = system.connect()
    ctx = parked(client, prompt(0, 300), "nvme")
    fetch = client.post("prefetch", ctx, "dram", 5)
    for _ in range(AT_ONCE):
        system.tick(NVME)
    system.advance(6_000_000)
    moved = client.result(fetch)
    assert 0 < moved.resident_blocks < 300
    begun = counters(system)["transfers"]
    system.run()
    assert counters(system)["transfers"] == begun
    assert tokens_of(client.call("generate", ctx, 3).tokens) == reference_tokens(prompt(0, 300), 3)


# -- was it worth it ----------------------------------------------------------------------------------------------------


def prefetched(system: SimulatedSystem) -> tuple[int, ...]:
    """begun, in time, late, wasted, outstanding"""
    c = system.kernel.machine.counters
    ends = (f"prefetch_{end}_blocks" for end in ("in_time", "late", "wasted"))
    return (c["prefetched_blocks"], *(c[end] for end in ends), len(system.kernel.machine.prefetches))


@CORES
@pytest.mark.parametrize("target", ["hbm", "dram"])
def test_prefetches_that_are_used_are_counted_in_time(core: CoreMaker, target: str) -> None:
    system = SimulatedSystem(frames=12, dram=12, nvme=24, core=core)
    client = system.connect()
    ctx = parked(client, prompt(0, 3), "nvme")
    client.call("prefetch", ctx, target)
    assert prefetched(system) == (3, 0, 0, 0, 3)
    client.call("generate", ctx, 1)
    assert prefetched(system) == (3, 3, 0, 0, 0)
    client.call("generate", ctx, 1)
    assert prefetched(system) == (3, 3, 0, 0, 0), "only the first use counts"
    vmstat = client.call("vmstat").counters
    assert vmstat["prefetch_in_time_blocks"] == 3


@CORES
@pytest.mark.parametrize("target", ["hbm", "dram"])
def test_prefetches_that_the_job_overtakes_are_counted_late(core: CoreMaker, target: str) -> None:
    system = SimulatedSystem(frames=12, dram=12, nvme=24, core=core)
    client = system.connect()
    ctx = parked(client, prompt(0, 3), "nvme")
    client.post("prefetch", ctx, target)
    request = client.post("generate", ctx, 1)
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(prompt(0, 3), 1)
    assert prefetched(system) == (3, 0, 3, 0, 0)


@CORES
def test_prefetches_that_nobody_used_are_counted_with_their_bytes(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=8, dram=12, nvme=24, core=core)
    client = system.connect()
    ctx = parked(client, prompt(0, 3), "nvme")
    client.call("prefetch", ctx)
    for n in range(1, 4):  # others need the frames
        other = client.call("alloc_context").ctx
        client.call("append", other, ints(prompt(n, 7)))
        client.call("generate", other, 1)
        client.call("release", other)
    assert prefetched(system) == (3, 0, 0, 3, 0)
    assert client.call("vmstat").counters["prefetch_wasted_bytes"] == 3 * 32
    client.call("generate", ctx, 1)
    assert prefetched(system) == (3, 0, 0, 3, 0)


@CORES
def test_a_lost_device_leaves_no_prefetch_open(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, nvme=24, core=core)
    client = system.connect()
    ctx = parked(client, prompt(0, 3), "nvme")
    client.call("prefetch", ctx)
    system.kill_driver(0, arena="lost")
    client.call("generate", ctx, 1)
    begun, in_time, late, wasted, outstanding = prefetched(system)
    assert (begun, in_time, late, wasted, outstanding) == (3, 0, 0, 0, 0)
    assert counters(system)["prefetch_failed_blocks"] == 3


def test_transfers_carry_whole_pairs() -> None:
    """A guard for this file: `items` counts what a transfer moves."""
    effect = Transfer(1, 1, "read", 0, array("i", [1, 2, 3, 4]).tobytes(), b"", -1, 0)
    assert items(effect) == 2


@CORES
def test_who_waits_for_transfers_is_looked_at_when_some_have_ended(
    core: CoreMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred demotions, as one program may ask for.  A step that ends no transfer looks at none of them, and one that does at a
    few that still wait; each is answered all the same."""
    looks = Counter[str]()

    def counted(kind: type[errands.Errand]) -> None:
        step = kind.step

        def look(errand: errands.Errand, m: Machine) -> tuple[object, ...] | None:
            looks[kind.__name__] += 1
            return step(errand, m)

        monkeypatch.setattr(kind, "step", look)

    counted(errands.Demotion)
    counted(errands.Promotion)
    system = SimulatedSystem(frames=40, dram=40, nvme=80, core=core, check=False)
    client, other = system.connect(), system.connect(1001)
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(range(60)))
    system.run()
    for name, tier, kind in (("demote", "nvme", "Demotion"), ("prefetch", "dram", "Promotion")):
        looks.clear()
        asked = [client.post(name, ctx, tier) for _ in range(100)]
        assert looks[kind] == 100 and any(request not in client.replies for request in asked), "once each"
        for _ in range(20):
            other.post("uname")
        assert looks[kind] == 100
        moved = system.run()
        assert looks[kind] <= 100 + moved * errands.AT_ONCE + 100
        assert all(client.result(request).resident_blocks for request in asked)
    assert not system.kernel.fsck()
