"""`frames`: every frame of a device, and who has what is in it."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import pytest

from attnix.kernel.core import Core
from attnix.kernel.errors import Errno
from attnix.kernel.twin import TwinCore
from attnix.simulated import CoreMaker, SimulatedClient, SimulatedSystem, ints

from .doctor_rig import ask


class Told(NamedTuple):
    states: list[int]
    cids: list[int]
    logical: list[int]
    sharers: list[int]
    ages: list[int]
    blocks: list[int]


def told(client: SimulatedClient, device: str = "hbm0", start: int = 0, count: int = 16384) -> Told:
    found = client.call("frames", device, start, count)
    assert found.device == device and found.start == start
    words = [array("i", part).tolist() for part in found[4:]]
    return Told(list(found.states), *words)


def cid_of(client: SimulatedClient, ctx: int) -> int:
    return int(client.call("stat", ctx).cid)


@pytest.mark.parametrize("core", [TwinCore, Core])
def test_frames_of_contexts_of_cache_and_free_ones(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=10, core=core)
    client = system.connect()
    first = ask(client, [1, 2, 3, 4, 5, 6, 7])  # 7 tokens: two frames
    (child,) = client.call("fork", first, 1).ctxs
    gone = ask(client, [9] * 8)  # two full blocks
    client.call("release", gone)
    seen = told(client)
    assert [seen.states.count(n) for n in range(3)] == [6, 1, 3]  # the last block of 7 tokens is not full
    mine = [f for f, cid in enumerate(seen.cids) if cid]
    assert [seen.cids[f] for f in mine] == [cid_of(client, first)] * 2  # the older of two that share
    assert sorted(seen.logical[f] for f in mine) == [0, 1]
    assert [seen.sharers[f] for f in mine] == [2, 2]
    cache = [f for f, (state, cid) in enumerate(zip(seen.states, seen.cids, strict=True)) if state == 2 and not cid]
    assert len(cache) == 2 and all(seen.sharers[f] == 0 and seen.blocks[f] >= 0 for f in cache)
    assert child


def test_ages_are_since_somebody_wanted_them() -> None:
    system = SimulatedSystem(frames=10)
    client = system.connect()
    ask(client, [1, 2, 3, 4, 5, 6, 7, 8])
    system.advance(5_000_000_000)
    ask(client, [11, 12, 13, 14, 15, 16, 17, 18])
    ages = sorted(age for age in told(client).ages if age >= 0)
    assert ages == [0, 0, 5000, 5000]


def test_frames_of_a_slower_tier_are_told_with_the_contexts_whose_log_they_are() -> None:
    system = SimulatedSystem(frames=10, dram=10)
    client = system.connect()
    ctx = ask(client, [1, 2, 3, 4, 5, 6, 7, 8])
    client.call("demote", ctx, "dram")
    seen = told(client, "dram0")
    assert [cid for cid in seen.cids if cid] == [cid_of(client, ctx)] * 2
    assert sorted(n for n, cid in zip(seen.logical, seen.cids, strict=True) if cid) == [0, 1]
    assert [n for n, cid in zip(seen.sharers, seen.cids, strict=True) if cid] == [1, 1]


def test_a_part_is_the_same_part_of_the_whole() -> None:
    system = SimulatedSystem(frames=10)
    client = system.connect()
    ask(client, [*range(30)])
    whole, part = told(client), told(client, start=3, count=4)
    assert part.blocks == whole.blocks[3:7] and part.cids == whole.cids[3:7]


def test_frames_of_others_look_free() -> None:
    system = SimulatedSystem(frames=10)
    owner, other = system.connect(), system.connect(uid=2000)
    ask(owner, [1, 2, 3, 4, 5])
    mine = ask(other, [6, 7, 8, 9, 10])
    seen = told(other)
    assert seen.states == [2, 1] + [0] * 8, "its own come first, in the order of its blocks"
    assert seen.cids == [cid_of(other, mine)] * 2 + [0] * 8 and seen.logical[:2] == [0, 1]
    assert seen.blocks == [-1] * 10 and told(other, start=1, count=3).states == [1, 0, 0]
    assert [told(owner).states.count(n) for n in (1, 2, 4)] == [2, 2, 0]


@pytest.mark.parametrize(
    ("args", "errno"), [(("ssd9",), "ENODEV"), (("hbm0", 11), "EINVAL"), (("hbm0", 0, 99999), "EINVAL")]
)
def test_what_is_not_there_is_refused(args: tuple[object, ...], errno: str) -> None:
    client = SimulatedSystem(frames=10).connect()
    with pytest.raises(Errno) as caught:
        client.call("frames", *args)
    assert caught.value.code.name == errno


def test_an_empty_context_has_no_frames() -> None:
    client = SimulatedSystem(frames=4).connect()
    client.call("alloc_context")
    assert told(client) == Told([0] * 4, [0] * 4, [-1] * 4, [0] * 4, [-1] * 4, [-1] * 4)
    assert ints([]) == b""
