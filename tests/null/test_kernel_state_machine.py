"""The whole kernel against a naive model: a context is a list of tokens, a generation is what the model says after it.

Any interleaving of calls, completions, failed passes, dead drivers, lost arenas and disconnects must stream exactly the
tokens of the same requests run alone, cold, on an unlimited pool (the oracle reads no frame and no page table), answer
every request once, break no invariant after any step, and give every frame back.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attnix.drivers.sim_memory import SimTier
from attnix.drivers.sim_model import SamplingChoice, reference_distribution, reference_scores, reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.kernel.events import Exec, ExecDone, Pause, Resume, StopAt, Transfer, TransferDone
from attnix.kernel.order import registry as orders
from attnix.kernel.tag import GATE_FAILED, gate_value
from attnix.kernel.twin import TwinCore
from attnix.simulated import CoreMaker, SimulatedClient, SimulatedSystem, ints, tokens_of

FRAMES, BLOCK, WINDOW = 9, 4, 40
ROOM = min(WINDOW, FRAMES * BLOCK)  # tokens a log may be given
LIMIT = min(WINDOW, FRAMES * BLOCK + 1)  # tokens a generation may bring it to: the last needs no frame


@dataclass(eq=False)
class Mirror:
    """The naive model of one context."""

    client: SimulatedClient
    ctx: int
    cid: int
    pid: int
    tokens: list[int]
    request: int = 0  # generation that runs, 0 = none
    want: int = 0
    seed: int = 0
    temperature: float = 0.0
    expected: list[int] = field(default_factory=list)
    logprobs: int = 0
    gone: bool = False


@dataclass(eq=False)
class Family:
    """The naive model of the processes of one client: its first and that one's children."""

    alive: list[int] = field(default_factory=list)
    ended: list[tuple[int, int]] = field(default_factory=list)  # (pid, exit code), in the order in which they ended
    waits: list[tuple[int, int]] = field(default_factory=list)  # (request, pid or 0) without an answer
    answers: dict[int, int] = field(default_factory=dict)  # request -> pid that it must get, or minus the errno

    def wait(self, request: int, pid: int) -> None:
        if not any(pid in (0, child) for child in (*self.alive, *(p for p, _ in self.ended))):
            self.answers[request] = -E.ENOENT
            return
        for index, (ended, _) in enumerate(self.ended):
            if pid in (0, ended):
                del self.ended[index]
                self.answers[request] = ended
                self.bereave(ended)
                return
        self.waits.append((request, pid))

    def end(self, pid: int, code: int) -> None:
        self.alive.remove(pid)
        self.ended.append((pid, code))
        for wanted in (pid, 0):
            for request, whom in self.waits:
                if whom == wanted:
                    self.waits.remove((request, whom))
                    self.wait(request, pid)
                    return

    def bereave(self, pid: int) -> None:
        """Those who wait for a child that another wait took, or for any when there is none left."""
        for request, whom in self.waits[:]:
            if whom == pid or not (self.alive or self.ended):
                self.waits.remove((request, whom))
                self.answers[request] = -E.ENOENT


