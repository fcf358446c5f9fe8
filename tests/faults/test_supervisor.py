"""The supervisor against real driver processes that die, hang, lie, or never start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from attnix.drivers.faulty import Fault, FaultPlan
from attnix.drivers.sim import KV_BYTES, reference_tokens
from attnix.drivers.spec import Argv, DriverFds, DriverSpec, Timing, driver_argv
from attnix.drivers.supervisor import DriverStartError, Supervisor
from attnix.kernel.batch import SAMPLE, SEQ
from attnix.kernel.errors import E
from attnix.kernel.events import Bug, DriverDown, DriverUp, Event, Exec, ExecDone, ExecFailed
from attnix.kernel.geometry import RowLayout

LAYOUT = RowLayout(4, 4)
BLOCK_TOKENS = 4
FRAMES = 16
PROMPT = [5, 6, 7]
ANSWER = reference_tokens(PROMPT, 1)
DEADLINE_S = 60.0
QUICK = Timing(
    probe_ns=60_000_000_000,
    exec_ns=60_000_000_000,
    stop_ns=10_000_000_000,
    backoff_first_ns=1_000_000,
    backoff_cap_ns=4_000_000,
)
T = TypeVar("T")


class World:
    """A supervisor with what it emitted and logged so far."""

    def __init__(self, *specs: DriverSpec) -> None:
        self.events: list[Event] = []
        self.logs: list[tuple[str, str]] = []
        self.pids: list[int] = []
        self.at_down: Callable[[], None] = lambda: None
        self.supervisor = Supervisor(specs, self._emit, lambda level, text: self.logs.append((level, text)))
        for spec in specs:
            self.map_row(spec.device, 0, [3])

    def _emit(self, event: Event) -> None:
        if isinstance(event, DriverDown):
            # The order that matters: it was reaped before anybody is told.
            assert not is_alive(self.pids[-1]), "DriverDown before the process was gone"
        if isinstance(event, DriverUp):
            self.pids.append(event.driver_pid)
        self.events.append(event)
        if isinstance(event, DriverDown):
            self.at_down()

    def map_row(self, device: int, slot: int, frames: list[int]) -> None:
        rows = memoryview(self.supervisor.rows(device))
        n = LAYOUT.entries
        rows[LAYOUT.frame_offset + 4 * n * slot :][: 4 * len(frames)] = array("i", frames).tobytes()
        rows[LAYOUT.count_offset + 2 * n * slot :][: 2 * len(frames)] = array(
            "h", [BLOCK_TOKENS] * len(frames)
        ).tobytes()
        rows.release()

    def submit(self, seq: int, device: int = 0, copies: bytes = b"") -> None:
        record = SEQ.pack(0, 0, 0, len(PROMPT), 0, 1, 0, SAMPLE, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, len(PROMPT), 1, 0, 0)
        self.supervisor.exec(Exec(device, seq, record, array("i", PROMPT).tobytes(), copies, ()))

    async def until(self, condition: Callable[[], T]) -> T:
        """Wait until a condition about other processes holds; what it returned."""
        async with asyncio.timeout(DEADLINE_S):
            while not (value := condition()):
                await asyncio.sleep(0.002)
        return value

    async def event(self, kind: type[T], n: int = 1) -> T:
        """The n-th event of a kind, when it has come."""
        found = await self.until(lambda: [event for event in self.events if isinstance(event, kind)][n - 1 : n])
        return found[0]

    def answers(self) -> list[tuple[str, int]]:
        """Kind and seq of every answer to a pass, in order."""
        return [(type(event).__name__, event.seq) for event in self.events if isinstance(event, (ExecDone, ExecFailed))]

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


@contextlib.asynccontextmanager
async def running(*specs: DriverSpec) -> AsyncIterator[World]:
    world = World(*specs)
    await world.supervisor.start()
    try:
        yield world
    finally:
        await world.supervisor.close()
        assert not any(is_alive(pid) for pid in world.pids), "close left a driver behind"


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def sim_spec(device: int = 0, plan: FaultPlan | None = None, argv: Argv | None = None, **changes: Any) -> DriverSpec:
    config = {"slots": LAYOUT.slots, "entries": LAYOUT.entries, "block_tokens": BLOCK_TOKENS}
    settings: dict[str, Any] = {
        "device": device,
        "name": f"hbm{device}",
        "argv": argv or driver_argv("attnix.drivers.sim"),
        "config": config,
        "arena_bytes": FRAMES * BLOCK_TOKENS * KV_BYTES,
        "rows_bytes": LAYOUT.total_bytes,
        "environment": {} if plan is None else plan.environment(),
        "timing": QUICK,
    }
    return DriverSpec(**{**settings, **changes})


def script_argv(script: str) -> Argv:
    """A driver that is a few lines of Python; `fds` and `config` are what it was started with."""

    def build(fds: DriverFds, config: str) -> list[str]:
        return [sys.executable, "-c", f"CHANNEL = {fds.channel}\n{script}"]

    return build


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    """Run a coroutine to its end on either loop; what the loop would only log fails the test."""
    factory = asyncio.new_event_loop
    if request.param == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop

    async def watched(test: Awaitable[None]) -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        await test
        assert not problems

    def run(test: Awaitable[None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(watched(test))

    return run


Run = Callable[[Awaitable[None]], None]


def test_start_exec_close(run: Run) -> None:
    async def test() -> None:
        world = World(sim_spec(0), sim_spec(1))
        probes = await world.supervisor.start()
        assert [probe.capacity_frames for probe in probes] == [FRAMES, FRAMES]
        assert {event.device for event in world.events if isinstance(event, DriverUp)} == {0, 1}
        assert [probe.pid for probe in probes] == [world.supervisor.driver_pid(0), world.supervisor.driver_pid(1)]
        world.submit(7, device=1)
        done = await world.event(ExecDone)
        assert (done.device, done.seq, list(array("i", done.tokens))) == (1, 7, ANSWER)
        assert done.computed_tokens == len(PROMPT)
        pids = [probe.pid for probe in probes]
        await world.supervisor.close()
        assert not any(map(is_alive, pids))
        assert not any(isinstance(event, DriverDown) for event in world.events), "closing is not a failure"
        await world.supervisor.close()

    run(test())


def test_a_killed_driver_is_restarted_at_once_with_its_frames(run: Run) -> None:
    async def test() -> None:
        async with running(sim_spec()) as world:
            world.submit(1)
            await world.event(ExecDone)
            arena = os.pread(world.supervisor.arena_fd(0), FRAMES * BLOCK_TOKENS * KV_BYTES, 0)
            assert any(arena)
            os.kill(world.supervisor.driver_pid(0), signal.SIGKILL)
            up = await world.event(DriverUp, 2)
            assert world.kinds() == ["DriverUp", "ExecDone", "DriverDown", "DriverUp"]
            assert world.events[2] == DriverDown(0, 1, "killed by SIGKILL")
            assert (up.epoch, up.arena) == (2, "kept")
            assert os.pread(world.supervisor.arena_fd(0), len(arena), 0) == arena
            assert world.supervisor.restarts(0) == 1
            world.submit(2)
            assert list(array("i", (await world.event(ExecDone, 2)).tokens)) == ANSWER

    run(test())


def test_what_the_driver_timed_goes_to_the_kernel(run: Run) -> None:
    async def test() -> None:
        config = {"slots": LAYOUT.slots, "entries": LAYOUT.entries, "block_tokens": BLOCK_TOKENS}
        async with running(sim_spec(0, config=config | {"prefill": [[16, 0, 900], [64, 512, 4000]]})) as world:
            assert (await world.event(DriverUp)).prefill == ((16, 0, 900), (64, 512, 4000))
        async with running(sim_spec(0)) as world:
            assert (await world.event(DriverUp)).prefill == ()
        with pytest.raises(DriverStartError, match="prefill"):
            await World(sim_spec(0, config=config | {"prefill": [[16, 0]]})).supervisor.start()

    run(test())


def test_a_lost_arena_is_really_lost(run: Run) -> None:
    async def test() -> None:
        async with running(sim_spec(arena="lost")) as world:
            world.submit(1)
            await world.event(ExecDone)
            before = os.pread(world.supervisor.arena_fd(0), 4096, 0)
            world.supervisor.restart(0, "test")
            assert (await world.event(DriverUp, 2)).arena == "lost"
            after = os.pread(world.supervisor.arena_fd(0), 4096, 0)
            assert before[3 * 32 : 4 * 32] not in after, "old KV is still there"

    run(test())


@pytest.mark.parametrize("fault", [Fault.DIE_BEFORE, Fault.DIE_AFTER])
def test_death_with_a_pass_in_flight(run: Run, fault: Fault) -> None:
    async def test() -> None:
        async with running(sim_spec(plan=FaultPlan({(1, 0): fault}))) as world:
            world.submit(1)
            await world.event(DriverUp, 2)
            assert world.kinds() == ["DriverUp", "DriverDown", "DriverUp"]
            world.submit(1)
            assert list(array("i", (await world.event(ExecDone)).tokens)) == ANSWER

    run(test())


def test_a_hung_driver_is_killed_and_reaped_before_it_is_down(run: Run) -> None:
    async def test() -> None:
        timing = QUICK._replace(exec_ns=300_000_000, exec_token_ns=0)
        async with running(sim_spec(plan=FaultPlan({(1, 0): Fault.HANG}), timing=timing)) as world:
            world.submit(1)
            world.at_down = lambda: world.submit(2)  # at once: the next life is not far
            down = await world.event(DriverDown)  # World._emit looks whether it is gone
            assert down.reason == "did not finish a pass within 0.3 s"
            failed = await world.event(ExecFailed)
            assert (failed.seq, failed.code) == (2, E.ENODEV)
            await world.event(DriverUp, 2)

    run(test())


def test_a_stopped_driver_is_found_by_its_health_while_idle(run: Run) -> None:
    async def test() -> None:
        timing = QUICK._replace(health_every_ns=20_000_000, health_ns=1_000_000_000)
        async with running(sim_spec(timing=timing)) as world:
            health = await world.until(lambda: world.supervisor.health(0))
            assert health["passes"] == 0
            os.kill(world.supervisor.driver_pid(0), signal.SIGSTOP)
            assert "did not answer" in (await world.event(DriverDown)).reason
            await world.event(DriverUp, 2)

    run(test())


def test_a_long_pass_is_not_taken_for_a_hang(run: Run) -> None:
    async def test() -> None:
        timing = QUICK._replace(health_every_ns=10_000_000, health_ns=20_000_000)
        plan = FaultPlan({(1, 0): Fault.SLOW}, slow_ns=500_000_000)
        async with running(sim_spec(plan=plan, timing=timing)) as world:
            world.submit(1)
            await world.event(ExecDone)
            assert world.kinds() == ["DriverUp", "ExecDone"]

    run(test())


def test_answers_nobody_waits_for_are_dropped_and_counted(run: Run) -> None:
    async def test() -> None:
        plan = FaultPlan({(1, 0): Fault.TWICE, (1, 1): Fault.LATE, (1, 2): Fault.FAIL})
        async with running(sim_spec(plan=plan)) as world:
            world.submit(1)
            await world.event(ExecDone)
            world.submit(2)
            world.submit(3)
            world.submit(4)
            await world.until(lambda: len(world.events) == 5)
            # The late answer of 2 comes behind that of the next pass that computes: 4.
            assert world.answers() == [("ExecDone", 1), ("ExecFailed", 3), ("ExecDone", 4), ("ExecDone", 2)]
            assert world.supervisor.late_messages(0) == 1

    run(test())


def test_a_driver_that_does_not_read_costs_a_queue_and_no_wait(run: Run) -> None:
    async def test() -> None:
        async with running(sim_spec()) as world:
            os.kill(world.supervisor.driver_pid(0), signal.SIGSTOP)
            n_passes = 64  # of 1 MB each: more than any socket buffer holds; a send that waited would hang here
            copies = bytes(1_000_001)  # no whole records, so each is refused at once
            for seq in range(n_passes):
                world.submit(seq, copies=copies)
            os.kill(world.supervisor.driver_pid(0), signal.SIGCONT)
            await world.event(ExecFailed, n_passes)
            assert world.answers() == [("ExecFailed", seq) for seq in range(n_passes)]

    run(test())


def test_nonsense_costs_the_driver_its_life(run: Run) -> None:
    async def test() -> None:
        async with running(sim_spec(plan=FaultPlan({(1, 0): Fault.GARBAGE}))) as world:
            world.submit(1)
            assert "spoke nonsense" in (await world.event(DriverDown)).reason
            await world.event(DriverUp, 2)
            world.submit(1)
            assert list(array("i", (await world.event(ExecDone)).tokens)) == ANSWER

    run(test())


SPEAKS = """
import os, socket, sys, time
sock = socket.socket(fileno=CHANNEL)
sock.recv(1 << 16)
"""


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (SPEAKS + "sock.send(b'\\x02abc'); time.sleep(600)", "begins with byte 2"),
        (SPEAKS + "sock.send(b'\\x00\\xc1'); time.sleep(600)", "not MessagePack"),
        (SPEAKS + "sock.send(b'\\x00\\x90'); time.sleep(600)", "begins with its verb"),
        (SPEAKS + "sock.send(b'\\x00\\x93\\xa5probe\\x01\\x80'); time.sleep(600)", "bad probe field protocol"),
        (SPEAKS + "sock.send(b'\\x00\\x91\\xa3boo'); time.sleep(600)", "unknown verb 'boo'"),
        (SPEAKS + "sock.close(); time.sleep(600)", "closed its channel and did not exit"),
        (SPEAKS + "os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("import time; time.sleep(600)", "did not answer its probe within"),
    ],
)
def test_a_driver_that_cannot_speak_is_not_started(run: Run, script: str, reason: str) -> None:
    async def test() -> None:
        timing = QUICK._replace(start_attempts=2)
        if reason.startswith("did not answer"):
            timing = timing._replace(probe_ns=300_000_000)
        if reason.startswith("closed"):
            timing = timing._replace(stop_ns=100_000_000)
        world = World(sim_spec(argv=script_argv(script), timing=timing))
        with pytest.raises(DriverStartError, match=reason):
            await world.supervisor.start()
        assert world.supervisor.restarts(0) == 1, "it was tried twice"
        assert world.events == []

    run(test())


def test_the_message_of_a_driver_that_dies_at_start_is_shown(run: Run) -> None:
    async def test() -> None:
        script = "import sys; print('loading'); sys.exit('model.gguf: not a GGUF file (magic 0x0)')"
        world = World(sim_spec(1), sim_spec(argv=script_argv(script)))
        with pytest.raises(DriverStartError) as caught:
            await world.supervisor.start()
        text = str(caught.value)
        assert "hbm0" in text and "exited with status 1" in text and "attempt 3" in text
        assert text.endswith("\n    loading\n    model.gguf: not a GGUF file (magic 0x0)")
        assert ("info", "hbm0: loading") in world.logs
        assert not any(map(is_alive, world.pids)), "the other driver was left running"

    run(test())


def test_a_wrong_configuration_is_not_tried_again(run: Run) -> None:
    async def test() -> None:
        world = World(sim_spec(config={"slots": 4}))
        with pytest.raises(DriverStartError, match="setting 'entries' is required"):
            await world.supervisor.start()
        assert world.supervisor.restarts(0) == 0

    run(test())


def test_a_program_that_does_not_exist(run: Run) -> None:
    async def test() -> None:
        world = World(sim_spec(argv=lambda fds, config: ["/nonexistent/driver"]))
        with pytest.raises(DriverStartError, match="/nonexistent/driver"):
            await world.supervisor.start()

    run(test())


def test_a_pass_too_long_for_a_message_is_answered(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token histories of many long contexts: the daemon must not break over them, and the driver is none the worse."""

    async def test() -> None:
        async with running(sim_spec()) as world:
            monkeypatch.setattr("attnix.drivers.channel.MAX_CHANNEL_MESSAGE_BYTES", 1000)
            world.submit(1, copies=bytes(2000))
            failed = await world.event(ExecFailed)
            assert (failed.seq, failed.code) == (1, E.E2BIG)
            world.submit(2)
            assert (await world.event(ExecDone)).seq == 2
            assert world.kinds() == ["DriverUp", "ExecFailed", "ExecDone"]

    run(test())


