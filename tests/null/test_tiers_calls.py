"""The calls that say where contexts lie: what they answer, what they refuse and in which words."""

from __future__ import annotations

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.kernel.events import DriverDown, DriverGone
from attnix.kernel.records import FACT
from attnix.kernel.tag import stored_bytes
from attnix.kernel.twin import TwinCore
from attnix.simulated import CoreMaker, SimulatedClient, SimulatedSystem, ints, tokens_of

CORES = pytest.mark.parametrize("core", [TwinCore, Core])
DRAM, NVME = 1, 2
FRAME = stored_bytes(32)


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


def refused(client: SimulatedClient, *call: object) -> Errno:
    name, *args = call
    with pytest.raises(Errno) as error:
        client.call(str(name), *args)
    return error.value


def message_of(error: Errno) -> str:
    return str(error.detail["message"])


def available(system: SimulatedSystem) -> list[int]:
    return [system.available(d) for d in range(len(system.devices))]


def count(system: SimulatedSystem, name: str) -> int:
    return system.kernel.machine.counters[name]


# -- demote, prefetch, evict ---------------------------------------------------------------------------------------------


@CORES
@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_demote_prefetch_and_evict_say_what_they_did(core: CoreMaker, tier: str) -> None:
    system = SimulatedSystem(frames=12, dram=12, nvme=12, core=core)
    client = system.connect()
    log = prompt(1, 14)  # three blocks and a tail of two
    ctx = settled(client, log)
    down = client.call("demote", ctx, tier)
    assert (down.resident_blocks, down.failed_blocks) == (4, 0)
    assert down.moved_blocks >= 3
    assert client.call("stat", ctx).cached_tokens == 0
    assert client.call("demote", ctx, tier) == (0, 4, 0), "it is there"
    if tier == "nvme":
        assert client.call("prefetch", ctx, "dram") == (4, 4, 0)
        assert client.call("prefetch", ctx, "dram") == (0, 4, 0)
    up = client.call("prefetch", ctx)
    assert up == (4, 4, 0), "the tail is a block, too"
    assert client.call("prefetch", ctx) == (0, 4, 0)
    computed = system.devices[0].computed_tokens
    gone = client.call("evict", ctx)
    assert (gone.resident_blocks, gone.failed_blocks) == (0, 0)
    assert gone.moved_blocks >= 6
    assert available(system) == [12, 12, 12]
    assert [system.core.free_frames(d) for d in range(3)] == [12, 12, 12]
    assert client.call("evict", ctx) == (0, 0, 0)
    assert said(client, ctx, 2) == reference_tokens(log, 2)
    assert system.devices[0].computed_tokens - computed == 14 + 1, "an evicted context is computed again"


@CORES
def test_evict_leaves_what_others_share(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, core=core)
    client = system.connect()
    log = prompt(1, 12)
    ctx, other = settled(client, log), settled(client, [*log[:8], 9])
    client.call("evict", ctx)
    assert client.call("stat", other).cached_tokens == 9
    computed = system.devices[0].computed_tokens
    assert said(client, ctx, 1) == reference_tokens(log, 1)
    assert system.devices[0].computed_tokens - computed == 4


