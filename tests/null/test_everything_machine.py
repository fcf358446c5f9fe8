"""Tool waits, scheduling policies, groups and load control together, over tiers whose drivers fail.

Whatever happens in whatever order: after every step fsck is content (the system looks, and with it every group's limit to the
frame), every call is answered once, and what a generation says is what the model says after its log.  With the limits left
in place and nothing stopped any more, everybody is answered; at the end every frame is back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from attnix.drivers.sim_memory import SimTier
from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.errors import E
from attnix.kernel.events import Event, Exec, Pause, Plug, Reply, Resume, StopAt, Unplug
from attnix.kernel.evict import registry as evictions
from attnix.kernel.order import registry as orders
from attnix.kernel.wait.registry import POLICIES as WAIT_POLICIES
from attnix.simulated import CoreMaker, SimulatedClient, SimulatedSystem, ints, tokens_of

FRAMES, BLOCK, WINDOW, CONTEXTS = 9, 4, 40, 10
MS = 1_000_000
UIDS = (1000, 1001, 1002)  # the first owns the daemon
GROUPS = ("uid:1001", "uid:1001/a", "uid:1001/b", "uid:1002", "uid:1002/c")
SHORT = (E.EDQUOT, E.ENOMEM, E.E2BIG)
GONE = (E.ESTALE, E.EBADF, E.ENOENT, E.ECANCELED)
LIMITED = ("hbm", "hbm", "hbm", "dram", "nvme", "contexts", "tokens_s", "weight")
HARD = (0, 0, 1, 2, 3, 4, 6, 8)
MOVES: tuple[tuple[Any, ...], ...] = (
    ("demote", "dram"), ("demote", "nvme"), ("prefetch", "hbm"), ("prefetch", "dram"), ("prefetch", "hbm", 1), ("evict",),
    ("pin",), ("pin",), ("unpin",), ("advise", "willneed"), ("advise", "cold"), ("advise", "dontneed"),
)  # fmt: skip
KNOBS: dict[str, list[int | str]] = {
    "sched.policy": list(orders.names()),
    "wait.policy": list(WAIT_POLICIES),
    "wait.grace_ms": [0, 2, 100],
    "evict.policy": list(evictions.names()),
    "tier.write": ["back", "through", "selective"],
    "sched.tpot_ms": [0, 1],
    "sched.max_running": [1, 2, 4],
    "sched.max_wait_ms": [0, 1],
    "sched.max_queue": [0, 2],
    "sched.growth_permille": [0, 900],
    "load.thrash_high_permille": [1, 1000],
    "oom.after_ms": [0, 2, 2000],
    "tier.gates": [0, 1],
}


@dataclass(eq=False)
class Mirror:
    """The naive model of one context."""

    client: SimulatedClient
    ctx: int
    cid: int
    pid: int
    log: list[int] = field(default_factory=list)
    request: int = 0  # generation that runs, 0: none
    want: int = 0
    late: int = 0  # another call that has no answer yet, 0: none
    put: list[int] = field(default_factory=list)  # tokens injected since the generation began


class Everything(RuleBasedStateMachine):
    core: ClassVar[CoreMaker] = Core
    devices: ClassVar[int] = 1
    tiers: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.system = SimulatedSystem(
            frames=FRAMES, block_tokens=BLOCK, window_tokens=WINDOW, core=self.core, devices=self.devices,
            max_contexts=CONTEXTS, sysctl={"sched.step_tokens": 9, "sched.max_running": 4, "load.thrash_window_ms": 1},
            **self.tiers,
        )  # fmt: skip
        self.machine = self.system.kernel.machine
        for scheduler in self.machine.schedulers:
            scheduler.guard.fewest = 2
        for device in self.system.devices[: self.devices]:  # so that costs are learnt, and passes are limited
            device.ns_per_pass, device.ns_per_token = 400_000, 100_000
        step = self.system.step

        def slowly(event: Event) -> Any:
            self.system.now_ns += 100_000
            return step(event)

        self.system.step = slowly  # type: ignore[method-assign]
        self.owner = self.system.connect(1000)
        self.clients: list[SimulatedClient] = [self.system.connect(uid) for uid in UIDS]
        self.pids: dict[SimulatedClient, list[int]] = {c: [self.first(c)] for c in self.clients}
        self.contexts: list[Mirror] = []
        self.open: dict[tuple[SimulatedClient, int], Callable[[Reply], None]] = {}
        self.paused: set[SimulatedClient] = set()

    # -- helpers ----------------------------------------------------------------------------------------------

    def first(self, client: SimulatedClient) -> int:
        """Its first process."""
        return int(self.machine.connections[client.conn].pid)

    def pick(self, which: int, good: Callable[[Mirror], bool] = lambda _: True) -> Mirror | None:
        self.settle()
        found = [m for m in self.contexts if good(m)]
        return found[which % len(found)] if found else None

    def still(self, which: int) -> Mirror | None:
        """One that generates nothing and has every answer."""
        return self.pick(which, lambda m: not (m.request or m.late))

    def post(self, client: SimulatedClient, then: Callable[[Reply], None], name: str, *args: object) -> int:
        request = client.post(name, *args)
        self.open[client, request] = then
        return request

    def settle(self) -> None:
        """Take over what was answered: on one context in the order in which it happened."""
        for (client, request), then in sorted(self.open.items(), key=lambda item: -item[0][1]):
            reply = client.replies.get(request)
            if reply is not None:
                del self.open[client, request]
                then(reply)
        there = self.machine.contexts
        self.contexts = [m for m in self.contexts if m.cid in there and not there[m.cid].dying]  # type: ignore[index]

    def on(self, mirror: Mirror, codes: tuple[E, ...], done: Callable[[Any], None], name: str, *args: object) -> None:
        """A call on a context that may have to wait for its turn."""

        def then(reply: Reply) -> None:
            mirror.late = 0
            if reply.code:
                assert reply.code in (*codes, *GONE), f"{name}: {reply}"
            else:
                done(reply.result)

        mirror.late = self.post(mirror.client, then, name, *args)
        self.settle()

    def said(self, mirror: Mirror, reply: Reply) -> None:
        """A generation is over."""
        request, mirror.request = mirror.request, 0
        if reply.code:
            assert reply.code in (*SHORT, *GONE, E.EIO), reply
            assert not mirror.client.streamed.get(request), f"{reply} after tokens were streamed"
            put = 0
        else:
            result = reply.result
            got, log, put = tokens_of(result.tokens), list(mirror.log), 0  # type: ignore[union-attr]
            ranges = list(result.injected)  # type: ignore[union-attr]
            for k in range(len(got) + 1):
                while ranges and ranges[0][0] == k:
                    n = ranges.pop(0)[1]
                    log += mirror.put[put : put + n]
                    put += n
                if k < len(got):
                    assert reference_tokens(log, 1) == [got[k]], f"context {mirror.cid}: token {k} of {got} after {log}"
                    log.append(got[k])
            assert not ranges and result.tokens_total == len(log)  # type: ignore[union-attr]
            assert len(got) <= mirror.want and mirror.client.streamed.get(request, [])[: len(got)] == got
            mirror.log = log
        mirror.log += mirror.put[put:]
        mirror.put = []

    def busy(self) -> bool:
        return any(self.system.pending)

    # -- rules ------------------------------------------------------------------------------------------------

    @initialize(
        knobs=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in KNOBS.items()}),
        prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=16), min_size=1, max_size=5),
    )
    def begin(self, knobs: dict[str, int | str], prompts: list[list[int]]) -> None:
        for name, value in knobs.items():
            self.owner.call("sysctl", name, value)
        for k, prompt in enumerate(prompts):
            self.alloc(k, 0, prompt, "", 0)

    @rule(name=st.sampled_from(sorted(KNOBS)), value=st.integers(0, 20))
    def retune(self, name: str, value: int) -> None:
        self.owner.call("sysctl", name, KNOBS[name][value % len(KNOBS[name])])

    @rule(
        which=st.integers(0, 9), process=st.integers(0, 9), prompt=st.lists(st.integers(0, 2), max_size=20),
        domain=st.sampled_from(["", "", "sub"]), device=st.integers(0, 1),
    )  # fmt: skip
    def alloc(self, which: int, process: int, prompt: list[int], domain: str, device: int) -> None:
        client = self.clients[which % len(self.clients)]
        pids = self.pids[client]
        name = f"hbm{device}" if device < self.devices else ""
        request = client.post("alloc_context", pids[process % len(pids)], name, f"uid:{client.uid}/d" if domain else "")
        reply = client.replies[request]
        if reply.code:
            assert reply.code in SHORT
            return
        made = client.result(request)
        pid = self.machine.contexts[made.cid].process.pid
        self.contexts.append(Mirror(client, made.ctx, made.cid, pid))
        if prompt:
            self.write(self.contexts[-1], prompt)

    def write(self, mirror: Mirror, more: list[int], later: bool = False) -> None:
        def done(result: Any) -> None:
            mirror.log += more
            assert result.tokens == len(mirror.log)

        self.on(mirror, (*SHORT, E.EAGAIN, E.EBUSY), done, "append", mirror.ctx, ints(more), "", (), later)

    @rule(which=st.integers(0, 9), more=st.lists(st.integers(0, 2), min_size=1, max_size=12), later=st.booleans())
    def append(self, which: int, more: list[int], later: bool) -> None:
        if mirror := self.still(which):
            self.write(mirror, more, later)

    @rule(
        which=st.integers(0, 9),
        n=st.integers(0, 20),
        ttft=st.sampled_from([0, 0, 1, 50]),
        tpot=st.sampled_from([0, 0, 1, 9]),
    )
    def generate(self, which: int, n: int, ttft: int, tpot: int) -> None:
        mirror = self.pick(which, lambda m: not (m.request or m.late) and bool(m.log))
        if mirror is None:
            return
        chosen = mirror
        rest = (0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 0, (), b"", True, True, ttft, tpot)
        request = mirror.client.post("generate", mirror.ctx, n, *rest)
        reply = mirror.client.replies.get(request)
        if reply is not None and reply.code in (E.EBUSY, E.EAGAIN, E.EHOSTDOWN):
            return
        mirror.request, mirror.want, mirror.put = request, n, []
        self.open[mirror.client, request] = lambda reply: self.said(chosen, reply)
        self.settle()

    @rule(which=st.integers(0, 9), more=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def inject(self, which: int, more: list[int]) -> None:
        mirror = self.pick(which, lambda m: bool(m.request) and not m.late)
        if mirror is None:
            return
        chosen = mirror

        def done(result: Any) -> None:
            chosen.put += more
            if not chosen.request:
                chosen.log += chosen.put
                chosen.put = []

        self.on(mirror, (*SHORT, E.EBUSY, E.EAGAIN), done, "inject", mirror.ctx, ints(more))

    @rule(which=st.integers(0, 9), n=st.integers(1, 3))
    def fork(self, which: int, n: int) -> None:
        mirror = self.still(which)
        if mirror is None:
            return
        source = mirror

        def done(made: Any) -> None:
            for ctx, cid in zip(made.ctxs, made.cids, strict=True):
                self.contexts.append(Mirror(source.client, ctx, cid, source.pid, list(source.log)))

        self.on(mirror, SHORT, done, "fork", mirror.ctx, n)

    @rule(which=st.integers(0, 9), keep=st.integers(0, 40))
    def truncate(self, which: int, keep: int) -> None:
        if mirror := self.still(which):
            chosen, keep = mirror, keep % (len(mirror.log) + 1)

            def done(_: Any) -> None:
                del chosen.log[keep:]

            self.on(mirror, (), done, "truncate", mirror.ctx, keep)

    @rule(
        which=st.integers(0, 9),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=6),
        name=st.sampled_from(["score", "forward"]),
    )
    def ask(self, which: int, tail: list[int], name: str) -> None:
        if mirror := self.still(which):
            args = (ints(tail),) if name == "score" else (len(tail),)
            codes = (*SHORT, E.EAGAIN, E.EBUSY, E.EINVAL, E.EIO)
            self.on(mirror, codes, lambda _: None, name, mirror.ctx, *args)

    @rule(which=st.integers(0, 9), keep=st.integers(-1, 4))
    def end(self, which: int, keep: int) -> None:
        """Cancel a generation, or stop it at a string."""
        mirror = self.pick(which, lambda m: bool(m.request))
        if mirror is None:
            return
        if keep < 0:
            mirror.client.post("cancel", mirror.request)
        elif not mirror.put and not mirror.late:
            keep = min(keep, len(mirror.client.streamed.get(mirror.request, [])))
            self.system.step(StopAt(mirror.client.conn, mirror.request, keep))
        self.settle()

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: len(self.contexts) > 2)
    def release(self, which: int) -> None:
        if mirror := self.pick(which):
            mirror.client.post("release", mirror.ctx)
            self.settle()

    # -- tools ------------------------------------------------------------------------------------------------

    @rule(
        which=st.integers(0, 9), tool=st.sampled_from("ab"), eta=st.sampled_from([-1, 0, 1, 5, 30]),
        deadline=st.sampled_from([-1, -1, 2, 20]),
    )  # fmt: skip
    def wait_tool(self, which: int, tool: str, eta: int, deadline: int) -> None:
        if mirror := self.still(which):
            self.on(mirror, (E.EBUSY,), lambda _: None, "wait_tool", mirror.ctx, tool, eta, deadline)

    @rule(which=st.integers(0, 9), answer=st.lists(st.integers(0, 2), max_size=6), later=st.booleans())
    def resume(self, which: int, answer: list[int], later: bool) -> None:
        waits = self.machine.contexts
        mirror = self.pick(which, lambda m: not (m.request or m.late) and waits[m.cid].wait is not None)  # type: ignore[index]
        if mirror is None:
            return
        chosen = mirror

        def done(result: Any) -> None:
            chosen.log += answer
            assert result.tokens == len(chosen.log)

        self.on(mirror, (*SHORT, E.EINVAL), done, "resume", mirror.ctx, 0, ints(answer), "", (), 0, later)

    # -- groups and processes -----------------------------------------------------------------------------------

    @rule(
        group=st.sampled_from(GROUPS),
        resource=st.sampled_from(LIMITED), hard=st.sampled_from(HARD), soft=st.sampled_from([-1, 0, 1, 2, 4]),
    )  # fmt: skip
    def setlimit(self, group: str, resource: str, hard: int, soft: int) -> None:
        soft = soft if resource in ("hbm", "dram", "nvme") else -1
        hard *= 20 if resource == "tokens_s" else 1
        reply = self.owner.replies[self.owner.post("setlimit", group, resource, soft, hard)]
        assert reply.code in (0, E.EBUSY, E.EINVAL)

    @rule(
        which=st.integers(0, 9),
        sub=st.sampled_from(["", "a", "b", "c"]),
        source=st.integers(0, 9),
        nice=st.integers(-20, 19),
    )
    def spawn(self, which: int, sub: str, source: int, nice: int) -> None:
        client = self.clients[which % len(self.clients)]
        mirror = self.pick(source, lambda m: m.client is client and not (m.request or m.late))
        if len(self.pids[client]) > 3:
            return
        group = f"uid:{client.uid}/{sub}" if sub else ""

        def done(made: Any) -> None:
            self.pids[client].append(made.pid)
            if mirror is not None:
                self.contexts.append(Mirror(client, made.ctx, made.cid, made.pid, list(mirror.log)))

        args = ("child", nice, mirror.ctx if mirror else 0, group)
        if mirror is not None:
            self.on(mirror, SHORT, done, "spawn", *args)
        else:
            request = client.post("spawn", *args)
            if client.replies[request].code:
                assert client.replies[request].code in (*SHORT, E.EINVAL, E.EAGAIN), client.replies[request]
                return
            done(client.result(request))

    @rule(which=st.integers(0, 9), process=st.integers(0, 9), signal=st.sampled_from([9, 19, 19, 18, 18, 18]))
    def kill(self, which: int, process: int, signal: int) -> None:
        client = self.clients[which % len(self.clients)]
        pids = self.pids[client]
        pid = pids[process % len(pids)]
        if signal == 9 and pid == pids[0]:
            return
        client.call("kill", pid, signal)
        if signal == 9:
            pids.remove(pid)
            client.post("wait", pid)
        self.settle()

    @rule(which=st.integers(0, 9), process=st.integers(0, 9), nice=st.integers(-20, 19))
    def renice(self, which: int, process: int, nice: int) -> None:
        client = self.clients[which % len(self.clients)]
        pids = self.pids[client]
        client.call("setpriority", pids[process % len(pids)], nice)

    @rule(which=st.integers(0, 9))
    def pause_or_resume(self, which: int) -> None:
        client = self.clients[which % len(self.clients)]
        self.system.step(Resume(client.conn) if client in self.paused else Pause(client.conn))
        self.paused ^= {client}
        self.settle()

    @rule(which=st.integers(0, 9))
    def disconnect(self, which: int) -> None:
        """And somebody of the same uid comes."""
        self.settle()
        index = which % len(self.clients)
        client = self.clients[index]
        self.system.disconnect(client)
        self.open = {key: then for key, then in self.open.items() if key[0] is not client}
        self.paused.discard(client)
        self.contexts = [m for m in self.contexts if m.client is not client]
        del self.pids[client]
        self.clients[index] = self.system.connect(client.uid)
        self.pids[self.clients[index]] = [self.first(self.clients[index])]

    # -- memory -------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 9), what=st.sampled_from(MOVES))
    def memory(self, which: int, what: tuple[Any, ...]) -> None:
        if mirror := self.pick(which):
            self.post(mirror.client, lambda _: None, what[0], mirror.ctx, *what[1:])

    # -- time, and what goes wrong ------------------------------------------------------------------------------

    @rule(count=st.integers(1, 8))
    @precondition(lambda self: self.busy())
    def tick(self, count: int) -> None:
        for _ in range(count):
            for device in range(len(self.system.devices)):
                self.system.tick(device)
        self.settle()

    @rule(which=st.integers(0, 9), count=st.integers(1, 4))
    @precondition(lambda self: self.busy())
    def tick_one(self, which: int, count: int) -> None:
        for _ in range(count):
            self.system.tick(which % len(self.system.devices))
        self.settle()

    @rule(ms=st.sampled_from([1, 3, 20, 300, 3000]))
    def time_passes(self, ms: int) -> None:
        self.system.advance(ms * MS)
        self.settle()

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.busy())
    def fail(self, which: int) -> None:
        """The oldest pass or transfer of a device; never so often that somebody is to blame."""
        device = which % len(self.system.devices)
        known = self.machine.devices[device]
        if known.failures < 3 and not known.isolate:
            self.system.fail(device)
        self.settle()

    @rule(which=st.integers(0, 9), wrote=st.booleans(), arena=st.sampled_from(["kept", "kept", "lost"]))
    def driver_dies(self, which: int, wrote: bool, arena: str) -> None:
        device = which % len(self.system.devices)
        if self.system.devices[device] is not None:
            self.system.kill_driver(device, wrote, arena if device < self.devices else "kept")
        self.settle()

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.busy())
    def completion_repeats(self, which: int) -> None:
        device = which % len(self.system.devices)
        queue = self.system.pending[device]
        if queue and not (isinstance(queue[0], Exec) and not self.system.devices[device].is_open(queue[0])):
            done = self.system.perform(queue.popleft())
            self.system.step(done)
            self.system.step(done)
        self.settle()

    @rule(where=st.integers(0, 1 << 20), bit=st.integers(0, 7))
    def bit_rot(self, where: int, bit: int) -> None:
        tier = next((x for x in self.system.devices if isinstance(x, SimTier) and x.frames), None)
        if tier is not None and where % 2:
            frame = tier.frames[sorted(tier.frames)[where % len(tier.frames)]]
            frame[where % len(frame)] ^= 1 << bit
        elif self.system.dram:
            self.system.dram[where % len(self.system.dram)] ^= 1 << bit

    # -- what must be -------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_answered_twice(self) -> None:
        assert not self.system.double_replies

    @invariant()
    def nobody_is_ended(self) -> None:
        assert not self.machine.counters["oom_kills"]

    def everybody_is_answered(self, rounds: int) -> None:
        for _ in range(rounds):
            self.system.run()
            self.settle()
            if not self.open:
                return
            self.system.advance(2000 * MS)
            self.settle()
        names = [(client.uid, request) for client, request in self.open]
        states = [(s.queue, s.decoding, s.short) for s in self.machine.schedulers]
        raise AssertionError(f"no answer to {names}: {states}")

    def teardown(self) -> None:
        for client in sorted(self.paused, key=lambda c: c.conn):
            self.system.step(Resume(client.conn))
        for client, pids in self.pids.items():
            for pid in pids:
                client.call("kill", pid, 18)
        self.everybody_is_answered(100)
        for mirror in self.contexts:
            slot = self.machine.contexts[mirror.cid].slot  # type: ignore[index]
            log = self.system.core.read_log(slot, 0, self.system.core.slot_row(slot).tokens)
            assert tokens_of(log) == mirror.log, f"context {mirror.cid}"
        for client in self.clients:
            self.system.disconnect(client)
        self.system.run()
        m = self.machine
        assert not m.contexts and not m.errands.open and not m.interrupts.pending and not m.ending
        assert not m.lifetimes.waiting and all(not s.queue and not s.decoding and not len(s.idle) for s in m.schedulers)
        for group in GROUPS:
            for resource in ("hbm", "dram", "nvme"):
                self.owner.call("setlimit", group, resource, 0, 0)
        self.system.run()
        for device, known in enumerate(m.devices):
            assert self.system.available(device) == known.capacity, f"frames of {known.name} leaked"


class Staged(Everything):
    tiers: ClassVar[dict[str, Any]] = {"dram": 7, "nvme": 12}


class Direct(Everything):
    tiers: ClassVar[dict[str, Any]] = {"dram": 3, "nvme": 16, "direct": True}


class Two(Everything):
    devices: ClassVar[int] = 2
    tiers: ClassVar[dict[str, Any]] = {"dram": 7}


MACHINES = (Everything, Staged, Direct, Two)


@pytest.mark.parametrize("machine", MACHINES)
def test_everything(machine: type[Everything]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max(1, settings().max_examples // 10), stateful_step_count=40, deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("machine", MACHINES)
def test_drawn_evenly(machine: type[Everything], seed: int) -> None:
    """Long ones, in which much is computed: what hypothesis draws seldom comes that far."""
    rng = random.Random(f"{machine.__name__} {seed}")
    m = machine()
    knobs = {name: rng.choice(values) for name, values in KNOBS.items()}
    m.begin(knobs, [[rng.randrange(3) for _ in range(rng.randint(1, 16))] for _ in range(rng.randint(1, 5))])
    for _ in range(120):
        together = rng.randint(2, 4) if rng.random() < 0.1 else 0  # some come in one piece
        if together:
            m.system.step(Plug())
        for _ in range(max(1, together)):
            draw(m, rng)
        if together:
            m.system.step(Unplug())
        m.nothing_is_answered_twice()
        m.nobody_is_ended()
    m.teardown()


def draw(m: Everything, rng: random.Random) -> None:
    """One thing happens."""
    which, process = rng.randrange(10), rng.randrange(10)

    def tokens(least: int, most: int) -> list[int]:
        return [rng.randrange(3) for _ in range(rng.randint(least, most))]

    busy = m.busy()
    actions: list[tuple[int, Callable[[], object]]] = [
        (10, lambda: m.alloc(which, process, tokens(0, 20), rng.choice(["", "", "sub"]), rng.randrange(2))),
        (8, lambda: m.append(which, tokens(1, 12), rng.random() < 0.5)),
        (22, lambda: m.generate(which, rng.randint(0, 20), rng.choice([0, 0, 0, 1, 50]), rng.choice([0, 0, 0, 1, 9]))),
        (5, lambda: m.inject(which, tokens(1, 3))),
        (5, lambda: m.fork(which, rng.randint(1, 3))),
        (3, lambda: m.truncate(which, rng.randrange(41))),
        (5, lambda: m.ask(which, tokens(1, 6), rng.choice(["score", "forward"]))),
        (3, lambda: m.end(which, rng.randint(-1, 4))),
        (3 if len(m.contexts) > 2 else 0, lambda: m.release(which)),
        (12, lambda: m.wait_tool(which, rng.choice("ab"), rng.choice([-1, 0, 1, 5, 30]), rng.choice([-1, -1, 2, 20]))),
        (9, lambda: m.resume(which, tokens(0, 6), rng.random() < 0.5)),
        (
            8,
            lambda: m.setlimit(rng.choice(GROUPS), rng.choice(LIMITED), rng.choice(HARD), rng.choice([-1, 0, 1, 2, 4])),
        ),
        (4, lambda: m.spawn(which, rng.choice(["", "a", "b", "c"]), process, rng.randint(-20, 19))),
        (6, lambda: m.kill(which, process, rng.choice([9, 19, 19, 18, 18, 18]))),
        (2, lambda: m.renice(which, process, rng.randint(-20, 19))),
        (4, lambda: m.pause_or_resume(which)),
        (1, lambda: m.disconnect(which)),
        (8, lambda: m.memory(which, rng.choice(MOVES))),
        (40 if busy else 0, lambda: m.tick(rng.randint(1, 8))),
        (12 if busy else 0, lambda: m.tick_one(which, rng.randint(1, 4))),
        (9, lambda: m.time_passes(rng.choice([1, 3, 20, 300, 3000]))),
        (6 if busy else 0, lambda: m.fail(which)),
        (4, lambda: m.driver_dies(which, rng.random() < 0.5, rng.choice(["kept", "kept", "lost"]))),
        (2 if busy else 0, lambda: m.completion_repeats(which)),
        (2, lambda: m.bit_rot(rng.randrange(1 << 20), rng.randrange(8))),
        (4, lambda: m.retune(rng.choice(sorted(KNOBS)), rng.randrange(20))),
    ]
    _, act = rng.choices(actions, [weight for weight, _ in actions])[0]
    act()
