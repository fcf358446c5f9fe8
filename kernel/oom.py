"""The last resort when frames cannot be found: end a process, as few as possible, and tell its owner.

It is hardly ever needed, since whoever loses his frames can be computed again: free and reclaimable frames, idle contexts, kept
ones, pins, and the newest jobs all go first (kernel/pager.py).  docs/load-control.md lists the states that are left.  Two
things lead here:

    preempt   a context that runs needs a frame, and nobody may be dropped: somebody is ended at once
    the fuse  the first in a queue waits for frames, and its device has done nothing, for `oom.after_ms`.  First everything
              that may be dropped is, without saving what would be computed again; only when there is nothing left to drop, for as long
              again, is somebody ended

The score, 0..2000, is the share of the device's frames that ending the process would give back (proportional set size, in
permille), 5 a step of nice, less a point per minute of age up to 50, plus `oom_score_adj`; -1000 is never ended.  As in
Linux (mm/oom_kill.c) the highest goes, but among those whose end is enough for who waits, if there are any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .calls import OomNote
from .events import Notify
from .params import OOM_ADJ_NEVER

if TYPE_CHECKING:
    from .context import Context
    from .machine import Machine
    from .process import Process
    from .sched import Scheduler

_NICE_POINTS: Final = 5  # a step
_AGE_POINTS: Final = 50  # at most, one a minute
_MINUTE_NS: Final = 60_000_000_000


def score(m: Machine, process: Process) -> int:
    """0..2000: the larger, the sooner it is ended."""
    if process.oom_score_adj == OOM_ADJ_NEVER:
        return 0
    capacity = max(d.capacity for d in m.devices[: m.tiers.computes])
    held = sum(m.core.slot_row(c.slot).share_millionths for c in process.contexts.values())
    age = min(_AGE_POINTS, (m.now_ns - process.born_ns) // _MINUTE_NS)
    points = held // (1000 * capacity) + _NICE_POINTS * process.nice - age + process.oom_score_adj
    return max(0, min(2000, points))


class Oom:
    """Of one compute device."""

    def __init__(self, machine: Machine, device: int) -> None:
        self._m = machine
        self._device = device
        self._waits: Context | None = None  # who waits for frames while nothing runs ...
        self._since_ns = 0  # ... since then
        self._tried = ""  # what the fuse has done about it: "" | dropped | said
        self._armed_ns = 0

    def look(self) -> None:
        """Once per step."""
        m = self._m
        after_ns = m.sysctl.after_ms * 1_000_000
        scheduler, device = m.schedulers[self._device], m.devices[self._device]
        waits = scheduler.first_short() if device.up and device.flight is None and after_ns else None
        if waits is not self._waits:
            self._waits, self._since_ns, self._tried = waits, m.now_ns, ""
        if waits is None:
            return
        if m.now_ns - self._since_ns >= after_ns:
            self._since_ns = m.now_ns
            self._blow(scheduler, waits)
        at_ns = self._since_ns + after_ns
        if self._tried != "said" and not m.now_ns < self._armed_ns <= at_ns:  # a timer may be there for a longer time
            self._armed_ns = at_ns
            m.set_timer(at_ns)

    def _blow(self, scheduler: Scheduler, waits: Context) -> None:
        after_ms = self._m.sysctl.after_ms
        frames = scheduler.pager.drop_all_but(waits)
        if frames:
            self._m.count("oom_dropped_frames", frames)
            why = f"context {waits.cid} has waited {after_ms} ms for frames and nothing runs"
            self._m.log("warning", f"{self._name()}: {why}: {frames} frames are taken from all others")
            self._go_on(scheduler, waits)
        if frames or not self._tried:
            self._tried = "dropped"
        elif self.end_one(waits):
            self._go_on(scheduler, waits)
        elif self._tried != "said":
            self._tried = "said"
            text = f"context {waits.cid} waits for frames and nobody's end would give any back"
            self._m.log("error", f"{self._name()}: {text}")

    def _go_on(self, scheduler: Scheduler, waits: Context) -> None:
        """Before an older one, which may wait for something else, takes the frames again."""
        if waits.queued and not waits.admitted:
            scheduler.pager.admit(waits, 0)
        scheduler.run()

    def end_one(self, waits: Context | None) -> bool:
        """End the process whose end helps, with the highest score, but not that of `waits`.  False: there is
        none, or all of them together do not have enough."""
        m = self._m
        core = m.core
        need = 1
        if waits is not None:
            frames = -(-core.slot_row(waits.slot).tokens // m.config.block_tokens) - core.slot_row(waits.slot).entries
            need = max(1, frames - core.free_frames(self._device) - core.reclaimable_frames(self._device))
        found, total = [], 0
        for process in m.processes.values():
            if (
                process.oom_score_adj == OOM_ADJ_NEVER
                or process.zombie
                or (waits is not None and process is waits.process)
            ):
                continue
            gives = sum(self._gives(c) for c in process.contexts.values())
            total += gives
            if gives:
                found.append((gives >= need, score(m, process), process.pid, process))
        if not found or total < need:
            return False
        victim = max(found)[3]
        self._end(victim, waits)
        return True

    def _gives(self, context: Context) -> int:
        """Frames that come back when it goes: not those that are shared, or under I/O, or in a pass."""
        core = self._m.core
        if context.device != self._device or context.dying or core.in_flight(context.slot):
            return 0
        row = core.slot_row(context.slot)
        return max(0, row.entries - row.shared - core.loading(context.slot))

    def _end(self, process: Process, waits: Context | None) -> None:
        m = self._m
        points = score(m, process)
        largest = max((c for c in process.contexts.values()), key=lambda c: m.core.slot_row(c.slot).entries)
        frames = sum(m.core.slot_row(c.slot).entries for c in process.contexts.values())
        for_whom = f"context {waits.cid} of process {waits.process.pid}" if waits is not None else "what runs"
        text = (
            f"out of frames on {self._name()}: process {process.pid} ({process.name or '-'}) with {frames} frames and score {points} "
            f"was ended so that "
        )
        m.count("oom_kills")
        m.log("error", f"{text}{for_whom} can go on")
        others = waits is not None and waits.process.uid != process.uid
        text += f"{'another user' if others else for_whom} can go on"
        m.emit(Notify(process.conn, "oom", OomNote(process.pid, largest.cid, points, text)))
        m.end_process(process, 137, "killed")

    def _name(self) -> str:
        return self._m.devices[self._device].name