class KernelMachine(RuleBasedStateMachine):
    devices: ClassVar[int] = 1
    core: ClassVar[CoreMaker] = TwinCore
    hash_bits: ClassVar[int] = 128
    tiers: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.system = SimulatedSystem(
            frames=FRAMES, block_tokens=BLOCK, window_tokens=WINDOW, devices=self.devices, core=self.core,
            hash_bits=self.hash_bits, max_contexts=10, sysctl={"sched.step_tokens": 9, "sched.max_running": 4},
            **self.tiers,
        )  # fmt: skip
        for device in self.system.devices[: self.devices]:  # so that costs are learnt, and passes are limited
            device.ns_per_pass, device.ns_per_token = 400_000, 100_000
        self.clients: list[SimulatedClient] = []
        self.contexts: list[Mirror] = []
        self.scores: list[tuple[SimulatedClient, int, list[float]]] = []
        self.stopped: dict[int, SimulatedClient] = {}  # pid -> its client
        self.paused: set[int] = set()
        self.families: dict[SimulatedClient, Family] = {}
        self.later: list[tuple[SimulatedClient, int, int, int]] = []  # (client, request, cid, log length it must say)
        self.last_done: ExecDone | None = None

    # -- helpers ----------------------------------------------------------------------------------------------

    def pick(self, index: int) -> Mirror | None:
        self.settle()
        return self.contexts[index % len(self.contexts)] if self.contexts else None

    def settle(self) -> None:
        """Take over what finished generations have left in their contexts."""
        for mirror in self.contexts:
            if mirror.request and mirror.request in mirror.client.replies:
                if mirror.client.replies[mirror.request].code == E.ECANCELED:  # while it waited for its turn
                    mirror.request = 0
                    continue
                result = mirror.client.result(mirror.request)
                got = tokens_of(result.tokens)
                if mirror.logprobs:
                    said = reference_scores(mirror.tokens + got, len(mirror.tokens)) if got else []
                    assert [entry[0] for entry in result.logprobs] == pytest.approx(said, abs=1e-4)
                    assert all(len(entry[1]) == 4 * mirror.logprobs for entry in result.logprobs)
                assert result.reason in ("length", "cancelled", "killed", "stop")
                assert got == mirror.expected[: len(got)], f"context {mirror.cid}: {got} is not {mirror.expected}"
                if result.reason == "length":
                    assert len(got) == len(mirror.expected)
                streamed = mirror.client.streamed.get(mirror.request, [])
                assert streamed[: len(got)] == got
                mirror.tokens += got
                mirror.request = 0
                assert result.tokens_total == len(mirror.tokens)
        self.contexts = [m for m in self.contexts if not m.gone]
        for client, request, cid, want in self.later[:]:
            reply = client.replies.get(request)
            if reply is None:
                continue
            self.later.remove((client, request, cid, want))
            if reply.code == E.ESTALE:
                assert all(m.cid != cid for m in self.contexts)
            elif want < 0:
                assert reply.code == -want
            else:
                assert client.result(request).tokens == want

    def expect(self, mirror: Mirror, request: int, want: int) -> None:
        """The answer to a call that may have to wait for its turn: a log length, or minus an errno."""
        self.later.append((mirror.client, request, mirror.cid, want))
        self.settle()

    def process_ended(self, client: SimulatedClient, pid: int) -> None:
        for mirror in self.contexts:
            mirror.gone = mirror.gone or mirror.pid == pid
        self.stopped.pop(pid, None)
        self.settle()

    def busy(self) -> bool:
        return any(self.system.pending)

    def forget(self, mirror: Mirror) -> None:
        mirror.gone = True
        self.settle()

    # -- rules ------------------------------------------------------------------------------------------------

    @initialize(
        prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=4),
        policy=st.sampled_from(orders.names()),
        tpot_ms=st.sampled_from([0, 1]),
    )
    def begin(self, prompts: list[list[int]], policy: str, tpot_ms: int) -> None:
        self.connect(1000)
        self.clients[0].call("sysctl", "sched.policy", policy)
        self.clients[0].call("sysctl", "sched.tpot_ms", tpot_ms)
        for prompt in prompts:
            self.alloc(0, prompt, 0)

    @rule(uid=st.sampled_from([1000, 1001]))
    @precondition(lambda self: len(self.clients) < 3)
    def connect(self, uid: int) -> None:
        self.clients.append(self.system.connect(uid))
        self.families[self.clients[-1]] = Family()

    @rule(
        which=st.integers(0, 9), prompt=st.lists(st.integers(0, 3), min_size=0, max_size=20), device=st.integers(0, 1)
    )
    @precondition(lambda self: self.clients)
    def alloc(self, which: int, prompt: list[int], device: int) -> None:
        client = self.clients[which % len(self.clients)]
        name = f"hbm{device}" if device < self.devices else ""
        if len(self.system.kernel.machine.contexts) >= 10:
            with pytest.raises(Errno) as error:
                client.call("alloc_context", 0, name)
            assert error.value.code is E.ENOMEM
            return
        made = client.call("alloc_context", 0, name)
        pid = self.system.kernel.machine.contexts[made.cid].process.pid
        self.contexts.append(Mirror(client, made.ctx, made.cid, pid, []))
        if prompt:
            client.result(client.post("append", made.ctx, ints(prompt)))
            self.contexts[-1].tokens += prompt

    @rule(which=st.integers(0, 9), more=st.lists(st.integers(0, 3), min_size=1, max_size=14), later=st.booleans())
    def append(self, which: int, more: list[int], later: bool) -> None:
        mirror = self.pick(which)
        if mirror is None:
            return
        if mirror.request and (not mirror.expected or any(cid == mirror.cid for _, _, cid, _ in self.later)):
            return  # by its turn the generation may be over, if it samples nothing, or be cancelled while both wait
        request = mirror.client.post("append", mirror.ctx, ints(more), "", (), later)
        if mirror.request:
            self.expect(mirror, request, -E.EBUSY)
        elif len(mirror.tokens) + len(more) > ROOM:
            self.expect(mirror, request, -E.E2BIG)
        else:
            mirror.tokens += more
            self.expect(mirror, request, len(mirror.tokens))

    @rule(which=st.integers(0, 9), n=st.integers(1, 3))
    def fork(self, which: int, n: int) -> None:
        mirror = self.pick(which)
        if mirror is None or mirror.request:
            return
        request = mirror.client.post("fork", mirror.ctx, n)
        self.system.run(until=lambda: request in mirror.client.replies)  # behind a truncate, when there is one
        if mirror.client.replies[request].code:
            assert mirror.client.replies[request].code == E.ENOMEM
            return
        made = mirror.client.result(request)
        for ctx, cid in zip(made.ctxs, made.cids, strict=True):
            self.contexts.append(Mirror(mirror.client, ctx, cid, mirror.pid, list(mirror.tokens)))

    @rule(
        which=st.integers(0, 9),
        n=st.integers(0, 24),
        seed=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 0.0, 0.9]),
        penalties=st.sampled_from([(1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.5, 0.5, 0.25)]),
        logprobs=st.sampled_from([0, 0, 3]),
    )
    def generate(
        self, which: int, n: int, seed: int, temperature: float, penalties: tuple[float, float, float], logprobs: int
    ) -> None:
        mirror = self.pick(which)
        if mirror is None or mirror.request:
            return
        request = mirror.client.post("generate", mirror.ctx, n, temperature, 0, 1.0, 0.0, seed, *penalties, logprobs)
        if not mirror.tokens:
            self.expect(mirror, request, -E.EINVAL)
            return
        count = max(0, min(n, LIMIT - len(mirror.tokens)))
        repetition, presence, frequency = penalties
        choice = SamplingChoice(
            temperature=temperature,
            seed=seed,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
        mirror.logprobs = logprobs
        mirror.request = request
        mirror.expected = reference_tokens(mirror.tokens, count, choice=choice)

    @rule(which=st.integers(0, 9), keep=st.integers(0, 40))
    def truncate(self, which: int, keep: int) -> None:
        mirror = self.pick(which)
        if mirror is None or mirror.request:
            return
        keep %= len(mirror.tokens) + 1
        self.expect(mirror, mirror.client.post("truncate", mirror.ctx, keep), keep)
        mirror.tokens = mirror.tokens[:keep]

    @rule(which=st.integers(0, 9), tail=st.lists(st.integers(0, 3), min_size=1, max_size=9))
    def score(self, which: int, tail: list[int]) -> None:
        mirror = self.pick(which)
        if mirror is None or mirror.request or not mirror.tokens or len(mirror.tokens) + len(tail) > ROOM:
            return
        request = mirror.client.post("score", mirror.ctx, ints(tail))
        reply = mirror.client.replies.get(request)
        if reply is not None and reply.code:
            assert reply.code == E.ENOMEM
            return
        self.scores.append((mirror.client, request, reference_scores(mirror.tokens + tail, len(mirror.tokens))))

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: len(self.contexts) > 2)
    def release(self, which: int) -> None:
        mirror = self.pick(which)
        if mirror is None:
            return
        mirror.client.result(mirror.client.post("release", mirror.ctx))
        self.forget(mirror)
        stale = mirror.client.post("stat", mirror.ctx)
        assert mirror.client.replies[stale].code == E.ESTALE

    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        mirror = self.pick(which)
        if mirror is None or not mirror.request:
            return
        mirror.client.result(mirror.client.post("cancel", mirror.request))

    @rule(which=st.integers(0, 9), keep=st.integers(0, 4))
    def stop_at(self, which: int, keep: int) -> None:
        mirror = self.pick(which)
        if mirror is None or not mirror.request:
            return
        keep = min(keep, len(mirror.client.streamed.get(mirror.request, [])))
        self.system.step(StopAt(mirror.client.conn, mirror.request, keep))

    @rule(counts=st.lists(st.integers(0, 12), min_size=2, max_size=2))
    @precondition(lambda self: self.busy())
    def tick(self, counts: list[int]) -> None:
        for device in range(self.devices):
            for _ in range(counts[device]):
                self.system.tick(device)

    @rule()
    @precondition(lambda self: self.busy())
    def tick_once(self) -> None:
        for device in range(self.devices):
            self.system.tick(device)

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.busy())
    def finish_one(self, which: int) -> None:
        """Run until one generation is answered, as far as that needs passes only."""
        mirror = self.pick(which)
        if mirror is not None and mirror.request:
            self.system.run(until=lambda: mirror.request in mirror.client.replies)

    @rule(device=st.integers(0, 1))
    @precondition(lambda self: self.busy())
    def fail_pass(self, device: int) -> None:
        """But not a fourth in a row, nor while the kernel looks for who is to blame: the one it finds gets EIO."""
        known = self.system.kernel.machine.devices[device % self.devices]
        if known.failures < 3 and not known.isolate:
            self.system.fail(device % self.devices)

    @rule(device=st.integers(0, 1), wrote=st.booleans(), arena=st.sampled_from(["kept", "kept", "kept", "lost"]))
    @precondition(lambda self: self.busy())
    def driver_dies(self, device: int, wrote: bool, arena: str) -> None:
        self.system.kill_driver(device % self.devices, wrote, arena)

    @rule(device=st.integers(0, 1))
    @precondition(lambda self: self.busy())
    def completion_repeats(self, device: int) -> None:
        device %= self.devices
        if self.system.pending[device]:
            effect = self.system.pending[device][0]
            if isinstance(effect, Exec) and not self.system.devices[device].is_open(effect):
                return
            done = self.system.perform(self.system.pending[device].popleft())
            self.system.step(done)
            self.system.step(done)

    @rule(which=st.integers(0, 9))
    def stop_and_continue(self, which: int) -> None:
        mirror = self.pick(which)
        if mirror is None:
            return
        stopping = mirror.pid not in self.stopped
        mirror.client.result(mirror.client.post("kill", mirror.pid, 19 if stopping else 18))
        if stopping:
            self.stopped[mirror.pid] = mirror.client
        else:
            del self.stopped[mirror.pid]

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.clients)
    def pause_or_resume(self, which: int) -> None:
        conn = self.clients[which % len(self.clients)].conn
        self.system.step(Resume(conn) if conn in self.paused else Pause(conn))
        self.paused ^= {conn}

    @rule(which=st.integers(0, 9), nice=st.integers(-20, 19), parent=st.integers(0, 9))
    @precondition(lambda self: self.clients)
    def spawn(self, which: int, nice: int, parent: int) -> None:
        """A child process, with a fork of one of its client's contexts if that client has any."""
        client = self.clients[which % len(self.clients)]
        self.settle()
        family = self.families[client]
        mine = [m for m in self.contexts if m.client is client and not m.request]
        source = mine[parent % len(mine)] if mine else None
        if len(family.alive) + len(family.ended) > 3:
            return
        request = client.post("spawn", "child", nice, source.ctx if source else 0)
        self.system.run(until=lambda: request in client.replies)
        if client.replies[request].code:
            assert client.replies[request].code == E.ENOMEM and source is not None
            return
        made = client.result(request)
        family.alive.append(made.pid)
        if source is not None:
            self.contexts.append(Mirror(client, made.ctx, made.cid, made.pid, list(source.tokens)))

    @rule(which=st.integers(0, 9), child=st.integers(0, 9), signal=st.sampled_from([0, 9, 15]), by=st.integers(0, 9))
    @precondition(lambda self: any(f.alive for f in self.families.values()))
    def end_a_child(self, which: int, child: int, signal: int, by: int) -> None:
        """By itself, or killed from any connection of the same uid."""
        clients = [c for c in self.clients if self.families[c].alive]
        client = clients[which % len(clients)]
        family = self.families[client]
        pid = family.alive[child % len(family.alive)]
        if signal:
            same = [c for c in self.clients if c.uid == client.uid]
            killer = same[by % len(same)]
            killer.result(killer.post("kill", pid, signal))
        else:
            client.result(client.post("exit", pid, 5))
        family.end(pid, 128 + signal if signal else 5)
        self.process_ended(client, pid)

    @rule(which=st.integers(0, 9), child=st.integers(0, 4))
    @precondition(lambda self: self.clients)
    def wait(self, which: int, child: int) -> None:
        client = self.clients[which % len(self.clients)]
        family = self.families[client]
        known = [0, *family.alive, *(pid for pid, _ in family.ended)]
        pid = known[child % len(known)]
        family.wait(client.post("wait", pid), pid)

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: any(f.waits for f in self.families.values()))
    def cancel_a_wait(self, which: int) -> None:
        clients = [c for c in self.clients if self.families[c].waits]
        client = clients[which % len(clients)]
        request, _ = self.families[client].waits.pop()
        client.result(client.post("cancel", request))
        self.families[client].answers[request] = -E.ECANCELED

    @invariant()
    def waits_are_answered_as_the_model_says(self) -> None:
        for client, family in self.families.items():
            for request, answer in family.answers.items():
                reply = client.replies[request]
                assert reply.code == -answer if answer < 0 else client.result(request).pid == answer
            assert not any(request in client.replies for request, _ in family.waits)

    @rule(which=st.integers(0, 9), k=st.integers(1, 6))
    def forward(self, which: int, k: int) -> None:
        mirror = self.pick(which)
        if mirror is None or mirror.request or not 0 < len(mirror.tokens) <= ROOM:
            return
        request = mirror.client.post("forward", mirror.ctx, k)
        self.system.run(until=lambda: request in mirror.client.replies)
        if request not in mirror.client.replies:  # stopped or paused
            mirror.client.result(mirror.client.post("cancel", request))
            self.system.run(until=lambda: request in mirror.client.replies)
            assert mirror.client.replies[request].code == E.ECANCELED
            return
        said = mirror.client.result(request)
        tokens, logprobs = reference_distribution(mirror.tokens).top(k)
        assert tokens_of(said.tokens) == tokens
        assert array("f", said.logprobs).tolist() == pytest.approx(logprobs, abs=1e-4)

    @rule(which=st.integers(0, 9), nice=st.integers(-20, 19))
    def renice(self, which: int, nice: int) -> None:
        mirror = self.pick(which)
        if mirror is not None:
            mirror.client.result(mirror.client.post("setpriority", mirror.pid, nice))

    @rule(which=st.integers(0, 9), policy=st.sampled_from(orders.names()))
    @precondition(lambda self: any(client.uid == 1000 for client in self.clients))
    def change_policy(self, which: int, policy: str) -> None:
        owners = [client for client in self.clients if client.uid == 1000]
        client = owners[which % len(owners)]
        client.result(client.post("sysctl", "sched.policy", policy))

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: len(self.clients) > 1)
    def disconnect(self, which: int) -> None:
        self.settle()
        client = self.clients.pop(which % len(self.clients))
        self.system.disconnect(client)
        del self.families[client]
        self.later = [x for x in self.later if x[0] is not client]
        self.paused.discard(client.conn)
        self.stopped = {pid: c for pid, c in self.stopped.items() if c is not client}
        self.contexts = [m for m in self.contexts if m.client is not client]
        self.scores = [s for s in self.scores if s[0] is not client]

    @invariant()
    def nothing_is_answered_twice(self) -> None:
        assert not self.system.double_replies

    def teardown(self) -> None:
        for conn in sorted(self.paused):
            self.system.step(Resume(conn))
        for pid, client in self.stopped.items():
            client.call("kill", pid, 18)
        self.system.run()
        self.settle()
        assert not self.later, f"calls that waited for their turn got no answer: {self.later}"
        for mirror in self.contexts:
            assert not mirror.request, f"context {mirror.cid}: generation {mirror.request} got no answer"
        for client, request, expected in self.scores:
            try:
                got = array("f", client.result(request).logprobs).tolist()
            except Errno as error:
                assert error.code in (E.ECANCELED, E.ENOMEM, E.ESTALE)
                continue
            assert got == pytest.approx(expected, abs=1e-4)
        for client in self.clients:
            self.system.disconnect(client)
        self.system.run()
        assert not self.system.kernel.machine.contexts
        assert not self.system.kernel.machine.processes
        for device in range(self.devices):
            assert self.system.available(device) == FRAMES, "frames leaked"


