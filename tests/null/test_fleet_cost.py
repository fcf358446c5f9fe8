"""What a step costs does not grow with the contexts that wait for tools: counted, not timed.

Counted are the bytecodes that the kernel's own Python executes in a step, and the numbers that the C core hands back to it.
The same two agents take their turns beside some parked contexts and beside four times as many, in tiers that hold neither lot.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

import pytest

import attnix.kernel.step
from attnix.kernel.core import Core
from attnix.kernel.events import Effect, Event
from attnix.simulated import SimulatedClient, SimulatedSystem, ints

KERNEL = attnix.kernel.step.__file__.rpartition("/")[0]
PROMPT_TOKENS = 12
TURNS = 4
FEW, MANY = 400, 1600
MORE = 1.1  # of all together: which transfers end together is another matter of chance beside other contexts
LOOPS = 2.0  # of the busiest function in a step: a loop over all parked contexts would be at least four times the loop


class CountingCore(Core):
    """items: numbers and bytes that its calls handed back."""

    items = 0

    def _list(self, count: int) -> list[int]:
        found = super()._list(count)
        self.items += len(found)
        return found

    def _bytes(self, count: int) -> bytes:
        found = super()._bytes(count)
        self.items += len(found)
        return found


class Cost(NamedTuple):
    """bytecodes and items of all steps; busiest: bytecodes of one function in one step, at most."""

    bytecodes: int
    items: int
    busiest: int
    function: str


class Meter:
    """Stands in front of a kernel."""

    def __init__(self, system: SimulatedSystem) -> None:
        self._step: Callable[[Event, int], list[Effect]] = system.kernel.step
        self._core = cast(Any, system.core)
        self._before = self._core.items
        self._now: Counter[CodeType] = Counter()
        self._all = self._busiest = 0
        self._function = ""
        system.kernel.step = self.step  # type: ignore[method-assign]

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        self._now.clear()
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return self._step(event, now_ns)
        finally:
            sys.settrace(before)
            self._all += self._now.total()
            for code, count in self._now.most_common(1):
                if count > self._busiest:
                    self._busiest, self._function = count, code.co_qualname

    def _enter(self, frame: FrameType, what: str, arg: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(KERNEL):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, what: str, arg: object) -> Callable[..., Any]:
        self._now[frame.f_code] += what == "opcode"
        return self._opcode

    def cost(self) -> Cost:
        return Cost(self._all, self._core.items - self._before, self._busiest, self._function)


def park(system: SimulatedSystem, client: SimulatedClient, contexts: int, eta_ms: int) -> None:
    for number in range(contexts):
        ctx = client.call("alloc_context").ctx
        client.call("append", ctx, prompt(1 + number))
        system.run()
        client.call("wait_tool", ctx, "human", eta_ms + 1000 * number if eta_ms else -1)


def prompt(number: int) -> bytes:
    digits = [number // 200**power % 200 for power in range(2)]
    return ints([*digits, *range(PROMPT_TOKENS - len(digits))])


def turns_beside(contexts: int, eta_ms: int) -> Cost:
    """What two agents' turns cost beside so many parked contexts."""
    system = SimulatedSystem(
        core=CountingCore,
        frames=12,
        dram=24,
        nvme=48,
        max_contexts=MANY + 4,
        check=False,
        sysctl={"evict.policy": "lru"},
    )
    client = system.connect()
    park(system, client, contexts, eta_ms)
    agents = [client.call("alloc_context").ctx for _ in range(2)]
    for number, ctx in enumerate(agents):
        client.call("append", ctx, prompt(30_000 + number))
    system.run()
    meter = Meter(system)
    for turn in range(TURNS):
        asked = [client.post("generate", ctx, 3) for ctx in agents]
        system.run()
        assert all(client.result(request) for request in asked)
        for ctx in agents:
            client.call("wait_tool", ctx, "search", 5)
        system.advance(5_000_000)
        system.run()
        for ctx in agents:
            client.call("resume", ctx, 0, ints([turn]))
        system.run()
    assert system.kernel.machine.lifetimes.waiting == contexts
    return meter.cost()


@pytest.mark.parametrize("eta_ms", [0, 3_600_000], ids=["nobody knows", "due in an hour and more"])
def test_steps_beside_parked_contexts(eta_ms: int) -> None:
    few, many = turns_beside(FEW, eta_ms), turns_beside(MANY, eta_ms)
    assert many.busiest <= LOOPS * few.busiest, f"beside {MANY} parked contexts {many}, beside {FEW} {few}"
    assert many.bytecodes <= MORE * few.bytecodes and many.items <= MORE * few.items, f"{many}, beside {FEW} {few}"
