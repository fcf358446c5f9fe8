"""Groups under pressure: any interleaving of work, limits, kills, failed passes and dead drivers.

After every step no group has more than any limit of it, to the frame (fsck, I8); while the guaranteed group does nothing
itself, nobody pushes it below its guarantee; every generation streams what it would alone; every request is answered once,
and at the end every frame is back.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.errors import E
from attnix.kernel.twin import TwinCore
from attnix.simulated import CoreMaker, SimulatedClient, SimulatedSystem, ints, tokens_of

FRAMES, BLOCK, WINDOW = 12, 4, 40
GROUPS = ("uid:1001", "uid:1001/a", "uid:1001/b", "uid:1002")
QUIET = "uid:1003"  # has a guarantee, and works only when nobody else does
REFUSALS = (E.EDQUOT, E.ENOMEM, E.E2BIG)


class GroupsMachine(RuleBasedStateMachine):
    core: ClassVar[CoreMaker] = TwinCore
    tiers: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.system = SimulatedSystem(
            frames=FRAMES, block_tokens=BLOCK, window_tokens=WINDOW, core=self.core, max_contexts=12,
            sysctl={"sched.step_tokens": 9, "sched.max_running": 4}, **self.tiers,
        )  # fmt: skip
        self.owner = self.system.connect(1000)
        self.clients = {uid: self.system.connect(uid) for uid in (1001, 1002, 1003)}
        self.pids: dict[str, list[int]] = {g: [] for g in GROUPS}
        for name in GROUPS:
            self.spawn(name)
        self.contexts: list[tuple[str, int, int, list[int]]] = []  # group, pid, ctx, log
        self.running: list[tuple[str, int, int, list[int], int, int]] = []  # the same, request, tokens wanted
        self.quiet_ns = 0

    def client(self, group: str) -> SimulatedClient:
        return self.clients[int(group[4:8])]

    def used(self, group: str, device: int = 0) -> int:
        found = self.system.kernel.machine.groups.find(group)
        return self.system.core.account(device, found.number).used if found is not None else 0

    def spawn(self, group: str) -> int:
        pid: int = self.client(group).call("spawn", "", 0, 0, group).pid
        self.pids[group].append(pid)
        return pid

    # -- the quiet one --------------------------------------------------------------------------------------------

    @initialize(tokens=st.integers(4, 16), soft=st.integers(0, 4))
    def guarantee(self, tokens: int, soft: int) -> None:
        self.owner.call("setlimit", QUIET, "hbm", soft)
        ctx = self.clients[1003].call("alloc_context").ctx
        self.clients[1003].call("append", ctx, ints([3] * tokens))
        self.system.run()
        if soft % 2:
            self.clients[1003].call("release", ctx)
        self.soft = soft
        self.floor = min(soft, self.used(QUIET))

    @invariant()
    def guaranteed(self) -> None:
        if hasattr(self, "floor"):
            assert self.used(QUIET) >= self.floor, f"{self.used(QUIET)} frames are left of {self.floor} guaranteed"
            self.floor = min(self.soft, self.used(QUIET))

    # -- work -------------------------------------------------------------------------------------------------------

    @rule(group=st.sampled_from(GROUPS), prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20))
    def alloc(self, group: str, prompt: list[int]) -> None:
        client = self.client(group)
        pid = self.pids[group][-1] if self.pids[group] else self.spawn(group)
        request = client.post("alloc_context", pid)
        if client.replies[request].code:
            assert client.replies[request].code in REFUSALS
            return
        ctx = client.result(request).ctx
        log = prompt if not client.replies[client.post("append", ctx, ints(prompt))].code else []
        self.contexts.append((group, pid, ctx, log))

    @rule(which=st.integers(0, 9), n=st.integers(1, 20))
    @precondition(lambda self: self.contexts)
    def generate(self, which: int, n: int) -> None:
        group, pid, ctx, log = self.contexts[which % len(self.contexts)]
        if not log or any(entry[2] == ctx and entry[0] == group for entry in self.running):
            return
        request = self.client(group).post("generate", ctx, n)
        self.running.append((group, pid, ctx, log, request, n))
        self.settle()

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.contexts)
    def fork(self, which: int) -> None:
        group, pid, ctx, log = self.contexts[which % len(self.contexts)]
        if any(entry[2] == ctx and entry[0] == group for entry in self.running):
            return
        client = self.client(group)
        request = client.post("fork", ctx, 2)
        self.system.run(until=lambda: request in client.replies)
        if not client.replies[request].code:
            self.contexts += [(group, pid, child, list(log)) for child in client.result(request).ctxs]
        else:
            assert client.replies[request].code in REFUSALS

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.contexts)
    def release(self, which: int) -> None:
        group, _, ctx, _ = entry = self.contexts.pop(which % len(self.contexts))
        self.client(group).post("release", ctx)
        self.running = [r for r in self.running if (r[0], r[2]) != (entry[0], ctx)]

    @rule(group=st.sampled_from(GROUPS), signal=st.sampled_from([9, 19, 18, 18]))
    def kill(self, group: str, signal: int) -> None:
        if not self.pids[group]:
            return
        pid = self.pids[group][-1]
        self.client(group).call("kill", pid, signal)
        if signal == 9:
            self.pids[group].remove(pid)
            self.contexts = [c for c in self.contexts if c[1] != pid]
            self.running = [r for r in self.running if r[1] != pid]

    @rule(
        group=st.sampled_from(GROUPS),
        resource=st.sampled_from(["hbm", "hbm", "hbm", "dram", "contexts", "tokens_s"]),
        hard=st.sampled_from([0, 1, 2, 3, 4, 6, 9]),
        soft=st.sampled_from([-1, -1, 0, 1, 2]),
    )
    def setlimit(self, group: str, resource: str, hard: int, soft: int) -> None:
        request = self.owner.post("setlimit", group, resource, soft, hard)
        reply = self.owner.replies[request]
        assert reply.code in (0, E.EBUSY, E.EINVAL)
        if reply.code == E.EBUSY:
            assert isinstance(reply.result, dict) and int(reply.result["used"]) > hard

    # -- time, and what goes wrong -----------------------------------------------------------------------------------

    @rule(count=st.integers(1, 9))
    def tick(self, count: int) -> None:
        for _ in range(count):
            for device in range(len(self.system.devices)):
                self.system.tick(device)
        self.settle()

    @rule(ms=st.sampled_from([1, 300, 5000]))
    def advance(self, ms: int) -> None:
        self.system.advance(ms * 1_000_000)
        self.settle()

    @rule()
    def fail_pass(self) -> None:
        if self.system.kernel.machine.devices[0].failures < 2:
            self.system.fail(0)

    @rule(arena=st.sampled_from(["kept", "kept", "lost"]))
    def kill_driver(self, arena: str) -> None:
        if arena == "lost":
            self.floor = 0
        self.system.kill_driver(0, arena=arena)
        self.settle()

    # -- what must be -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        for entry in self.running[:]:
            group, _, _, log, request, n = entry
            client = self.client(group)
            if request not in client.replies:
                continue
            self.running.remove(entry)
            if client.replies[request].code:
                assert client.replies[request].code in REFUSALS, client.replies[request]
                continue
            result = client.result(request)
            got, want = tokens_of(result.tokens), reference_tokens(log, min(n, WINDOW - len(log)))
            assert result.reason == "length" and got == want[: len(got)]
            log += got

    def teardown(self) -> None:
        for group in GROUPS:
            for resource in ("hbm", "dram", "contexts", "tokens_s"):
                self.owner.call("setlimit", group, resource, 0, 0)
            for pid in self.pids[group]:
                self.client(group).call("kill", pid, 18)
        self.system.run()
        self.settle()
        assert not self.running, "a generation that nothing holds back has not ended"
        for client in (*self.clients.values(), self.owner):
            self.system.disconnect(client)
        self.system.run()
        root = self.system.connect(0)
        for _ in root.call("groups").rows:
            pass
        root.call("setlimit", QUIET, "hbm", 0)
        core = self.system.core
        for device, size in enumerate([d.capacity for d in self.system.kernel.machine.devices]):
            assert self.system.available(device) == size
            while core.reclaimable_frames(device):
                assert core.evict(device, core.evictable(device, core.oldest(device, 1 << 20), 1 << 20))
            assert core.free_frames(device) == size
        assert not self.system.double_replies
        assert [row.name for row in root.call("groups").rows] == ["uid:0"]


class CGroupsMachine(GroupsMachine):
    core = Core


class TieredGroupsMachine(GroupsMachine):
    tiers: ClassVar[dict[str, Any]] = {"dram": 8, "nvme": 8}


class CTieredGroupsMachine(TieredGroupsMachine):
    core = Core


@pytest.mark.parametrize("machine", [GroupsMachine, CGroupsMachine, TieredGroupsMachine, CTieredGroupsMachine])
def test_groups(machine: type[GroupsMachine]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine,
        settings=settings(
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_who_was_benched_when_the_arena_was_lost_decodes_again() -> None:
    """Found by the machine: its slot stayed benched, and the core ran what the scheduler did not."""
    state = CGroupsMachine()
    state.guarantee(tokens=4, soft=0)
    state.alloc(group="uid:1001", prompt=[0])
    state.alloc(group="uid:1002", prompt=[0, 0, 0])
    state.generate(n=13, which=3)
    state.generate(n=14, which=0)
    state.fail_pass()
    state.tick(count=5)
    state.tick(count=6)
    state.fail_pass()
    state.kill_driver(arena="lost")
    state.tick(count=7)
    state.teardown()
