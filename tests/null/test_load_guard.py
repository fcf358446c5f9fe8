"""The thrash guard and the growth reserve in the kernel; expected values worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.load import Guard
from attnix.kernel.twin import TwinCore
from attnix.simulated import CoreMaker, SimulatedSystem, ints, tokens_of

S, MS = 1_000_000_000, 1_000_000


class Judged:
    """A guard without a machine around it: `window` is what one window saw."""

    def __init__(self) -> None:
        thresholds: dict[str, int | str] = {"load.thrash_high_permille": 200, "load.thrash_low_permille": 50}
        self.system = SimulatedSystem(core=Core, sysctl=thresholds)
        self.machine = self.system.kernel.machine
        self.scheduler = self.machine.schedulers[0]
        self.guard = Guard(self.machine, 0)
        self.active = 0

    def window(self, again: int, fresh: int, active: int, loaded: int = 0, seconds: float = 2.0) -> int:
        self.scheduler.active = lambda: active  # type: ignore[method-assign]
        self.guard.brought_back(again, loaded)
        self.machine.now_ns += round(seconds * S)
        for _ in range(31):
            self.guard.passed(self.scheduler, 0)
        self.guard.passed(self.scheduler, again - loaded + fresh)
        return self.guard.limit

    def said(self) -> list[str]:
        return [row.text for row in self.machine.dmesg.since(0) if "of the work" in row.text]


def test_the_set_shrinks_by_a_quarter_and_grows_by_few() -> None:
    judged = Judged()
    assert judged.window(again=200, fresh=800, active=16) == 0  # 200 permille is not above 200
    assert judged.window(again=201, fresh=799, active=16) == 12
    assert judged.window(again=500, fresh=500, active=12) == 9
    assert judged.window(again=500, fresh=500, active=9) == 6
    assert judged.window(again=100, fresh=900, active=6) == 6  # between the two: as it is
    assert judged.window(again=49, fresh=951, active=6) == 6  # one calm window is not enough
    assert [judged.window(again=0, fresh=1, active=n) for n in (6, 7, 8)] == [7, 8, 9]
    assert judged.window(again=60, fresh=940, active=9) == 9
    assert judged.window(again=0, fresh=1, active=9) == 9  # calm has to begin again
    assert judged.window(again=0, fresh=1, active=4) == 0  # it keeps nobody waiting
    counters = judged.machine.counters
    assert [counters[f"admitted_limit_{how}"] for how in ("lowered", "raised", "lifted")] == [3, 3, 1]
    assert counters["thrash_tokens"] == 200 + 201 + 500 + 500 + 100 + 49 + 60


def test_tokens_that_were_loaded_are_no_part_of_what_was_computed() -> None:
    """100 again, 60 of them loaded: 40 of the 340 computed are the others.  100 / (100 + 300) is 250 permille."""
    judged = Judged()
    assert judged.window(again=100, fresh=300, loaded=60, active=4) == 3
    assert judged.window(again=100, fresh=400, loaded=60, active=3) == 3


def test_it_never_goes_below_one() -> None:
    judged = Judged()
    assert [judged.window(again=9, fresh=1, active=n) for n in (3, 2, 1, 1, 0)] == [2, 1, 1, 1, 1]
    assert judged.guard.full(1) and not judged.guard.full(0)


def test_a_window_is_long_enough_and_has_enough_passes() -> None:
    judged = Judged()
    assert judged.window(again=9, fresh=1, active=8, seconds=1.9) == 0
    for _ in range(31):
        judged.machine.now_ns += 10 * S
        judged.guard.passed(judged.scheduler, 0)
    assert judged.guard.limit == 6


def test_dmesg_is_told_of_a_new_direction_and_not_too_often() -> None:
    judged = Judged()
    judged.window(again=9, fresh=1, active=8)
    judged.window(again=9, fresh=1, active=6)
    for _ in range(6):
        judged.window(again=0, fresh=1, active=9)
    judged.window(again=9, fresh=1, active=8)  # too soon after the last line
    assert [text.partition(" (")[0] for text in judged.said()] == [
        "hbm0: 6 contexts may run at once", "hbm0: 7 contexts may run at once",
    ]  # fmt: skip


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 300), st.integers(0, 9)), min_size=1, max_size=40
    )
)
def test_whatever_it_sees_the_limit_stays_between_none_and_what_ran(windows: list[tuple[int, int, int, int]]) -> None:
    judged = Judged()
    for again, fresh, active, loaded in windows:
        before = judged.guard.limit
        after = judged.window(again, fresh, active, min(loaded, again))
        if again == 0:
            assert after >= before or after == 0, "no thrashing, and the set was made smaller"
        assert 0 <= after <= max(1, before + 1 + before // 16, active)


def crowd(
    core: CoreMaker, sysctl: dict[str, int | str], rounds: int = 6, contexts: int = 8, frames: int = 24
) -> SimulatedSystem:
    """Prompts of two blocks that grow to ten: `frames` hold two of them whole and a dozen beginnings."""
    system = SimulatedSystem(
        core=core, frames=frames, block_tokens=4, window_tokens=64, check=False,
        sysctl={"sched.watermark_permille": 0, "sched.policy": "fcfs", **sysctl},
    )  # fmt: skip
    client = system.connect()
    asked: dict[int, tuple[int, list[int]]] = {}
    for n in range(contexts):
        ctx = client.call("alloc_context").ctx
        tokens = [n, *range(6)]
        client.post("append", ctx, ints(tokens))
        asked[ctx] = (client.post("generate", ctx, 32), tokens)
    left = dict.fromkeys(asked, rounds)
    while any(left.values()):
        assert any(system.tick(d) for d in range(len(system.devices))), "everybody waits"
        system.now_ns += 10 * MS
        for ctx, (request, tokens) in list(asked.items()):
            if left[ctx] and request in client.replies:
                assert tokens_of(client.result(request).tokens) == reference_tokens(tokens, 32)
                left[ctx] -= 1
                client.call("truncate", ctx, 7)
                if left[ctx]:
                    asked[ctx] = (client.post("generate", ctx, 32), tokens)
    return system


@pytest.mark.parametrize("core", [TwinCore, Core])
def test_the_reserve_keeps_known_lengths_from_pushing_each_other_out(core: CoreMaker) -> None:
    with_it = crowd(core, {}).kernel.machine.counters
    without = crowd(core, {"sched.growth_permille": 0, "load.thrash_high_permille": 1000}).kernel.machine.counters
    assert without["preemptions_running"] > 40
    # Those before 16 ends were seen are not in its power: the first two rounds of eight.
    assert with_it["preemptions_running"] < 0.5 * without["preemptions_running"]
    late = crowd(core, {}, rounds=12).kernel.machine.counters
    assert late["preemptions_running"] - with_it["preemptions_running"] <= 2, "later rounds have none"


def test_the_reserve_does_not_leave_memory_idle() -> None:
    """A context has 2 frames at its beginning and 10 at its end, 6 on average: of 24 frames, two whole ones leave 4, and
    four would be perfect packing.  Alone, nobody leaves anything."""
    with_it = crowd(Core, {}, rounds=12)
    at_once = 12 * 8 * 32 / with_it.kernel.machine.counters["passes"]
    assert 2.5 < at_once < 4
    alone = SimulatedSystem(core=Core, frames=10, block_tokens=4)
    client = alone.connect()
    ctx = client.call("alloc_context").ctx
    for _ in range(30):
        client.post("append", ctx, ints([1] * 8))
        request = client.post("generate", ctx, 30)
        alone.run()
        assert len(client.result(request).tokens) == 4 * 30
        client.call("truncate", ctx, 0)


@pytest.mark.parametrize("core", [TwinCore, Core])
def test_a_crowd_that_thrashes_is_made_smaller_and_everybody_is_served(core: CoreMaker) -> None:
    sysctl: dict[str, int | str] = {
        "sched.growth_permille": 0, "load.thrash_window_ms": 100, "load.thrash_high_permille": 200,
    }  # fmt: skip
    guarded = crowd(core, sysctl, rounds=10)
    machine = guarded.kernel.machine
    free = crowd(core, {**sysctl, "load.thrash_high_permille": 1000}, rounds=10).kernel.machine
    assert machine.counters["admitted_limit_lowered"] > 0 and free.counters["admitted_limit_lowered"] == 0
    assert machine.counters["preemptions_running"] < free.counters["preemptions_running"]
    assert machine.counters["thrash_tokens"] < free.counters["thrash_tokens"]
    assert "admitted_limit" in guarded.connect().call("vmstat").counters


def test_without_preemptions_there_is_no_limit() -> None:
    system = crowd(Core, {"load.thrash_window_ms": 10}, frames=100)
    counters = system.kernel.machine.counters
    assert counters["preemptions"] == counters["admitted_limit_lowered"] == 0
    assert system.connect().call("pressure").admitted_limit == 0


def test_pressure_names_the_limit() -> None:
    system = SimulatedSystem(core=Core)
    system.kernel.machine.schedulers[0].guard.limit = 3
    assert system.connect().call("pressure").admitted_limit == 3
