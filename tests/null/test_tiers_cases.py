"""Cases from the field that concern the memory hierarchy (the numbers of cases.md), at the kernel and its simulated devices.

Case 42 (pinned host memory) is about a driver and not here; case 16(c), restart, does not exist: output is always kept.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest

from attnix.drivers.sim_memory import SimTier
from attnix.drivers.sim_model import SamplingChoice, reference_entries, reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.errors import E
from attnix.kernel.events import Exec, Syscall
from attnix.kernel.tag import HEADER_BYTES, TAG_OFFSET, stored_bytes
from attnix.kernel.twin import TwinCore
from attnix.simulated import ARGUMENTS, CoreMaker, SimulatedClient, SimulatedSystem, ints, tokens_of

CORES = pytest.mark.parametrize("core", [TwinCore, Core])
NVME = 2


def prompt(n: int, tokens: int) -> list[int]:
    """Different n share no block."""
    return [1 + n % 250, 1 + n // 250, *((7 * k + n * k * k) % 250 for k in range(tokens - 2))]


def begin(client: SimulatedClient, tokens: list[int]) -> int:
    ctx: int = client.call("alloc_context").ctx
    client.call("append", ctx, ints(tokens))
    return ctx


def settled(client: SimulatedClient, tokens: list[int]) -> int:
    ctx = begin(client, tokens)
    client.call("forward", ctx, 1)
    return ctx


def available(system: SimulatedSystem) -> list[int]:
    return [system.available(d) for d in range(len(system.devices))]


def count(system: SimulatedSystem, name: str) -> int:
    return system.kernel.machine.counters[name]


def row(client: SimulatedClient, device: str) -> Any:
    return next(r for r in client.call("tiers").tiers if r.device == device)


# -- case 10: swap while it is computed ---------------------------------------------------------------------------------


def stored_is_right(system: SimulatedSystem, logs: list[list[int]]) -> int:
    """Every stored frame of nvme holds the KV of a part of some log, as the model would compute it; how many there are."""
    expected: set[tuple[int, int, bytes]] = set()
    for log in logs:
        entries = reference_entries(log)
        for at in range(0, len(log), 4):
            expected.update((at, n, b"".join(entries[at : at + n])) for n in range(1, 5))
    tier = system.devices[NVME]
    mapped = {f for f, state in enumerate(system.core.frame_table(NVME)[0]) if state == 2}
    for f in mapped:
        frame = tier.frames[f]
        depth, n = struct.unpack_from("<ii", frame, TAG_OFFSET + 48)
        payload = bytes(frame[HEADER_BYTES : HEADER_BYTES + 8 * n])
        assert (depth, n, payload) in expected, f"frame {f}: {n} tokens at depth {depth}"
    return len(mapped)


@CORES
def test_case_10_what_is_demoted_while_it_is_being_computed(core: CoreMaker) -> None:
    """The pass is scheduled but has not written; the demotion is asked for in between; two frames of dram serve as staging
    for everything.  In any order of completions the stored copies are those of the computed frames."""
    stored = 0
    for seed in range(200 if core is Core else 40):
        rng = random.Random(seed)
        system = SimulatedSystem(frames=12, dram=2, nvme=12, core=core)
        client = system.connect()
        logs = [prompt(2 * seed + k, 10) for k in range(2)]
        ctxs = [begin_without_running(client, log) for log in logs]
        assert any(isinstance(e, Exec) for e in system.pending[0]), "scheduled, not written"
        downs = [client.post("demote", ctx, "nvme") for ctx in ctxs]
        while any(system.pending):
            system.tick(rng.choice([d for d in range(3) if system.pending[d]]))
        assert all(down in client.replies for down in downs)
        stored += stored_is_right(system, logs)
        for ctx, log in zip(ctxs, logs, strict=True):
            assert tokens_of(client.call("generate", ctx, 4).tokens) == reference_tokens(log, 4)
    assert stored > 200


def begin_without_running(client: SimulatedClient, tokens: list[int]) -> int:
    made = client.post("alloc_context")
    ctx: int = client.result(made).ctx
    client.result(client.post("append", ctx, ints(tokens)))
    return ctx


# -- case 14: who waits for whom ----------------------------------------------------------------------------------------


@CORES
@pytest.mark.parametrize("with_third", ["", "unschedulable", "urgent"])
def test_case_14_two_that_come_back_at_once_do_not_lock_each_other_out(core: CoreMaker, with_third: str) -> None:
    """Pool 7; A is 4 frames in dram and needs one more, B is 3 and one more."""
    system = SimulatedSystem(frames=7, dram=16, core=core)
    client = system.connect()
    a, b = prompt(1, 16), prompt(2, 12)
    ctxs = [settled(client, a), settled(client, b)]
    for ctx in ctxs:
        client.call("demote", ctx, "dram")
    third = 0
    if with_third:
        pid = client.call("spawn", "third", -20 if with_third == "urgent" else 0).pid
        made = client.result(client.post("alloc_context", pid))
        client.result(client.post("append", made.ctx, ints(prompt(3, 26))))  # all seven frames
        third = client.post("generate", made.ctx, 2)
    requests = [client.post("generate", ctx, 4) for ctx in ctxs]
    passes = system.run(limit=200)
    assert passes < 100
    for request, log in zip(requests, (a, b), strict=True):
        assert tokens_of(client.result(request).tokens) == reference_tokens(log, 4)
    if third:
        assert tokens_of(client.result(third).tokens) == reference_tokens(prompt(3, 26), 2)


# -- case 16: preemption keeps what has been said ------------------------------------------------------------------------


@CORES
@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_case_16_a_preempted_stream_goes_on_as_if_nothing_had_happened(core: CoreMaker, way: str) -> None:
    """The older context grows into the frames of the younger, which has said 0 .. n tokens by then."""
    choice = SamplingChoice(temperature=1.0, seed=5)
    said, swapped = set(), 0
    for older_tokens in range(4, 17):
        for younger_tokens, chunk in ((9, 512), (19, 2)):  # the second is still being read, two tokens a pass
            system = SimulatedSystem(
                frames=9, dram=16 if way == "swap" else 0, core=core, sysctl={"sched.step_tokens": chunk}
            )
            client = system.connect()
            logs = [prompt(40, older_tokens), prompt(50, younger_tokens)]
            ctxs = [begin_without_running(client, log) for log in logs]
            requests = [client.post("generate", ctx, 18, 1.0, 0, 1.0, 0.0, 5, 1.0, 0.0, 0.0, 1) for ctx in ctxs]
            younger = max(system.kernel.machine.contexts.values(), key=lambda c: c.cid)
            at = -1
            while system.tick(0) or (way == "swap" and system.tick(1)):
                if younger.preemptions and at < 0:
                    at = len(client.streamed.get(requests[1], []))
            for request, log in zip(requests, logs, strict=True):
                result = client.result(request)
                want = reference_tokens(log, 18, choice=choice)
                assert client.streamed[request] == tokens_of(result.tokens) == want
                assert len(result.logprobs) == result.usage.generated_tokens == 18
            said.add(at)
            usage = client.call("stat", ctxs[1]).usage
            if at >= 0 and way == "swap":
                # A block that others could find, and that is half read, is begun again by whoever fills it next.
                assert usage.recomputed_tokens < (4 if chunk == 2 else 1)
            swapped += usage.dram_tokens
            if at > 0 and way == "recompute":
                assert usage.recomputed_tokens > 0
    assert said >= {0, 5}, f"preempted after {sorted(said)} tokens"
    assert (swapped > 0) == (way == "swap")


# -- case 20: a tier that loses things ----------------------------------------------------------------------------------


@CORES
@pytest.mark.parametrize("loss", ["before the lookup", "after the lookup", "in the dram arena"])
def test_case_20_a_copy_that_is_gone_is_a_miss(core: CoreMaker, loss: str) -> None:
    system = SimulatedSystem(frames=12, dram=6, nvme=12, core=core)
    client, neighbour = system.connect(), system.connect()
    log = prompt(7, 12)
    ctx = settled(client, log)
    client.call("demote", ctx, "dram" if "dram" in loss else "nvme")
    other = begin(neighbour, prompt(8, 3))
    stream = neighbour.post("generate", other, 12)
    tier: SimTier = system.devices[NVME]
    if loss == "before the lookup":
        tier.drop(list(tier.frames))
    elif "dram" in loss:
        system.dram[:] = bytes(len(system.dram))
    request = client.post("generate", ctx, 3)
    if loss == "after the lookup":
        while not system.pending[NVME]:  # until the read has been asked for
            assert system.tick(0)
        tier.drop(list(tier.frames))
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(log, 3)
    assert tokens_of(neighbour.result(stream).tokens) == reference_tokens(prompt(8, 3), 12)
    device = "hbm0" if "dram" in loss else "nvme0"  # whoever reads it sees it
    assert row(client, device).errors == 3
    assert row(client, device).corrupt == (3 if "dram" in loss else 0)
    assert row(client, device).restarts == 0
    assert client.call("stat", ctx).usage.recomputed_tokens == 12
    assert system.core.free_frames(NVME) == 12, "entries of what is gone are dropped"


@CORES
def test_case_20_evicting_what_is_gone_and_a_store_that_fails(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=4, dram=2, nvme=3, core=core)
    client = system.connect()
    tier: SimTier = system.devices[NVME]
    for n in range(6):
        log = prompt(n, 9)
        ctx = begin(client, log)
        assert tokens_of(client.call("generate", ctx, 2).tokens) == reference_tokens(log, 2)
        client.call("release", ctx)
        if n == 2:
            tier.drop(list(tier.frames))  # what is evicted next is not there any more
    assert tier.written_frames > 3, "the test needs evictions from nvme"
    tier.fault = lambda verb, frame: E.EIO if verb == "write" else 0
    for n in range(6, 12):
        log = prompt(n, 9)
        ctx = begin(client, log)
        assert tokens_of(client.call("generate", ctx, 2).tokens) == reference_tokens(log, 2)
        client.call("release", ctx)
    assert row(client, "nvme0").errors > 0
    assert row(client, "nvme0").restarts == 0
    assert row(client, "nvme0").state == "up"


# -- case 24: prefetch and everything else ------------------------------------------------------------------------------


@CORES
def test_case_24_a_hundred_prefetches_whose_contexts_are_killed(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=8, nvme=32, core=core, max_contexts=8)
    client = system.connect()
    log = prompt(3, 20)
    home = settled(client, log)
    client.call("demote", home, "nvme")
    baseline = available(system)
    rng = random.Random(24)
    for n in range(100):
        pid = client.call("spawn", "short", 0, home).pid
        ctx = next(c for c in system.kernel.machine.contexts.values() if c.process.pid == pid)
        fetch = client.post("prefetch", 0, rng.choice(["hbm", "dram"]), 0, ctx.cid)
        if n % 3 == 0:
            client.post("generate", home, 1)
        for _ in range(rng.randrange(8)):
            system.tick(rng.randrange(3))
        client.post("kill", pid, 9)
        if n % 3 == 0:
            system.run()
            client.call("truncate", home, 20)
            client.call("demote", home, "nvme")
        assert fetch in client.replies or not system.kernel.machine.errands.open or system.run() >= 0
        assert fetch in client.replies
        client.call("wait", pid)
    system.run()
    assert not system.kernel.machine.errands.open
    assert not system.kernel.machine.movers.moving()
    assert available(system) == baseline
    before = system.devices[0].computed_tokens
    last = client.call("prefetch", home)
    assert (last.resident_blocks, last.failed_blocks) == (5, 0)
    assert client.call("stat", home).cached_tokens == 20
    assert system.devices[0].computed_tokens == before, "the 101st came from nvme"


@CORES
def test_case_24_prefetch_and_run_at_once(core: CoreMaker) -> None:
    for ticks in range(12):
        system = SimulatedSystem(frames=12, dram=8, nvme=32, core=core)
        client = system.connect()
        log = prompt(3, 20)
        ctx = settled(client, log)
        client.call("demote", ctx, "nvme")
        fetch = client.post("prefetch", ctx)
        for n in range(ticks):
            system.tick(n % 3)
        request = client.post("generate", ctx, 2)
        system.run()
        assert client.result(fetch).failed_blocks == 0
        assert tokens_of(client.result(request).tokens) == reference_tokens(log, 2)
        assert client.call("stat", ctx).usage.recomputed_tokens == 0


@CORES
def test_case_24_a_prefetch_of_nothing_is_done(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=8, core=core)
    client = system.connect()
    empty = client.call("alloc_context").ctx
    for target in ("hbm", "dram"):
        assert client.call("prefetch", empty, target) == (0, 0, 0)


# -- case 26: a restart that counts where it matters ----------------------------------------------------------------------


@CORES
def test_case_26_after_a_restart_only_what_is_new_is_computed(core: CoreMaker) -> None:
    """A second kernel finds the slots of the first one's nvme tier; the executor computes exactly four tokens."""
    log = prompt(9, 64)
    first = SimulatedSystem(frames=20, dram=20, nvme=40, window_tokens=128, core=core)
    client = first.connect()
    client.call("demote", settled(client, log), "nvme")
    slots = first.devices[NVME].frames
    assert len(slots) == 16

    second = SimulatedSystem(frames=20, dram=20, nvme=40, window_tokens=128, core=core)
    second.devices[NVME].frames = {f: bytearray(frame) for f, frame in slots.items()}
    second.kill_driver(NVME)  # its driver starts again, and reports what it finds
    client = second.connect()
    ctx = begin(client, [*log, 9, 8, 7, 6])
    result = client.call("generate", ctx, 1)
    assert second.devices[0].computed_tokens == 4
    assert result.usage.computed_tokens == 4
    assert (result.usage.hit_tokens, result.usage.nvme_tokens) == (64, 64)
    pagemap = client.call("pagemap", ctx)
    assert len(pagemap.flags) == 17
    assert all(flag & 4 for flag in pagemap.flags)
    assert tokens_of(result.tokens) == reference_tokens([*log, 9, 8, 7, 6], 1)

    # The same with another uid: nothing is found, since its domain is another.
    stranger = second.connect(1001)
    other = begin(stranger, log)
    second.run()
    assert stranger.call("stat", other).usage.hit_tokens == 0
    assert second.devices[0].computed_tokens == 4 + 64


