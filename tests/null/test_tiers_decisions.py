"""The ring of decisions: who asks about a context or a block gets what concerns it, and the numbers that decided."""

from __future__ import annotations

import pytest

from attnix.kernel.core import Core
from attnix.kernel.decisions import ENTRIES, Decisions
from attnix.kernel.errors import E, Errno
from attnix.kernel.twin import TwinCore
from attnix.simulated import CoreMaker, SimulatedClient, SimulatedSystem, ints

CORES = pytest.mark.parametrize("core", [TwinCore, Core])


def test_rows_are_numbered_and_the_oldest_are_dropped() -> None:
    ring = Decisions()
    for n in range(ENTRIES + 10):
        ring.add(n, "evict", "hbm0", 0, (n,), "why", (n + 1,))
    rows = ring.rows(latest=ENTRIES + 100)
    assert [row.number for row in rows] == list(range(11, ENTRIES + 11))
    assert ring.rows(latest=2) == rows[-2:]


def test_rows_are_found_by_context_by_key_and_by_number() -> None:
    ring = Decisions()
    ring.add(1, "load", "hbm0", 7, (3, 4), "a", (30, 40))
    ring.add(2, "evict", "hbm0", 0, (4, 5), "b", (40, 50))
    ring.add(3, "evict", "hbm0", 0, (4,), "c", (99,))  # number 4 stands for other content by now
    ring.add(4, "pin", "hbm0", 8, (), "d")
    assert [row.why for row in ring.rows(cid=7)] == ["a"]
    assert [row.why for row in ring.rows(keys=frozenset((40,)))] == ["a", "b"]
    assert [row.why for row in ring.rows(blocks=frozenset((4,)))] == ["a", "b", "c"]
    assert [row.why for row in ring.rows(cid=8, keys=frozenset((99,)))] == ["c", "d"]
    assert [row.why for row in ring.rows()] == ["a", "b", "c", "d"]
    assert ring.rows(cid=9) == ()
    first = ring.rows(cid=7)[0]
    assert (first.block, first.blocks, first.device, first.at_ns) == (3, 2, "hbm0", 1)
    assert (ring.rows(cid=8)[0].block, ring.rows(cid=8)[0].blocks) == (-1, 0)


# -- what the kernel writes into it -----------------------------------------------------------------------------------


def context_with(client: SimulatedClient, tokens: list[int]) -> int:
    ctx: int = client.call("alloc_context").ctx
    client.call("append", ctx, ints(tokens))
    client.call("generate", ctx, 1)
    return ctx


def rows_of(client: SimulatedClient, ctx: int) -> dict[str, str]:
    return {row.what: row.why for row in client.call("explain", ctx).rows}


@CORES
def test_miss_load_drop_and_recompute_are_explained(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=8, dram=8, core=core)
    client = system.connect()
    ctx = context_with(client, list(range(12)))
    assert rows_of(client, ctx) == {"miss": "3 blocks from token 0 on are in no tier: they are computed"}
    client.call("demote", ctx, "dram")
    assert rows_of(client, ctx)["demote"].startswith("asked for: ")
    client.call("generate", ctx, 1)
    assert rows_of(client, ctx)["load"].startswith("3 blocks from dram0")
    client.call("evict", ctx)
    assert rows_of(client, ctx)["drop"].startswith("asked for: ")
    client.call("generate", ctx, 1)
    assert rows_of(client, ctx)["recompute"] == (
        "3 blocks from token 0 on were computed before and are in no tier any more: they are computed"
    )
    counters = client.call("vmstat").counters
    assert (counters["miss_blocks"], counters["recompute_blocks"]) == (3, 3)


@CORES
def test_a_pinned_context_is_said_to_be_kept(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=8, dram=8, core=core, sysctl={"pin.share_permille": 1000})
    client = system.connect()
    kept = context_with(client, list(range(12)))
    client.call("pin", kept, 1000)
    other = context_with(client, list(range(50, 62)))
    client.call("append", other, ints(range(70, 78)))  # five or six blocks in eight frames: somebody has to give way
    client.call("generate", other, 1)
    why = rows_of(client, kept)
    assert why["pin"] == "4 frames for 1000 ms"
    assert "pinned for another 1000 ms" in why.get("keep", ""), why


@CORES
def test_an_eviction_names_what_went_and_stays_true_when_its_number_is_used_again(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=4, core=core, dram=2)
    client = system.connect()
    old = context_with(client, list(range(8)))
    key = system.core.key_of(system.kernel.machine.by_slot[0].slot, 0)
    client.call("release", old)
    for n in range(6):  # other prompts take the frames, and in the end the block numbers too
        client.call("release", context_with(client, [60 + n, *range(11)]))
    assert system.core.find_key(key) < 0, "the test needs the block to be gone"
    again = context_with(client, list(range(8)))
    whys = [row.why for row in client.call("explain", again).rows if row.what == "evict"]
    assert whys, "the eviction of its blocks is found by their keys"
    admin = system.connect(0)
    number = system.core.find_key(key)
    assert {row.what for row in admin.call("explain", 0, 0, number).rows} == {"evict"}


@CORES
def test_only_administrators_ask_about_others(core: CoreMaker) -> None:
    system = SimulatedSystem(frames=8, dram=8, core=core)
    client = system.connect()
    cid = client.call("alloc_context").cid
    stranger = system.connect(1001)
    for args in ((0, 0, -1), (0, 0, 0)):
        with pytest.raises(Errno) as error:
            stranger.call("explain", *args)
        assert error.value.code is E.EACCES
    with pytest.raises(Errno) as error:
        stranger.call("explain", 0, cid)
    assert error.value.code is E.ENOENT
    assert system.connect(0).call("explain", 0, 0, 1 << 30).rows == ()
