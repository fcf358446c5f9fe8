"""Keeps driver processes alive: spawn, probe, watch, kill, reap, start again.  Runs in the daemon's loop; no threads.

One `Life` (drivers/life.py) is one process from spawn to reap; here is what connects one life to the next.  The rule
behind the order of things is *hung is not dead* (DESIGN.md §10, item 19): a driver that does not answer may still be
writing frames, so the kernel hears DriverDown only after the process has been reaped, whatever made us give up on it.

    spawn ─ probe answered ─► up ─┬─ process ends by itself ──────────────► reaped ─ DriverDown ─► back-off ─► spawn
       │                          └─ deadline, nonsense, restart ─ SIGKILL ────┘                      ▲
       └─ no answer, wrong answer, exit ─ SIGKILL ─ reaped ───────────────────────────────────────────┘

The memfds of frames, of page-table rows, of the dram tier and of the gates belong to the supervisor and outlive every
life.  A dram tier has no driver and is up from the start.  Drivers of slower tiers come after the accels, since their
identity holds the accels' fingerprint, and may be attached and detached while serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from attnix.kernel.errors import E
from attnix.kernel.events import (
    AttachTier,
    Bug,
    DriverAsleep,
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

from .dram import DramArena, DramSpec
from .gates import Gates
from .life import Life, LifeCallbacks, State, failed_transfer
from .memfd import create_memfd, give_back, map_shared, reopen_read_only
from .protocol import Probe
from .spec import DriverFds, DriverSpec, Log, Timing, driver_argv

__all__ = ["DriverFds", "DriverSpec", "DriverStartError", "Supervisor", "Timing", "driver_argv"]

# What must not change from one life to the next: block keys and the kernel's tables were built on it.
_IDENTITY: Final = {
    "hbm": ("fingerprint", "capacity_frames", "frame_bytes", "vocab_tokens", "numerics", "engine"),
    "tier": ("capacity_frames", "frame_bytes", "stored_bytes"),
}
_TIER_ROWS_BYTES: Final = 4096  # a tier driver reads no page tables: it inherits a page of zeros
_JUNK = b"\xa5"


class DriverStartError(Exception):
    """A driver could not be started at boot; the message says which, why, and what it printed last."""


class _Shared:
    """What every driver may inherit: the dram arena, the gates, and for direct transfers the arenas of the accels."""

    def __init__(self, dram: DramSpec | None, log: Log) -> None:
        self.gates = Gates()
        self.hbm_fds: dict[int, int] = {}
        try:
            self.dram = None if dram is None else DramArena(dram, log)
        except BaseException:
            self.gates.close()
            raise

    def add_to(self, spec: DriverSpec) -> DriverSpec:
        """The driver with its share of the descriptors, under the names of drivers/protocol.py.

        Without a dram nothing ever moves, and a driver that never heard of tiers is started as ever.
        """
        if self.dram is None:
            return spec
        fds = {"dram": self.dram.fd, "gates": self.gates.fd}
        config: dict[str, Any] = {
            "dram_fd": self.dram.fd,
            "dram_device": self.dram.spec.device,
            "dram_frames": self.dram.spec.capacity_frames,
            "gates_fd": self.gates.fd,
        }
        if spec.tier != "hbm":
            fds |= {f"hbm{device}": fd for device, fd in self.hbm_fds.items()}
            config["hbm_fds"] = {str(device): fd for device, fd in self.hbm_fds.items()}
        return dataclasses.replace(spec, config={**spec.config, **config}, fds={**spec.fds, **fds})

    def close(self) -> None:
        self.gates.close()
        if self.dram is not None:
            self.dram.close()


TierMaker = Callable[[AttachTier], DriverSpec]  # ValueError: the settings make no driver, and why


class Supervisor:
    """All drivers of one daemon.

    specs    one per accel
    emit     gets every event about drivers, from the loop, in the order in which they happened
    log      gets (level, text) for what drivers print and what is done about them
    dram     the dram tier, if there is one: without it no other tier can be
    tier_of  makes the driver of a tier that is attached while serving

    DriverUp of the first life is emitted too, before `start` returns: a daemon that makes its kernel out of the probes
    keeps those events until then.
    """

    def __init__(
        self,
        specs: Sequence[DriverSpec],
        emit: Callable[[Event], None],
        log: Log,
        *,
        dram: DramSpec | None = None,
        tier_of: TierMaker | None = None,
    ) -> None:
        self._emit = emit
        self._log = log
        self._tier_of = tier_of
        self._devices: dict[int, _Device] = {}
        self._identity = b""
        self._attaching: dict[int, asyncio.Task[None]] = {}
        self._resting: set[asyncio.Task[None]] = set()
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._shared = _Shared(dram, log)
        try:
            for spec in specs:
                self._add(spec)
        except BaseException:
            self._close_memory()
            raise

    async def start(self) -> list[Probe]:
        """Start the driver of every accel and wait for all probes, in the order of `specs`.

        Error: DriverStartError, with every driver stopped again.
        """
        dram = self._shared.dram
        if dram is not None:
            self._emit(DriverUp(dram.spec.device, 1, 0, "kept", dram.pages))
        try:
            return list(await asyncio.gather(*(device.start() for device in self._devices.values())))
        except BaseException:
            await self.close()
            raise

    def set_identity(self, digest: bytes) -> None:
        """Tell the accels what goes into the header of every frame that they copy out; in every later life again."""
        self._identity = digest
        for device in self._devices.values():
            device.set_identity(digest)

    async def start_tier(self, spec: DriverSpec) -> Probe:
        """Start the driver of a slower tier.  What it finds in its slots is emitted before its DriverUp.

        Error: DriverStartError, ValueError: nothing of it is left; the other drivers go on.
        """
        device = self._add(spec)
        try:
            return await device.start()
        except DriverStartError:
            del self._devices[spec.device]
            device.close_memory()
            raise

    def attach(self, effect: AttachTier) -> None:
        """Start a new tier while serving.  DriverUp or DriverGone of its device answers."""
        task = asyncio.ensure_future(self._attach(effect))
        self._attaching[effect.device] = task
        task.add_done_callback(lambda _: _forget(self._attaching, effect.device, task))

    async def _attach(self, effect: AttachTier) -> None:
        try:
            if self._tier_of is None:
                raise ValueError("this daemon attaches no tiers")
            spec = self._tier_of(effect)
            if effect.device in self._leaving:  # the number's last owner has to be gone
                await self._leaving[effect.device]
            await self.start_tier(spec)
        except (DriverStartError, ValueError, OSError) as error:
            self._emit(Bug("error", f"{effect.name} cannot be attached: {error}"))
            self._emit(DriverGone(effect.device, str(error)))

    def detach(self, device: int) -> None:
        """Stop the driver of a tier for good.  Nothing is emitted about it from here on."""
        if device in self._attaching:
            self._attaching[device].cancel()
        leaving = self._devices.pop(device, None)
        if leaving is None:
            return

        async def retire() -> None:
            await leaving.stop()
            leaving.close_memory()

        self._leaving[device] = task = asyncio.ensure_future(retire())
        task.add_done_callback(lambda _: _forget(self._leaving, device, task))

    def sleep(self, device: int) -> None:
        """Stop the driver of a compute device, then give the memory of its frames back to the machine.  DriverAsleep answers."""
        task = asyncio.ensure_future(self._sleep(device))
        self._resting.add(task)
        task.add_done_callback(self._resting.discard)

    async def _sleep(self, device: int) -> None:
        await self._devices[device].rest()
        self._emit(DriverAsleep(device))

    def wake(self, device: int) -> None:
        """Start it again.  DriverUp or DriverGone answers."""
        self._devices[device].resume()

    def _add(self, spec: DriverSpec) -> _Device:
        dram = self._shared.dram
        if spec.device in self._devices or (dram is not None and dram.spec.device == spec.device):
            raise ValueError(f"two drivers with device number {spec.device}")
        if spec.tier != "hbm" and dram is None:
            raise ValueError(f"{spec.name} has no dram to copy from and to")
        device = _Device(spec, self._shared, self._emit, self._log)
        device.set_identity(self._identity)
        self._devices[spec.device] = device
        if spec.tier == "hbm" and spec.arena == "kept":  # else its frames are not there, and nobody can read into them
            self._shared.hbm_fds[spec.device] = device.arena_fd
        return device

    def _close_memory(self) -> None:
        for device in self._devices.values():
            device.close_memory()
        self._shared.close()

    def exec(self, effect: Exec) -> None:
        """Send a pass to its driver.  Answered by ExecDone or ExecFailed, or its driver goes down.

        To a device that is down already the answer is ExecFailed with ENODEV, from the next turn of the loop.
        """
        self._devices[effect.device].exec(effect)

    def transfer(self, effect: Transfer) -> None:
        """Send a transfer to the driver that does it.  Answered by TransferDone, or its driver goes down.

        When that is down already every item fails with ENODEV, from the next turn of the loop.
        """
        device = self._devices.get(effect.device)
        if device is not None:
            device.transfer(effect)
        else:
            asyncio.get_running_loop().call_soon(self._emit, failed_transfer(effect, E.ENODEV))

    def restart(self, device: int, reason: str) -> None:
        """Kill a driver and start it again; DriverDown and DriverUp follow.  Also revives one that was given up."""
        supervised = self._devices.get(device)
        if supervised is not None:  # a dram has no driver, and a tier may just have been detached
            supervised.restart(reason)

    async def close(self) -> None:
        """Ask every driver to exit, make sure of it, reap all, give the memory back.  Nothing is emitted from here on."""
        tasks = [*self._attaching.values(), *self._leaving.values(), *self._resting]
        for task in self._attaching.values():
            task.cancel()
        await asyncio.gather(*(device.stop() for device in self._devices.values()))
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close_memory()

    def rows(self, device: int) -> mmap.mmap:
        """The page-table rows of a device, writable: what its driver reads."""
        return self._devices[device].rows

    def arena_fd(self, device: int) -> int:
        """The memfd of its frames, open as long as the supervisor is; of a tier with a driver, the dram that it copies
        from and to."""
        dram = self._shared.dram
        return dram.fd if dram is not None and dram.spec.device == device else self._devices[device].arena_fd

    @property
    def gates(self) -> Gates:
        return self._shared.gates

    @property
    def dram_pages(self) -> str:
        """What the dram's memory is made of, for people; empty without one."""
        return "" if self._shared.dram is None else self._shared.dram.pages

    def driver_pid(self, device: int) -> int:
        """The process id of the running driver, 0 while there is none."""
        supervised = self._devices.get(device)
        return 0 if supervised is None or supervised.life is None else supervised.life.pid

    def restarts(self, device: int) -> int:
        """How often it was spawned again."""
        return max(0, self._devices[device].epoch - 1)

    def late_messages(self, device: int) -> int:
        """Answers dropped because no pass or transfer was waiting for them, over all lives."""
        supervised = self._devices[device]
        return supervised.late_messages + (0 if supervised.life is None else supervised.life.late_messages)

    def health(self, device: int) -> dict[str, int]:
        """The counters of the running driver's last health answer; empty while there are none."""
        life = self._devices[device].life
        return {} if life is None else dict(life.health)