# -- case 44: ids -------------------------------------------------------------------------------------------------------


@CORES
def test_case_44_a_late_abort_does_not_hit_who_came_after(core: CoreMaker) -> None:
    """The same request number is aborted and used again, 100 times; context ids are never used twice."""
    system = SimulatedSystem(frames=12, dram=6, nvme=12, core=core, max_contexts=6)
    client = system.connect()
    seen: set[int] = set()
    rng = random.Random(44)
    number = 7_000
    client.sent.add(number)

    def say(name: str, *args: object) -> None:
        system.step(Syscall(client.conn, number, name, ARGUMENTS[name](*args)))

    for n in range(100):
        made = client.call("alloc_context")
        assert made.cid not in seen
        seen.add(made.cid)
        log = prompt(n, 6)
        client.call("append", made.ctx, ints(log))
        verb = ("generate", made.ctx, 30) if n % 2 else ("demote", made.ctx, "nvme")
        say(*verb)
        for _ in range(rng.randrange(4)):
            system.tick(rng.randrange(3))
        if number not in client.replies:
            client.result(client.post("cancel", number))
        system.run()
        assert number in client.replies, "the aborted one has its own answer"
        del client.replies[number]
        system.double_replies.clear()
        late = client.post("cancel", number)  # for one that is over
        assert client.replies[late].code in (0, E.ENOENT, E.ESTALE)
        client.call("truncate", made.ctx, 6)
        say("generate", made.ctx, 2)
        system.run()
        assert tokens_of(client.result(number).tokens) == reference_tokens(log, 2)
        del client.replies[number]
        stale = made.ctx
        client.call("release", made.ctx)
        assert client.replies[client.post("stat", stale)].code == E.ESTALE
        system.double_replies.clear()