class Hierarchy(KernelMachine):
    """The same with tiers whose drivers fail, delay, lose, repeat and corrupt: the answers stay right, nobody gets an error,
    no frame under I/O is used for anything else (the simulated devices check every header and checksum)."""

    core: ClassVar[CoreMaker] = Core
    tiers: ClassVar[dict[str, Any]] = {"dram": 7, "nvme": 12}

    @rule(which=st.integers(0, 9), count=st.integers(1, 6))
    @precondition(lambda self: self.busy())
    def transfers_end(self, which: int, count: int) -> None:
        device = which % len(self.system.devices)
        for _ in range(count):
            self.system.tick(device)

    @rule(
        which=st.integers(0, 9), mask=st.integers(0, 255), code=st.sampled_from([E.EIO, E.ECORRUPT, E.ENOSPC, E.ENOENT])
    )
    @precondition(lambda self: self.busy())
    def transfer_fails(self, which: int, mask: int, code: E) -> None:
        """Some items of the oldest transfer of a device fail; the others are done."""
        device = which % len(self.system.devices)
        queue = self.system.pending[device]
        effect = queue.popleft() if queue and isinstance(queue[0], Transfer) else None
        if not isinstance(effect, Transfer):
            return
        done = self.system.perform(effect)
        assert isinstance(done, TransferDone)
        failed = {k: code for k in range(len(effect.pairs) // 8) if mask >> k & 1} | dict(done.failed)
        if effect.gate >= 0 and failed:
            memoryview(self.system.gates).cast("q")[effect.gate] = gate_value(effect.ticket, GATE_FAILED)
        self.system.step(done._replace(failed=tuple(failed.items())))

    @rule(device=st.integers(0, 9), wrote=st.booleans())
    def tier_dies(self, device: int, wrote: bool) -> None:
        below = [d for d, x in enumerate(self.system.devices) if isinstance(x, SimTier)]
        if below:
            self.system.kill_driver(below[device % len(below)], wrote)

    @rule(where=st.integers(0, 1 << 20), bit=st.integers(0, 7))
    def bit_rot(self, where: int, bit: int) -> None:
        """In a stored frame of dram or of a tier, header or payload."""
        tier = next((x for x in self.system.devices if isinstance(x, SimTier) and x.frames), None)
        if tier is not None and where % 2:
            frame = tier.frames[sorted(tier.frames)[where % len(tier.frames)]]
            frame[where % (4096 + 32)] ^= 1 << bit
        elif self.system.dram:
            self.system.dram[where % len(self.system.dram)] ^= 1 << bit

    @rule(which=st.integers(0, 9), tier=st.sampled_from(["dram", "nvme"]))
    def demote(self, which: int, tier: str) -> None:
        self.ask(which, "demote", tier)

    @rule(which=st.integers(0, 9), tier=st.sampled_from(["hbm", "dram"]), deadline=st.sampled_from([0, 0, 1]))
    def prefetch(self, which: int, tier: str, deadline: int) -> None:
        self.ask(which, "prefetch", tier, deadline)

    @rule(which=st.integers(0, 9), name=st.sampled_from(["evict", "pin", "unpin"]))
    def memory(self, which: int, name: str) -> None:
        self.ask(which, name)

    @rule(ms=st.integers(1, 3))
    def time_passes(self, ms: int) -> None:
        self.system.advance(ms * 1_000_000)

    @rule(which=st.integers(0, 9), advice=st.sampled_from(["willneed", "cold", "dontneed"]))
    def advise(self, which: int, advice: str) -> None:
        self.ask(which, "advise", advice)

    @rule(
        policy=st.sampled_from(["lru", "fifo", "arc", "lfu", "s3fifo"]),
        write=st.sampled_from(["back", "through", "selective"]),
    )
    def retune(self, policy: str, write: str) -> None:
        root = self.system.connect(0)
        root.result(root.post("sysctl", "evict.policy", policy))
        root.result(root.post("sysctl", "tier.write", write))
        self.system.disconnect(root)

    @invariant()
    def no_prefetched_block_is_lost_from_the_books(self) -> None:
        m = self.system.kernel.machine
        ends = ("in_time", "late", "wasted", "abandoned", "failed")
        ended = sum(m.counters[f"prefetch_{end}_blocks"] for end in ends)
        assert m.counters["prefetched_blocks"] == ended + len(m.prefetches)

    def ask(self, which: int, name: str, *args: object) -> None:
        mirror = self.pick(which)
        if mirror is not None:
            mirror.client.post(name, mirror.ctx, *args)

    def teardown(self) -> None:
        super().teardown()
        for d in range(self.devices, len(self.system.kernel.machine.devices)):
            assert self.system.available(d) == self.system.kernel.machine.devices[d].capacity, f"frames of {d} leaked"
        assert not self.system.kernel.machine.errands.open


class DirectHierarchy(Hierarchy):
    tiers: ClassVar[dict[str, Any]] = {"dram": 3, "nvme": 20, "direct": True}


class TwinHierarchy(Hierarchy):
    core: ClassVar[CoreMaker] = TwinCore
    tiers: ClassVar[dict[str, Any]] = {"dram": 4, "nvme": 9, "remote": 5}


class TwinMachine(KernelMachine):
    pass


class CoreMachine(KernelMachine):
    core: ClassVar[CoreMaker] = Core


class TwoDevices(KernelMachine):
    core: ClassVar[CoreMaker] = Core
    devices: ClassVar[int] = 2


class ConstantKey(KernelMachine):
    """A broken key function: every block has the same key.  Verification must catch it; the answers stay right."""

    core: ClassVar[CoreMaker] = Core
    hash_bits: ClassVar[int] = 0


def examples(of_the_profile: float) -> settings:
    """So many of the examples of the profile (tests/conftest.py), so that `make grind` runs more of these too."""
    return settings(
        max_examples=max(1, int(of_the_profile * settings().max_examples)), stateful_step_count=50, deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip


TestHierarchy = Hierarchy.TestCase
TestHierarchy.settings = examples(1)
TestDirectHierarchy = DirectHierarchy.TestCase
TestDirectHierarchy.settings = examples(1)
TestTwinHierarchy = TwinHierarchy.TestCase
TestTwinHierarchy.settings = examples(0.3)
TestTwin = TwinMachine.TestCase
TestTwin.settings = examples(0.3)
TestCore = CoreMachine.TestCase
TestCore.settings = examples(1)
TestTwoDevices = TwoDevices.TestCase
TestTwoDevices.settings = examples(1)
TestConstantKey = ConstantKey.TestCase
TestConstantKey.settings = examples(0.4)
