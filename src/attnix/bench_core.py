"""The measuring half of `attnix bench core`: times the kernel's own objects, so it may not live in userland.

    python -m attnix.bench_core

One JSON request a line on stdin, `[method, argument...]`, one JSON answer a line on stdout: the protocol of the peers
(userland/bench/peers/serve.py), so that userland/bench/core.py drives all of them alike and takes turns.

Every method returns the seconds of one operation.  What is prepared before it is not timed.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Final, TypeAlias

from attnix.kernel import calls
from attnix.kernel.batch import SAMPLE, SEQ
from attnix.kernel.config import DeviceConfig, KernelConfig
from attnix.kernel.core import Core
from attnix.kernel.coreapi import CoreApi
from attnix.kernel.events import Connect, DriverUp, Effect, Exec, ExecDone, Syscall
from attnix.kernel.geometry import KvShape, RowLayout
from attnix.kernel.records import EVICT, OK, PREFILL
from attnix.kernel.step import Kernel
from attnix.kernel.twin import TwinCore

BLOCK: Final = 16
PROMPT: Final = 4096  # tokens
PROMPT_BLOCKS: Final = PROMPT // BLOCK
LAYOUT: Final = RowLayout(slots=1100, entries=512)
CONTEXT_TOKENS: Final = 100  # of each decoding context
STEPS: Final = (
    32  # decode steps behind one number, the least: a sixteenth of the contexts crosses a block edge in each, so
)
# they are alike, and what other processes add to a step of milliseconds is not wanted on either side
REPEATS: Final = 9  # of a case of microseconds behind one number, their median: the first ones find cold caches
CoreKind: TypeAlias = type[Core] | type[TwinCore]
CORES: Final[dict[str, CoreKind]] = {"core": Core, "twin": TwinCore}


def prompt(number: int) -> bytes:
    """4,096 token ids; prompts of different numbers differ in every block."""
    base = array("i", range(number * 7919 % 30000, number * 7919 % 30000 + PROMPT))
    base[0] = number
    return base.tobytes()


class FullPool:
    """A core whose frames all hold cached prompts."""

    def __init__(self, kind: CoreKind, frames: int) -> None:
        self.core: CoreApi = kind(bytes(16), BLOCK, LAYOUT, [frames], [memoryview(bytearray(LAYOUT.total_bytes))])
        self.root = self.core.hash(b"bench")
        self.oldest = 0  # prompts oldest .. next - 1 are cached
        self.next = 0
        for _ in range(frames // PROMPT_BLOCKS):
            slot = self.opened(self.next)
            assert self.core.admit(slot, 0).status == OK
            self.finish(slot)

    def opened(self, number: int) -> int:
        slot = self.core.open_slot(0, 1, self.root)
        self.core.append(slot, prompt(number))
        return slot

    def finish(self, slot: int) -> None:
        """As if computed; then released into the cache."""
        self.core.advance(slot)
        self.core.plan(0, 1, PREFILL.pack(slot, 0, PROMPT, 0, -1, 0))
        self.core.commit(0, b"", b"")
        self.core.close_slot(slot)
        self.next += 1

    def evict(self, frames: int) -> None:
        assert self.core.evict(0, self.core.oldest(0, frames)) == frames
        self.oldest += frames // PROMPT_BLOCKS

    def admit_hit(self, turn: int) -> float:
        tokens = prompt(self.oldest + turn * 31 % (self.next - self.oldest))
        began = perf_counter()
        slot = self.core.open_slot(0, 1, self.root)
        self.core.append(slot, tokens)
        result = self.core.admit(slot, 0)
        took = perf_counter() - began
        assert result.mapped_frames == PROMPT_BLOCKS
        self.core.close_slot(slot)
        return took

    def keys(self, turn: int) -> float:
        """Nothing but the 256 chained keys of a prompt: each needs the one before, so no core can admit in less."""
        slot = self.core.open_slot(0, 1, self.root)
        tokens = prompt(turn)
        began = perf_counter()
        self.core.append(slot, tokens)
        took = perf_counter() - began
        self.core.close_slot(slot)
        return took

    def admit_miss(self, turn: int) -> float:
        """A new prompt when no frame is free: as the kernel does it, admit, evict what is short, admit."""
        tokens = prompt(self.next)
        began = perf_counter()
        slot = self.core.open_slot(0, 1, self.root)
        self.core.append(slot, tokens)
        result = self.core.admit(slot, 0)
        if result.status == EVICT:
            self.core.evict(0, self.core.oldest(0, result.shortage_frames))
            result = self.core.admit(slot, 0)
        took = perf_counter() - began
        assert result.new_frames == PROMPT_BLOCKS
        self.oldest += 1
        self.finish(slot)
        return took

    def allocate(self, turn: int) -> float:
        self.evict(PROMPT_BLOCKS)
        slot = self.opened(self.next)
        began = perf_counter()
        result = self.core.admit(slot, 0)
        took = perf_counter() - began
        assert result.new_frames == PROMPT_BLOCKS
        self.finish(slot)
        return took

    def free(self, turn: int) -> float:
        slot = self.opened(self.next - 1)
        self.core.admit(slot, 0)
        began = perf_counter()
        self.core.close_slot(slot)
        return perf_counter() - began

    def fork(self, turn: int) -> float:
        slot = self.opened(self.next - 1)
        self.core.admit(slot, 0)
        self.core.advance(slot)
        began = perf_counter()
        (child,) = self.core.fork(slot, 1)
        took = perf_counter() - began
        for s in (child, slot):
            self.core.close_slot(s)
        return took

    def evict_block(self, turn: int) -> float:
        """Per block, in batches of 1,024; the pool is filled again afterwards."""
        count = 4 * PROMPT_BLOCKS
        began = perf_counter()
        self.evict(count)
        took = perf_counter() - began
        for _ in range(4):
            slot = self.opened(self.next)
            self.core.admit(slot, 0)
            self.finish(slot)
        return took / count


class Decoding:
    """n contexts of about a hundred tokens that decode: plan and commit, nothing else of the kernel."""

    def __init__(self, kind: CoreKind, n: int) -> None:
        frames = n * (LAYOUT.entries // 4)
        self.core: CoreApi = kind(bytes(16), BLOCK, LAYOUT, [frames], [memoryview(bytearray(LAYOUT.total_bytes))])
        self.n = n
        self.sampled = array("i", range(n)).tobytes()
        self.logprobs = bytes(4 * n)
        chunks = []
        for i in range(n):
            slot = self.core.open_slot(0, 1, self.core.hash(b"bench"))
            length = CONTEXT_TOKENS - i % BLOCK
            self.core.append(slot, array("i", [i] * length).tobytes())
            self.core.admit(slot, 0)
            self.core.set_generation(slot, SEQ.pack(*[0] * 22), array("i", [-5, -6]).tobytes(), 1 << 30, 1 << 20, 1, i)
            self.core.advance(slot)
            chunks.append(PREFILL.pack(slot, 0, length, SAMPLE, -1, 0))
        self.core.plan(0, n, b"".join(chunks))
        self.core.commit(0, self.sampled, self.logprobs)

    def step(self, turn: int) -> float:
        took = []
        for _ in range(STEPS):
            began = perf_counter()
            plan = self.core.plan(0, self.n, b"")
            self.core.commit(0, self.sampled, self.logprobs)
            took.append(perf_counter() - began)
            assert plan.sequences == self.n
        if self.core.slot_row(0).tokens > LAYOUT.entries * BLOCK // 4 - 2 * STEPS:
            for s in self.core.slots_used():  # a shorter log again, before the frames are used up
                self.core.truncate(s, CONTEXT_TOKENS - s % BLOCK)
        return min(took)


class WholeStep:
    """n generations in a whole kernel: one `Kernel.step` takes a completed pass and gives back the tokens and the next pass."""

    def __init__(self, kind: CoreKind, n: int) -> None:
        self.n = n
        frames = n * 96
        config = KernelConfig(
            devices=(DeviceConfig("hbm0", "hbm", frames),), kv=KvShape(1, 1, 16, 2), window_tokens=BLOCK * 96,
            vocab_tokens=32000, identity=(("weights", "bench"),), max_contexts=n,
            sysctl={"sched.max_running": n, "sched.step_tokens": 1 << 20, "sched.watermark_permille": 0},
        )  # fmt: skip
        rows = [memoryview(bytearray(config.layout.total_bytes))]
        self.kernel = Kernel(config, kind(bytes(16), BLOCK, config.layout, [frames], rows))
        self.now = 0
        self.sampled = array("i", range(n)).tobytes()
        self.logprobs = bytes(4 * n)
        self.exec: Exec | None = None
        self.request = 0
        self.send(DriverUp(0, 1, 1, "kept"))
        self.send(Connect(1, 0, 0, 1))
        self.call("hello", calls.HelloArgs("bench", 1))
        self.contexts = [self.call("alloc_context", calls.AllocContextArgs()) for _ in range(n)]
        for i, handle in enumerate(self.contexts):
            length = CONTEXT_TOKENS - i % BLOCK
            self.call("append", calls.AppendArgs(handle, array("i", [i] * length).tobytes()))
            self.call("generate", calls.GenerateArgs(handle, max_tokens=BLOCK * 64, ignore_eos=True))
        while self.exec is not None and len(self.exec.tokens) != 4 * n:
            self.complete()

    def send(self, event: DriverUp | Connect | Syscall | ExecDone) -> list[Effect]:
        self.now += 1000
        effects = self.kernel.step(event, self.now)
        for effect in effects:
            if isinstance(effect, Exec):
                self.exec = effect
        return effects

    def call(self, name: str, args: tuple[object, ...]) -> int:
        """The first field of the reply, 0 when there is none yet."""
        self.request += 1
        for effect in self.send(Syscall(1, self.request, name, args)):
            if getattr(effect, "request", -1) == self.request:
                result = getattr(effect, "result", ())
                assert not isinstance(result, dict), result
                first = result[0] if result else 0
                return first if isinstance(first, int) else 0
        return 0

    def complete(self) -> None:
        assert self.exec is not None
        samples = self.kernel.machine.devices[0].samples
        done = ExecDone(0, self.exec.seq, self.sampled[: 4 * samples], self.logprobs[: 4 * samples], (), (), self.n, 1)
        self.exec = None
        self.send(done)

    def step(self, turn: int) -> float:
        took = []
        for _ in range(STEPS):
            assert self.exec is not None and len(self.exec.tokens) == 4 * self.n
            done = ExecDone(0, self.exec.seq, self.sampled, self.logprobs, (), (), self.n, 1)
            began = perf_counter()
            self.send(done)
            took.append(perf_counter() - began)
        return min(took)


class Engine:
    """What can be asked for.  Pools and contexts are made once and kept."""

    def __init__(self) -> None:
        self.version = "attnix"
        self._pools: dict[tuple[str, int], FullPool] = {}
        self._decoding: dict[tuple[str, int], Decoding] = {}
        self._kernels: dict[tuple[str, int], WholeStep] = {}

    def pool(self, kind: str, frames: int, case: str, turn: int) -> float:
        if (kind, frames) not in self._pools:
            self._pools[kind, frames] = FullPool(CORES[kind], frames)
        measure: Callable[[int], float] = getattr(self._pools[kind, frames], case)
        repeats = 1 if kind == "twin" else REPEATS
        return median(measure(turn * repeats + i) for i in range(repeats))

    def decode(self, kind: str, n: int, turn: int) -> float:
        if (kind, n) not in self._decoding:
            self._decoding[kind, n] = Decoding(CORES[kind], n)
        return self._decoding[kind, n].step(turn)

    def whole_step(self, kind: str, n: int, turn: int) -> float:
        if (kind, n) not in self._kernels:
            self._kernels[kind, n] = WholeStep(CORES[kind], n)
        return self._kernels[kind, n].step(turn)


def main() -> None:
    engine = Engine()
    print(json.dumps({"ok": engine.version}), flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps({"ok": getattr(engine, method)(*arguments)}), flush=True)


if __name__ == "__main__":
    main()
