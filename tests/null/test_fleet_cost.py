"""What a step costs does not grow with the contexts that wait for tools: counted, not timed.

Counted are the bytecodes that the kernel's own Python executes in a step, and the numbers that the C core hands back to it.
The same two agents take their turns beside few parked contexts and beside ten times as many, in tiers that hold neither lot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest

import attnix.kernel.step
from attnix.kernel.core import Core
from attnix.kernel.events import Effect, Event
from attnix.simulated import SimulatedClient, SimulatedSystem, ints

KERNEL = attnix.kernel.step.__file__.rpartition("/")[0]
PROMPT_TOKENS = 12
TURNS = 4
FEW, MANY = 40, 400
SOME = 1.1  # due times and heaps: a comparison more here and there, as a logarithm has it


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


class Meter:
    """Stands in front of a kernel: bytecodes and items of each step."""

    def __init__(self, system: SimulatedSystem) -> None:
        self._step: Callable[[Event, int], list[Effect]] = system.kernel.step
        self._core: Any = system.core
        self._now = 0
        self.steps: list[tuple[int, int, str]] = []
        system.kernel.step = self.step  # type: ignore[method-assign]

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        self._now, items = 0, self._core.items
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return self._step(event, now_ns)
        finally:
            sys.settrace(before)
            self.steps.append((self._now, self._core.items - items, type(event).__name__))

    def _enter(self, frame: FrameType, what: str, arg: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(KERNEL):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, what: str, arg: object) -> Callable[..., Any]:
        self._now += what == "opcode"
        return self._opcode


def park(system: SimulatedSystem, client: SimulatedClient, contexts: int, eta_ms: int) -> None:
    for number in range(contexts):
        ctx = client.call("alloc_context").ctx
        client.call("append", ctx, prompt(1 + number))
        system.run()
        client.call("wait_tool", ctx, "human", eta_ms + 1000 * number if eta_ms else -1)


def prompt(number: int) -> bytes:
    digits = [number // 200**power % 200 for power in range(2)]
    return ints([*digits, *range(PROMPT_TOKENS - len(digits))])


def busiest(contexts: int, eta_ms: int) -> tuple[int, int, int]:
    """(bytecodes of the busiest step, bytecodes of all, items of all) of two agents' turns beside parked contexts."""
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
    return max(n for n, _, _ in meter.steps), sum(n for n, _, _ in meter.steps), sum(n for _, n, _ in meter.steps)


def within(few: Sequence[int], many: Sequence[int]) -> bool:
    return all(b <= SOME * a for a, b in zip(few, many, strict=True))


@pytest.mark.parametrize("eta_ms", [0, 3_600_000], ids=["nobody knows", "due in an hour and more"])
def test_steps_beside_parked_contexts(eta_ms: int) -> None:
    few, many = busiest(FEW, eta_ms), busiest(MANY, eta_ms)
    assert within(few, many), f"beside {FEW} parked contexts {few}, beside {MANY} {many}"