def test_a_long_pass_has_more_time(run: Run) -> None:
    async def test() -> None:
        timing = QUICK._replace(exec_ns=50_000_000, exec_token_ns=20_000_000_000)
        plan = FaultPlan({(1, 0): Fault.SLOW}, slow_ns=300_000_000)
        async with running(sim_spec(plan=plan, timing=timing)) as world:
            world.submit(1)
            assert (await world.event(ExecDone)).seq == 1
            assert world.kinds() == ["DriverUp", "ExecDone"]

    run(test())


def test_back_off_and_giving_up_and_revival(run: Run) -> None:
    async def test() -> None:
        healthy = driver_argv("attnix.drivers.sim")
        broken = script_argv("import sys; sys.exit('no memory')")
        works = [True]
        timing = QUICK._replace(restart_attempts=5)
        spec = sim_spec(argv=lambda fds, config: (healthy if works[0] else broken)(fds, config), timing=timing)
        async with running(spec) as world:
            works[0] = False
            os.kill(world.supervisor.driver_pid(0), signal.SIGKILL)
            bug = await world.event(Bug)
            assert "no memory" in bug.text and "attempt 5" in bug.text
            assert world.kinds() == ["DriverUp", "DriverDown", "Bug", "DriverGone"], (
                "lives that never came up are not reported"
            )
            delays = [text.rsplit(" in ", 1)[1] for level, text in world.logs if "starting it again" in text]
            assert delays == ["0 s", "0.001 s", "0.002 s", "0.004 s"]
            assert world.supervisor.driver_pid(0) == 0
            works[0] = True
            world.supervisor.restart(0, "by hand")
            assert (await world.event(DriverUp, 2)).epoch == 6

    run(test())


