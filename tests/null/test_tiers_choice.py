"""Swap or recompute: whichever the measured times say is cheaper, block by block, and `explain` says which numbers said so.

The kernel is given the times that drivers would report (ExecDone.compute_ns, TransferDone.elapsed_ns) and nothing else.
"""

from __future__ import annotations

from typing import Any

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.batch import unpack_seqs
from attnix.kernel.core import Core
from attnix.kernel.events import Exec, ExecDone, ExecFailed, Transfer, TransferDone
from attnix.kernel.twin import TwinCore
from attnix.simulated import CoreMaker, SimulatedClient, SimulatedSystem, ints, tokens_of

CORES = pytest.mark.parametrize("core", [TwinCore, Core])


class Timed(SimulatedSystem):
    """token_ns, pair_ns: of computing; frame_ns: of moving one frame, either way."""

    def __init__(self, token_ns: float, pair_ns: float, frame_ns: int, **more: Any) -> None:
        self.token_ns, self.pair_ns, self.frame_ns = token_ns, pair_ns, frame_ns
        super().__init__(**more)

    def perform(self, effect: Exec | Transfer) -> ExecDone | ExecFailed | TransferDone:
        done = super().perform(effect)
        if isinstance(done, TransferDone):
            return done._replace(
                elapsed_ns=self.frame_ns * (len(effect.pairs) // 8) if isinstance(effect, Transfer) else 0
            )
        if isinstance(done, ExecDone) and isinstance(effect, Exec):
            spent = sum(
                self.token_ns * q.ntokens + self.pair_ns * q.ntokens * (q.start + q.ntokens / 2)
                for q in unpack_seqs(effect.seqs)
            )
            return done._replace(compute_ns=int(spent))
        return done


def prompt(n: int, tokens: int) -> list[int]:
    return [1 + n % 250, 1 + n // 250, *((7 * k + n * k * k) % 250 for k in range(tokens - 2))]


def settled(client: SimulatedClient, tokens: list[int]) -> int:
    ctx: int = client.call("alloc_context").ctx
    client.call("append", ctx, ints(tokens))
    client.system.run()
    return ctx


def learn(client: SimulatedClient) -> None:
    """Prompts of several lengths and a trip to dram and back: all costs are known afterwards."""
    for n, tokens in enumerate((5, 12, 30, 44, 9, 21), 200):
        ctx = settled(client, prompt(n, tokens))
        client.call("demote", ctx, "dram")
        client.call("prefetch", ctx)
        client.call("evict", ctx)
        client.call("release", ctx)


def pressed(core: CoreMaker, token_ns: float, frame_ns: int) -> tuple[Timed, SimulatedClient, int]:
    """Three contexts that do not fit together go on in turn."""
    system = Timed(token_ns, 0.0, frame_ns, frames=12, dram=40, core=core)
    client = system.connect()
    learn(client)
    logs = [prompt(n, 24) for n in range(3)]
    ctxs = [settled(client, log) for log in logs]
    for _ in range(3):
        for k, ctx in enumerate(ctxs):
            new = tokens_of(client.call("generate", ctx, 2).tokens)
            assert new == reference_tokens(logs[k], 2)
            logs[k] += new
    return system, client, ctxs[0]


@CORES
def test_swapping_wins_where_computing_is_slow(core: CoreMaker) -> None:
    _, client, ctx = pressed(core, 1_000_000, 1_000)
    vmstat = client.call("vmstat").counters
    assert vmstat.get("dropped_cheap", 0) == 0
    assert vmstat["demoted_blocks"] > 0
    assert client.call("getrusage").recomputed_tokens == 0
    whys = [row.why for row in client.call("explain", ctx).rows if row.what in ("demote", "load")]
    assert any("to dram0 and back takes 0.001 + 0.001 ms a block, computing 4.000 ms" in why for why in whys), whys
    assert any("loading takes 0.0" in why and "computing 2" in why for why in whys), whys


@CORES
def test_recomputing_wins_where_moving_is_slow(core: CoreMaker) -> None:
    system, client, ctx = pressed(core, 1_000, 1_000_000)
    sealed = system.devices[0].sealed_frames
    vmstat = client.call("vmstat").counters
    assert vmstat["dropped_cheap"] > 0
    assert client.call("getrusage").recomputed_tokens > 0
    whys = [row.why for row in client.call("explain", ctx).rows]
    assert any("computing it again is cheaper; to dram0 and back takes 1.000 + 1.000 ms a block, computing 0.004 ms" in w
               for w in whys), whys  # fmt: skip
    assert any("were computed before and are in no tier any more" in why for why in whys)
    assert sealed == system.devices[0].sealed_frames


@CORES
def test_a_context_in_dram_is_split_where_the_numbers_cross(core: CoreMaker) -> None:
    """a = 100 ns, b = 10 ns a pair: block i takes 480 + 160 i ns to compute, and 1,000 to load.  So of ten blocks the first four
    (480, 640, 800, 960) are computed and the other six are loaded: counted at the executor."""
    system = Timed(100, 10, 1_000, frames=24, dram=40, core=core)
    client = system.connect()
    learn(client)
    log = prompt(7, 40)
    ctx = settled(client, log)
    client.call("demote", ctx, "dram")
    computed, loaded = system.devices[0].computed_tokens, system.devices[0].unsealed_frames
    split_before = client.call("vmstat").counters.get("split_blocks", 0)
    assert tokens_of(client.call("generate", ctx, 2).tokens) == reference_tokens(log, 2)
    assert system.devices[0].computed_tokens - computed == 4 * 4 + 2
    assert system.devices[0].unsealed_frames - loaded == 6
    (why,) = [row.why for row in client.call("explain", ctx).rows if row.what == "split"]
    assert why.startswith("compute 4 of 10 blocks (0.00 ms) and load the others from dram0 (0.01 ms)"), why
    assert "loading all takes 0.01 ms, computing all 0.01 ms" in why
    assert client.call("vmstat").counters["split_blocks"] - split_before == 4


@CORES
def test_without_measurements_what_there_is_is_loaded(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=24, dram=40, core=core)
    client = system.connect()
    log = prompt(7, 40)
    ctx = settled(client, log)
    client.call("demote", ctx, "dram")
    computed = system.devices[0].computed_tokens
    assert tokens_of(client.call("generate", ctx, 2).tokens) == reference_tokens(log, 2)
    assert system.devices[0].computed_tokens - computed == 2


@CORES
def test_the_choice_follows_the_times_when_they_change(core: CoreMaker) -> None:
    """A link that becomes a thousand times slower is avoided after a few transfers."""
    system = Timed(1_000, 0.0, 100, frames=24, dram=40, core=core)
    client = system.connect()
    learn(client)
    log = prompt(7, 40)
    ctx = settled(client, log)

    def computed_for_a_turn() -> int:
        client.call("truncate", ctx, 40)
        client.call("demote", ctx, "dram")
        before: int = system.devices[0].computed_tokens
        assert tokens_of(client.call("generate", ctx, 2).tokens) == reference_tokens(log, 2)
        return int(system.devices[0].computed_tokens) - before

    assert computed_for_a_turn() <= 3
    system.frame_ns = 100_000
    for _ in range(4):
        learn(client)
    assert computed_for_a_turn() >= 40
