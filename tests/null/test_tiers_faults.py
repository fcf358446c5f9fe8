"""Tiers that fill up, rot, lie, die and repeat themselves: the answers stay right, the counters tell, no frame is lost."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from attnix.drivers.sim_memory import SimTier
from attnix.drivers.sim_model import reference_tokens
from attnix.drivers.stored import Gates
from attnix.kernel.calls import TierRow
from attnix.kernel.core import Core
from attnix.kernel.device import RESTART_AFTER_FAILURES
from attnix.kernel.errors import E
from attnix.kernel.events import DriverUp, Exec, ExecDone, ExecFailed, Transfer, TransferDone
from attnix.kernel.tag import GATE_FAILED
from attnix.kernel.twin import TwinCore
from attnix.simulated import CoreMaker, SimulatedClient, SimulatedSystem, ints, tokens_of

CORES = pytest.mark.parametrize("core", [TwinCore, Core])
DRAM, NVME = 1, 2


def prompt(n: int, tokens: int) -> list[int]:
    """Different n share no block."""
    return [1 + n % 250, 1 + n // 250, *((7 * k + n * k * k) % 250 for k in range(tokens - 2))]


def settled(client: SimulatedClient, tokens: list[int]) -> int:
    ctx: int = client.call("alloc_context").ctx
    client.call("append", ctx, ints(tokens))
    client.call("forward", ctx, 1)
    return ctx


def said(client: SimulatedClient, ctx: int, n: int) -> list[int]:
    return tokens_of(client.call("generate", ctx, n).tokens)


def row(client: SimulatedClient, device: str) -> TierRow:
    rows: tuple[TierRow, ...] = client.call("tiers").tiers
    return next(r for r in rows if r.device == device)


def count(system: SimulatedSystem, name: str) -> int:
    return system.kernel.machine.counters[name]


def everything_is_given_back(system: SimulatedSystem, client: SimulatedClient) -> None:
    system.disconnect(client)
    system.run()
    assert not system.kernel.machine.errands.open
    assert not system.kernel.machine.movers.moving()
    for device in system.kernel.machine.devices:
        assert system.available(device.index) == device.capacity, device.name


# -- full -----------------------------------------------------------------------------------------------------------------


@CORES
def test_a_full_tier_evicts_and_tries_once_more(core: CoreMaker) -> None:
    """One write meets ENOSPC; what is evicted for it makes room, and the tier stays writable."""
    system = SimulatedSystem(frames=12, dram=12, nvme=8, core=core)
    client = system.connect()
    tier: SimTier = system.devices[NVME]
    first, second = settled(client, prompt(1, 12)), settled(client, prompt(2, 12))
    client.call("demote", first, "nvme")
    fails = iter([E.ENOSPC])
    tier.fault = lambda verb, frame: next(fails, 0) if verb == "write" else 0
    client.call("demote", second, "nvme")
    assert count(system, "enospc_retries") == 1
    assert row(client, "nvme0").state == "up"
    third = settled(client, prompt(3, 12))
    assert client.call("demote", third, "nvme").failed_blocks == 0
    for n, ctx in enumerate((first, second, third), 1):
        assert said(client, ctx, 2) == reference_tokens(prompt(n, 12), 2)
    everything_is_given_back(system, client)


@CORES
def test_a_write_that_goes_well_gives_a_full_tier_its_retry_back(core: CoreMaker) -> None:
    """ENOSPC once a day is no reason to stop writing; ENOSPC twice with nothing written in between is."""
    system = SimulatedSystem(frames=16, dram=16, nvme=16, core=core)
    client = system.connect()
    tier: SimTier = system.devices[NVME]
    fails: list[int] = []
    tier.fault = lambda verb, frame: fails.pop() if verb == "write" and fails else 0
    for n in range(1, 4):
        fails.append(E.ENOSPC)
        client.call("demote", settled(client, prompt(2 * n, 12)), "nvme")
        assert not fails and count(system, "enospc_retries") == n
        assert row(client, "nvme0").state == "up"
        assert client.call("demote", settled(client, prompt(2 * n + 1, 12)), "nvme").failed_blocks == 0
    fails[:] = [E.ENOSPC] * 100
    for n in range(8, 10):
        client.call("demote", settled(client, prompt(n, 12)), "nvme")
    assert row(client, "nvme0").state == "read-only" and count(system, "enospc_retries") == 4
    everything_is_given_back(system, client)


@CORES
@pytest.mark.parametrize("second", [0, E.ENOSPC])
def test_a_write_that_was_sent_before_the_tier_was_full_proves_nothing(core: CoreMaker, second: int) -> None:
    """Two writes are under way: the first meets ENOSPC, the second goes well or does not.  What is sent after is the retry."""
    system = SimulatedSystem(frames=16, dram=16, nvme=16, core=core)
    client = system.connect()
    ctxs = [settled(client, prompt(n, 12)) for n in range(1, 4)]
    for ctx in ctxs:
        client.call("demote", ctx, "dram")
    for ctx in ctxs[:2]:
        client.post("demote", ctx, "nvme")
    assert len(system.pending[NVME]) == 2
    tier: SimTier = system.devices[NVME]
    tier.fault = lambda verb, frame: E.ENOSPC
    system.tick(NVME)
    tier.fault = lambda verb, frame: second
    system.tick(NVME)
    system.run()
    assert count(system, "enospc_retries") == 1 and row(client, "nvme0").state == "up"
    tier.fault = lambda verb, frame: E.ENOSPC if verb == "write" else 0
    client.call("demote", ctxs[2], "nvme")
    assert row(client, "nvme0").state == "read-only" and count(system, "enospc_retries") == 1
    everything_is_given_back(system, client)


@CORES
def test_a_tier_that_stays_full_becomes_read_only_and_serving_goes_on(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=8, dram=6, nvme=12, core=core)
    client = system.connect()
    tier: SimTier = system.devices[NVME]
    kept = settled(client, prompt(1, 12))
    client.call("demote", kept, "nvme")
    tier.fault = lambda verb, frame: E.ENOSPC if verb == "write" else 0
    for n in range(2, 12):
        ctx = settled(client, prompt(n, 12))
        assert said(client, ctx, 2) == reference_tokens(prompt(n, 12), 2)
    assert row(client, "nvme0").state == "read-only"
    assert count(system, "enospc_retries") == 1
    texts = [r.text for r in client.call("dmesg").rows if r.level == "error"]
    assert len(texts) == 1, "said once"
    assert texts[0].startswith("nvme0 is full (ENOSPC)") and "read-only from now on" in texts[0]
    written = tier.written_frames
    assert said(client, kept, 2) == reference_tokens(prompt(1, 12), 2)
    assert client.call("stat", kept).usage.recomputed_tokens <= 4, (
        "what it holds can be read, but for what ENOSPC evicted"
    )
    assert tier.read_frames >= 2
    settled(client, prompt(20, 28))
    assert tier.written_frames == written
    everything_is_given_back(system, client)


# -- rot ----------------------------------------------------------------------------------------------------------------------


@CORES
@pytest.mark.parametrize("byte", [4096 + 5, 70, 9], ids=["payload", "tag", "version"])
def test_a_corrupt_copy_is_dropped_counted_and_computed_again(core: CoreMaker, byte: int) -> None:
    system = SimulatedSystem(frames=12, dram=12, nvme=12, core=core)
    client = system.connect()
    tier: SimTier = system.devices[NVME]
    log = prompt(1, 12)
    ctx = settled(client, log)
    client.call("demote", ctx, "nvme")
    victim = sorted(tier.frames)[1]
    tier.frames[victim][byte] ^= 4
    before = system.devices[0].computed_tokens
    assert said(client, ctx, 2) == reference_tokens(log, 2)
    assert tier.corrupt == row(client, "nvme0").corrupt == count(system, "corrupt_copies") == 1
    assert 4 <= system.devices[0].computed_tokens - before - 2 <= 12
    assert row(client, "nvme0").restarts == 0
    client.call("truncate", ctx, 12)
    client.call("demote", ctx, "nvme")
    assert said(client, ctx, 2) == reference_tokens(log, 2)
    assert count(system, "corrupt_copies") == 1, "the bad copy is gone"
    everything_is_given_back(system, client)


@CORES
def test_another_copy_takes_over_from_a_corrupt_one(core: CoreMaker) -> None:
    """Dram and nvme both have it; the copy in dram rots: nothing is computed again."""
    system = SimulatedSystem(frames=12, dram=12, nvme=12, core=core)
    client = system.connect()
    log = prompt(1, 12)
    ctx = settled(client, log)
    client.call("demote", ctx, "nvme")
    client.call("prefetch", ctx, "dram")
    for at in range(4096, len(system.dram), 8192):
        system.dram[at] ^= 1
    before = system.devices[0].computed_tokens
    assert said(client, ctx, 2) == reference_tokens(log, 2)
    assert system.devices[0].computed_tokens - before == 2
    assert row(client, "hbm0").corrupt == 3  # who copies it in sees it
    assert count(system, "loads_retried") == 3
    assert client.call("stat", ctx).usage.nvme_tokens == 12
    everything_is_given_back(system, client)


# -- death ----------------------------------------------------------------------------------------------------------------------


def demotion(client: SimulatedClient, ctx: int) -> int:
    return client.post("demote", ctx, "nvme")


def fault(client: SimulatedClient, ctx: int) -> int:
    client.call("demote", ctx, "nvme")
    return client.post("generate", ctx, 2)


def prefetch_up(client: SimulatedClient, ctx: int) -> int:
    client.call("demote", ctx, "nvme")
    return client.post("prefetch", ctx, "dram")


@CORES
@pytest.mark.parametrize("act", [demotion, fault, prefetch_up])
@pytest.mark.parametrize("dies", [0, NVME], ids=["accel", "nvme"])
@pytest.mark.parametrize("wrote", [False, True])
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
def test_a_driver_dies_in_every_phase(
    core: CoreMaker, act: Callable[[SimulatedClient, int], int], dies: int, wrote: bool, direct: bool
) -> None:
    """Before each completion of the whole act in turn; hbm frames survive or not.  The call is answered, the next one is
    right, nothing leaks."""
    log = prompt(1, 14)
    for arena in ("kept", "lost") if dies == 0 else ("kept",):
        ticks = 0
        while True:
            system = SimulatedSystem(frames=12, dram=12, nvme=12, direct=direct, core=core)
            client = system.connect()
            ctx = settled(client, log)
            request = act(client, ctx)
            done = 0
            while done < ticks and any(system.tick(d) for d in range(3)):
                done += 1
            if done < ticks:
                break
            system.kill_driver(dies, wrote, arena)
            system.run()
            assert client.replies[request].code == 0, f"after {ticks} completions"
            if act is fault:
                assert tokens_of(client.result(request).tokens) == reference_tokens(log, 2)
                client.call("truncate", ctx, 14)
            assert said(client, ctx, 3) == reference_tokens(log, 3)
            everything_is_given_back(system, client)
            ticks += 1
        assert ticks >= 2


@CORES
def test_a_tier_that_is_down_is_neither_read_nor_written(core: CoreMaker) -> None:
    from attnix.kernel.events import DriverDown

    system = SimulatedSystem(frames=8, dram=4, nvme=12, core=core)
    client = system.connect()
    log = prompt(1, 12)
    ctx = settled(client, log)
    client.call("demote", ctx, "nvme")
    system.step(DriverDown(NVME, system.epochs[NVME], "hung"))
    assert said(client, ctx, 2) == reference_tokens(log, 2)
    for n in range(2, 8):
        assert said(client, settled(client, prompt(n, 12)), 2) == reference_tokens(prompt(n, 12), 2)
    assert not system.pending[NVME]
    assert row(client, "nvme0").state == "down"
    system.driver_up(NVME)
    client.call("evict", ctx)
    other = settled(client, prompt(9, 12))
    assert client.call("demote", other, "nvme").failed_blocks == 0
    everything_is_given_back(system, client)


@CORES
def test_what_a_driver_was_moving_is_not_waited_for_when_the_kernel_restarts_it(core: CoreMaker) -> None:
    """The device was no longer up when its driver died of it, so that its load never ended: whoever waited for that hung."""
    system = SimulatedSystem(frames=8, dram=8, core=core)
    client = system.connect()
    log = prompt(1, 12)
    ctx = settled(client, log)
    client.call("demote", ctx, "dram")
    request = client.post("generate", ctx, 2)
    client.post("append", client.call("alloc_context").ctx, ints(prompt(2, 8)))
    load, passed = system.pending[0]
    assert isinstance(load, Transfer) and isinstance(passed, Exec)
    for seq in range(passed.seq, passed.seq + RESTART_AFTER_FAILURES):
        system.step(ExecFailed(0, seq, E.EIO, "injected"))
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(log, 2)
    assert row(client, "hbm0").restarts == 1 and count(system, "driver_deaths") == 1
    everything_is_given_back(system, client)


@CORES
def test_what_a_restarted_driver_finds_is_used(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, nvme=12, core=core)
    client = system.connect()
    log = prompt(1, 12)
    ctx = settled(client, log)
    client.call("demote", ctx, "nvme")
    system.kill_driver(NVME)
    before = system.devices[0].computed_tokens
    assert said(client, ctx, 2) == reference_tokens(log, 2)
    assert system.devices[0].computed_tokens - before == 2
    assert any("3 blocks found from before" in r.text for r in client.call("dmesg").rows)


@CORES
@pytest.mark.parametrize("dram", [1, 2, 6])
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
def test_drivers_die_while_loads_wait_for_room_in_dram(core: CoreMaker, dram: int, direct: bool) -> None:
    """What had to wait for a frame of dram still held its source in nvme when nvme came back (it was a panic)."""
    for seed in range(6 if core is Core else 2):
        rng = random.Random(seed)
        system = SimulatedSystem(frames=9, dram=dram, nvme=16, direct=direct, core=core)
        client = system.connect()
        ctxs = [client.call("alloc_context").ctx for _ in range(6)]
        for n, ctx in enumerate(ctxs):
            client.call("append", ctx, ints(prompt(n, rng.randrange(3, 20))))
        for _ in range(150):
            ctx, what = rng.choice(ctxs), rng.randrange(9)
            if what == 0:
                client.post("generate", ctx, rng.randrange(1, 6))
            elif what == 1:
                client.post("demote", ctx, rng.choice(["dram", "nvme"]))
            elif what == 2:
                client.post("prefetch", ctx, rng.choice(["dram", "hbm"]), rng.choice([0, 1]))
            elif what == 3:
                system.kill_driver(rng.choice([NVME, NVME, 0]), rng.random() < 0.5, rng.choice(["kept", "lost"]))
            elif what == 4:
                system.fail(0)
            else:
                for _ in range(rng.randrange(6)):
                    system.tick(rng.randrange(3))
        system.run()
        everything_is_given_back(system, client)


# -- late and repeated --------------------------------------------------------------------------------------------------------------


@CORES
def test_completions_that_come_twice_or_for_nobody_are_counted_and_ignored(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=8, dram=6, nvme=12, core=core)
    client = system.connect()
    seen: list[TransferDone] = []
    ignored = 0
    for n in range(8):
        ctx = client.call("alloc_context").ctx
        client.post("append", ctx, ints(prompt(n, 12)))
        client.post("demote", ctx, "nvme")
        request = client.post("generate", ctx, 2)
        while any(system.pending):
            for d in range(3):
                if system.pending[d] and isinstance(system.pending[d][0], Transfer):
                    done = system.perform(system.pending[d].popleft())
                    assert isinstance(done, TransferDone)
                    system.step(done)
                    system.step(done)
                    seen.append(done)
                    ignored += 1
                else:
                    system.tick(d)
        assert tokens_of(client.result(request).tokens) == reference_tokens(prompt(n, 12), 2)
    for done in seen:
        system.step(done)
    system.step(TransferDone(NVME, 10**9, ((0, E.EIO), (77, E.EIO)), 5, 5))
    assert count(system, "late_completions") == ignored + len(seen) + 1
    assert ignored > 10
    everything_is_given_back(system, client)


@CORES
def test_a_completion_with_items_that_it_does_not_have_does_no_harm(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, core=core)
    client = system.connect()
    log = prompt(1, 12)
    ctx = settled(client, log)
    down = client.post("demote", ctx, "dram")
    effect = system.pending[0].popleft()
    assert isinstance(effect, Transfer)
    done = system.perform(effect)
    assert isinstance(done, TransferDone)
    system.step(done._replace(failed=((-1, E.EIO), (99, E.EIO))))
    system.run()
    assert client.result(down).resident_blocks == 3
    assert said(client, ctx, 2) == reference_tokens(log, 2)


# -- gates ----------------------------------------------------------------------------------------------------------------------------


def gated_system(core: CoreMaker) -> tuple[SimulatedSystem, SimulatedClient, int, list[int], int]:
    """A context of 14 tokens in nvme only, whose generation has just been asked for: its pass waits at the gate of its load."""
    system = SimulatedSystem(frames=12, dram=12, nvme=12, direct=True, core=core)
    client = system.connect()
    log = prompt(1, 14)
    ctx = settled(client, log)
    client.call("demote", ctx, "nvme")
    request = client.post("generate", ctx, 2)
    while not any(isinstance(e, Exec) for e in system.pending[0]):
        assert system.tick(0), "the tail comes through dram"
    return system, client, ctx, log, request


@CORES
def test_a_pass_follows_its_load_through_a_gate(core: CoreMaker) -> None:
    system, client, _, log, request = _gated(core)
    assert count(system, "gated_passes") == 1
    assert not system.tick(0), "the gate is shut"
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(log, 2)
    assert system.devices[NVME].read_frames >= 3
    everything_is_given_back(system, client)


def _gated(core: CoreMaker) -> tuple[SimulatedSystem, SimulatedClient, int, list[int], int]:
    """The same with whole blocks only, so that nothing comes through dram."""
    system = SimulatedSystem(frames=12, dram=12, nvme=12, direct=True, core=core)
    client = system.connect()
    log = prompt(1, 12)
    ctx = settled(client, log)
    client.call("demote", ctx, "nvme")
    request = client.post("generate", ctx, 2)
    effect = system.pending[0][0]
    assert isinstance(effect, Exec) and effect.gates
    return system, client, ctx, log, request


@CORES
@pytest.mark.parametrize("layered", [False, True])
def test_a_pass_follows_a_load_from_dram_where_the_accel_loads_beside_its_passes(
    core: CoreMaker, layered: bool
) -> None:
    system = SimulatedSystem(frames=12, dram=12, core=core)
    client = system.connect()
    log = prompt(1, 12)
    ctx = settled(client, log)
    client.call("demote", ctx, "dram")
    if layered:
        system.step(DriverUp(0, 1, 101, "kept", "sim", ("exec", "drop", "read", "write", "layered")))
    request = client.post("generate", ctx, 2)
    load, *behind = system.pending[0]
    assert isinstance(load, Transfer) and load.verb == "write"
    assert (load.gate >= 0) is layered
    assert [isinstance(effect, Exec) and bool(effect.gates) for effect in behind] == [True] * layered
    system.run()
    assert count(system, "gated_passes") == int(layered)
    assert tokens_of(client.result(request).tokens) == reference_tokens(log, 2)
    everything_is_given_back(system, client)


@CORES
@pytest.mark.parametrize("first", ["pass", "load"])
@pytest.mark.parametrize("items", [(0,), (1, 2), (0, 1, 2)])
def test_a_load_that_fails_fails_the_pass_and_it_is_redone(core: CoreMaker, first: str, items: tuple[int, ...]) -> None:
    """Whoever reports first: the driver of the tier or the compute device that waits at the gate."""
    system, client, _, log, request = _gated(core)
    load = system.pending[NVME].popleft()
    assert isinstance(load, Transfer) and load.gate >= 0
    done = system.perform(load)
    assert isinstance(done, TransferDone)
    Gates(system.gates).store(load.gate, load.ticket, GATE_FAILED)
    done = done._replace(failed=tuple((k, int(E.ECORRUPT)) for k in items))
    if first == "load":
        system.step(done)
    effect = system.pending[0].popleft()
    assert isinstance(effect, Exec)
    answer = system.perform(effect)
    assert isinstance(answer, ExecFailed) and answer.code == E.EIO
    system.step(answer)
    if first == "pass":
        system.step(done)
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(log, 2)
    assert count(system, "exec_failed") >= 1
    assert row(client, "hbm0").restarts == 0, "nothing is wrong with the compute device"
    assert row(client, "nvme0").corrupt == len(items)
    everything_is_given_back(system, client)


@CORES
@pytest.mark.parametrize("dies", [0, NVME], ids=["accel", "nvme"])
@pytest.mark.parametrize("landed", [False, True])
def test_a_driver_dies_while_a_pass_waits_at_a_gate(core: CoreMaker, dies: int, landed: bool) -> None:
    system, client, _, log, request = _gated(core)
    if landed:
        system.tick(NVME)
    system.kill_driver(dies, False)
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(log, 2)
    everything_is_given_back(system, client)


@CORES
def test_a_tail_and_whole_blocks_come_by_different_ways(core: CoreMaker) -> None:
    system, client, ctx, log, request = gated_system(core)
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(log, 2)
    assert client.call("stat", ctx).usage.recomputed_tokens == 0
    everything_is_given_back(system, client)


def test_what_these_tests_take_for_a_pass_is_one() -> None:
    system = SimulatedSystem(frames=12)
    client = system.connect()
    client.post("append", client.call("alloc_context").ctx, ints([1, 2]))
    assert isinstance(system.perform(system.pending[0][0]), ExecDone)
