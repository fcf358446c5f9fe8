"""What becomes of the work done when more is asked than a machine can do: `attnix study overload`.

    python -m attnix.study_overload [--profile NAME] [--seconds N] [--control NAME] [--sysctl NAME=VALUE] ...
                                                                           one JSON document on stdout

The real kernel over the timed compute device of `attnix replay`, token by token.  First its capacity is measured: requests
that are all there at once, and the rate at which they end, beginning and end left out.  Then requests come at half, one, two
and four times that rate for ten minutes (Poisson arrivals, an open loop: who is refused does not come again), with prompts
and answers of log-normal length, all different.  A request is good when its first token came within one target and each
later one, on average, within another; goodput is what good requests get, per second.

That is done under three controls, `CONTROLS`: as whoever has such targets sets the system up, as `attnix boot` ships it, and
without load control.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from math import exp, log
from typing import Any, Final, NamedTuple

import numpy as np

from attnix.boot_sysctl import DEFAULTS as BOOT
from attnix.kernel import calls
from attnix.kernel.config import DeviceConfig, KernelConfig
from attnix.kernel.core import Core
from attnix.kernel.errors import Errno
from attnix.kernel.events import Connect, DriverUp, Effect, Event, Exec, Reply, SetTimer, Syscall, Timer
from attnix.kernel.look import vmstat
from attnix.kernel.params import ABI_VERSION, MAX_CONTEXTS
from attnix.kernel.step import Kernel
from attnix.kernel.sysctl import Sysctl
from attnix.replay.device import Pass, TimedAccel
from attnix.replay.profile import PROFILES, Profile
from attnix.replay.workload import ANSWER_TOKENS, STOP_TOKEN, VOCAB_TOKENS

LOADS: Final = (0.5, 1.0, 2.0, 4.0)  # of the capacity
_SPREAD: Final = 0.6  # sigma of the logarithm of lengths
_LONGEST: Final = 4  # times the mean
_CONN: Final = 1
CAPACITY_REQUESTS: Final = 300
OFF: Final[dict[str, int | str]] = {"sched.growth_permille": 0, "load.thrash_high_permille": 1000}


class Control(NamedTuple):
    """One way to set the system up.  wait_share: of the target for the first token, that new work may wait; 0: as sysctl says."""

    name: str
    title: str
    sysctl: Mapping[str, int | str]
    wait_share: float = 0.0


CONTROLS: Final = (
    # Who promises a time to the first token serves in order of arrival: the default order ends more jobs sooner, and some of
    # those that are overtaken late (docs/load-control.md has both).
    Control(
        "target", "for a target: first come first served, refused what would wait for half of it", {"sched.policy": "fcfs"}, 0.5
    ),
    Control("boot", "as attnix boot ships it", BOOT),
    Control("off", "first come first served, without: nobody refused, no growth reserve, no thrash guard", {"sched.policy": "fcfs", **OFF}),
)  # fmt: skip


class Request(NamedTuple):
    at_ns: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Setup:
    """What is asked for, and of which machine.  contexts: of mean length that its frames hold."""

    profile: str = "h100-8b"
    seconds: float = 600.0
    prompt_tokens: int = 1000
    output_tokens: int = 200
    contexts: int = 64
    step_tokens: int = 1024
    ttft_s: float = 10.0
    tpot_s: float = 0.2
    seed: int = 1
    block_tokens: int = 16
    settings: tuple[tuple[str, int | str], ...] = ()  # on top of every control's

    @property
    def frames(self) -> int:
        return self.contexts * -(-(self.prompt_tokens + self.output_tokens) // self.block_tokens)

    @property
    def window_tokens(self) -> int:
        return _LONGEST * (self.prompt_tokens + self.output_tokens) + self.block_tokens


@dataclass
class Row:
    """One load.  *_s: seconds, or per second; good: within both targets."""

    load: float
    control: str
    offered: int = 0
    refused: int = 0
    without_retry: int = 0  # refusals that do not say when to come again
    served: int = 0
    good: int = 0
    good_s: float = 0.0
    good_tokens_s: float = 0.0
    tokens_s: float = 0.0
    ttft_p50_s: float = 0.0
    ttft_p99_s: float = 0.0
    tpot_p50_s: float = 0.0
    tpot_p99_s: float = 0.0
    preemptions: int = 0
    again_tokens: int = 0  # computed again after a preemption
    retry_after_p50_s: float = 0.0
    lowered: int = 0  # times the thrash guard lowered the admitted set
    counters: dict[str, int] = field(default_factory=dict)


def lengths(draw: random.Random, mean: int) -> int:
    """Log-normal with that mean."""
    return max(1, min(_LONGEST * mean, round(exp(draw.gauss(log(mean) - _SPREAD**2 / 2, _SPREAD)))))


def poisson(setup: Setup, rate_s: float) -> list[Request]:
    draw = random.Random(f"{setup.seed} {rate_s}")
    at_s, made = 0.0, []
    while (at_s := at_s + draw.expovariate(rate_s)) < setup.seconds:
        made.append(Request(round(at_s * 1e9), lengths(draw, setup.prompt_tokens), lengths(draw, setup.output_tokens)))
    return made


class Served(NamedTuple):
    request: Request
    first_ns: int
    end_ns: int

    @property
    def ttft_s(self) -> float:
        return (self.first_ns - self.request.at_ns) / 1e9

    @property
    def tpot_s(self) -> float:
        return (self.end_ns - self.first_ns) / 1e9 / max(1, self.request.output_tokens - 1)


class _Live(NamedTuple):
    request: Request
    handle: int
    slot: int


class Machine:
    """One kernel, one compute device, and clients that ask once."""

    def __init__(self, setup: Setup, profile: Profile, slots: int, sysctl: Mapping[str, int | str]) -> None:
        block = setup.block_tokens
        config = KernelConfig(
            devices=(DeviceConfig("hbm0", "hbm", setup.frames),), kv=profile.kv,
            window_tokens=-(-setup.window_tokens // block) * block, vocab_tokens=VOCAB_TOKENS, identity=(("study", profile.name),),
            block_tokens=block, max_contexts=slots, stop_tokens=(STOP_TOKEN,), kv_dtype="bfloat16",
            sysctl={"sched.step_tokens": setup.step_tokens, **sysctl},
        )  # fmt: skip
        rows = [memoryview(bytearray(config.layout.total_bytes))]
        self.kernel = Kernel(config, Core(bytes(range(16)), block, config.layout, [setup.frames], rows))
        self.accel = TimedAccel(profile, slots, exact=True)
        self.now_ns = 0
        self.served: list[Served] = []
        self.refusals: list[dict[str, Any]] = []
        self._heap: list[tuple[int, int, Any]] = []
        self._count = self._request = 0
        self._first_ns: dict[int, int] = {}  # by slot
        self._answering: dict[int, _Live] = {}
        self._ended: list[_Live] = []
        self._next_token = 0
        self.step(DriverUp(0, 1, 1, "kept"))
        self.step(Connect(_CONN, 0, 0, 1))
        self.call("hello", calls.HelloArgs("study", ABI_VERSION))

    def run(self, requests: Sequence[Request]) -> None:
        """Until all have ended."""
        for request in requests:
            self.at(request.at_ns, request)
        while self._heap:
            self.now_ns, _, what = heappop(self._heap)
            if type(what) is Request:
                self._ask(what)
            elif callable(what):
                what()
            elif type(what) is Pass:
                for slot in what.firsts:
                    self._first_ns[slot] = self.now_ns
                self.step(what.done)
            else:
                self.step(what)
            while self._ended:
                live = self._ended.pop()
                self.accel.end(live.slot)
                self.call("release", calls.CtxArgs(live.handle))

    def prompt(self, request: Request) -> bytes:
        """Tokens that no other request has."""
        made = np.arange(self._next_token, self._next_token + request.prompt_tokens, dtype=np.int64)
        self._next_token += request.prompt_tokens
        return (made % ANSWER_TOKENS).astype(np.int32).tobytes()

    def at(self, at_ns: int, what: object) -> None:
        """An event, a request, or something to call."""
        self._count += 1
        heappush(self._heap, (at_ns, self._count, what))

    def step(self, event: Event) -> list[Effect]:
        effects = self.kernel.step(event, self.now_ns)
        for effect in effects:
            if type(effect) is Exec:
                begun = self.accel.start(effect, self.now_ns, self.now_ns)
                self.at(begun.end_ns, begun)
            elif type(effect) is Reply:
                live = self._answering.pop(effect.request, None)
                if live is not None:
                    self._answered(live, effect)
            elif type(effect) is SetTimer:
                self.at(max(effect.at_ns, self.now_ns + 1), Timer(effect.timer))
        return effects

    def call(self, name: str, args: tuple[object, ...]) -> Reply:
        """A system call that is answered at once."""
        self._request += 1
        for effect in self.step(Syscall(_CONN, self._request, name, args)):
            if type(effect) is Reply and effect.request == self._request:
                return effect
        raise RuntimeError(f"{name} was not answered at once")

    def _ask(self, request: Request) -> None:
        made: Any = self.call("alloc_context", calls.AllocContextArgs())
        if made.code:
            self.refusals.append(made.result)
            return
        ctx, cid = made.result
        tokens = self.prompt(request)
        slot = self.kernel.machine.contexts[cid].slot
        # Before the prompt is appended: a pass with it may begin in that very step.
        self.accel.begin(slot, request.prompt_tokens, request.output_tokens, ANSWER_TOKENS)
        reply: Any = self.call("append", calls.AppendArgs(ctx, tokens))
        if reply.code:
            self.refusals.append(reply.result)
            self.call("release", calls.CtxArgs(ctx))
            return
        self._request += 1
        self._answering[self._request] = _Live(request, ctx, slot)
        most = _LONGEST * request.output_tokens
        self.step(Syscall(_CONN, self._request, "generate", calls.GenerateArgs(ctx, most, stream=False)))

    def _answered(self, live: _Live, reply: Reply) -> None:
        if reply.code:
            self.refusals.append(dict(reply.result))  # type: ignore[arg-type]
        else:
            self.served.append(Served(live.request, self._first_ns[live.slot], self.now_ns))
        self._ended.append(live)


def capacity_s(setup: Setup, profile: Profile, requests: int = CAPACITY_REQUESTS) -> float:
    """Requests per second when there are always more, first come first served."""
    draw = random.Random(f"{setup.seed} capacity")
    asked = [
        Request(0, lengths(draw, setup.prompt_tokens), lengths(draw, setup.output_tokens)) for _ in range(requests)
    ]
    everybody: dict[str, int | str] = {"sched.max_wait_ms": 0, "sched.max_queue": 0}
    machine = Machine(setup, profile, requests + 8, {"sched.policy": "fcfs", **dict(setup.settings), **everybody})
    machine.run(asked)
    ends = sorted(s.end_ns for s in machine.served)
    first, last = len(ends) // 5, len(ends) * 4 // 5
    return (last - first) / ((ends[last] - ends[first]) / 1e9)


def quantile(values: Sequence[float], permille: int) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * permille // 1000) - 1)] if ordered else 0.0


def overload(setup: Setup, profile: Profile, capacity: float, load: float, control: Control) -> Row:
    asked = poisson(setup, load * capacity)
    sysctl = dict(control.sysctl)
    if control.wait_share:
        sysctl["sched.max_wait_ms"] = round(1000 * control.wait_share * setup.ttft_s)
    slots = len(asked) + 8 if control.name == "off" else MAX_CONTEXTS
    machine = Machine(setup, profile, slots, {**sysctl, **dict(setup.settings)})
    machine.run(asked)
    end_s = max(setup.seconds, max((s.end_ns for s in machine.served), default=0) / 1e9)
    good = [s for s in machine.served if s.ttft_s <= setup.ttft_s and s.tpot_s <= setup.tpot_s]
    counters = vmstat(machine.kernel.machine)
    retry = [r["retry_after_ms"] / 1e3 for r in machine.refusals if "retry_after_ms" in r]
    return Row(
        load, control.name, len(asked), len(machine.refusals), len(machine.refusals) - len(retry), len(machine.served), len(good),
        len(good) / end_s, sum(s.request.output_tokens for s in good) / end_s,
        sum(s.request.output_tokens for s in machine.served) / end_s,
        quantile([s.ttft_s for s in machine.served], 500), quantile([s.ttft_s for s in machine.served], 990),
        quantile([s.tpot_s for s in machine.served], 500), quantile([s.tpot_s for s in machine.served], 990),
        counters.get("preemptions_running", 0), counters.get("thrash_tokens", 0), quantile(retry, 500),
        counters.get("admitted_limit_lowered", 0), counters,
    )  # fmt: skip


def study(
    setup: Setup, profile: Profile, controls: Sequence[Control], loads: Sequence[float] = LOADS
) -> dict[str, Any]:
    capacity = capacity_s(setup, profile)
    rows = [asdict(overload(setup, profile, capacity, load, control)) for control in controls for load in loads]
    titles = {control.name: control.title for control in controls}
    return {"setup": asdict(setup), "frames": setup.frames, "capacity_s": capacity, "controls": titles, "rows": rows}


def setting(text: str) -> tuple[str, int | str]:
    """NAME=VALUE.  Error: argparse.ArgumentTypeError."""
    name, separator, value = text.partition("=")
    try:
        if not separator:
            raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE")
        Sysctl().set(name, value)
    except Errno as error:
        raise argparse.ArgumentTypeError(str(error.detail["message"])) from error
    return name, value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="attnix study overload")
    standard = Setup()
    parser.add_argument("--profile", choices=sorted(PROFILES), default=standard.profile)
    for name, kind in (
        ("seconds", float), ("prompt-tokens", int), ("output-tokens", int), ("contexts", int), ("step-tokens", int),
        ("ttft-s", float), ("tpot-s", float), ("seed", int),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=getattr(standard, name.replace("-", "_")))
    parser.add_argument("--control", action="append", choices=[control.name for control in CONTROLS], default=[])
    parser.add_argument("--load", action="append", type=float, default=[])
    parser.add_argument("--sysctl", action="append", type=setting, default=[], metavar="NAME=VALUE")
    asked = vars(parser.parse_args(arguments))
    names, loads, settings = asked.pop("control"), asked.pop("load") or LOADS, asked.pop("sysctl")
    controls = [control for control in CONTROLS if control.name in names or not names]
    setup = Setup(**asked, settings=tuple(settings))
    json.dump(study(setup, PROFILES[setup.profile], controls, loads), sys.stdout)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