@CORES
def test_what_these_calls_refuse(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, nvme=12, core=core)
    client = system.connect()
    ctx = settled(client, prompt(1, 14))
    error = refused(client, "demote", ctx, "hbm")
    assert (error.code, message_of(error)) == (E.EINVAL, "a context is demoted to a tier below hbm")
    error = refused(client, "demote", ctx, "tape")
    assert (error.code, message_of(error)) == (E.ENODEV, "no tier 'tape': there is hbm0, dram0, nvme0")
    assert refused(client, "prefetch", ctx, "remote").code is E.ENODEV
    assert refused(client, "prefetch", ctx, "hbm", -1).code is E.EINVAL
    for call in (("demote", 99), ("prefetch", 99), ("evict", 99), ("pin", 99), ("unpin", 99), ("advise", 99, "cold")):
        assert refused(client, *call).code in (E.EBADF, E.ESTALE), call
    running = client.post("generate", ctx, 20)
    error = refused(client, "demote", ctx, "dram")
    assert error.code is E.EBUSY and "cancel it before you demote" in message_of(error)
    error = refused(client, "evict", ctx)
    assert error.code is E.EBUSY and "cancel that before you evict" in message_of(error)
    system.run()
    assert tokens_of(client.result(running).tokens) == reference_tokens(prompt(1, 14), 20)
    stranger = system.connect(1001)
    cid = client.call("ps").processes[0].contexts[0].cid
    for name, *args in (("demote", "dram"), ("prefetch", "hbm", 0)):
        error = refused(stranger, name, 0, *args, cid)
        assert (error.code, message_of(error)) == (E.ENOENT, f"no context {cid} of this user")
    system.pending[NVME].clear()
    system.step(DriverGone(NVME, "unplugged"))
    error = refused(client, "demote", ctx, "nvme")
    assert error.code is E.EHOSTDOWN and message_of(error).startswith("nvme0 takes nothing at present")
    assert client.call("demote", ctx, "dram").failed_blocks == 0


@CORES
@pytest.mark.parametrize("call", [("prefetch",), ("advise", "willneed")])
def test_a_context_that_has_grown_beyond_the_pool_is_not_waited_for(core: CoreMaker, call: tuple[str, ...]) -> None:
    """A generation ends one token beyond the pool, since its last token needs no frame; to bring all of that back would wait
    for ever (and did, with the compute device idle)."""
    system = SimulatedSystem(frames=9, dram=12, core=core)
    client = system.connect()
    log = prompt(1, 6)
    ctx = settled(client, log)
    assert said(client, ctx, 40) == reference_tokens(log, 31)
    assert client.call("stat", ctx).tokens == 9 * 4 + 1
    name, *args = call
    client.call(name, ctx, *args)
    system.run()
    client.call("truncate", ctx, 20)
    assert said(client, ctx, 2) == reference_tokens([*log, *reference_tokens(log, 14)], 2)


# -- pin, unpin --------------------------------------------------------------------------------------------------------------


@CORES
def test_a_pinned_context_stays_until_its_time_is_over(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, core=core)
    client = system.connect()
    log = prompt(1, 16)
    kept = settled(client, log)
    client.call("pin", kept, 50)
    error = refused(client, "demote", kept, "dram")
    assert (error.code, message_of(error)) == (
        E.EBUSY,
        "the context is pinned for another 50 ms: unpin it before you demote",
    )
    assert refused(client, "evict", kept).code is E.EBUSY
    for n in range(2, 6):
        settled(client, prompt(n, 28))
        assert client.call("stat", kept).cached_tokens == 16
    system.advance(50_000_001)
    settled(client, prompt(7, 36))
    assert client.call("stat", kept).cached_tokens < 16
    assert said(client, kept, 2) == reference_tokens(log, 2)


@CORES
def test_unpin_ends_it_at_once(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, core=core)
    client = system.connect()
    ctx = settled(client, prompt(1, 16))
    client.call("pin", ctx, 0)
    client.call("unpin", ctx)
    client.call("unpin", ctx)
    assert client.call("demote", ctx, "dram").failed_blocks == 0


@CORES
def test_pins_are_bounded_by_a_share_and_a_time(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, core=core)  # share: half of 12
    client = system.connect()
    first, second = settled(client, prompt(1, 16)), settled(client, prompt(2, 12))
    client.call("pin", first, 100)
    client.call("pin", first, 100)  # its own frames are not counted twice
    error = refused(client, "pin", second, 100)
    assert (error.code, error.detail["wanted"], error.detail["held"], error.detail["limit"]) == (E.EDQUOT, 3, 4, 6)
    assert (
        message_of(error)
        == "3 frames would be pinned beside 4; pins may hold 6 frames of hbm0 (sysctl pin.share_permille)"
    )
    client.call("unpin", first)
    client.call("pin", second, 100)
    longest = 600_000
    for wrong in (-1, longest + 1):
        error = refused(client, "pin", first, wrong)
        assert (error.code, error.detail["limit"]) == (E.EINVAL, longest)


