"""Which of several devices a new context gets (case 36, for the devices of one machine)."""

from __future__ import annotations

from collections import Counter

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.events import DriverDown, DriverGone
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of

DEVICES, REQUESTS, SHARED = 4, 80, 32


def system() -> SimulatedSystem:
    return SimulatedSystem(
        core=Core, devices=DEVICES, frames=120, block_tokens=4, window_tokens=256, max_contexts=128, check=False
    )


def prompt(number: int, shared: bool) -> list[int]:
    """32 blocks that all have in common, or none has, and a tail of its own."""
    return [*((7 * k + (0 if shared else number * (k + 1))) % 250 for k in range(4 * SHARED)), number, number, 5]


def begin(client: SimulatedClient, tokens: list[int]) -> tuple[int, int]:
    """(context, its generation)"""
    ctx: int = client.result(client.post("alloc_context")).ctx
    client.post("append", ctx, ints(tokens))
    return ctx, client.post("generate", ctx, 2)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("clients", [1, 2])
def test_case_36_all_work_and_none_does_most(shared: bool, at_once: bool, clients: int) -> None:
    made = system()
    asking = [made.connect() for _ in range(clients)]
    worked: Counter[str] = Counter()
    begun = []
    for number in range(REQUESTS):
        client = asking[number % clients]
        begun.append((client, *begin(client, prompt(number, shared)), number))
        if at_once and number < REQUESTS - 1:
            continue
        made.run()
        for each, ctx, request, which in begun:
            assert tokens_of(each.result(request).tokens) == reference_tokens(prompt(which, shared), 2)
            worked[each.call("stat", ctx).device] += 1
            each.call("release", ctx)
        begun = []
    assert sorted(worked) == [f"hbm{d}" for d in range(DEVICES)] and sum(worked.values()) == REQUESTS
    assert max(worked.values()) <= 0.4 * REQUESTS
    if not shared:
        assert max(worked.values()) <= 1.2 * REQUESTS / DEVICES, "near even"


def test_case_36_a_device_that_dies_gets_nothing_until_it_is_back() -> None:
    """It is empty, but it does not compute: every new context would have ended in EHOSTDOWN, or waited for its driver."""
    made = system()
    client = made.connect()
    ctxs = [begin(client, prompt(number, True))[0] for number in range(8)]
    made.run()
    for ctx in ctxs:
        client.call("release", ctx)

    def devices_of(count: int) -> Counter[str]:
        found: Counter[str] = Counter()
        for number in range(count):
            ctx, request = begin(client, prompt(number, True))
            made.run()
            assert tokens_of(client.result(request).tokens) == reference_tokens(prompt(number, True), 2)
            found[client.call("stat", ctx).device] += 1
            client.call("release", ctx)
        return found

    for lost in (DriverDown(1, made.epochs[1], "killed"), DriverGone(1, "no such device")):
        made.step(lost)
        assert devices_of(9) == {"hbm0": 3, "hbm2": 3, "hbm3": 3}
    made.driver_up(1)
    assert set(devices_of(20).values()) == {5}, "it serves again, and no more than the others"
