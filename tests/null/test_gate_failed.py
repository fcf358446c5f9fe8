"""A load that passes follow fails: the pass behind its gate says so before the tier's driver has said how it ended."""

from __future__ import annotations

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.errors import E
from attnix.kernel.events import DriverDown, Exec, RestartDriver, Transfer, TransferDone
from attnix.simulated import SimulatedSystem, ints, tokens_of


def test_a_gate_that_failed_is_waited_for_and_no_fault_of_the_accel() -> None:
    """The pass was sent again at once behind the same gate, and failed at once: after a few rounds the accel was restarted,
    and then the client got EIO."""
    system = SimulatedSystem(
        core=Core, frames=8, dram=8, nvme=40, direct=True, block_tokens=4, window_tokens=64, record=True
    )
    client = system.connect()
    prompt = list(range(20))
    context = client.call("alloc_context")
    client.call("append", context.ctx, ints(prompt))
    system.run()
    client.call("demote", context.ctx, "nvme")
    request = client.post("generate", context.ctx, 6)
    (load,) = system.pending[2]
    assert isinstance(load, Transfer)
    failures = 0
    while system.fail(0, "the load at gate 0 failed"):  # the gate says so from the first bad frame on
        failures += 1
        assert failures < 10, "the pass goes round"
    assert failures == 1, "nothing runs behind a gate that failed"
    system.pending[2].clear()
    bad = ((0, int(E.ECORRUPT)), (3, int(E.ECORRUPT)))
    done = system.perform(load)
    assert isinstance(done, TransferDone)
    system.step(done._replace(failed=bad))
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(prompt, 6)
    assert not [effect for _, _, effects in system.log for effect in effects if isinstance(effect, RestartDriver)]
    assert [effect for _, _, effects in system.log for effect in effects if isinstance(effect, Exec) and effect.gates]


def test_nobody_reads_what_is_still_arriving_because_another_came() -> None:
    """A pass behind a gate is lost with its driver; when that is back somebody else has frames too, so that no pass may wait
    at gates.  The last token, all that was left to compute, was then computed over frames that had not landed."""
    system = SimulatedSystem(core=Core, frames=16, dram=8, nvme=40, direct=True, block_tokens=4, window_tokens=64)
    client = system.connect()
    prompt = list(range(20))
    context = client.call("alloc_context")
    client.call("append", context.ctx, ints(prompt))
    system.run()
    client.call("demote", context.ctx, "nvme")
    request = client.post("generate", context.ctx, 6)
    (gated,) = system.pending[0]
    assert isinstance(gated, Exec) and gated.gates
    system.pending[0].clear()
    system.step(DriverDown(0, system.epochs[0], "killed by test"))
    other = client.call("alloc_context")
    client.post("append", other.ctx, ints(range(100, 110)))
    system.driver_up(0)
    while system.tick(0):
        pass
    assert request not in client.replies, "it was computed without its blocks"
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(prompt, 6)