@CORES
def test_pinned_contexts_that_all_grow_do_not_stop_the_machine(core: CoreMaker) -> None:
    """A pin is a wish: when those that decode have no other room, pins end, and nobody loses a token (it was a panic)."""
    system = SimulatedSystem(frames=9, dram=4, nvme=9, core=core)
    client = system.connect()
    logs = [prompt(n, 6) for n in range(2)]
    ctxs = [settled(client, log) for log in logs]
    for ctx in ctxs:
        client.call("pin", ctx, 1000)
    requests = [client.post("generate", ctx, 20) for ctx in ctxs]
    system.run()
    for request, log in zip(requests, logs, strict=True):
        assert tokens_of(client.result(request).tokens) == reference_tokens(log, 20)
    assert count(system, "pins_broken") > 0
    assert any("is pinned no more" in row.text for row in client.call("dmesg").rows)


# -- advise ----------------------------------------------------------------------------------------------------------------


@CORES
def test_advise_cold_and_willneed_move_contexts_down_and_up(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, core=core)
    client = system.connect()
    log = prompt(1, 14)
    ctx = settled(client, log)
    client.call("advise", ctx, "cold")
    system.run()
    assert client.call("stat", ctx).cached_tokens == 0
    assert system.devices[0].sealed_frames == 4
    client.call("advise", ctx, "willneed")
    system.run()
    assert client.call("stat", ctx).cached_tokens == 14
    assert count(system, "prefetched_blocks") == 3
    assert not system.kernel.machine.errands.open
    assert client.call("stat", ctx).usage.recomputed_tokens == 0


@CORES
def test_advised_priorities_decide_what_goes_first_and_end_in_time(core: CoreMaker) -> None:
    """Under the policy that looks at nothing else.  The older context would go first."""
    for advice, args, stays in (
        ("dontneed", (), 0), ("priority", (0, -1, 10), 0), ("normal", (), 1), ("priority", (0, -1, 0, 5), 1),
    ):  # fmt: skip
        system = SimulatedSystem(frames=12, core=core, sysctl={"evict.policy": "priority"})
        client = system.connect()
        logs = [prompt(1, 16), prompt(2, 16)]
        ctxs = [settled(client, log) for log in logs]
        client.call("advise", ctxs[1], advice, *args)
        for ctx in ctxs:
            client.call("release", ctx)
        if args == (0, -1, 0, 5):
            ctxs = [settled(client, log) for log in logs]
            client.call("advise", ctxs[1], advice, *args)
            system.advance(6_000_000)
            for ctx in ctxs:
                client.call("release", ctx)
        client.call("release", settled(client, prompt(3, 24)))  # two frames too many
        computed = system.devices[0].computed_tokens
        settled(client, logs[stays])
        assert system.devices[0].computed_tokens - computed <= 1, f"{advice} {args}: context {stays} had to go"


