"""Case 2, from outside: what a uid can look at is the same whether another's prompt was in the cache or not.

Twice the same system and the same calls, but for one prompt of another uid: in one it is a hit of four blocks, in the other a
miss.  Whatever differs in what the first uid is told would tell it that.
"""

from __future__ import annotations

from typing import Any

import pytest

from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.kernel.twin import TwinCore
from attnix.simulated import CoreMaker, SimulatedClient, SimulatedSystem, ints

S, MS = 1_000_000_000, 1_000_000
OWNER, MINE, THEIRS = 1000, 1001, 1002


def context(client: SimulatedClient, first: int, tokens: int) -> int:
    ctx: int = client.call("alloc_context").ctx
    client.call("append", ctx, ints(range(first, first + tokens)))
    client.system.run()
    return ctx


def without_times(result: Any) -> Any:
    """How many ns have passed is how many steps were taken: in a test a step takes 1 ns, in life the clock is everybody's."""
    if not isinstance(result, tuple):
        return result
    names = getattr(result, "_fields", ())
    parts = zip(names, result, strict=True) if names else (("", part) for part in result)
    return tuple(0 if name in ("at_ns", "age_ns") else without_times(part) for name, part in parts)


def look(client: SimulatedClient, contexts: list[int]) -> dict[str, Any]:
    """Everything that can be looked at."""
    told = {
        name: client.call(name)
        for name in ("ps", "tiers", "vmstat", "groups", "fsck", "getrusage", "pressure", "health", "names")
    }
    for device in ("hbm0", "dram0"):
        told[f"frames {device}"] = client.call("frames", device)
    for ctx in contexts:
        for name in ("stat", "pagemap", "explain"):
            told[f"{name} {ctx & 0xFF}"] = client.call(name, ctx)
    return {name: without_times(result) for name, result in told.items()}


def seen(core: CoreMaker, *, hit: bool) -> list[Any]:
    """What MINE is told before, and after THEIRS has asked for something."""
    system = SimulatedSystem(frames=24, dram=24, block_tokens=4, core=core, sysctl={"pin.share_permille": 300})
    mine, theirs = system.connect(MINE), system.connect(THEIRS)
    mine.call("pressure", 1, 100)
    first = context(mine, 0, 9)
    mine.call("demote", first, "dram")
    theirs.call("release", context(theirs, 100, 16))
    told: list[Any] = [look(mine, [first])]
    asked = context(theirs, 100 if hit else 140, 17)
    assert (theirs.call("stat", asked).usage.hit_tokens == 16) is hit
    told.append(look(mine, [first]))
    second = context(mine, 50, 13)  # in whatever frames and under whatever numbers there are
    theirs.call("pin", asked)
    with pytest.raises(Errno) as error:
        mine.call("pin", second)
    assert error.value.detail["held"] == 0, "its own pins"
    told += [look(mine, [first, second]), error.value.detail, mine.notices]
    for fill in (60, 80):  # until the oldest go
        mine.call("release", context(mine, fill, 17))
    system.run()
    return [*told, look(mine, [first, second])]


@pytest.mark.parametrize("core", [TwinCore, Core])
def test_a_hit_of_another_uid_shows_nowhere(core: CoreMaker) -> None:
    for hit, miss in zip(seen(core, hit=True), seen(core, hit=False), strict=True):
        if isinstance(hit, dict):
            assert [name for name in hit if hit[name] != miss[name]] == []
        assert hit == miss


def test_frames_that_others_have_look_free_and_are_nowhere() -> None:
    system = SimulatedSystem(frames=12, block_tokens=4, core=Core)
    theirs, mine = system.connect(THEIRS), system.connect(MINE)
    context(theirs, 100, 16)
    ctx = context(mine, 0, 7)
    told = mine.call("pressure")
    assert (told.free_frames, told.reclaimable_frames, told.admitted_limit) == (12 - 2, 0, 0)
    frames = memoryview(mine.call("pagemap", ctx).frames).cast("i").tolist()
    assert frames == [0, 1], "its own frames, numbered as if it were alone"
    assert list(mine.call("frames", "hbm0").states).count(0) == 10
    owner = system.connect(OWNER)
    assert owner.call("pressure").free_frames == 12 - 2 - 4
    assert list(owner.call("frames", "hbm0").states).count(0) == 6


def test_what_others_did_is_not_told_when_they_have_gone() -> None:
    system = SimulatedSystem(frames=12, core=Core)
    mine, theirs = system.connect(MINE), system.connect(THEIRS)
    context(theirs, 100, 9)
    system.disconnect(theirs)
    assert "passes" not in mine.call("vmstat").counters
    assert mine.call("health").samples == () and mine.call("health").heads == ()
    assert [row.free_frames for row in mine.call("tiers").tiers] == [12]
    with pytest.raises(Errno) as error:
        mine.call("dmesg", 0)
    assert error.value.code is E.EACCES and error.value.detail["uid"] == OWNER


