"""A third party's eviction policy may raise, answer rubbish or be half written: it loses its place, and nobody loses more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.calls import LostPlaceRow
from attnix.kernel.core import Core
from attnix.kernel.evict import registry
from attnix.kernel.evict.fifo import Fifo
from attnix.kernel.evict.protocol import BlockView, EvictionPolicy
from attnix.kernel.twin import TwinCore
from attnix.simulated import CoreMaker, SimulatedSystem, ints, tokens_of


def boo(*args: object) -> None:
    raise RuntimeError("boo")


class Silent(Fifo):
    name = "what it calls itself"


class Raises(Silent):
    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        raise RuntimeError("boo")


class NoNumbers(Silent):
    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        return ["first"]  # type: ignore[list-item]


class NoBlocks(Silent):
    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        return [-1, 1 << 20, 1 << 40]


class Nothing(Silent):
    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        return None  # type: ignore[return-value]


class HalfWritten:
    """Somebody forgot the rest."""


def cannot_be_made() -> EvictionPolicy:
    raise RuntimeError("boo")


def told(what: str) -> Callable[[], EvictionPolicy]:
    def made() -> EvictionPolicy:
        policy = Silent()
        setattr(policy, what, boo)
        return policy

    return made


FAULTS: dict[str, tuple[Callable[[], EvictionPolicy], str]] = {
    "raises": (Raises, "failed in victims (RuntimeError: boo)"),
    "no numbers": (NoNumbers, "failed in victims ("),
    "no blocks": (NoBlocks, "failed in victims ("),
    "nothing": (Nothing, "failed in victims (TypeError: "),
    "half written": (HalfWritten, "failed when it was made (AttributeError: "),  # type: ignore[dict-item]
    "not made": (cannot_be_made, "failed when it was made (RuntimeError: boo)"),
    **{
        what: (told(what), f"failed in {what} (RuntimeError: boo)") for what in ("inserted", "used", "ended", "removed")
    },
}


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], EvictionPolicy]], None]]:
    monkeypatch.setattr(registry, "_registered", {})
    yield lambda factory: registry.register("mine", factory)


def worked(core: CoreMaker, dram: int, set_at: str) -> list[str]:
    """Six contexts on frames for three, each continued after all the others: every token right; -> what dmesg says of it."""
    at_boot: dict[str, int | str] = {"evict.policy": "mine"} if set_at == "boot" else {}
    system = SimulatedSystem(frames=15, dram=dram, core=core, sysctl=at_boot)
    client = system.connect()
    if set_at == "run":
        client.call("sysctl", "evict.policy", "mine")
    logs = [[n, *range(1, 16)] for n in range(1, 7)]
    ctxs = [client.call("alloc_context").ctx for _ in logs]
    for ctx, log in zip(ctxs, logs, strict=True):
        client.call("append", ctx, ints(log))
        assert tokens_of(client.call("generate", ctx, 2).tokens) == reference_tokens(log, 2)
    for ctx, log in zip(ctxs, logs, strict=True):
        both = reference_tokens(log, 4)
        assert tokens_of(client.call("generate", ctx, 2).tokens) == both[2:]
    same = client.call("alloc_context").ctx  # finds the blocks of the last one
    client.call("append", same, ints(logs[-1]))
    assert tokens_of(client.call("generate", same, 2).tokens) == reference_tokens(logs[-1], 2)
    assert not client.call("fsck").problems
    return [line.text for line in client.call("dmesg").rows if line.level == "error"]


@pytest.mark.parametrize(("core", "dram", "set_at"), [(Core, 0, "run"), (Core, 20, "boot"), (TwinCore, 20, "run")])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_the_policy_its_place_and_nobody_a_token(
    register: Callable[[Callable[[], EvictionPolicy]], None], fault: str, core: CoreMaker, dram: int, set_at: str
) -> None:
    factory, says = FAULTS[fault]
    register(factory)
    errors = worked(core, dram, set_at)
    assert any(f"0: eviction policy mine {says}" in line for line in errors), errors
    assert all(line.endswith("lru takes its place") for line in errors)
    assert len(errors) <= (2 if dram else 1), "once a device"


@pytest.mark.parametrize("core", [TwinCore, Core])
def test_one_without_a_fault_stays_under_the_name_that_it_was_registered_by(
    register: Callable[[Callable[[], EvictionPolicy]], None], core: CoreMaker
) -> None:
    """Sleep makes policies anew, by name."""
    register(Silent)
    assert worked(core, 20, "boot") == []
    system = SimulatedSystem(frames=15, dram=20, core=core, sysctl={"evict.policy": "mine"})
    client = system.connect()
    client.call("sleep")
    client.call("wake")
    assert [row.policy for row in client.call("tiers").tiers] == ["mine", "mine"]


def test_sleep_does_not_make_it_forgotten_and_naming_another_does(
    register: Callable[[Callable[[], EvictionPolicy]], None],
) -> None:
    """After a sleep what stands in for it is made anew, too."""
    register(Raises)
    system = SimulatedSystem(frames=5, dram=20, sysctl={"evict.policy": "mine"})
    client = system.connect()
    for first in (1, 100):
        ctx = client.call("alloc_context").ctx
        client.call("append", ctx, ints(range(first, first + 14)))
        client.call("generate", ctx, 1)
        client.call("release", ctx)
    lost = [LostPlaceRow("hbm0", "evict.hbm", "eviction policy mine failed in victims (RuntimeError: boo)", "lru")]
    assert system.kernel.machine.lost_places() == lost
    client.call("sleep")
    client.call("wake")
    assert system.kernel.machine.lost_places() == lost
    client.call("sysctl", "evict.hbm", "lru")
    assert system.kernel.machine.lost_places() == []
