"""Frames that a pass waits for, until they are copied away, are nobody else's.

Many contexts come to the end of a block in the same pass, more than an admission reserves for.  Who was preempted for them
was admitted again whenever a transfer had ended, with a load that went ahead of the copies which the pass waited for, and was
preempted again: no pass was ever planned.  Found by 200 agents whose first prompts ended with a block.
"""

from __future__ import annotations

import random

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.simulated import SimulatedSystem, ints, tokens_of

HEAD = list(range(8))


@pytest.mark.parametrize("seed", range(3))
def test_who_grows_is_not_overtaken_by_who_was_preempted_for_it(seed: int) -> None:
    frames, own, draw = 40, 2, random.Random(seed)
    system = SimulatedSystem(
        frames=frames, dram=1000, max_contexts=2 * frames + 2, window_tokens=256, core=Core, check=False
    )
    client = system.connect()
    head = client.call("alloc_context").ctx
    client.call("append", head, ints(HEAD))
    asked = {}
    for ctx in client.call("fork", head, 2 * frames).ctxs:
        tokens = [draw.randrange(200) for _ in range(own)]
        client.post("append", ctx, ints(tokens))
        asked[client.post("generate", ctx, 5)] = HEAD + tokens
    transfers = 0  # since a pass has ended
    while len(asked.keys() & client.replies.keys()) < len(asked):
        busy = [device for device in range(len(system.devices)) if system.pending[device]]
        before = system.kernel.machine.devices[0].seq
        system.tick(draw.choice(busy))
        transfers = transfers + 1 if system.kernel.machine.devices[0].seq == before else 0
        assert transfers < 10 * frames, "frames only change hands"
    for request, prompt in asked.items():
        assert tokens_of(client.result(request).tokens) == reference_tokens(prompt, 5)
    assert not system.kernel.fsck()
