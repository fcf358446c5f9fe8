"""A tier's driver that dies after its loads have landed, and a pass has followed them, but before it said so."""

from __future__ import annotations

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.events import DriverDown, Exec
from attnix.simulated import SimulatedSystem, ints, tokens_of


def test_a_pass_proves_that_its_loads_have_landed() -> None:
    system = SimulatedSystem(core=Core, frames=8, dram=8, nvme=40, direct=True, block_tokens=4, window_tokens=64)
    client = system.connect()
    prompt = list(range(20))
    context = client.call("alloc_context")
    client.call("append", context.ctx, ints(prompt))
    system.run()
    client.call("demote", context.ctx, "nvme")
    request = client.post("generate", context.ctx, 6)
    (load,) = list(system.pending[2])
    (gated,) = [effect for effect in system.pending[0] if isinstance(effect, Exec)]
    assert gated.gates, "the pass follows the load through its gate"
    system.perform(load)  # it lands, and the gate says so; its completion is never sent
    assert system.tick(0)
    system.pending[2].clear()
    system.step(DriverDown(2, system.epochs[2], "killed by test"))
    system.driver_up(2)
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(prompt, 6)
    assert client.call("getrusage").recomputed_tokens == 0
