"""The supervisor with a dram and real tier processes that die, hang, lie, come and go while the others serve."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from attnix.drivers.dram import DramSpec
from attnix.drivers.faulty import Fault, FaultPlan
from attnix.drivers.sim import KV_BYTES
from attnix.drivers.spec import DriverSpec, Timing, driver_argv
from attnix.drivers.supervisor import DriverStartError, Supervisor
from attnix.kernel.batch import SAMPLE, SEQ
from attnix.kernel.errors import E
from attnix.kernel.events import (
    AttachTier,
    Bug,
    DriverDown,
    DriverGone,
    DriverUp,
    Event,
    Exec,
    ExecDone,
    ExecFailed,
    Found,
    Transfer,
    TransferDone,
)
from attnix.kernel.geometry import RowLayout
from attnix.kernel.tag import GATE_FAILED, Tag, gate_value, stored_bytes, unpack_tag

HBM, DRAM, TIER = 0, 1, 2
BLOCK, FRAMES, SLOTS = 4, 8, 6
FRAME_BYTES = BLOCK * KV_BYTES
STORED = stored_bytes(FRAME_BYTES)
LAYOUT = RowLayout(4, 4)
IDENTITY = bytes(range(16))
DEADLINE_S = 60.0
QUICK = Timing(
    probe_ns=60_000_000_000,
    exec_ns=60_000_000_000,
    transfer_ns=60_000_000_000,
    stop_ns=10_000_000_000,
    backoff_first_ns=1_000_000,
    backoff_cap_ns=4_000_000,
)
T = TypeVar("T")


def tag(n: int) -> bytes:
    tokens = array("i", range(n, n + BLOCK)).tobytes()
    return Tag(bytes([n] * 16), bytes(16), b"r" * 16, BLOCK * n, BLOCK, 0, b"uid:0", tokens).pack(BLOCK)


def accel(**changes: Any) -> DriverSpec:
    config = {"slots": LAYOUT.slots, "entries": LAYOUT.entries, "block_tokens": BLOCK}
    spec = DriverSpec(
        HBM, "hbm0", driver_argv("attnix.drivers.sim"), config, FRAMES * FRAME_BYTES, LAYOUT.total_bytes, timing=QUICK
    )
    return dataclasses.replace(spec, **changes)


def tier(device: int = TIER, plan: FaultPlan | None = None, timing: Timing = QUICK, **settings: Any) -> DriverSpec:
    config = {
        "frame_bytes": FRAME_BYTES, "stored_bytes": STORED, "layers": 1, "block_tokens": BLOCK,
        "identity": IDENTITY.hex(), "capacity_frames": SLOTS, **settings,
    }  # fmt: skip
    return DriverSpec(
        device, f"sim{device}", driver_argv("attnix.drivers.sim_tier"), config, 0, 0, arena="lost", tier="sim",
        timing=timing, environment={} if plan is None else plan.environment(),
    )  # fmt: skip


def nvme(folder: Path, timing: Timing = QUICK) -> DriverSpec:
    """The file tier under the same number."""
    spec = tier(timing=timing, path=str(folder / "nvme0.frames"))
    return dataclasses.replace(spec, name="nvme0", argv=driver_argv("attnix.drivers.nvme"), tier="nvme")


class World:
    """A supervisor of one accel and a dram, and everything it said."""

    def __init__(self, tier_of: Callable[[AttachTier], DriverSpec] | None = None) -> None:
        self.events: list[Event] = []
        self.logs: list[str] = []
        self.pids: dict[tuple[int, int], int] = {}
        dram = DramSpec(DRAM, "dram0", FRAMES, FRAME_BYTES)
        self.supervisor = Supervisor(
            [accel()], self._emit, lambda level, text: self.logs.append(text), dram=dram, tier_of=tier_of
        )
        self._seq = 0

    def _emit(self, event: Event) -> None:
        if isinstance(event, DriverUp):
            self.pids[event.device, event.epoch] = event.driver_pid
        if isinstance(event, DriverDown):
            assert not is_alive(self.pids[event.device, event.epoch]), "DriverDown before the process was gone"
        self.events.append(event)

    def fill(self, frame: int, byte: int) -> None:
        os.pwrite(self.supervisor.arena_fd(HBM), bytes([byte]) * FRAME_BYTES, frame * FRAME_BYTES)

    def frame(self, frame: int) -> bytes:
        return os.pread(self.supervisor.arena_fd(HBM), FRAME_BYTES, frame * FRAME_BYTES)

    def stored(self, frame: int) -> bytes:
        return os.pread(self.supervisor.arena_fd(DRAM), STORED, frame * STORED)

    def submit(
        self, device: int, verb: str, own: int, far: int, n: int, *, arena: int = DRAM, gate: int = -1, ticket: int = 0
    ) -> int:
        self._seq += 1
        pairs = array("i", [own, far]).tobytes()
        self.supervisor.transfer(Transfer(device, self._seq, verb, arena, pairs, tag(n), gate, ticket))
        return self._seq

    async def move(self, device: int, verb: str, own: int, far: int, n: int, **more: Any) -> TransferDone:
        return await self.answer(self.submit(device, verb, own, far, n, **more))

    async def answer(self, seq: int) -> TransferDone:
        found = await self.until(lambda: [e for e in self.events if isinstance(e, TransferDone) and e.seq == seq])
        return found[0]

    async def until(self, condition: Callable[[], T]) -> T:
        async with asyncio.timeout(DEADLINE_S):
            while not (value := condition()):
                await asyncio.sleep(0.002)
        return value

    def of(self, device: int) -> list[str]:
        return [type(e).__name__ for e in self.events if getattr(e, "device", None) == device]

    async def event(self, kind: type[T], device: int, n: int = 1) -> T:
        def found() -> list[T]:
            matching: list[T] = []
            for event in self.events:
                if isinstance(event, kind) and getattr(event, "device", None) == device:
                    matching.append(event)
            return matching[n - 1 : n]

        return (await self.until(found))[0]

    async def demote(self, n: int, slot: int) -> None:
        """Block `n`: from hbm frame n through dram frame n into a slot of the tier."""
        self.fill(n, 0x40 + n)
        assert not (await self.move(HBM, "read", n, n, n)).failed
        assert not (await self.move(TIER, "write", slot, n, n)).failed


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@contextlib.asynccontextmanager
async def running(
    *tiers: DriverSpec, tier_of: Callable[[AttachTier], DriverSpec] | None = None
) -> AsyncIterator[World]:
    world = World(tier_of)
    await world.supervisor.start()
    world.supervisor.set_identity(IDENTITY)
    for spec in tiers:
        await world.supervisor.start_tier(spec)
    try:
        yield world
    finally:
        await world.supervisor.close()
        assert not any(is_alive(pid) for pid in world.pids.values() if pid), "close left a driver behind"


def run(test: Coroutine[Any, Any, None]) -> None:
    uvloop = pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        problems: list[dict[str, Any]] = []
        runner.get_loop().set_exception_handler(lambda _, context: problems.append(context))
        runner.run(test)
        assert not problems


@pytest.mark.parametrize("kind", ["sim", "nvme"])
def test_a_block_goes_down_two_tiers_and_comes_back(kind: str, tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tier() if kind == "sim" else nvme(tmp_path)) as world:
            assert world.events[0] == DriverUp(DRAM, 1, 0, "kept", world.supervisor.dram_pages)
            up = await world.event(DriverUp, TIER)
            assert "direct" in up.capabilities or kind == "nvme", "frames of 32 bytes have no place for O_DIRECT"
            assert up.engine.startswith(("sim/", "uring/", "threads/"))
            await world.demote(1, slot=4)
            assert world.stored(1)[32:48] == IDENTITY and world.stored(1)[4096 : 4096 + FRAME_BYTES] == world.frame(1)
            assert not (await world.move(TIER, "read", 4, 5, 1)).failed
            assert world.stored(5)[4096:] == world.stored(1)[4096:], "in the header a file tier counts generations"
            done = await world.move(HBM, "write", 7, 5, 1)
            assert (done.failed, done.moved_bytes) == ((), FRAME_BYTES)
            assert world.frame(7) == world.frame(1) == bytes([0x41]) * FRAME_BYTES
            assert (await world.move(TIER, "read", 4, 5, 2)).failed == ((0, E.ECORRUPT),)
            assert (await world.move(TIER, "read", 3, 5, 2)).failed[0][1] in (E.ENOENT, E.ECORRUPT), "never written"

    run(test())


def test_direct_into_hbm_with_a_pass_behind_the_gate() -> None:
    """The pass is sent first: it must wait, and see the frame that arrived meanwhile."""

    async def test() -> None:
        async with running(tier(latency_ns=100_000_000)) as world:
            await world.demote(1, slot=0)
            rows = memoryview(world.supervisor.rows(HBM))
            rows[LAYOUT.frame_offset :][:8] = array("i", [1, 2]).tobytes()
            rows[LAYOUT.count_offset :][:4] = array("h", [BLOCK, BLOCK]).tobytes()
            rows.release()
            record = SEQ.pack(0, 0, BLOCK, 1, BLOCK, 2, 0, SAMPLE, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, BLOCK + 1, 1, 0, 0)
            for n in range(1, 6):  # a pass that was held up may find its frame there
                world.fill(1, 0)
                gates = array("q", [3, 9 * n]).tobytes()
                behind = Exec(HBM, n, record, array("i", [5]).tobytes(), b"", (), gates)
                world.supervisor.exec(behind)
                done = await world.move(TIER, "read", 0, 1, 1, arena=HBM, gate=3, ticket=9 * n)
                assert not done.failed and world.frame(1) == bytes([0x41]) * FRAME_BYTES
                passed = await world.event(ExecDone, HBM, n)
                assert world.supervisor.gates.value(3) == gate_value(9 * n, 1)
                if passed.waited_ns:
                    break
            assert passed.waited_ns > 0
            world.supervisor.exec(behind._replace(seq=n + 1, gates=b""))  # the control: everything is there already
            again = await world.event(ExecDone, HBM, n + 1)
            assert (again.tokens, again.waited_ns) == (passed.tokens, 0)
            world.fill(1, 0)
            world.supervisor.exec(behind._replace(seq=n + 2, gates=b""))
            other = await world.event(ExecDone, HBM, n + 2)
            assert other.tokens != passed.tokens, "the pass does not look at the frame"

    run(test())


def test_a_killed_tier_closes_its_gates_and_finds_its_frames_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tier(path=str(tmp_path / "slots"), latency_ns=200_000_000)) as world:
            await world.demote(1, slot=4)
            await world.demote(2, slot=0)
            load = world.submit(TIER, "read", 4, 5, 1, arena=HBM, gate=7, ticket=3)
            record = SEQ.pack(0, 0, 0, 1, 0, 1, 0, SAMPLE, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0)
            world.supervisor.exec(Exec(HBM, 1, record, bytes(4), b"", (), array("q", [7, 3]).tobytes()))
            os.kill(world.supervisor.driver_pid(TIER), signal.SIGKILL)
            failed = await world.event(ExecFailed, HBM)  # it does not wait for ever
            assert failed.code == E.EIO and world.supervisor.gates.value(7) == gate_value(3, GATE_FAILED)
            await world.event(DriverUp, TIER, 2)
            assert world.of(TIER)[-3:] == ["DriverDown", "Found", "DriverUp"]
            assert not any(isinstance(e, TransferDone) and e.seq == load for e in world.events)
            found, up = world.events[-2:]
            assert isinstance(found, Found) and isinstance(up, DriverUp)
            assert (found.epoch, up.epoch, up.arena) == (2, 2, "lost")
            size = len(found.rows) // 2
            rows = [found.rows[:size], found.rows[size:]]
            assert [int.from_bytes(row[:4], "little") for row in rows] == [0, 4]
            assert [unpack_tag(row[4:], BLOCK).key[0] for row in rows] == [2, 1]
            assert not (await world.move(TIER, "read", 4, 6, 1)).failed
            assert world.stored(6) == world.stored(1)

    run(test())


@pytest.mark.parametrize("kind", ["sim", "nvme"])
def test_hung_is_not_dead_until_it_is_reaped(kind: str, tmp_path: Path) -> None:
    async def test() -> None:
        timing = QUICK._replace(transfer_ns=2_000_000_000, transfer_frame_ns=0)
        async with running(tier(timing=timing) if kind == "sim" else nvme(tmp_path, timing)) as world:
            await world.demote(1, slot=0)
            pid = world.supervisor.driver_pid(TIER)
            os.kill(pid, signal.SIGSTOP)
            first = world.submit(TIER, "read", 0, 5, 1)
            second = world.submit(TIER, "read", 0, 6, 1)
            assert not (await world.move(HBM, "read", 1, 7, 1)).failed, "the others serve"
            down = await world.event(DriverDown, TIER)
            assert "did not finish a transfer within 2 s" in down.reason and not is_alive(pid)
            await world.event(DriverUp, TIER, 2)
            assert not any(isinstance(e, TransferDone) and e.seq in (first, second) for e in world.events)
            if kind == "nvme":
                assert world.of(TIER)[-3:] == ["DriverDown", "Found", "DriverUp"]
                assert not (await world.move(TIER, "read", 0, 6, 1)).failed

    run(test())


def test_transfers_in_a_queue_each_have_their_time() -> None:
    """Eight of 300 ms with a limit of 2 s each: the last ends after 2.4 s, and nobody is killed for it, nor for being busy."""

    async def test() -> None:
        timing = QUICK._replace(transfer_ns=2_000_000_000, transfer_frame_ns=0)
        timing = timing._replace(health_every_ns=50_000_000, health_ns=2_000_000_000)
        async with running(tier(timing=timing, latency_ns=300_000_000)) as world:
            await world.demote(1, slot=0)
            seqs = [world.submit(TIER, "read", 0, 5, 1) for _ in range(8)]
            await world.answer(seqs[-1])
            done = [e.seq for e in world.events if isinstance(e, TransferDone) and e.seq in seqs]
            assert done == seqs and "DriverDown" not in world.of(TIER)

    run(test())


@pytest.mark.parametrize("fault", [Fault.TWICE, Fault.LATE, Fault.FAIL, Fault.GARBAGE, Fault.DIE_AFTER, Fault.LOSE])
def test_answers_that_come_twice_late_never_or_as_garbage(fault: Fault) -> None:
    async def test() -> None:
        plan = FaultPlan({(1, 1): fault}, verbs=("read", "write"))
        timing = QUICK._replace(transfer_ns=2_000_000_000) if fault is Fault.LOSE else QUICK
        async with running(tier(plan=plan, timing=timing)) as world:
            await world.demote(1, slot=0)
            hit = world.submit(TIER, "read", 0, 5, 1)
            if fault in (Fault.GARBAGE, Fault.DIE_AFTER, Fault.LOSE):
                await world.event(DriverUp, TIER, 2)
                assert (await world.move(TIER, "read", 0, 6, 1)).failed == ((0, E.ENOENT),), "a memory of its own"
                assert not any(isinstance(e, TransferDone) and e.seq == hit for e in world.events)
                return
            await world.move(TIER, "read", 0, 6, 1)
            await world.answer(hit)
            answers = [e for e in world.events if isinstance(e, TransferDone) and e.seq == hit]
            assert [bool(e.failed) for e in answers] == [fault is Fault.FAIL]
            await world.until(lambda: world.supervisor.late_messages(TIER) == (fault is Fault.TWICE))
            assert world.supervisor.restarts(TIER) == 0

    run(test())


def test_planned_item_faults() -> None:
    async def test() -> None:
        async with running(tier(enospc_after=1, fail_items=[2], flip_items=[3], lose_items=[5])) as world:
            await world.demote(1, slot=0)
            assert (await world.move(TIER, "write", 1, 1, 1)).failed == ((0, E.ENOSPC),)
            assert (await world.move(TIER, "read", 0, 5, 1)).failed == ((0, E.EIO),)
            assert (await world.move(TIER, "read", 0, 5, 1)).failed == ((0, E.ECORRUPT),)
            assert (await world.move(TIER, "read", 0, 5, 1)).failed == ((0, E.ECORRUPT),), "it stays rotten"
            assert (await world.move(TIER, "read", 0, 5, 1)).failed == ((0, E.ENOENT),)

    run(test())


def test_a_device_that_is_down_or_was_never_there_answers() -> None:
    async def test() -> None:
        slow = QUICK._replace(backoff_first_ns=60_000_000_000, backoff_cap_ns=60_000_000_000, restart_attempts=1)
        async with running(tier(timing=slow)) as world:
            os.kill(world.supervisor.driver_pid(TIER), signal.SIGKILL)
            await world.event(DriverGone, TIER)
            done = await world.move(TIER, "read", 0, 5, 1, gate=4, ticket=2)
            assert done.failed == ((0, E.ENODEV),) and world.supervisor.gates.value(4) == gate_value(2, GATE_FAILED)
            assert (await world.move(6, "read", 0, 5, 1)).failed == ((0, E.ENODEV),)
            world.supervisor.restart(TIER, "by hand")
            await world.event(DriverUp, TIER, 2)

    run(test())


def attached(effect: AttachTier) -> DriverSpec:
    return tier(effect.device, capacity_frames=effect.capacity_frames, **json.loads(effect.settings))


def open_fds() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
    return sorted(found)


def test_a_tier_is_attached_and_detached_while_the_others_serve() -> None:
    async def test() -> None:
        async with running(tier_of=attached) as world:
            before = open_fds()
            for round_ in range(2):
                world.supervisor.attach(AttachTier(3, "sim3", "sim", SLOTS, "{}"))
                assert not (await world.move(HBM, "read", 1, 1, 1)).failed
                await world.event(DriverUp, 3, 2 * round_ + 1)
                pid = world.supervisor.driver_pid(3)
                assert not (await world.move(3, "write", 0, 1, 1)).failed
                world.supervisor.detach(3)
                world.supervisor.attach(AttachTier(3, "sim3", "sim", SLOTS, "{}"))  # the number, again, at once
                await world.event(DriverUp, 3, 2 * round_ + 2)
                assert not is_alive(pid), "two owners of one number"
                assert (await world.move(3, "read", 0, 1, 1)).failed == ((0, E.ENOENT),), "it is a new tier"
                world.supervisor.detach(3)
                await world.until(lambda: open_fds() == before)
            assert not any(isinstance(e, (DriverDown, DriverGone, Bug)) for e in world.events)

    run(test())


@pytest.mark.parametrize(
    ("settings", "says"),
    [("{bad", "property name"), ('{"nosuch": 1}', "nosuch"), ('{"path": "/nowhere/at/all"}', "/nowhere/at/all")],
)
def test_a_tier_that_cannot_be_attached_leaves_nothing(settings: str, says: str) -> None:
    async def test() -> None:
        async with running(tier_of=attached) as world:
            before = open_fds()
            world.supervisor.attach(AttachTier(3, "sim3", "sim", SLOTS, settings))
            gone = await world.event(DriverGone, 3)
            assert says in gone.reason
            assert world.of(3) == ["DriverGone"]
            await world.until(lambda: open_fds() == before)
            assert not (await world.move(HBM, "read", 1, 1, 1)).failed

    run(test())


def test_closing_while_tiers_come_and_go() -> None:
    async def test() -> None:
        async with running(tier(), tier_of=attached) as world:
            world.supervisor.attach(AttachTier(3, "sim3", "sim", SLOTS, "{}"))
            world.supervisor.detach(TIER)
            await asyncio.sleep(0)

    run(test())


def test_a_tier_that_lies_about_itself_is_no_tier() -> None:
    async def test() -> None:
        async with running() as world:
            wrong = tier(timing=QUICK._replace(start_attempts=1), frame_bytes=FRAME_BYTES)
            wrong = dataclasses.replace(wrong, argv=lambda fds, config: wrong_argv(fds.channel))
            with pytest.raises(DriverStartError, match="claims 5 frames of 64 bytes"):
                await world.supervisor.start_tier(wrong)
            assert not (await world.move(HBM, "read", 1, 1, 1)).failed
            await world.supervisor.start_tier(tier())  # its number is free again

    run(test())


def wrong_argv(channel: int) -> list[str]:
    import sys

    script = f"""
from attnix.drivers.channel import Channel
from attnix.drivers.messages import probe_message
from attnix.drivers.protocol import Probe
channel = Channel.from_fd({channel})
channel.recv()
channel.send(probe_message(1, Probe(1, "sim", 1, "", (), 5, 64, 1, 0, "", "x", "", {stored_bytes(64)})))
channel.recv()
"""
    return [sys.executable, "-c", script]
