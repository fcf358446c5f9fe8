"""tier.write=through copies down whatever was computed: not the ends of generations only."""

from __future__ import annotations

import pytest

from attnix.kernel.core import Core
from attnix.simulated import SimulatedSystem, ints


def nvme_blocks(system: SimulatedSystem) -> int:
    return 40 - system.core.free_frames(2)


@pytest.mark.parametrize("then", ["", "forward"])
def test_a_prompt_is_written_through_when_it_is_computed(then: str) -> None:
    for write, blocks in (("back", 0), ("through", 5)):
        system = SimulatedSystem(
            core=Core, frames=16, dram=16, nvme=40, block_tokens=4, window_tokens=64, sysctl={"tier.write": write}
        )
        client = system.connect()
        context = client.call("alloc_context")
        client.call("append", context.ctx, ints(range(20)))
        if then:
            client.call(then, context.ctx)
        system.run()
        assert nvme_blocks(system) == blocks


def test_a_named_context_is_written_through_when_its_prompt_is_computed() -> None:
    system = SimulatedSystem(core=Core, frames=16, dram=16, nvme=40, block_tokens=4, window_tokens=64)
    client = system.connect()
    context = client.call("alloc_context")
    client.call("publish", context.ctx, "it")
    client.call("append", context.ctx, ints(range(20)))
    system.run()
    assert nvme_blocks(system) == 5
