"""What is found where: counted at the executor and at the tiers, never from the kernel's own word alone."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from attnix.drivers.sim_device import SimDevice
from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.events import TransferDone
from attnix.kernel.evict import registry
from attnix.kernel.twin import TwinCore
from attnix.simulated import CoreMaker, SimulatedClient, SimulatedSystem, ints, tokens_of

CORES = pytest.mark.parametrize("core", [TwinCore, Core])
DRAM, NVME = 1, 2


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


def said(client: SimulatedClient, ctx: int, n: int) -> list[int]:
    return tokens_of(client.call("generate", ctx, n).tokens)


def count(system: SimulatedSystem, name: str) -> int:
    return system.kernel.machine.counters[name]


def residents(client: SimulatedClient, ctx: int, device: int) -> int:
    """Blocks of the context with a copy on that device."""
    return sum(mask >> device & 1 for mask in client.call("pagemap", ctx).copies)


# -- 64 contexts on room for eight ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("policy", ["lru", "learned"])
def test_64_contexts_on_an_hbm_that_holds_8(direct: bool, policy: str) -> None:
    """Dram holds 24 and nvme the rest; continued five times in random order: every token right, no token computed twice."""
    blocks, contexts = 10, 64  # of each at its end: 30 tokens, and five times two
    system = SimulatedSystem(
        frames=8 * blocks, dram=24 * blocks, nvme=64 * blocks, direct=direct, core=Core, max_contexts=70, check=False,
        sysctl={"evict.policy": policy},
    )  # fmt: skip
    client = system.connect()
    logs = [prompt(n, 30) for n in range(contexts)]
    ctxs = [settled(client, log) for log in logs]
    before = system.devices[0].computed_tokens
    rng = random.Random(64)
    order = [n for n in range(contexts) for _ in range(5)]
    rng.shuffle(order)
    for at, n in enumerate(order):
        new = said(client, ctxs[n], 2)
        assert new == reference_tokens(logs[n], 2), f"context {n}"
        logs[n] += new
        if at % 20 == 0:
            assert not system.kernel.fsck()
    # Two passes of one token each time: the last one that was there, which nothing had been asked to follow, and the first
    # new one.
    assert system.devices[0].computed_tokens - before == 2 * len(order)
    tier = system.devices[NVME]
    assert tier.read_frames > 0 and tier.written_frames > 0 and system.devices[0].sealed_frames > 0
    assert client.call("getrusage").recomputed_tokens == 0
    assert system.core.free_frames(0) <= 8 * blocks
    system.disconnect(client)
    system.run()
    assert [system.available(d) for d in range(3)] == [8 * blocks, 24 * blocks, 64 * blocks]


# -- the flood -----------------------------------------------------------------------------------------------------------


def flood(policy: str) -> int:
    """40 chats of their own on one system prompt of 8 blocks, one a second; then one-use prompts of ten times the cache.  How
    many tokens of the system prompt the executor must compute again for the next chat."""
    frames = 64
    system = SimulatedSystem(
        frames=frames, core=Core, window_tokens=128, check=False, sysctl={"evict.policy": policy},
        make_device=lambda frames, layout, rows: SimDevice(frames, layout, rows, 4, ns_per_token=1000, ns_per_pass=50_000),
    )  # fmt: skip
    client = system.connect()
    hot = prompt(999, 32)

    def ask(tokens: list[int]) -> int:
        before = system.devices[0].computed_tokens
        ctx = begin(client, tokens)
        system.run()
        computed: int = system.devices[0].computed_tokens - before
        assert said(client, ctx, 2) == reference_tokens(tokens, 2)
        client.call("release", ctx)
        system.advance(1_000_000_000)
        return computed

    for user in range(40):
        ask([*hot, *prompt(2000 + user, 8)])
    for n in range(10 * frames // 16):
        assert ask(prompt(n, 64)) == 64
    return ask([*hot, *prompt(3000, 8)]) - 8


def test_a_flood_of_one_use_prompts_leaves_a_hot_prompt_resident_under_the_default_policy() -> None:
    assert flood(registry.DEFAULT) == 0
    assert registry.DEFAULT == "learned"


def test_the_same_flood_washes_it_out_under_fifo() -> None:
    assert flood("fifo") == 32


# -- part of a block ------------------------------------------------------------------------------------------------------


@CORES
@pytest.mark.parametrize("where", ["hbm", "dram", "nvme"])
@pytest.mark.parametrize("same", [1, 2, 3])
def test_the_first_tokens_of_a_block_are_kept_to_the_token(core: CoreMaker, where: str, same: int) -> None:
    """Eight tokens and `same` of the third block are known; the rest of it, and what follows, is computed."""
    system = SimulatedSystem(frames=12, dram=12, nvme=12, core=core)
    client = system.connect()
    log = prompt(5, 12)
    known = settled(client, log)
    if where != "hbm":
        client.call("demote", known, where)
    other = [*log[: 8 + same], *(249 - t for t in log[8 + same : 12]), 1, 2]
    before = system.devices[0].computed_tokens
    ctx = begin(client, other)
    system.run()
    assert system.devices[0].computed_tokens - before == len(other) - 8 - same
    assert said(client, ctx, 3) == reference_tokens(other, 3)
    usage = client.call("stat", ctx).usage
    assert usage.hit_tokens == 8 + same
    vmstat = client.call("vmstat").counters
    assert (vmstat["partial_hits"], vmstat["partial_tokens"]) == (1, same)
    if where != "hbm":
        assert system.devices[0].unsealed_frames == 3
    assert said(client, known, 3) == reference_tokens(log, 3), "whose block it was has it unchanged"


@CORES
def test_a_partial_hit_can_be_turned_off_and_asked_to_be_worth_it(core: CoreMaker) -> None:
    for least, hits in ((0, 8), (4, 8), (3, 11), (2, 11)):
        system = SimulatedSystem(frames=12, core=core, sysctl={"tier.partial_tokens": least})
        client = system.connect()
        log = prompt(5, 12)
        settled(client, log)
        ctx = begin(client, [*log[:11], 249, 1])
        assert said(client, ctx, 1) == reference_tokens([*log[:11], 249, 1], 1)
        assert client.call("stat", ctx).usage.hit_tokens == hits


def in_three_tiers(client: SimulatedClient) -> list[int]:
    """24 tokens, in blocks of 4: two blocks in hbm, two in dram, two in nvme."""
    log = prompt(6, 24)
    for tier, tokens in (("nvme", 24), ("dram", 16), ("hbm", 8)):
        ctx = settled(client, log[:tokens])
        if tier != "hbm":
            client.call("demote", ctx, tier)
            client.call("release", ctx)
    return log


@CORES
def test_hit_tokens_are_told_per_tier(core: CoreMaker) -> None:
    """Two blocks in hbm, two in dram, two in nvme."""
    system = SimulatedSystem(frames=14, dram=14, nvme=14, core=core, window_tokens=128)
    client = system.connect()
    log = in_three_tiers(client)
    before = system.devices[0].computed_tokens
    ctx = begin(client, [*log, 3])
    result = client.call("generate", ctx, 1)
    assert tokens_of(result.tokens) == reference_tokens([*log, 3], 1)
    assert system.devices[0].computed_tokens - before == 1
    usage = result.usage
    assert (usage.hit_tokens, usage.dram_tokens + usage.nvme_tokens) == (24, 16)
    assert usage.computed_tokens == 1
    assert usage.nvme_tokens >= 8


@CORES
def test_hits_of_all_tiers_are_shares_of_one_number(core: CoreMaker) -> None:
    """By hand, in blocks of 4 tokens, of prompts that go on with a last token of their own.  24 tokens, of which two blocks are in
    hbm, two in dram and two in nvme: six blocks looked for, two found in each.  Eight tokens that nobody knows: none of two."""
    system = SimulatedSystem(frames=14, dram=14, nvme=14, core=core, window_tokens=128)
    client = system.connect()
    log = in_three_tiers(client)
    names = ("lookup_hits", "found_blocks_dram", "found_blocks_nvme", "lookup_misses")

    def grown(tokens: list[int]) -> list[int]:
        before = client.call("vmstat").counters
        assert said(client, begin(client, tokens), 1) == reference_tokens(tokens, 1)
        now = client.call("vmstat").counters
        return [now.get(name, 0) - before.get(name, 0) for name in names]

    assert grown([*log, 3]) == [2, 2, 2, 0]
    assert grown([*prompt(7, 8), 3]) == [0, 0, 0, 2]
    last = client.call("health").samples[-1]
    counters = client.call("vmstat").counters
    assert last.fault_blocks == counters["found_blocks_dram"] + counters["found_blocks_nvme"]
    assert (last.hit_blocks, last.missed_blocks) == (counters["lookup_hits"], counters["lookup_misses"])


# -- when things are written down -------------------------------------------------------------------------------------------


@CORES
def test_a_clean_copy_goes_without_io(core: CoreMaker) -> None:
    """What was brought back and not changed needs no second copy: counted in transfers."""
    system = SimulatedSystem(frames=8, dram=24, core=core)
    client = system.connect()
    log = prompt(1, 16)
    ctx = settled(client, log)
    client.call("demote", ctx, "dram")
    client.call("prefetch", ctx)
    sealed, transfers = system.devices[0].sealed_frames, count(system, "transfers")
    client.call("demote", ctx, "dram")
    assert (system.devices[0].sealed_frames, count(system, "transfers")) == (sealed, transfers)
    assert client.call("stat", ctx).cached_tokens == 0
    assert said(client, ctx, 2) == reference_tokens(log, 2)
    # The same by pressure: another prompt of the whole pool takes its frames, and the four clean ones move nothing.
    client.call("truncate", ctx, 16)
    other = settled(client, prompt(2, 20))
    assert system.devices[0].sealed_frames == sealed
    assert said(client, other, 2) == reference_tokens(prompt(2, 20), 2)


def written(core: CoreMaker, mode: str, turns: int, hits: int = 2) -> tuple[int, int]:
    """Frames that reached dram and nvme after turns over a shared prompt of three blocks, without any pressure."""
    system = SimulatedSystem(
        frames=40, dram=40, nvme=40, core=core, window_tokens=128,
        sysctl={"tier.write": mode, "tier.selective_hits": hits},
    )  # fmt: skip
    client = system.connect()
    log = prompt(1, 12)
    for turn in range(turns):
        ctx = begin(client, [*log, 100 + turn])
        assert said(client, ctx, 1) == reference_tokens([*log, 100 + turn], 1)
        client.call("release", ctx)
        system.run()
    return system.devices[0].sealed_frames, system.devices[NVME].written_frames


@CORES
def test_write_back_writes_nothing_before_it_must(core: CoreMaker) -> None:
    assert written(core, "back", 5) == (0, 0)


@CORES
def test_write_through_writes_at_the_end_of_the_first_turn_and_once(core: CoreMaker) -> None:
    assert written(core, "through", 1) == (3, 3)
    assert written(core, "through", 5) == (3, 3)


@CORES
@pytest.mark.parametrize("hits", [1, 2, 4])
def test_write_selective_writes_at_the_nth_hit(core: CoreMaker, hits: int) -> None:
    """The first turn computes the prompt, the k-th after it is its k-th hit."""
    assert written(core, "selective", hits, hits) == (0, 0)
    assert written(core, "selective", hits + 1, hits)[0] == 3


# -- order -------------------------------------------------------------------------------------------------------------------


@CORES
@pytest.mark.parametrize(
    "policy", ["lru", "fifo", "lfu", "s3fifo", "sieve", "arc", "slru", "learned", "cost", "ttl", "priority"]
)
def test_a_leaf_goes_before_its_parent_on_every_tier(core: CoreMaker, policy: str) -> None:
    """Nothing is left behind by its parent: what hbm has of a context is its beginning, and what a slower tier has is a run
    of neighbours, which grows at its front and loses its end."""
    system = SimulatedSystem(frames=8, dram=6, nvme=6, core=core, sysctl={"evict.policy": policy})
    client = system.connect()
    log = prompt(1, 20)
    ctx = settled(client, log)
    blocks = system.core.log_blocks(next(iter(system.kernel.machine.contexts.values())).slot)
    client.call("release", ctx)
    order: list[list[int]] = [[], [], []]
    for n in range(2, 12):
        request = begin(client, prompt(n, 12))
        client.post("generate", request, 1)
        busy = True
        while busy:
            busy = any(system.tick(d) for d in range(3))
            for device in range(3):
                here = [
                    at
                    for at, b in enumerate(blocks)
                    if key_is(system, b, log, at) and system.core.copies_of(b)[device] >= 0
                ]
                order[device].append(len(here))
                first = here[0] if here and device else 0
                assert here == list(range(first, first + len(here))), f"device {device} has blocks {here}"
        client.call("release", request)
    assert order[0][0] == 5 and order[0][-1] < 5, "the test needs evictions"


def key_is(system: SimulatedSystem, block: int, log: list[int], at: int) -> bool:
    """The number still stands for block `at` of that log."""
    tokens = array("i", system.core.block_tokens_of(block)).tolist()
    return tokens == log[4 * at : 4 * at + 4]


# -- determinism ----------------------------------------------------------------------------------------------------------------


@CORES
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
def test_the_same_events_give_the_same_effects_to_the_byte(core: CoreMaker, direct: bool) -> None:
    """A run with tiers, failures and a death is recorded; a second kernel is fed its events alone."""

    def build() -> SimulatedSystem:
        return SimulatedSystem(
            frames=9, dram=6, nvme=16, direct=direct, core=core, record=True, sysctl={"evict.policy": "learned"}
        )

    system = build()
    client = system.connect()
    rng = random.Random(7)
    ctxs = [begin(client, prompt(n, rng.randrange(3, 20))) for n in range(6)]
    for _ in range(150):
        ctx = rng.choice(ctxs)
        what = rng.randrange(9)
        if what == 0:
            client.post("generate", ctx, rng.randrange(1, 6))
        elif what == 1:
            client.post("demote", ctx, rng.choice(["dram", "nvme"]))
        elif what == 2:
            client.post("prefetch", ctx, rng.choice(["dram", "hbm"]), rng.choice([0, 1]))
        elif what == 3:
            system.kill_driver(NVME, rng.random() < 0.5)
        elif what == 4 and system.pending[0]:
            system.fail(0)
        else:
            for _ in range(rng.randrange(6)):
                system.tick(rng.randrange(3))
    system.run()
    again = build()
    assert len(system.log) > 200
    assert any(isinstance(event, TransferDone) and event.failed for _, event, _ in system.log)
    for now_ns, event, effects in system.log[2:] if not again.log else system.log[len(again.log) :]:
        assert again.kernel.step(event, now_ns) == effects
    assert again.kernel.machine.counters == system.kernel.machine.counters
    assert [again.core.frame_table(d) for d in range(3)] == [system.core.frame_table(d) for d in range(3)]


def test_both_cores_give_the_same_effects() -> None:
    logs: list[list[Any]] = []
    for core in (TwinCore, Core):
        system = SimulatedSystem(frames=9, dram=6, nvme=16, core=core, record=True)
        client = system.connect()
        ctxs = [begin(client, prompt(n, 15)) for n in range(5)]
        for n, ctx in enumerate(ctxs):
            client.call("generate", ctx, 3)
            client.call("demote", ctxs[n - 1], "nvme")
        for ctx in ctxs:
            client.call("generate", ctx, 3)
        logs.append([(event, effects) for _, event, effects in system.log])
    assert logs[0] == logs[1]