@CORES
def test_a_later_advice_stands_when_an_earlier_one_ends(core: CoreMaker) -> None:
    """Six blocks.  What is advised last of a block holds for as long as it says, and what it says nothing of is as before."""
    system = SimulatedSystem(frames=12, core=core)
    client = system.connect()
    ctx = settled(client, prompt(1, 24))
    blocks = system.core.log_blocks(system.kernel.machine.contexts[client.call("stat", ctx).cid].slot)

    def priorities() -> list[int]:
        return [fact[8] for fact in FACT.iter_unpack(system.core.facts(blocks))]

    client.call("advise", ctx, "priority", 0, -1, 10, 5)  # all, for 5 ms
    client.call("advise", ctx, "priority", 4, 12, 20)  # blocks 1 and 2, for ever
    client.call("advise", ctx, "priority", 12, 16, 30, 9)  # block 3, for 9 ms
    client.call("advise", ctx, "priority", 17, 19, 40, 1)  # no block is whole
    assert priorities() == [10, 20, 20, 30, 10, 10]
    system.advance(6_000_000)
    assert priorities() == [50, 20, 20, 30, 50, 50]
    client.call("advise", ctx, "normal", 0, 8)
    system.advance(4_000_000)
    assert priorities() == [50, 50, 20, 50, 50, 50]
    assert "prefetches_late" not in system.kernel.machine.counters


@CORES
@pytest.mark.parametrize("advice", ["priority", "willneed", "cold"])
def test_advice_that_is_given_again_and_again_is_one_errand(core: CoreMaker, advice: str) -> None:
    """Nobody waits for it, so nothing else bounds how much of it there is, and what a step has to look at."""
    system = SimulatedSystem(frames=12, dram=24, core=core)
    client = system.connect()
    ctx = settled(client, prompt(1, 24))
    if advice == "willneed":
        client.call("demote", ctx)
        client.post("generate", client.call("fork", ctx).ctxs[0], 20)  # the device is busy
    for k in range(200):
        client.post("advise", ctx, advice, *((4 * (k % 5), -1, 1, 10**9) if advice == "priority" else ()))
    open_ = list(system.kernel.machine.errands.open)
    assert len(open_) <= (6 if advice == "priority" else 2)
    assert advice != "priority" or not system.kernel.machine.errands._look
    client.call("release", ctx)
    system.run()
    assert not system.kernel.machine.errands.open


@CORES
def test_what_advise_refuses(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, core=core)
    client = system.connect()
    ctx = settled(client, prompt(1, 14))
    error = refused(client, "advise", ctx, "whatever")
    assert error.code is E.EINVAL and message_of(error).startswith(
        "advice is willneed, dontneed, cold, normal or priority"
    )
    for start, end in ((-1, 4), (5, 4), (0, 15)):
        error = refused(client, "advise", ctx, "dontneed", start, end)
        assert (error.code, error.detail["tokens"]) == (E.EINVAL, 14)
    for priority in (-1, 101):
        assert refused(client, "advise", ctx, "priority", 0, -1, priority).code is E.EINVAL


# -- attach_tier, detach_tier ------------------------------------------------------------------------------------------------


@CORES
def test_a_tier_is_attached_used_drained_and_detached_while_serving(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, core=core)
    client, admin = system.connect(), system.connect(0)
    log, steady = prompt(1, 14), prompt(2, 4)
    ctx = settled(client, log)
    stream = client.post("generate", settled(client, steady), 30)
    for turn in range(3):
        assert admin.call("attach_tier", "sim", 10 * FRAME + 5) == ("sim0",)
        row = next(r for r in client.call("tiers").tiers if r.device == "sim0")
        assert (row.state, row.capacity_frames, row.free_frames, row.tier) == ("up", 10, 10, "sim")
        down = client.call("demote", ctx, "sim0")
        assert (down.resident_blocks, down.failed_blocks) == (4, 0), turn
        assert system.core.free_frames(DRAM) >= 12 - 4
        tier = system.devices[2]
        assert tier.written_frames == 4
        admin.call("detach_tier", "sim0")
        assert tier.read_frames >= 3, "what only it had is kept in dram"
        assert "sim0" not in [r.device for r in client.call("tiers").tiers if r.state != "down"]
        before = client.call("stat", ctx).usage.recomputed_tokens
        assert said(client, ctx, 2) == reference_tokens(log, 2)
        assert client.call("stat", ctx).usage.recomputed_tokens - before <= 2, "the tail at most"
        client.call("truncate", ctx, 14)
    system.run()
    assert tokens_of(client.result(stream).tokens) == reference_tokens(steady, 30)
    assert any("sim0: detached" in row.text for row in client.call("dmesg").rows)