def _forget(tasks: dict[int, asyncio.Task[None]], device: int, task: asyncio.Task[None]) -> None:
    """The number may have a new owner, with a task of its own."""
    if tasks.get(device) is task:
        del tasks[device]


class _Device:
    """The sequence of lives of one driver.

    epoch     lives so far
    failures  ends since the last stable life
    """

    def __init__(self, spec: DriverSpec, shared: _Shared, emit: Callable[[Event], None], log: Log) -> None:
        self.spec = shared.add_to(spec)
        self._shared = shared
        self.epoch = 0
        self.failures = 0
        self.late_messages = 0
        self.life: Life | None = None
        self.probe: Probe | None = None
        self._emit = emit
        self._log = log
        self._closing = False
        self._resting = False  # put to sleep: no process wanted
        self._started: asyncio.Future[Probe] | None = None
        self._respawn: asyncio.TimerHandle | None = None
        self._stable: asyncio.TimerHandle | None = None
        self._last_output: list[str] = []
        self._changed = ""  # what differs from the first life's identity: it must not serve again
        self._identity = b""
        self._gated: dict[int, tuple[int, int]] = {}  # transfers in flight that report to a gate: (gate, ticket) by seq
        self._owns_arena = spec.tier == "hbm"
        if shared.dram is None or self._owns_arena:
            self.arena_fd = create_memfd(f"attnix-{spec.name}-arena", spec.arena_bytes)
            self.rows_fd = create_memfd(f"attnix-{spec.name}-rows", spec.rows_bytes)
        else:
            self.arena_fd = shared.dram.fd
            self.rows_fd = create_memfd(f"attnix-{spec.name}-rows", _TIER_ROWS_BYTES)
        self._rows_read_only_fd = reopen_read_only(self.rows_fd)
        self.rows = map_shared(self.rows_fd)

    def close_memory(self) -> None:
        owned = (self.arena_fd,) if self._owns_arena else ()
        for fd in (*owned, self.rows_fd, self._rows_read_only_fd):
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

    def transfer(self, effect: Transfer) -> None:
        if effect.gate >= 0:
            self._gated[effect.seq] = (effect.gate, effect.ticket)
        if self.life is not None and self.life.state is State.UP:
            self.life.transfer(effect)
        elif self.life is None or not self.life.was_up:
            asyncio.get_running_loop().call_soon(self._on_answered, failed_transfer(effect, E.ENODEV))

    def set_identity(self, digest: bytes) -> None:
        self._identity = digest if self._shared.dram is not None and self.spec.tier == "hbm" else b""
        if self._identity and self.life is not None and self.life.state is State.UP:
            self.life.identify(self._identity)

    def _on_answered(self, event: ExecDone | ExecFailed | TransferDone) -> None:
        if isinstance(event, TransferDone):
            gated = self._gated.pop(event.seq, None)
            if gated is not None and event.failed:  # whatever the driver did about it
                self._shared.gates.fail(*gated)
        self._emit_open(event)

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

    async def rest(self) -> None:
        """No process and no frames until `resume`.  Nobody else may be reading or writing them."""
        self._resting = True
        for timer in (self._respawn, self._stable):
            if timer is not None:
                timer.cancel()
        self._respawn = self._stable = None
        if self.life is not None:
            await self.life.stop()
        if self._owns_arena:
            give_back(self.arena_fd)

    def resume(self) -> None:
        if self._resting:
            self._resting = False
            self.failures = 0
            if self.life is None:
                self._spawn()

    def _spawn(self) -> None:
        self._respawn = None
        if self._closing or self._resting:
            return
        self.epoch += 1
        if self.epoch > 1 and self.spec.arena == "lost" and self._owns_arena:
            self._spoil_arena()
        callbacks = LifeCallbacks(self._on_up, self._on_answered, self._on_ended, self._log)
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
            names = _IDENTITY["hbm" if self.spec.tier == "hbm" else "tier"]
            changed = [name for name in names if getattr(probe, name) != getattr(self.probe, name)]
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
        if self._identity:
            life.identify(self._identity)
        for found in life.found:
            self._emit_open(found)
        # The first life finds nothing worth keeping; a driver whose frames lie in its device's memory never does.
        arena = self.spec.arena if life.epoch > 1 and probe.arena != "lost" else "lost"
        self._emit_open(
            DriverUp(
                self.spec.device, life.epoch, life.pid, arena, probe.engine, probe.capabilities,
                probe.read_bytes_s, probe.write_bytes_s, probe.latency_ns, probe.prefill,
            )
        )  # fmt: skip

    def _on_stable(self) -> None:
        self._stable = None
        self.failures = 0

    def _on_ended(self, life: Life) -> None:
        self.life = None
        self.late_messages += life.late_messages
        self._last_output = list(life.output)
        for gate, ticket in self._gated.values():
            self._shared.gates.fail(gate, ticket)
        self._gated.clear()
        if self._stable is not None:
            self._stable.cancel()
            self._stable = None
        if self._closing or self._resting:
            return
        if life.was_up:
            self._emit_open(DriverDown(self.spec.device, life.epoch, life.reason))
        # A driver that exits with EX_CONFIG before it was up says that another try would end the same way.
        is_final = bool(self._changed) or (life.exit_status == os.EX_CONFIG and not life.was_up)
        self._after_failure(life.reason, is_final=is_final)

    def _after_failure(self, reason: str, *, is_final: bool) -> None:
        self.failures += 1
        timing = self.spec.timing
        starting = self.probe is None
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

    def _emit_open(
        self, event: ExecDone | ExecFailed | TransferDone | Found | DriverUp | DriverDown | DriverGone | Bug
    ) -> None:
        if not self._closing:
            self._emit(event)
