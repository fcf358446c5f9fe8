"""Random interleavings of wait, resume, stop, kill and inject with failing drivers, against the naive model.

The naive model is that of test_kernel_state_machine.py; a wait adds nothing to it but who may be written to.  Whatever
happens, a generation says what the same log says alone, every call is answered once, and the same interleaving gives the
same effects to the byte.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.kernel.events import Event, Syscall
from attnix.kernel.ids import Cid
from attnix.kernel.order import registry as orders
from attnix.kernel.wait.registry import POLICIES
from attnix.simulated import CoreMaker, SimulatedSystem, ints
from tests.null.test_kernel_state_machine import BLOCK, FRAMES, ROOM, WINDOW, KernelMachine, Mirror

MS = 1_000_000


def links_cost(system: SimulatedSystem) -> None:
    """A frame takes 1 ms down and 2 ms up, as far as decisions go: what costs nothing is not known, and then all is kept."""
    costs = system.kernel.machine.costs
    for verb, ms in (("read", 1), ("write", 2)):
        costs.link(0, verb).bytes_s = costs.frame_bytes * 1000 / ms


class Waits(KernelMachine):
    core: ClassVar[CoreMaker] = Core
    tiers: ClassVar[dict[str, Any]] = {"dram": 12}

    def __init__(self) -> None:
        super().__init__()
        self.system.record = True
        links_cost(self.system)
        self.ends: dict[int, int] = {}  # by cid: deadline of the wait it is in, 0: none
        self.numbers: dict[int, int] = {}  # by cid: number of the wait that it was in last

    # Rules of the other machine that would crowd out those which this one is about.
    score = forward = renice = wait = cancel_a_wait = fork = completion_repeats = None  # type: ignore[assignment]

    # -- helpers ----------------------------------------------------------------------------------------------

    def waiting(self) -> list[Mirror]:
        self.settle()
        return [m for m in self.contexts if m.cid in self.ends]

    def free(self, which: int, generates: bool) -> Mirror | None:
        """One that does not wait for a tool and has no call that waits for its turn; that generates, if any does."""
        self.settle()
        late = {cid for _, _, cid, _ in self.later}
        free = [m for m in self.contexts if m.cid not in self.ends and m.cid not in late]
        chosen = [m for m in free if bool(m.request) is generates] or free
        return chosen[which % len(chosen)] if chosen else None

    def pick(self, index: int) -> Mirror | None:
        """For the rules of the other machine: none of them knows of waits."""
        mirror = super().pick(index)
        return None if mirror is not None and mirror.cid in self.ends else mirror

    # -- rules ------------------------------------------------------------------------------------------------

    @rule(
        which=st.integers(0, 9), tool=st.sampled_from("abc"), eta=st.sampled_from([-1, 0, 1, 5]),
        deadline=st.sampled_from([-1, -1, 2, 4]),
    )  # fmt: skip
    def wait_tool(self, which: int, tool: str, eta: int, deadline: int) -> None:
        mirror = self.free(which, generates=False)
        if mirror is None:
            return
        if mirror.request:
            with pytest.raises(Errno) as error:
                mirror.client.result(mirror.client.post("wait_tool", mirror.ctx, tool, eta, deadline))
            assert error.value.code is E.EBUSY
            return
        said = mirror.client.result(mirror.client.post("wait_tool", mirror.ctx, tool, eta, deadline))
        assert said.wait > self.numbers.get(mirror.cid, 0)
        self.numbers[mirror.cid] = said.wait
        self.ends[mirror.cid] = self.system.now_ns + deadline * MS if deadline >= 0 else 0

    @rule(policy=st.sampled_from(sorted(POLICIES)), ttl_ms=st.sampled_from([0, 2, 2000]))
    @precondition(lambda self: any(client.uid == 1000 for client in self.clients))
    def change_wait_policy(self, policy: str, ttl_ms: int) -> None:
        owner = next(client for client in self.clients if client.uid == 1000)
        owner.result(owner.post("sysctl", "wait.policy", policy))
        owner.result(owner.post("sysctl", "wait.ttl_ms", ttl_ms))

    @rule(
        which=st.integers(0, 9),
        answer=st.lists(st.integers(0, 3), max_size=6),
        by_cid=st.booleans(),
        later=st.booleans(),
    )
    @precondition(lambda self: self.ends)
    def resume(self, which: int, answer: list[int], by_cid: bool, later: bool) -> None:
        chosen = self.waiting()
        if not chosen:
            return
        mirror = chosen[which % len(chosen)]
        ctx, cid = (0, mirror.cid) if by_cid else (mirror.ctx, 0)
        names = (ctx, 0, ints(answer), "", (), cid, later)
        request = mirror.client.post("resume", *names)
        if len(mirror.tokens) + len(answer) > ROOM:
            assert mirror.client.replies[request].code == E.E2BIG
            return
        mirror.tokens += answer
        assert mirror.client.result(request).tokens == len(mirror.tokens)
        del self.ends[mirror.cid]

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.numbers)
    def resume_again(self, which: int) -> None:
        """An answer to a wait that is over changes nothing."""
        self.settle()
        over = [m for m in self.contexts if m.cid in self.numbers and m.cid not in self.ends]
        if over:
            mirror = over[which % len(over)]
            request = mirror.client.post("resume", mirror.ctx, self.numbers[mirror.cid], ints([1]))
            assert mirror.client.replies[request].code == E.ESTALE

    @rule(which=st.integers(0, 9), name=st.sampled_from(["append", "generate", "forward", "score", "inject"]))
    @precondition(lambda self: self.ends)
    def refused(self, which: int, name: str) -> None:
        chosen = self.waiting()
        if chosen:
            mirror = chosen[which % len(chosen)]
            more = (3,) if name in ("generate", "forward") else (ints([1]),)
            request = mirror.client.post(name, mirror.ctx, *more)
            assert mirror.client.replies[request].code == E.EBUSY

    @rule(which=st.integers(0, 9), keep=st.integers(0, 40))
    @precondition(lambda self: self.ends)
    def truncate_while_waiting(self, which: int, keep: int) -> None:
        chosen = self.waiting()
        if chosen:
            mirror = chosen[which % len(chosen)]
            keep %= len(mirror.tokens) + 1
            request = mirror.client.post("truncate", mirror.ctx, keep)
            self.system.run(until=lambda: request in mirror.client.replies)
            mirror.tokens = mirror.tokens[:keep]

    @rule(which=st.integers(0, 9), name=st.sampled_from(["demote", "prefetch"]))
    @precondition(lambda self: self.ends)
    def move(self, which: int, name: str) -> None:
        chosen = self.waiting()
        if chosen:
            mirror = chosen[which % len(chosen)]
            mirror.client.post(name, mirror.ctx, "dram" if name == "demote" else "hbm")

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.ends)
    def stop_while_waiting(self, which: int) -> None:
        chosen = self.waiting()
        if chosen:
            mirror = chosen[which % len(chosen)]
            stopping = mirror.pid not in self.stopped
            mirror.client.result(mirror.client.post("kill", mirror.pid, 19 if stopping else 18))
            if stopping:
                self.stopped[mirror.pid] = mirror.client
            else:
                del self.stopped[mirror.pid]

    @rule(ms=st.integers(1, 4))
    def time_passes(self, ms: int) -> None:
        self.system.advance(ms * MS)
        self.settle()

    @rule(which=st.integers(0, 9), more=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def inject(self, which: int, more: list[int]) -> None:
        """Into a generation that is known not to be over: what it says from there on is another thing."""
        mirror = self.free(which, generates=True)
        if mirror is None or not mirror.request or mirror.request in mirror.client.replies:
            return
        job = self.system.kernel.machine.contexts[Cid(mirror.cid)].job
        if job is None or job.ending or mirror.logprobs or job.args.temperature or job.args.repetition_penalty != 1.0:
            return  # those are tests/null/test_inject.py's
        if len(mirror.tokens) + len(mirror.expected) + len(more) > ROOM:
            return
        request = mirror.client.post("inject", mirror.ctx, ints(more))
        self.system.run(until=lambda: request in mirror.client.replies, limit=200)
        said = mirror.client.result(request)
        result = mirror.client.replies.get(mirror.request)
        sampled = mirror.client.streamed.get(mirror.request, [])
        if result is None:
            assert said.tokens == len(mirror.tokens) + len(sampled) + len(more)
        # From here on it is followed by what the log says, not by what the generation would have said.
        slot = self.system.kernel.machine.contexts[Cid(mirror.cid)].slot
        log = list(memoryview(self.system.core.read_log(slot, 0, said.tokens)).cast("i"))
        assert log[-len(more) :] == more
        left = len(mirror.expected) - len(sampled)
        mirror.expected = sampled + (reference_tokens(log, left) if left > 0 else [])
        if result is None:
            mirror.client.call("cancel", mirror.request)
        self.system.run(until=lambda: mirror.request in mirror.client.replies, limit=200)
        answer = mirror.client.result(mirror.request)
        got = list(memoryview(answer.tokens).cast("i"))
        assert got == mirror.expected[: len(got)] and sum(n for _, n in answer.injected) == len(more)
        log = list(memoryview(self.system.core.read_log(slot, 0, answer.tokens_total)).cast("i"))
        at = len(mirror.tokens) + answer.injected[0][0]
        assert log[at : at + len(more)] == more
        mirror.tokens, mirror.request = log, 0

    # -- what must hold ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        super().settle()
        now = self.system.now_ns
        alive = {m.cid for m in self.contexts}
        self.ends = {cid: end for cid, end in self.ends.items() if cid in alive and not 0 < end <= now}

    def teardown(self) -> None:
        log = list(self.system.log)
        super().teardown()
        replayed(self, log)


def replayed(machine: Waits, log: list[tuple[int, Event, list[Any]]]) -> None:
    """The same events at the same times once more: the same effects."""
    again = SimulatedSystem(
        frames=FRAMES, block_tokens=BLOCK, window_tokens=WINDOW, devices=machine.devices, core=machine.core, max_contexts=10,
        sysctl={"sched.step_tokens": 9, "sched.max_running": 4}, **machine.tiers,
    )  # fmt: skip
    links_cost(again)
    for now_ns, event, effects in log:
        assert again.kernel.step(event, now_ns) == effects, event


TestWaits = Waits.TestCase
TestWaits.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip


@pytest.mark.parametrize("half", range(2))
def test_a_hundred_interleavings(half: int) -> None:
    """Drawn evenly, so that each of them waits, answers, interrupts, stops, kills and breaks something."""
    counts: Counter[str] = Counter()
    for seed in range(50 * half, 50 * half + 50):
        rng = random.Random(seed)
        machine = Waits()
        prompts = [[rng.randrange(4) for _ in range(rng.randrange(1, 16))] for _ in range(4)]
        machine.begin(prompts, rng.choice(orders.names()), rng.choice([0, 1]))
        policy = rng.choice(sorted(POLICIES))
        machine.change_wait_policy(policy, rng.choice([0, 2, 2000]))
        for _ in range(60):
            step(machine, rng)
        machine.teardown()
        counts.update(machine.system.kernel.machine.counters)
        counts[f"under {policy}"] += machine.system.kernel.machine.counters["tool_waits"]
        kills = [e.args for _, e, _ in machine.system.log if isinstance(e, Syscall) and e.name == "kill"]
        counts.update(f"signal {args[1]}" for args in kills)
    for name in (
        "tool_waits_answered",
        "tool_waits_late",
        "tool_waits_keep",
        "tool_waits_demote",
        "tool_waits_drop",
        "injected_tokens",
        "exec_failed",
        "driver_deaths",
        "wait_prefetches",
        *(f"under {policy}" for policy in POLICIES),
        *(f"signal {number}" for number in (9, 15, 18, 19)),
    ):
        assert counts[name] > 0, name


def kill(m: Waits, which: int, rng: random.Random) -> None:
    if rng.random() < 0.3 and any(family.alive for family in m.families.values()):
        m.end_a_child(which, rng.randrange(4), rng.choice([0, 9, 15]), 0)


def step(m: Waits, rng: random.Random) -> None:
    """One thing happens."""
    which = rng.randrange(10)

    def tokens(least: int, most: int) -> list[int]:
        return [rng.randrange(4) for _ in range(rng.randrange(least, most + 1))]

    actions: list[Callable[[], object]] = [
        lambda: m.generate(which, rng.randrange(12), 0, 0.0, (1.0, 0.0, 0.0), 0),
        lambda: m.generate(which, rng.randrange(12), 1, 0.9, (1.0, 0.0, 0.0), 0),
        lambda: m.wait_tool(which, rng.choice("abc"), rng.choice([-1, 1, 5]), rng.choice([-1, -1, 2, 4])),
        lambda: m.wait_tool(which, rng.choice("abc"), rng.choice([-1, 1, 5]), rng.choice([-1, -1, 2, 4])),
        lambda: m.resume(which, tokens(0, 3), rng.random() < 0.5, rng.random() < 0.5) if m.ends else None,
        lambda: m.resume(which, tokens(0, 3), rng.random() < 0.5, rng.random() < 0.5) if m.ends else None,
        lambda: m.resume_again(which) if m.numbers else None,
        lambda: m.refused(which, rng.choice(["append", "generate", "inject"])) if m.ends else None,
        lambda: m.inject(which, tokens(1, 2)),
        lambda: m.inject(which, tokens(1, 2)),
        lambda: m.append(which, tokens(1, 5), rng.random() < 0.5),
        lambda: m.truncate_while_waiting(which, rng.randrange(40)) if m.ends else None,
        lambda: m.move(which, rng.choice(["demote", "prefetch"])) if m.ends else None,
        lambda: m.stop_and_continue(which),
        lambda: m.stop_while_waiting(which) if m.ends else None,
        lambda: m.time_passes(rng.randrange(1, 5)),
        lambda: m.time_passes(rng.randrange(1, 5)),
        lambda: m.alloc(which, tokens(1, 16), 0) if rng.random() < 0.5 else None,
        lambda: m.spawn(which, 0, rng.randrange(4)) if rng.random() < 0.3 else None,
        lambda: kill(m, which, rng),
        lambda: m.release(which) if len(m.contexts) > 2 and rng.random() < 0.3 else None,
        lambda: m.fail_pass(0) if m.busy() else None,
        lambda: m.driver_dies(0, rng.random() < 0.5, rng.choice(["kept", "lost"])) if rng.random() < 0.3 else None,
        *[lambda: m.tick([rng.randrange(6), 0])] * 6,
        *[lambda: [m.system.tick(d) for d in range(len(m.system.devices))]] * 3,
    ]
    rng.choice(actions)()
