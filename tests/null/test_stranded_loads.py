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


@pytest.mark.parametrize("core", [TwinCore, Core])
@pytest.mark.parametrize(("group", "soft", "hard"), [("uid:1001", 0, 1), ("uid:1000", 2, 0)])
def test_a_limit_of_dram_does_not_stop_a_load(core: CoreMaker, group: str, soft: int, hard: int) -> None:
    """Loads that no frame of dram can be had for are given up, and computed, when nothing else is to come that could help."""
    system = SimulatedSystem(core=core, frames=8, dram=2, nvme=40, block_tokens=4, window_tokens=64)
    owner, client, other = (system.connect(uid) for uid in (1000, 1001, 1002))
    prompts = {owner: [9] * 8, client: list(range(20)), other: list(range(30, 50))}
    ctx = {}
    for who, prompt in prompts.items():
        ctx[who] = who.call("alloc_context").ctx
        who.call("append", ctx[who], ints(prompt))
        system.run()
        who.call("demote", ctx[who], "nvme")
    owner.call("prefetch", ctx[owner], "dram")
    owner.call("setlimit", group, "dram", soft, hard)
    requests = {who: who.post("generate", ctx[who], 3) for who in (client, other)}
    system.run()
    for who, request in requests.items():
        assert tokens_of(who.result(request).tokens) == reference_tokens(prompts[who], 3)
