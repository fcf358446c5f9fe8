"""The whole kernel against the naive model (test_kernel_state_machine.py), with load control that reacts to everything: windows
of a millisecond, any waste lowers the admitted set, growth is reserved, frames are taken by force after two milliseconds in which
nothing ran, and somebody listens to pressure.  Tokens stay right, everybody is answered, nobody is ever ended."""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from attnix.kernel.core import Core
from attnix.kernel.events import Effect, Event
from attnix.simulated import CoreMaker

from .test_kernel_state_machine import Hierarchy, KernelMachine, examples

_SYSCTL: dict[str, int | str] = {
    "sched.step_tokens": 9, "sched.max_running": 4, "sched.growth_permille": 900, "load.thrash_window_ms": 1,
    "load.thrash_high_permille": 1, "load.thrash_low_permille": 1, "oom.after_ms": 2,
}  # fmt: skip


class _Controlled(KernelMachine):
    def __init__(self) -> None:
        super().__init__()
        for name, value in _SYSCTL.items():
            self.system.kernel.machine.sysctl.set(name, value)
        for scheduler in self.system.kernel.machine.schedulers:
            scheduler.guard.fewest = 2
        step = self.system.step

        def slowly(event: Event) -> list[Effect]:
            self.system.now_ns += 200_000
            return step(event)

        self.system.step = slowly  # type: ignore[method-assign]

    @rule(us=st.integers(1, 5000))
    def time_passes(self, us: int) -> None:
        self.system.advance(us * 1000)

    @rule(which=st.integers(0, 9), threshold=st.sampled_from([0, 0, 1, 500, 1001]))
    def listen(self, which: int, threshold: int) -> None:
        if self.clients:
            client = self.clients[which % len(self.clients)]
            told = client.result(client.post("pressure", threshold, 100))
            for some, full in zip(told.some_permille, told.full_permille, strict=True):
                assert 0 <= full <= some <= 1000
            assert 0 <= told.full_ns <= told.some_ns <= self.system.now_ns

    @invariant()
    def nobody_is_ended(self) -> None:
        assert not self.system.kernel.machine.counters["oom_kills"]

    def teardown(self) -> None:
        super().teardown()
        psi = self.system.kernel.machine.psi
        assert not psi._subscriptions and psi.machine.state == (False, False)
        assert all(not s.queue and not s.decoding for s in self.system.kernel.machine.schedulers)


class _ControlledTiers(_Controlled, Hierarchy):
    core: ClassVar[CoreMaker] = Core
    tiers: ClassVar[dict[str, Any]] = {"dram": 7, "nvme": 12}


TestControlled = _Controlled.TestCase
TestControlled.settings = examples(0.3)
TestControlledTiers = _ControlledTiers.TestCase
TestControlledTiers.settings = examples(0.3)