@CORES
def test_a_tier_that_is_started_again_is_worth_another_attempt(core: CoreMaker) -> None:
    """EHOSTDOWN says that it will not come back."""
    system = SimulatedSystem(frames=12, dram=12, nvme=12, core=core)
    client = system.connect()
    ctx = settled(client, prompt(1, 14))
    system.step(DriverDown(NVME, system.epochs[NVME], "killed"))
    error = refused(client, "demote", ctx, "nvme")
    assert error.code is E.EAGAIN and "being started again" in message_of(error)
    system.driver_up(NVME)
    assert client.call("demote", ctx, "nvme").failed_blocks == 0


@CORES
def test_nothing_new_goes_to_a_tier_that_drains(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, nvme=12, core=core)
    client, admin = system.connect(), system.connect(0)
    ctx, other = settled(client, prompt(1, 14)), settled(client, prompt(2, 14))
    client.call("demote", ctx, "nvme")
    leaving = admin.post("detach_tier", "nvme0")
    assert leaving not in admin.replies
    assert refused(client, "demote", other, "nvme0").code is E.EHOSTDOWN
    error = refused(admin, "detach_tier", "nvme0")
    assert error.code in (E.EBUSY, E.ENODEV)
    system.run()
    assert admin.result(leaving) == ()
    assert system.devices[NVME] is None
    assert said(client, ctx, 2) == reference_tokens(prompt(1, 14), 2)


@CORES
def test_what_attach_and_detach_refuse(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, nvme=12, core=core)
    client, admin, stranger = system.connect(), system.connect(0), system.connect(1001)
    for name, *args in (("attach_tier", "sim", FRAME), ("detach_tier", "nvme0")):
        assert refused(stranger, name, *args).code is E.EACCES
    assert refused(admin, "attach_tier", "dram", 10 * FRAME).code is E.EINVAL
    error = refused(admin, "attach_tier", "sim", FRAME - 1)
    assert (error.code, message_of(error)) == (E.EINVAL, f"{FRAME - 1} bytes hold 0 frames")
    error = refused(admin, "detach_tier", "dram0")
    assert error.code is E.EINVAL and message_of(error).startswith("dram0 stays: ")
    assert refused(admin, "detach_tier", "hbm0").code is E.EINVAL
    error = refused(admin, "detach_tier", "nvme7")
    assert (error.code, message_of(error)) == (E.ENODEV, "no device 'nvme7'")
    for n in range(5):
        assert admin.call("attach_tier", "sim", FRAME) == (f"sim{n}",)
    assert refused(admin, "attach_tier", "sim", FRAME).code is E.ENOMEM
    admin.call("detach_tier", "sim3")
    assert admin.call("attach_tier", "sim", FRAME).device not in ("sim0", "sim1", "sim2", "sim4")
    assert len(system.kernel.machine.devices) == 8, "its number is used again"
    alone = SimulatedSystem(frames=12, core=core).connect(0)
    assert refused(alone, "attach_tier", "sim", FRAME).code is E.ENODEV
    assert said(client, settled(client, prompt(1, 9)), 2) == reference_tokens(prompt(1, 9), 2)


@CORES
def test_a_tier_that_cannot_be_started_is_an_error_and_leaves_nothing_behind(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=12, dram=12, core=core)
    admin = system.connect(0)
    request = admin.post("attach_tier", "nvme", 10 * FRAME)
    system.attaching.clear()
    system.step(DriverGone(2, "no such directory"))
    error = admin.replies[request]
    assert error.code == E.ENODEV
    assert error.result == {"message": "nvme0 cannot be started: no such directory", "device": "nvme0"}
    assert admin.call("attach_tier", "nvme", 10 * FRAME) == ("nvme0",)
    assert not system.kernel.machine.errands.open
