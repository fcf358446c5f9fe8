"""Calls that take several transfers are answered in the step that ends them: the next event may be hours away."""

from __future__ import annotations

import pytest

from attnix.kernel.core import Core
from attnix.kernel.twin import TwinCore
from attnix.simulated import SimulatedSystem, ints

TOKENS = range(1, 17)  # four blocks of four


@pytest.mark.parametrize("tier", ["dram", "nvme"])
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("core", [TwinCore, Core])
def test_a_context_goes_down_and_comes_back_and_both_calls_are_answered(
    tier: str, direct: bool, core: type[TwinCore] | type[Core]
) -> None:
    system = SimulatedSystem(dram=16, nvme=16, direct=direct, core=core)
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(TOKENS))
    client.call("forward", ctx, 1)
    down = client.call("demote", ctx, tier)  # runs what is pending and nothing more; without a reply it is a KeyError
    assert (down.resident_blocks, down.failed_blocks) == (4, 0)
    assert client.call("stat", ctx).cached_tokens == 0
    before = client.call("stat", ctx).usage.computed_tokens
    up = client.call("prefetch", ctx)
    assert (up.moved_blocks, up.resident_blocks, up.failed_blocks) == (4, 4, 0)
    after = client.call("stat", ctx)
    assert after.cached_tokens == 16
    assert after.usage.computed_tokens == before
    assert getattr(after.usage, f"{tier}_tokens") == 16


@pytest.mark.parametrize("core", [TwinCore, Core])
@pytest.mark.parametrize("direct", [False, True], ids=["staged", "direct"])
def test_a_demotion_waits_for_transfers_that_hold_its_frames(direct: bool, core: type[TwinCore] | type[Core]) -> None:
    """At the end of a turn its blocks are being copied to dram: their frames in hbm cannot be let go yet."""
    system = SimulatedSystem(dram=16, nvme=16, direct=direct, core=core, sysctl={"tier.write": "through"})
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(TOKENS))
    client.call("forward", ctx, 1)
    for _ in range(3):
        down = client.call("demote", ctx, "nvme")
        assert (down.resident_blocks, down.failed_blocks) == (4, 0)
        assert system.core.free_frames(0) == 12
        client.call("generate", ctx, 1)  # the end of a turn: what it begins to copy down is under way when it returns
        client.call("truncate", ctx, 16)
