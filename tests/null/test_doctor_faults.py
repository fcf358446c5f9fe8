"""`attnix doctor` on what has failed: drivers that are down, die or answer nothing, and policies that lost their places.
Planted, and not planted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from attnix.drivers.sim_memory import SimTier
from attnix.kernel.errors import E
from attnix.kernel.events import DriverDown, DriverGone
from attnix.kernel.evict import registry
from attnix.kernel.evict.fifo import Fifo
from attnix.kernel.evict.protocol import BlockView
from attnix.kernel.order import registry as orders
from attnix.kernel.order.fcfs import Fcfs
from attnix.kernel.order.protocol import Key, Waiting
from attnix.simulated import SimulatedClient, SimulatedSystem, ints

from .doctor_rig import ask, found

SECOND = 1_000_000_000
NVME = 2


def machine() -> tuple[SimulatedSystem, SimulatedClient]:
    """Ten frames of hbm, 10 of dram, 20 of nvme; ten seconds old."""
    system = SimulatedSystem(frames=10, dram=10, nvme=20)
    client = system.connect()
    ask(client, [1, 2, 3])
    for _ in range(10):
        later(system, client, 1)
    return system, client


def later(system: SimulatedSystem, client: SimulatedClient, seconds: int) -> None:
    system.advance(seconds * SECOND)
    client.call("uname")  # a sample that is due is taken in the next call


def down(system: SimulatedSystem, device: int) -> None:
    system.step(DriverDown(device, system.epochs[device], "killed by signal 9"))


def test_a_driver_that_is_down() -> None:
    system, client = machine()
    down(system, NVME)
    later(system, client, 30)
    finding = found(client)["driver"]
    assert finding.evidence == (
        "nvme0: its driver is down for 30 s (killed by signal 9), and no attempt to start it has gone well since",
    )
    # 30 of 40 s without 20 of 40 frames.
    assert finding.costs == "frames" and finding.damage == pytest.approx(0.75 * 0.5, rel=0.01)
    assert "`attnix dmesg`" in finding.remedies[0] and "`attnix detach-tier nvme0`" in finding.remedies[0]
    system.driver_up(NVME)
    assert found(client) == {}


def test_a_driver_that_is_gone_for_good_comes_before_one_that_is_not() -> None:
    system, client = machine()
    down(system, 0)
    system.step(DriverGone(0, "another model lies there now"))
    down(system, NVME)
    later(system, client, 20)
    finding = found(client)["driver"]
    assert (finding.costs, finding.damage, finding.numbers["device"]) == ("time", 1.0, "hbm0")
    assert finding.evidence[0] == "hbm0: its driver is gone for good (another model lies there now)"
    assert finding.evidence[1].startswith("nvme0: its driver is down for 20 s")


def test_a_driver_that_keeps_dying() -> None:
    system, client = machine()
    for _ in range(4):
        down(system, NVME)
        later(system, client, 5)
        system.driver_up(NVME)
        later(system, client, 5)
    finding = found(client)["driver"]
    assert finding.evidence == (
        "nvme0: its driver died 4 times in 50 s (last: killed by signal 9) and was away for 40% of them",
    )
    assert finding.damage == pytest.approx(0.4 * 0.5, rel=0.01)
    assert "driver" not in found(client, window_s=12)  # one death


def test_a_driver_that_died_once_and_is_back_or_soon_will_be_is_healthy() -> None:
    system, client = machine()
    down(system, NVME)
    later(system, client, 5)
    assert found(client) == {}
    system.driver_up(NVME)
    later(system, client, 30)
    assert found(client) == {}


def stored(fails: int) -> set[str]:
    """Ten transfers in vain to a store whose driver lives, or nine, and then one that goes well."""
    system, client = machine()
    tier = system.devices[NVME]
    assert isinstance(tier, SimTier)
    left = iter([E.EIO] * fails)
    tier.fault = lambda verb, frame: next(left, 0) if verb == "write" else 0
    for number in range(10):
        ctx = ask(client, [10 + number, 2, 3])  # a block
        client.call("demote", ctx, "nvme")
        client.call("release", ctx)
    return set(found(client))


def test_a_store_that_does_not_answer_though_its_driver_lives() -> None:
    assert stored(fails=100) == {"driver"}


def test_a_store_that_answers_again_is_healthy() -> None:
    assert stored(fails=9) == set()


class FailsToEvict(Fifo):
    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        raise ZeroDivisionError("by nothing")


class FailsToOrder(Fcfs):
    plain = False  # so that it is asked

    def key(self, job: Waiting) -> Key:
        raise ZeroDivisionError("by nothing")


def crowded(evict: str, order: str) -> tuple[SimulatedSystem, SimulatedClient]:
    """Two queue, and the second needs a frame of the first's cache."""
    system = SimulatedSystem(frames=5, sysctl={"evict.policy": evict, "sched.policy": order})
    client = system.connect()
    for first in (1, 100):
        client.call("release", ask(client, list(range(first, first + 14))))
    contexts = [client.call("alloc_context").ctx for _ in range(2)]
    requests = []
    for ctx in contexts:
        client.post("append", ctx, ints([7, 7, ctx % 250]))
        requests.append(client.post("generate", ctx, 1))
    system.run()
    for request in requests:
        client.result(request)
    return system, client


def test_policies_that_lost_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {"mine": FailsToEvict})
    monkeypatch.setattr(orders, "_registered", {"own": FailsToOrder})
    _, client = crowded("mine", "own")
    finding = found(client)["lost_place"]
    assert finding.evidence == (
        "hbm0: eviction policy mine failed in victims (ZeroDivisionError: by nothing); lru decides instead",
        "hbm0: scheduling policy own failed in key (ZeroDivisionError: by nothing); fcfs decides instead",
    )
    assert finding.settings == {"evict.hbm": "lru", "sched.policy": "fcfs"}
    for name, value in finding.settings.items():
        client.call("sysctl", name, value)
    assert "lost_place" not in found(client)


def test_third_parties_policies_that_decide_are_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {"mine": Fifo})
    monkeypatch.setattr(orders, "_registered", {"own": Fcfs})
    _, client = crowded("mine", "own")
    assert "lost_place" not in found(client)
