"""Keeps driver processes alive: spawn, probe, watch, kill, reap, start again.  Runs in the daemon's loop; no threads.

One `Life` (drivers/life.py) is one process from spawn to reap; here is what connects one life to the next.  The rule
behind the order of things is *hung is not dead* (DESIGN.md §10, item 19): a driver that does not answer may still be
writing frames, so the kernel hears DriverDown only after the process has been reaped, whatever made us give up on it.

    spawn ─ probe answered ─► up ─┬─ process ends by itself ──────────────► reaped ─ DriverDown ─► back-off ─► spawn
       │                          └─ deadline, nonsense, restart ─ SIGKILL ────┘                      ▲
       └─ no answer, wrong answer, exit ─ SIGKILL ─ reaped ───────────────────────────────────────────┘

The memfds of frames and page-table rows belong to the supervisor and outlive every life.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections.abc import Callable, Sequence

from attnix.kernel.errors import E
from attnix.kernel.events import Bug, DriverDown, DriverGone, DriverUp, Event, Exec, ExecDone, ExecFailed

from .life import Life, LifeCallbacks, State
from .memfd import create_memfd, map_shared, reopen_read_only
from .protocol import Probe
from .spec import DriverFds, DriverSpec, Log, Timing, driver_argv

__all__ = ["DriverFds", "DriverSpec", "DriverStartError", "Supervisor", "Timing", "driver_argv"]

# What must not change from one life to the next: block keys and the kernel's tables were built on it.
_IDENTITY = ("fingerprint", "capacity_frames", "frame_bytes", "vocab_tokens", "numerics", "engine")
_JUNK = b"\xa5"


class DriverStartError(Exception):
    """A driver could not be started at boot; the message says which, why, and what it printed last."""


class Supervisor:
    """All drivers of one daemon.

    specs  one per device
    emit   gets DriverUp, DriverDown, ExecDone, ExecFailed and Bug, from the loop, in the order in which they happened
    log    gets (level, text) for what drivers print and what is done about them

    DriverUp of the first life is emitted too, before `start` returns: a daemon that makes its kernel out of the probes
    keeps those events until then.
    """

    def __init__(self, specs: Sequence[DriverSpec], emit: Callable[[Event], None], log: Log) -> None:
        self._devices: dict[int, _Device] = {}
        try:
            for spec in specs:
                if spec.device in self._devices:
                    raise ValueError(f"two drivers with device number {spec.device}")
                self._devices[spec.device] = _Device(spec, emit, log)
        except BaseException:
            for device in self._devices.values():
                device.close_memory()
            raise

    async def start(self) -> list[Probe]:
        """Start every driver and wait for all probes, in the order of `specs`.

        Error: DriverStartError, with every driver stopped again.
        """
        try:
            return list(await asyncio.gather(*(device.start() for device in self._devices.values())))
        except BaseException:
            await self.close()
            raise

    def exec(self, effect: Exec) -> None:
        """Send a pass to its driver.  Answered by ExecDone or ExecFailed, or its driver goes down.

        To a device that is down already the answer is ExecFailed with ENODEV, from the next turn of the loop.
        """
        self._devices[effect.device].exec(effect)

    def restart(self, device: int, reason: str) -> None:
        """Kill a driver and start it again; DriverDown and DriverUp follow.  Also revives one that was given up."""
        self._devices[device].restart(reason)

    async def close(self) -> None:
        """Ask every driver to exit, make sure of it, reap all, give the memory back.  Nothing is emitted from here on."""
        devices = self._devices.values()
        await asyncio.gather(*(device.stop() for device in devices))
        for device in devices:
            device.close_memory()

    def rows(self, device: int) -> mmap.mmap:
        """The page-table rows of a device, writable: what its driver reads."""
        return self._devices[device].rows

    def arena_fd(self, device: int) -> int:
        """The memfd of its frames, open as long as the supervisor is."""
        return self._devices[device].arena_fd

    def driver_pid(self, device: int) -> int:
        """The process id of the running driver, 0 while there is none."""
        life = self._devices[device].life
        return 0 if life is None else life.pid

    def restarts(self, device: int) -> int:
        """How often it was spawned again."""
        return max(0, self._devices[device].epoch - 1)

    def late_messages(self, device: int) -> int:
        """Answers dropped because no pass was waiting for them, over all lives."""
        supervised = self._devices[device]
        return supervised.late_messages + (0 if supervised.life is None else supervised.life.late_messages)

    def health(self, device: int) -> dict[str, int]:
        """The counters of the running driver's last health answer; empty while there are none."""
        life = self._devices[device].life
        return {} if life is None else dict(life.health)


