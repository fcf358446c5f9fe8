"""The clock: arrivals, completions and timers go into `Kernel.step`, and its effects come out as times.

It is the daemon's kernel with the core in C; only devices and clients are simulated.  One client plays all sessions.  A
session keeps one context over its turns: it cuts the log back to what the next prompt has in common with it, appends the
rest and generates.  A request without a session gets a context, which it releases at its end.  What is drawn at random
(how wrong a noisy eta is) is drawn from the number of its turn, so the same workload and settings give the same events at the same times.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Final, NamedTuple

import numpy as np

from attnix.kernel import calls
from attnix.kernel.config import DeviceConfig, KernelConfig
from attnix.kernel.context import Context
from attnix.kernel.core import Core
from attnix.kernel.errors import E
from attnix.kernel.events import (
    Connect,
    DriverUp,
    Effect,
    Event,
    Exec,
    Reply,
    SetTimer,
    Syscall,
    Timer,
    Transfer,
    TransferDone,
)
from attnix.kernel.evict import registry
from attnix.kernel.evict.protocol import KIND_TOOL
from attnix.kernel.look import vmstat
from attnix.kernel.params import ABI_VERSION
from attnix.kernel.step import Kernel
from attnix.kernel.tag import tag_bytes

from .device import Pass, TimedAccel, TimedLink
from .metrics import Result, quantiles
from .optimum import bound
from .profile import Profile
from .workload import ANSWER_TOKENS, STOP_TOKEN, VOCAB_TOKENS, Int64s, Session, Turn, Workload, common_blocks

_STEP_TOKENS: Final = 8192  # token budget of a pass, as engines on such machines have it
SLOTS: Final = 4096  # contexts at once; who comes later waits for one
_CONN: Final = 1
_HBM: Final = 0
_S: Final = 1e-9
_TAG_NTOKENS: Final = 13  # int32 word of a packed tag (kernel/tag.py)


@dataclass(frozen=True)
class Frames:
    """Capacity of each tier; 0: there is none.  hbm >= 1."""

    hbm: int
    dram: int = 0
    nvme: int = 0

    @property
    def total(self) -> int:
        return self.hbm + self.dram + self.nvme

    def by_tier(self) -> dict[str, int]:
        """Those that there are, fastest first."""
        return {t: n for t, n in (("hbm", self.hbm), ("dram", self.dram), ("nvme", self.nvme)) if n}


def share_of(workload: Workload, capacity: str) -> Frames:
    """`5%` of the distinct blocks, or a number of frames; `5%+20%`: hbm and dram.  ValueError."""
    parts = [_share(workload, capacity, part) for part in capacity.split("+")]
    if len(parts) > 2:
        raise ValueError(f"--capacity {capacity} has more parts than hbm and dram")
    return Frames(*parts)


def _share(workload: Workload, capacity: str, part: str) -> int:
    share = part.removesuffix("%")
    try:
        number = float(share)
    except ValueError:
        raise ValueError(f"--capacity {capacity!r} is neither 5% nor a number of frames") from None
    if share != part:
        if not workload.distinct_blocks:
            raise ValueError("this trace has no blocks to take a share of: give --hbm")
        number = workload.distinct_blocks * number / 100
    if number < 1:
        raise ValueError(f"--capacity {capacity} is less than one frame")
    return round(number)


class _Arrival(NamedTuple):
    session: Live


class _ToolCall(NamedTuple):
    """A session's tool begins, and takes so long."""

    session: Live
    pause_ns: int


class Waits(NamedTuple):
    """How sessions tell the kernel that they wait for a tool: by `wait_tool`, and `resume` with what follows.

    policy  sysctl wait.policy; "": the kernel's own choice
    eta     "": none is given; "exact": the time the tool will take, as only an oracle knows it; "noisy": off by up to half
            of it, either way
    """

    policy: str
    eta: str = ""


class _Finish(NamedTuple):
    """A pass is over."""

    work: Pass


@dataclass(slots=True)
class Live:
    """A session at its turn `at`."""

    session: Session
    at: int = 0
    handle: int = 0  # of its context; 0: none yet
    pid: int = 0  # of its process: a session is a program
    context: Context | None = None
    blocks: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))  # what its log begins with
    prompt_tokens: int = 0  # of this turn, from the start of the log on
    arrived_ns: int = 0
    first_ns: int = 0
    pauses_ns: int = 0
    waits: bool = False  # its context is in a wait for a tool
    after_tool: bool = False  # this turn begins with a tool's answer

    @property
    def turn(self) -> Turn:
        return self.session.turns[self.at]