def test_a_stable_life_forgives_earlier_failures(run: Run) -> None:
    async def test() -> None:
        async with running(sim_spec(timing=QUICK._replace(stable_ns=1_000_000, backoff_first_ns=10**15))) as world:
            for life in range(1, 5):  # the second of these in a row would wait for days
                await world.event(DriverUp, life)
                await asyncio.sleep(0.005)  # longer than stable_ns; not a wait for anything else
                os.kill(world.supervisor.driver_pid(0), signal.SIGKILL)
            await world.event(DriverUp, 5)

    run(test())


def test_other_weights_after_a_restart_are_refused(run: Run) -> None:
    async def test() -> None:
        models = ["one"]

        def argv(fds: DriverFds, config: str) -> list[str]:
            return driver_argv("attnix.drivers.sim")(fds, config.replace("MODEL", models[-1]))

        config = {"slots": 4, "entries": 4, "block_tokens": 4, "model": "MODEL"}
        async with running(sim_spec(argv=argv, config=config)) as world:
            models.append("two")
            os.kill(world.supervisor.driver_pid(0), signal.SIGKILL)
            bug = await world.event(Bug)
            assert "came back as something else: fingerprint" in bug.text
            assert world.kinds() == ["DriverUp", "DriverDown", "Bug", "DriverGone"]

    run(test())