class _Device:
    """The sequence of lives of one driver.

    epoch     lives so far
    failures  ends since the last stable life
    """

    def __init__(self, spec: DriverSpec, emit: Callable[[Event], None], log: Log) -> None:
        self.spec = spec
        self.epoch = 0
        self.failures = 0
        self.late_messages = 0
        self.life: Life | None = None
        self.probe: Probe | None = None
        self._emit = emit
        self._log = log
        self._closing = False
        self._started: asyncio.Future[Probe] | None = None
        self._respawn: asyncio.TimerHandle | None = None
        self._stable: asyncio.TimerHandle | None = None
        self._last_output: list[str] = []
        self._changed = ""  # what differs from the first life's identity: it must not serve again
        self.arena_fd = create_memfd(f"attnix-{spec.name}-arena", spec.arena_bytes)
        self.rows_fd = create_memfd(f"attnix-{spec.name}-rows", spec.rows_bytes)
        self._rows_read_only_fd = reopen_read_only(self.rows_fd)
        self.rows = map_shared(self.rows_fd)

    def close_memory(self) -> None:
        for fd in (self.arena_fd, self.rows_fd, self._rows_read_only_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.arena_fd = self.rows_fd = self._rows_read_only_fd = -1
        with contextlib.suppress(BufferError):  # the kernel still has views of it: it goes with the last of them
            self.rows.close()

    async def start(self) -> Probe:
        self._started = asyncio.get_running_loop().create_future()
        self._spawn()
        return await self._started

    def exec(self, effect: Exec) -> None:
        if self.life is not None and self.life.state is State.UP:
            self.life.exec(effect)
        elif self.life is None or not self.life.was_up:
            # The kernel has been told that it is down (or never that it is up), so it deserves an answer.
            failed = ExecFailed(effect.device, effect.seq, E.ENODEV, f"{self.spec.name} has no running driver")
            asyncio.get_running_loop().call_soon(self._emit_open, failed)
        # Else it is being killed, and DriverDown will answer for everything sent to it.

    def restart(self, reason: str) -> None:
        if self.life is not None:
            self.life.kill(reason)
        elif self._respawn is None and not self._closing:
            self.failures = 0
            self._changed = ""
            self._spawn()

    async def stop(self) -> None:
        self._closing = True
        for timer in (self._respawn, self._stable):
            if timer is not None:
                timer.cancel()
        self._respawn = self._stable = None
        if self._started is not None and not self._started.done():
            self._started.cancel()
        if self.life is not None:
            await self.life.stop()

    def _spawn(self) -> None:
        self._respawn = None
        if self._closing:
            return
        self.epoch += 1
        if self.epoch > 1 and self.spec.arena == "lost":
            self._spoil_arena()
        callbacks = LifeCallbacks(self._on_up, self._emit_open, self._on_ended, self._log)
        try:
            self.life = Life(self.spec, self.epoch, self.arena_fd, self._rows_read_only_fd, callbacks)
        except OSError as error:
            self._last_output = []
            self._after_failure(f"could not be spawned: {error}", is_final=self.epoch == 1)

    def _spoil_arena(self) -> None:
        """Make "lost" true: nobody may find old KV there, not even by mistake."""
        with map_shared(self.arena_fd) as arena:
            step = 1 << 20
            for at in range(0, len(arena), step):
                arena[at : at + step] = _JUNK * min(step, len(arena) - at)

    def _on_up(self, life: Life, probe: Probe) -> None:
        if self.probe is not None:
            changed = [name for name in _IDENTITY if getattr(probe, name) != getattr(self.probe, name)]
            if changed:
                self._changed = ", ".join(f"{x} {getattr(self.probe, x)} -> {getattr(probe, x)}" for x in changed)
                life.was_up = False  # nobody is told of this life
                life.kill(f"came back as something else: {self._changed}")
                return
        self.probe = probe
        loop = asyncio.get_running_loop()
        self._stable = loop.call_later(self.spec.timing.stable_ns / 1e9, self._on_stable)
        self._log("info", f"{self.spec.name}: up, pid {life.pid}, epoch {life.epoch}, {probe.engine}, {probe.model}")
        if self._started is not None and not self._started.done():
            self._started.set_result(probe)
        arena = self.spec.arena if life.epoch > 1 else "lost"  # the first life finds nothing worth keeping
        self._emit_open(DriverUp(self.spec.device, life.epoch, life.pid, arena))

    def _on_stable(self) -> None:
        self._stable = None
        self.failures = 0

    def _on_ended(self, life: Life) -> None:
        self.life = None
        self.late_messages += life.late_messages
        self._last_output = list(life.output)
        if self._stable is not None:
            self._stable.cancel()
            self._stable = None
        if self._closing:
            return
        if life.was_up:
            self._emit_open(DriverDown(self.spec.device, life.epoch, life.reason))
        # A driver that exits with EX_CONFIG before it was up says that another try would end the same way.
        is_final = bool(self._changed) or (life.exit_status == os.EX_CONFIG and not life.was_up)
        self._after_failure(life.reason, is_final=is_final)

    def _after_failure(self, reason: str, *, is_final: bool) -> None:
        self.failures += 1
        timing = self.spec.timing
        starting = self._started is not None and not self._started.done()
        attempts = timing.start_attempts if starting else timing.restart_attempts
        if is_final or self.failures >= attempts:
            self._give_up(reason)
            return
        delay_ns = 0
        if self.failures > 1:
            delay_ns = min(timing.backoff_first_ns << min(self.failures - 2, 32), timing.backoff_cap_ns)
        self._log("warning", f"{self.spec.name}: {reason}; starting it again in {delay_ns / 1e9:g} s")
        self._respawn = asyncio.get_running_loop().call_later(delay_ns / 1e9, self._spawn)

    def _give_up(self, reason: str) -> None:
        lines = "".join(f"\n    {line}" for line in self._last_output)
        said = f"; its last output:{lines}" if lines else "; it printed nothing"
        text = f"driver {self.spec.name} cannot be started: {reason} (attempt {self.failures}){said}"
        self._log("error", text)
        if self._started is not None and not self._started.done():
            self._started.set_exception(DriverStartError(text))
        else:
            self._emit_open(Bug("error", text))
            self._emit_open(DriverGone(self.spec.device, reason))

    def _emit_open(self, event: ExecDone | ExecFailed | DriverUp | DriverDown | DriverGone | Bug) -> None:
        if not self._closing:
            self._emit(event)