def note_turn(kernel: Kernel, context: Context, kind: int, due_ns: int) -> None:
    """Why a context's turn ended, and when it will go on (0: nobody knows), in the place of what the kernel took it for."""
    kernel.machine.core.note(context.slot, kind, context.turns, due_ns)


def policy_names() -> tuple[str, ...]:
    """What `Replay` takes as a policy."""
    return registry.names()


class Refused(Exception):
    """A system call said no."""

    def __init__(self, code: int, detail: object) -> None:
        super().__init__(f"{E(code).name}: {detail}")
        self.code = code


class Replay:
    """One workload through one kernel.

    policy  of every tier
    hints   the eviction policies are told when a session that waits for a tool will go on
    waits   sessions wait for their tools in the kernel; None: they are idle meanwhile
    stateless  every request has a context of its own, gets the whole log and shares nothing: what a server does that keeps
            nothing between requests
    slots   contexts at once
    exact   see device.py
    check   fsck after every step, any problem is an AssertionError
    sysctl  set at boot, besides
    """

    def __init__(
        self, workload: Workload, profile: Profile, frames: Frames, policy: str, *, hints: bool = False, exact: bool = False,
        check: bool = False, sysctl: Mapping[str, int | str] | None = None, waits: Waits | None = None,
        stateless: bool = False, slots: int = SLOTS,
    ) -> None:  # fmt: skip
        self._workload = workload
        self._waits = None if stateless else waits
        self._stateless = stateless
        self._hints = hints
        self._check = check
        self.frames = frames
        self.now_ns = 0
        self._heap: list[tuple[int, int, Any]] = []
        self._count = 0
        self._request = 0
        self._answering: dict[int, Live] = {}
        self._posted: set[int] = set()
        self._by_slot: dict[int, Live] = {}
        self._waiting: deque[Live] = deque()  # arrived, and no context slot is free
        self._ended: list[Live] = []  # their last turn is over, their context is still there
        self._order: list[Int64s] = []
        self._seen = np.zeros(workload.block_numbers, np.bool_)
        self._ttft_s: list[float] = []
        self.tool_ttfts_s: list[float] = []
        self._answer_s: list[float] = []
        self.jobs_s: list[float] = []
        self._first_arrival_ns = -1
        self._last_answer_ns = 0
        self._found_tokens = 0
        tiers = frames.by_tier()
        self._tiers = list(tiers)
        self._loaded = dict.fromkeys(tiers, 0)  # tokens, by the tier that they came from
        self.result = Result(policy, hit_tokens=dict.fromkeys(tiers, 0))
        size = workload.block_tokens
        slots = min(slots, len(workload.sessions) + 1)
        settings: dict[str, int | str] = {"sched.step_tokens": _STEP_TOKENS, "evict.policy": policy}
        if waits is not None and waits.policy:
            settings["wait.policy"] = waits.policy
        config = KernelConfig(
            devices=tuple(DeviceConfig(f"{tier}0", tier, n) for tier, n in tiers.items()), kv=profile.kv,
            window_tokens=-(-(workload.longest_tokens + 1) // size) * size, vocab_tokens=VOCAB_TOKENS,
            identity=(("replay", profile.name),), block_tokens=size, max_contexts=slots, stop_tokens=(STOP_TOKEN,),
            kv_dtype="bfloat16", sharing="none" if stateless else "uid", sysctl=settings | dict(sysctl or {}),
        )  # fmt: skip
        rows = [memoryview(bytearray(config.layout.total_bytes))]
        core = Core(bytes(range(16)), size, config.layout, list(tiers.values()), rows)
        self.kernel = Kernel(config, core)
        self.accel = TimedAccel(profile, slots, exact=exact)
        self._frame_bytes = profile.kv.frame_bytes(size)
        self._tag_words = tag_bytes(size) // 4
        links = {
            "hbm": {"read": profile.demote, "write": profile.promote},
            "nvme": {"read": profile.nvme_read, "write": profile.nvme_write},
        }
        self.links: dict[tuple[int, str], TimedLink] = {
            (device, verb): TimedLink(link)
            for device, tier in enumerate(tiers)
            for verb, link in links.get(tier, {}).items()
        }
        self._gate_ns: dict[tuple[int, int], int] = {}
        for device in range(len(tiers)):
            self._step(self._up(device))
        self._step(Connect(_CONN, 0, 0, 1))
        self._call("hello", calls.HelloArgs("replay", ABI_VERSION))

    def _up(self, device: int) -> DriverUp:
        """A device's driver, with what it has measured of itself: the profile's numbers."""
        out, into = self.links.get((device, "read")), self.links.get((device, "write"))
        if out is None or into is None:
            return DriverUp(device, 1, 1 + device, "kept")
        return DriverUp(
            device, 1, 1 + device, "kept", "simulated", (), round(out.link.bytes_per_s), round(into.link.bytes_per_s),
            out.link.latency_ns,
        )  # fmt: skip

    # -- the clock ------------------------------------------------------------------------------------------------

    def _at(self, time_ns: int, what: Any) -> None:
        self._count += 1
        heappush(self._heap, (time_ns, self._count, what))

    def run(self) -> Result:
        """Until every session has ended."""
        for session in self._workload.sessions:
            self._at(session.start_ns, _Arrival(Live(session)))
        heap = self._heap
        while heap:
            self.now_ns, _, what = heappop(heap)
            if type(what) is _Finish:
                self._finish(what.work)
            elif type(what) is _Arrival:
                self._arrive(what.session)
            elif type(what) is _ToolCall:
                self._wait(what.session, what.pause_ns)
            else:
                self._step(what)
            if self._ended or self._waiting:
                self._settle()
        if self._answering or self._waiting:
            raise RuntimeError(f"{len(self._answering) + len(self._waiting)} requests were never answered")
        for lost in self.kernel.machine.lost_places():
            raise RuntimeError(f"{lost.fault}: what was measured is {lost.instead}")
        return self._summary()

    def _step(self, event: Event) -> list[Effect]:
        effects = self.kernel.step(event, self.now_ns)
        passes: list[Exec] = []  # begun last: how far one may run depends on what else has been started
        for effect in effects:
            if type(effect) is Exec:
                passes.append(effect)
            elif type(effect) is Reply:
                live = self._answering.pop(effect.request, None)
                if live is not None:
                    self._answered(live, effect)
                elif effect.code and effect.request in self._posted:
                    raise Refused(effect.code, effect.result)
                self._posted.discard(effect.request)
            elif type(effect) is Transfer:
                self._transfer(effect)
            elif type(effect) is SetTimer:
                self._at(max(effect.at_ns, self.now_ns + 1), Timer(effect.timer))
        for work in passes:
            self._exec(work)
        if self._check:
            problems = self.kernel.fsck()
            if problems:
                raise AssertionError(f"after {type(event).__name__} at {self.now_ns}: " + "; ".join(problems))
        return effects

    def _call(self, name: str, args: tuple[object, ...]) -> Any:
        """A system call that is answered at once.  Refused."""
        self._request += 1
        request = self._request
        for effect in self._step(Syscall(_CONN, request, name, args)):
            if type(effect) is Reply and effect.request == request:
                if effect.code:
                    raise Refused(effect.code, effect.result)
                return effect.result
        raise RuntimeError(f"{name} was not answered at once")

    def _post(self, name: str, args: tuple[object, ...]) -> None:
        """A system call that may have to wait for a pass on its context; those after it wait behind it.  Refused."""
        self._request += 1
        self._posted.add(self._request)
        self._step(Syscall(_CONN, self._request, name, args))

    # -- devices --------------------------------------------------------------------------------------------------

    def _exec(self, work: Exec) -> None:
        next_ns = self._heap[0][0] if self._heap else 1 << 62
        if self._waiting:
            next_ns = self.now_ns
        gates = np.frombuffer(work.gates, np.int64).reshape(-1, 2).tolist() if work.gates else ()
        gates_ns = max((self._gate_ns.get((gate, ticket), 0) for gate, ticket in gates), default=0)
        begun = self.accel.start(work, self.now_ns, next_ns, gates_ns)
        self._at(begun.end_ns, _Finish(begun))

    def _finish(self, work: Pass) -> None:
        for slot in work.firsts:
            live = self._by_slot[slot]
            live.first_ns = self.now_ns
            self._found(live, slot)
        self._step(work.done)

    def _transfer(self, effect: Transfer) -> None:
        """Both ends of a link are named by the driver's device and the verb; sizes are those of bare KV."""
        moved_bytes = len(effect.pairs) // 8 * self._frame_bytes
        end_ns, took_ns = self.links[effect.device, effect.verb].start(moved_bytes, self.now_ns)
        if effect.verb == "read" and effect.device != _HBM:
            self._loaded[self._tiers[effect.device]] += self._tokens_of(effect)
        elif effect.verb == "write" and effect.device == _HBM:
            self._loaded["dram"] += self._tokens_of(effect)
        if effect.gate >= 0:
            self._gate_ns[effect.gate, effect.ticket] = end_ns
        self._at(end_ns, TransferDone(effect.device, effect.seq, (), moved_bytes, took_ns))

    def _tokens_of(self, effect: Transfer) -> int:
        tags = np.frombuffer(effect.tags, np.int32).reshape(-1, self._tag_words)
        return int(tags[:, _TAG_NTOKENS].sum())

    # -- sessions -------------------------------------------------------------------------------------------------

    def _arrive(self, live: Live) -> None:
        live.arrived_ns = self.now_ns
        if self._first_arrival_ns < 0:
            self._first_arrival_ns = self.now_ns
        if self._waiting or not self._begin(live):
            self._waiting.append(live)

    def _begin(self, live: Live) -> bool:
        """Append the prompt and generate.  False: there is no context slot for it now."""
        turn = live.turn
        size = self._workload.block_tokens
        follows = self._workload.follows
        core = self.kernel.machine.core
        length = core.slot_row(live.context.slot).tokens if follows and live.context is not None else 0
        live.prompt_tokens = length + turn.prompt_tokens
        if live.prompt_tokens + turn.output_tokens + 1 > self.frames.hbm * size:
            self.result.refused += 1
            if live.waits:
                self._resume(live, b"")
            self._next(live)
            return True
        held = b""
        if self._stateless and live.context is not None:
            held = core.read_log(live.context.slot, 0, length)
            self._release(live)
        if live.context is None:
            if not live.pid:
                live.pid = self._call("spawn", calls.SpawnArgs("session")).pid
            try:
                made = self._call("alloc_context", calls.AllocContextArgs(live.pid))
            except Refused as refused:
                if refused.code != E.ENOMEM:
                    raise
                return False
            live.handle = made.ctx
            live.context = self.kernel.machine.contexts[made.cid]
            live.blocks = turn.blocks[:0]
            self._by_slot[live.context.slot] = live
        keep = 0
        if not follows:
            keep = common_blocks(live.blocks, turn.blocks) * size
            if len(live.blocks):
                self._post("truncate", calls.TruncateArgs(live.handle, keep))
            live.blocks = turn.blocks
        self.accel.begin(live.context.slot, live.prompt_tokens, turn.output_tokens, ANSWER_TOKENS + turn.number)
        self._order.append(turn.blocks)
        self.result.prompt_tokens += live.prompt_tokens
        fresh = int(np.count_nonzero(~self._seen[turn.blocks])) * size
        self._seen[turn.blocks] = True
        self.result.first_tokens += fresh + turn.prompt_tokens - len(turn.blocks) * size
        tokens = held + self._workload.prompt(turn, keep).tobytes()
        if live.waits:
            self._resume(live, tokens)
        else:
            self._post("append", calls.AppendArgs(live.handle, tokens))
        self._request += 1
        self._answering[self._request] = live
        # The device ends the answer; each pass may stand for many tokens of it.
        self._step(
            Syscall(
                _CONN, self._request, "generate", calls.GenerateArgs(live.handle, turn.output_tokens + 1, stream=False)
            )
        )
        return True

    def _wait(self, live: Live, pause_ns: int) -> None:
        """Its tool has been called."""
        if live.context is None or self._waits is None:
            return
        eta_ns = -1.0
        if self._waits.eta == "exact":
            eta_ns = float(pause_ns)
        elif self._waits.eta == "noisy":
            eta_ns = pause_ns * (0.5 + random.Random(live.turn.number).random())
        tool = live.session.turns[live.at - 1].tool or "tool"
        self._call("wait_tool", calls.WaitToolArgs(live.handle, tool, round(eta_ns / 1e6) if eta_ns >= 0 else -1))
        live.waits = True

    def _resume(self, live: Live, tokens: bytes) -> None:
        self._post("resume", calls.ResumeArgs(live.handle, 0, tokens))
        live.waits = False

    def _found(self, live: Live, slot: int) -> None:
        """Its first token is there: what was not computed for it was found, where `_summary` tells."""
        self._found_tokens += max(0, live.prompt_tokens - int(self.accel.computed[slot]))

    def _answered(self, live: Live, reply: Reply) -> None:
        """The answer is complete.  Called in the middle of the kernel's effects, so what follows comes as an event."""
        if reply.code or live.context is None or reply.result[0] != "stop":  # type: ignore[index]
            raise RuntimeError(f"request {live.turn.number} failed: {reply}")
        turn = live.turn
        result = self.result
        self._last_answer_ns = self.now_ns
        result.requests += 1
        result.output_tokens += turn.output_tokens
        computed = int(self.accel.computed[live.context.slot])
        result.computed_tokens += max(0, computed - (turn.output_tokens - 1))
        self._ttft_s.append((live.first_ns - live.arrived_ns) * _S)
        if live.after_tool:
            self.tool_ttfts_s.append(self._ttft_s[-1])
        self._answer_s.append((self.now_ns - live.arrived_ns) * _S)
        self._next(live)

    def _next(self, live: Live) -> None:
        """The session's turn is over."""
        turns = live.session.turns
        kind = live.turn.kind
        live.at += 1
        if live.at < len(turns):
            pause_ns = turns[live.at].pause_ns
            live.pauses_ns += pause_ns
            live.after_tool = kind == KIND_TOOL
            if live.context is not None and self._waits is not None and live.after_tool:
                self._at(self.now_ns, _ToolCall(live, pause_ns))
            elif live.context is not None:
                known = self._hints and kind == KIND_TOOL
                note_turn(self.kernel, live.context, kind, self.now_ns + pause_ns if known else 0)
            self._at(self.now_ns + pause_ns, _Arrival(live))
            return
        self.jobs_s.append((self.now_ns - live.session.start_ns - live.pauses_ns) * _S)
        self._ended.append(live)

    def _settle(self) -> None:
        """Outside the kernel's steps: contexts that are done with go, and who waited for one begins."""
        ended, self._ended = self._ended, []
        for live in ended:
            if live.context is not None:
                self._release(live)
            if live.pid:
                self._call("exit", calls.ExitArgs(live.pid))
                self._call("wait", calls.WaitArgs(live.pid))
        while self._waiting and self._begin(self._waiting[0]):
            self._waiting.popleft()

    def _release(self, live: Live) -> None:
        if live.context is not None:
            del self._by_slot[live.context.slot]
            self.accel.end(live.context.slot)
            live.context = None
            self._call("release", calls.CtxArgs(live.handle))

    # -- the end --------------------------------------------------------------------------------------------------

    def _summary(self) -> Result:
        result = self.result
        accel = self.accel
        self._settle()
        makespan_ns = max(1, self._last_answer_ns - max(0, self._first_arrival_ns))  # the kernel's timers may be later
        counters = vmstat(self.kernel.machine)
        result.recomputed_tokens = max(0, result.computed_tokens - result.first_tokens)
        result.prefill_tokens = accel.prefill_tokens
        result.preemptions = counters.get("preemptions", 0)
        result.hit_tokens = self._by_tier()
        result.ttft_s = quantiles(self._ttft_s)
        result.tool_ttft_s = quantiles(self.tool_ttfts_s)
        result.answer_s = quantiles(self._answer_s)
        result.job_s = quantiles(self.jobs_s)
        result.moved_bytes = {
            f"{self.kernel.machine.devices[device].name}_{verb}": link.moved_bytes
            for (device, verb), link in self.links.items()
            if len(self._tiers) > 1
        }
        result.busy = round(accel.busy_ns / makespan_ns, 6)
        result.makespan_s = round(makespan_ns * _S, 6)
        result.passes = accel.passes
        result.steps = accel.steps
        result.waited_s = round(accel.waited_ns * _S, 6)
        result.counters = counters
        result.bound_hit_ratio = 0.0 if self._workload.follows else round(
            bound(
                self._order, result.prompt_tokens, self._workload.block_numbers, self._workload.block_tokens,
                self.frames.total,
            ),
            6,
        )  # fmt: skip
        return result

    def _by_tier(self) -> dict[str, int]:
        """Tokens found, by the tier that they were in: what was loaded out of a slower one was not in a faster one.

        A block on its way from nvme through dram counts once, for nvme.  What was loaded for nobody (a prefetch in vain,
        a preempted context's own blocks) counts too, so the slower tiers' shares are at most this.
        """
        found = dict.fromkeys(self._tiers, 0)
        rest = self._found_tokens
        for tier in reversed(self._tiers[1:]):
            staged = sum(self._loaded[slower] for slower in self._tiers[self._tiers.index(tier) + 1 :])
            found[tier] = min(rest, max(0, self._loaded[tier] - staged))
            rest -= found[tier]
        found[self._tiers[0]] = rest
        return found