@CORES
def test_case_44_transfer_numbers_survive_their_driver(core: CoreMaker) -> None:
    """A completion of the driver's earlier life names no transfer of its present one."""
    system = SimulatedSystem(frames=12, dram=6, nvme=12, core=core)
    client = system.connect()
    log = prompt(1, 12)
    ctx = settled(client, log)
    client.call("demote", ctx, "nvme")
    client.post("prefetch", ctx, "dram")
    late = system.perform(system.pending[NVME][0])
    system.kill_driver(NVME)
    request = client.post("generate", ctx, 2)
    ignored = count(system, "late_completions")
    system.step(late)
    assert count(system, "late_completions") == ignored + 1
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(log, 2)


# -- case 48: nowhere to swap to ----------------------------------------------------------------------------------------


@CORES
def test_case_48_a_dram_of_two_frames_and_contexts_of_three(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=7, dram=2, core=core, max_contexts=20)
    client = system.connect()
    logs = [prompt(n, 10) for n in range(4)]
    ctxs = [begin(client, log) for log in logs]
    requests = [client.post("generate", ctx, 6) for ctx in ctxs]
    assert system.run(limit=400) < 300
    for request, log in zip(requests, logs, strict=True):
        assert tokens_of(client.result(request).tokens) == reference_tokens(log, 6)
    vmstat = client.call("vmstat").counters
    assert vmstat["demoted_blocks"] > 0, "what fits is swapped"
    assert vmstat["dropped_blocks"] > 0, "what does not is dropped and computed again"
    for ctx in ctxs:
        client.call("release", ctx)

    parent = begin(client, logs[0])
    children = client.call("fork", parent, 8).ctxs
    requests = [client.post("generate", child, 8, 1.0, 0, 1.0, 0.0, seed) for seed, child in enumerate(children)]
    assert system.run(limit=2000) < 1500
    for seed, request in enumerate(requests):
        want = reference_tokens(logs[0], 8, choice=SamplingChoice(temperature=1.0, seed=seed))
        assert tokens_of(client.result(request).tokens) == want
    system.disconnect(client)
    system.run()
    assert available(system) == [7, 2]


def test_stored_frames_are_as_large_as_this_file_thinks() -> None:
    """`stored_is_right` looks for a payload of 32 bytes behind the header."""
    assert stored_bytes(32) == 2 * HEADER_BYTES
