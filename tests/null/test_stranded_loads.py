"""Loads that wait for a dram frame to come through, when the driver of the tier that they come from dies."""

from __future__ import annotations

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.twin import TwinCore
from attnix.simulated import CoreMaker, SimulatedSystem, ints, tokens_of


@pytest.mark.parametrize("core", [TwinCore, Core])
def test_loads_that_wait_for_dram_do_not_hold_frames_of_a_dead_tier(core: CoreMaker) -> None:
    """They kept them wired, and when the driver came back to say what it has, that was a panic."""
    system = SimulatedSystem(core=core, frames=8, dram=2, nvme=40, block_tokens=4, window_tokens=64)
    client = system.connect()
    prompt = list(range(20))
    context = client.call("alloc_context")
    client.call("append", context.ctx, ints(prompt))
    system.run()
    assert client.call("demote", context.ctx, "nvme").resident_blocks == 5
    request = client.post("generate", context.ctx, 6)
    assert system.pending[2], "the first are on their way, the others wait for dram"
    system.kill_driver(2)
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(prompt, 6)
