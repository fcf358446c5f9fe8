"""`attnix doctor` on load: thrashing, concurrency and what crowds out.  Each fault planted, and not planted."""

from __future__ import annotations

import random
from functools import partial

from attnix.kernel.events import Transfer
from attnix.simulated import ints
from attnix.userland.doctor.finding import Finding

from .doctor_rig import found
from .timed import MS, TimedSystem

UNGUARDED: dict[str, int | str] = {"sched.growth_permille": 0, "load.thrash_high_permille": 1000}
EVERY_S = 30


def fresh(number: int, length: int) -> list[int]:
    """A prompt that has nothing in common with another."""
    draw = random.Random(number)
    return [draw.randrange(4000) for _ in range(length)]


def bursts(frames: int, settings: dict[str, int | str], each: int = 12, times: int = 3) -> dict[str, Finding]:
    """Bursts of contexts of 40 tokens that grow to 160 together; the doctor looks in the middle of the last."""
    system = TimedSystem(frames=frames, block_tokens=4, sysctl={"sched.watermark_permille": 0, **settings})
    client = system.user()
    done: list[int] = []
    seen: list[dict[str, Finding]] = []
    asked: list[tuple[int, int]] = []

    def begin(burst: int) -> None:
        for ctx, _ in asked:
            client.post("release", ctx)
        asked[:] = [system.ask(client, fresh(100 * burst + n + 1, 40), 120) for n in range(each)]
        done.append(burst)

    for burst in range(times):
        system.at(burst * EVERY_S * 1000 * MS + 1, partial(begin, burst))
    system.at(((times - 1) * EVERY_S * 1000 + 2_500) * MS, lambda: seen.append(found(client)))
    system.run()
    assert done == list(range(times))
    return seen[0]


def test_contexts_that_grow_into_one_another() -> None:
    """12 of 10 frames fit into 160, and leave 40; they end with 40 each."""
    findings = bursts(160, {**UNGUARDED, "sched.max_admitted": 12})
    assert {"thrashing", "concurrency"} <= set(findings)
    thrash, many = findings["thrashing"], findings["concurrency"]
    assert int(thrash.numbers["preemptions"]) >= 4
    assert int(thrash.numbers["again_tokens"]) > 0.05 * int(thrash.numbers["computed_tokens"])
    assert thrash.settings == {"load.thrash_high_permille": 400, "sched.growth_permille": 500}
    assert (many.numbers["frames_at_first"], many.numbers["frames_at_end"]) == (10, 40)
    assert many.numbers["max_admitted"] == 12
    # 160 frames: 16 that begin, 4 that end, 160 / 25 = 6 in between.
    assert (many.numbers["fits_at_first"], many.numbers["fits"]) == (16, 6)
    assert many.settings["sched.max_admitted"] == 0


def test_the_same_where_all_of_them_fit_grown_up_is_healthy() -> None:
    assert bursts(12 * 41, {**UNGUARDED, "sched.max_admitted": 12}) == {}


def test_the_same_few_frames_with_as_many_at_once_as_fit_are_healthy() -> None:
    findings = bursts(160, {"sched.max_admitted": 4})
    assert not {"thrashing", "concurrency"} & set(findings)


def crowd(pinned: int, waiting: int) -> dict[str, Finding]:
    """8 contexts of 10 frames in 100: some pinned, some waiting for a tool; then 80 more want to run."""
    settings: dict[str, int | str] = {"pin.share_permille": 1000, "wait.policy": "ttl", "wait.ttl_ms": 600_000}
    system = TimedSystem(frames=100, block_tokens=4, max_contexts=128, sysctl=settings)
    client = system.user()
    held = []
    for number in range(8):
        ctx, request = system.ask(client, fresh(number + 1, 38), 3)
        system.run(until=partial(client.replies.__contains__, request))
        held.append(ctx)
    for ctx in held[:pinned]:
        client.call("pin", ctx, 600_000)
    for ctx in held[pinned : pinned + waiting]:
        client.call("wait_tool", ctx, "approval")
    for number in range(80):  # 22 frames each: there is room for one at a time, and not for two
        system.ask(client, fresh(50 + number, 84), 4)
    seen: list[dict[str, Finding]] = []
    system.at(system.now_ns + 4_000 * MS, lambda: seen.append(found(client, 3.0)))
    system.run(until=lambda: bool(seen))
    return seen[0]


def test_pins_that_crowd_out_who_wants_to_run() -> None:
    finding = crowd(pinned=6, waiting=0)["crowding"]
    assert finding.numbers["pinned_frames"] == 60
    assert int(finding.numbers["short_permille"]) > 900
    assert finding.settings == {"pin.share_permille": 250}
    assert any("unpin" in line for line in finding.remedies)


def test_keeps_that_crowd_out_who_wants_to_run() -> None:
    """A keep is a wish: it is broken when somebody could not grow otherwise, so some of the 60 frames may have gone."""
    finding = crowd(pinned=0, waiting=6)["crowding"]
    assert 15 <= int(finding.numbers["tool_frames"]) <= 60
    assert finding.settings["wait.policy"] == "cost"


def test_idle_contexts_that_nobody_keeps_crowd_out_nobody() -> None:
    assert "crowding" not in crowd(pinned=0, waiting=0)


def test_pins_while_nobody_waits_are_healthy() -> None:
    system = TimedSystem(frames=100, block_tokens=4, sysctl={"pin.share_permille": 1000})
    client = system.user()
    for number in range(8):
        ctx = client.call("alloc_context").ctx
        client.call("append", ctx, ints(fresh(number + 1, 38)))
        client.call("pin", ctx, 600_000)
    system.advance(20_000 * MS)
    assert found(client) == {}


class SlowCopies(TimedSystem):
    """Transfers take time, too."""

    def tick(self, device: int = 0) -> bool:
        pending = self.pending[device]
        if pending and isinstance(pending[0], Transfer):
            self.now_ns += 40 * MS
        return super().tick(device)


def one_after_another(write: str) -> dict[str, Finding]:
    """Each context takes half of hbm and leaves it as cache to the next but one."""
    system = SlowCopies(frames=44, dram=2000, block_tokens=4, sysctl={"tier.write": write})
    client = system.user()
    for number in range(40):
        ctx, request = system.ask(client, fresh(number, 78), 3)
        system.run(until=partial(client.replies.__contains__, request))
        client.call("release", ctx)
        system.advance(20 * MS)
    return found(client)


def test_a_cache_that_must_be_copied_before_anybody_can_have_its_frames() -> None:
    finding = one_after_another("back")["crowding"]
    assert int(finding.numbers["copy_waits"]) >= 38  # all but the first two
    assert finding.settings == {"tier.write": "through"}


def test_a_cache_that_is_copied_at_the_end_of_turns_is_healthy() -> None:
    assert "crowding" not in one_after_another("through")