def test_how_long_others_wait_for_a_tool_is_not_told() -> None:
    system = SimulatedSystem(core=Core)
    mine, theirs = system.connect(MINE), system.connect(THEIRS)
    ctx = context(theirs, 100, 5)
    for _ in range(4):
        theirs.call("wait_tool", ctx, "search")
        system.advance(300 * MS)
        theirs.call("resume", ctx)
    assert theirs.call("wait_tool", ctx, "search").expected_ms == 300
    own = context(mine, 0, 5)
    assert mine.call("wait_tool", own, "search").expected_ms == -1
    mine.call("resume", own)
    assert mine.call("wait_tool", own, "other").expected_ms == 0, "of those that it waited for itself"


def stalling() -> tuple[SimulatedSystem, SimulatedClient, SimulatedClient]:
    """Eight frames: a generation of THEIRS has five and another wants five.  MINE has work that fits."""
    system = SimulatedSystem(core=Core, frames=8, block_tokens=4)
    theirs, mine = system.connect(THEIRS), system.connect(MINE)
    for first in (100, 150):
        ctx = theirs.call("alloc_context").ctx
        theirs.post("append", ctx, ints(range(first, first + 18)))
        theirs.post("generate", ctx, 6)
        if first == 100:
            system.run(until=lambda: any(theirs.streamed.values()))
    system.tick()
    return system, theirs, mine


def test_pressure_is_told_to_whom_it_hits() -> None:
    """The one whose context waits for frames counts it and is notified; the other sees neither; who administers sees it."""
    system, theirs, mine = stalling()
    owner = system.connect(OWNER)
    for client in (theirs, mine, owner):
        client.call("pressure", 250, 1600)
    now_ns = system.now_ns
    while system.now_ns < now_ns + S:
        system.advance(100 * MS)
    hits = {client: client.call("pressure").some_ns for client in (theirs, mine, owner)}
    assert hits[mine] == 0 and hits[theirs] == pytest.approx(S, rel=0.01) and hits[owner] == pytest.approx(S, rel=0.01)
    assert [[kind for kind, _ in client.notices] for client in (theirs, mine, owner)] == [
        ["pressure"],
        [],
        ["pressure"],
    ]
    assert theirs.call("pressure").full_ns == 0, "its other context computes"
    late = mine.call("alloc_context").ctx
    mine.post("append", late, ints(range(14)))
    system.run()
    assert mine.call("pressure").full_ns <= mine.call("pressure").some_ns < 100, "a step takes 1 ns here"


def test_who_waits_behind_the_first_that_does_not_fit_waits_for_frames_too() -> None:
    system, theirs, mine = stalling()
    late = mine.call("alloc_context").ctx
    mine.post("append", late, ints(range(18)))
    system.tick()  # groups share, so it is the first now
    before_ns = theirs.call("pressure").some_ns
    system.advance(S)
    told = mine.call("pressure")
    assert told.some_ns == told.full_ns == pytest.approx(S, rel=0.01)
    told = theirs.call("pressure")
    assert told.some_ns - before_ns == pytest.approx(S, rel=0.01) and told.full_ns == 0


def crowd(client: SimulatedClient, n: int) -> None:
    for k in range(n):
        ctx = client.call("alloc_context").ctx
        client.result(client.post("append", ctx, ints([k] * 8)))


def refused(client: SimulatedClient, name: str, *args: object) -> Errno:
    with pytest.raises(Errno) as error:
        client.result(client.post(name, *args))
    return error.value


def test_a_refusal_counts_ones_own_jobs_and_whole_seconds() -> None:
    """A pass computes a prompt in 1.3 s: fourteen are left of twenty, and would be waited for 18.2 s, were it known to all."""
    sysctl: dict[str, int | str] = {"sched.step_tokens": 8, "sched.max_wait_ms": 9500}
    system = SimulatedSystem(core=Core, frames=80, block_tokens=4, max_contexts=64, sysctl=sysctl)
    theirs, mine, owner = system.connect(THEIRS), system.connect(MINE), system.connect(OWNER)
    crowd(theirs, 20)
    for _ in range(6):
        system.now_ns += 1300 * MS
        system.tick()
    said = {
        client: refused(client, "append", client.call("alloc_context").ctx, ints([9] * 8)) for client in (mine, owner)
    }
    assert all(error.code is E.EAGAIN for error in said.values())
    exact, told = said[owner].detail, said[mine].detail
    assert exact["queued"] == 14 and told["queued"] == 0
    assert 16_000 < int(exact["wait_ms"]) < 20_000 and int(exact["wait_ms"]) % 1000
    for field in ("wait_ms", "retry_after_ms"):
        assert int(told[field]) == -(-int(exact[field]) // 1000) * 1000
    assert str(exact["wait_ms"]) not in str(told["message"]) and "14" not in str(told["message"])


def test_frames_that_others_are_guaranteed_are_told_as_they_were_promised() -> None:
    """Not as they are used: 8 of 12 are, and 6 of them hold something."""
    system = SimulatedSystem(core=Core, frames=12, block_tokens=4)
    theirs, mine, owner = system.connect(THEIRS), system.connect(MINE), system.connect(OWNER)
    owner.call("setlimit", f"uid:{THEIRS}", "hbm", 8, -1)
    context(theirs, 100, 24)
    ctx = mine.call("alloc_context").ctx
    mine.call("append", ctx, ints(range(36)))
    said = refused(mine, "generate", ctx, 1)
    assert said.code is E.ENOMEM and (said.detail["wanted"], said.detail["free"]) == (9, 4)
