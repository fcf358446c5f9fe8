"""Requests that came together share the first pass that they start: nothing runs between Plug and Unplug."""

from __future__ import annotations

from attnix.drivers.sim_model import reference_distribution
from attnix.kernel.events import Plug, Unplug
from attnix.simulated import ints
from attnix.syscalls.records import unpack_ids

from .small import small


def test_eight_forwards_that_came_together_are_one_pass() -> None:
    system = small(frames=64)
    client = system.connect()
    prompts = [[number, 3, 1, 4, 1, 5] for number in range(8)]
    contexts = [client.call("alloc_context").ctx for _ in prompts]
    system.step(Plug())
    asked = [client.post("forward", ctx, 3, b"", ints(log)) for ctx, log in zip(contexts, prompts, strict=True)]
    assert "passes" not in system.kernel.machine.counters
    assert not system.kernel.fsck(), "that nobody runs is no fault while there is more to come"
    system.step(Unplug())
    system.run()
    assert system.kernel.machine.counters["passes"] == 1
    for request, log in zip(asked, prompts, strict=True):
        assert list(unpack_ids(client.result(request).tokens)) == reference_distribution(log).tokens[:3]


def test_a_pass_that_ends_in_between_is_followed_at_the_end() -> None:
    system = small()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints([1, 2, 3]))
    system.step(Plug())
    asked = client.post("generate", ctx, 2)
    assert system.run() == 1, "the prompt's pass, which ran already"
    assert system.kernel.machine.devices[0].flight is None
    system.step(Unplug())
    assert system.run() == 2
    first = reference_distribution([1, 2, 3]).tokens[0]
    assert list(unpack_ids(client.result(asked).tokens)) == [first, reference_distribution([1, 2, 3, first]).tokens[0]]
