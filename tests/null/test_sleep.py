"""sleep gives hbm back and keeps every context; wake goes on where it was."""

from __future__ import annotations

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.simulated import SimulatedSystem, ints, tokens_of


def test_contexts_sleep_in_dram_and_nvme_and_nothing_is_computed_again() -> None:
    system = SimulatedSystem(core=Core, frames=16, dram=8, nvme=40, block_tokens=4, window_tokens=64)
    client = system.connect()
    prompts = [[k + n for n in range(9 + k)] for k in range(4)]
    made = [client.call("alloc_context") for _ in prompts]
    for context, prompt in zip(made, prompts, strict=True):
        client.call("append", context.ctx, ints(prompt))
    system.run()
    streaming = client.post("generate", made[0].ctx, 8)
    system.tick()
    root = system.connect(0)
    root.call("sleep")
    hbm, *_ = root.call("tiers").tiers
    assert (hbm.state, hbm.free_frames) == ("asleep", 16)
    assert bytes(system.devices[0].arena) == bytes(len(system.devices[0].arena))
    with pytest.raises(Errno) as error:
        root.call("sleep")
    assert error.value.code is E.EBUSY
    later = client.post("generate", made[1].ctx, 3)  # waits for the wake
    system.run()
    assert later not in client.replies and streaming not in client.replies
    computed = system.devices[0].computed_tokens
    root.call("wake")
    system.run()
    assert tokens_of(client.result(streaming).tokens) == reference_tokens(prompts[0], 8)
    assert tokens_of(client.result(later).tokens) == reference_tokens(prompts[1], 3)
    for context, prompt in zip(made[2:], prompts[2:], strict=True):
        assert tokens_of(client.call("generate", context.ctx, 3).tokens) == reference_tokens(prompt, 3)
    assert client.call("getrusage").recomputed_tokens == 0
    # what was left of four generations, and the last prompt token of each that had been computed whole
    assert system.devices[0].computed_tokens - computed <= 8 + 3 + 3 + 3


def test_more_partial_tails_than_dram_has_frames_do_not_push_each_other_out_for_ever() -> None:
    system = SimulatedSystem(core=Core, frames=16, dram=2, block_tokens=4, window_tokens=64)
    client = system.connect()
    prompts = [[k + n for n in range(6)] for k in range(5)]
    made = [client.call("alloc_context") for _ in prompts]
    for context, prompt in zip(made, prompts, strict=True):
        client.call("append", context.ctx, ints(prompt))
    system.run()
    root = system.connect(0)
    request = root.post("sleep")
    assert system.run(until=lambda: request in root.replies, limit=200) < 200
    root.result(request)
    root.call("wake")
    for context, prompt in zip(made, prompts, strict=True):
        assert tokens_of(client.call("generate", context.ctx, 3).tokens) == reference_tokens(prompt, 3)


def test_without_a_tier_below_there_is_no_sleep() -> None:
    system = SimulatedSystem(core=Core, frames=8)
    with pytest.raises(Errno) as error:
        system.connect(0).call("sleep")
    assert error.value.code is E.ENODEV