def test_closing_ends_a_driver_that_ignores_everything(run: Run) -> None:
    async def test() -> None:
        plan = FaultPlan({(1, 0): Fault.HANG})
        world = World(sim_spec(plan=plan, timing=QUICK._replace(stop_ns=50_000_000)))
        await world.supervisor.start()
        world.submit(1)
        pid = world.supervisor.driver_pid(0)
        await world.supervisor.close()
        assert not is_alive(pid)
        assert world.kinds() == ["DriverUp"]

    run(test())


def test_drivers_end_with_the_daemon() -> None:
    """kill -9 of the process that supervises: the driver, which hangs in a pass, is gone too."""
    program = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
import importlib.util
spec = importlib.util.spec_from_file_location("test_supervisor", {__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

async def main():
    world = module.World(module.sim_spec(plan=module.FaultPlan({{(1, 0): module.Fault.HANG}})))
    await world.supervisor.start()
    world.submit(1)
    print(world.supervisor.driver_pid(0), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""

    async def test() -> None:
        daemon = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
        assert daemon.stdout is not None
        driver_pid = int(await daemon.stdout.readline())
        assert is_alive(driver_pid)
        daemon.kill()
        await daemon.wait()
        async with asyncio.timeout(DEADLINE_S):
            while is_running(driver_pid):
                await asyncio.sleep(0.01)

    asyncio.run(test())


def is_running(pid: int) -> bool:
    """Alive and no zombie: an orphan is reaped by whatever plays init here, if anything does."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"
