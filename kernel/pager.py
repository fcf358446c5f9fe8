"""The pager of one device: finds frames for those that need them.

In this version a context that loses its frames is *recomputed*: its token log is complete (I7).  Frames are found in
this order: free ones; reclaimable ones, chosen by the eviction policy; those of idle contexts, least recently used
first; and, only for contexts that decode already, those of the newest job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .context import Context
from .errors import Panic
from .twin import EVICT, OK

if TYPE_CHECKING:
    from .machine import Machine
    from .sched import Scheduler


class Pager:
    def __init__(self, machine: Machine, device: int, scheduler: Scheduler) -> None:
        self._m = machine
        self._core = machine.core
        self._device = machine.devices[device]
        self._sched = scheduler

    def evict(self, want_frames: int) -> None:
        """Free `want_frames` reclaimable frames.  Requires: there are that many."""
        index = self._device.index
        freed = self._core.evict(index, list(self._m.policy.victims(self._core, index, want_frames)))
        while freed < want_frames:  # the policy fell short
            more = self._core.evict(index, self._core.oldest(index, want_frames - freed))
            if not more:
                raise Panic(f"{self._device.name}: {want_frames - freed} reclaimable frames cannot be evicted")
            freed += more

    def reserve(self) -> int:
        """Frames an admission must leave: the watermark, and one for each context that will grow.  None when it is alone."""
        active = self._sched.active()
        if not active:
            return 0
        return self._device.capacity * self._m.sysctl.watermark_permille // 1000 + min(
            active, self._device.capacity // 4
        )

    def admit(self, context: Context) -> bool:
        """Map the whole log of `context`, making room by caches and idle contexts only."""
        while True:
            reserve = self.reserve()
            result = self._core.admit(context.slot, reserve)
            if result.status == OK:
                context.admitted = True
                return True
            if result.status == EVICT:
                self.evict(result.shortage_frames)
            elif self.make_room(result.shortage_frames, context):
                continue
            elif self._sched.active() or not (self._drop_waiting(context) or self._drop_own(context)):
                return False

    def make_room(self, shortage_frames: int, keep: Context | None = None) -> bool:
        """Drop the least recently used idle context (not `keep`).  False: there is none."""
        idle = (
            c for c in self._m.contexts_of(self._device.index) if c.job is None and c is not keep and self._can_drop(c)
        )
        victim = min(idle, key=lambda c: c.last_ns, default=None)
        if victim is None:
            return False
        self._drop(victim, "idle")
        return True

    def _can_drop(self, context: Context) -> bool:
        return not self._core.in_flight(context.slot) and self._core.slot_row(context.slot).entries > 0

    def _drop(self, context: Context, why: str) -> None:
        self._core.drop(context.slot)
        context.admitted = False
        context.preemptions += 1
        self._m.count("preemptions")
        self._m.count(f"preemptions_{why}")

    def _drop_waiting(self, keep: Context) -> bool:
        """Nothing runs and the oldest job does not fit: take the frames of those that wait behind it, newest first."""
        for context in reversed(self._sched.queue):
            if context is not keep and self._can_drop(context):
                self._drop(context, "waiting")
                return True
        return self._drop_held(keep)

    def _drop_own(self, context: Context) -> bool:
        """Alone and still short: copying its partial tail needs one frame more than the context itself.  Start afresh."""
        if not self._can_drop(context):
            return False
        self._drop(context, "own")
        return True

    def _drop_held(self, keep: Context) -> bool:
        """Then those of stopped and paused contexts."""
        for context in self._m.contexts_of(self._device.index):
            if context is not keep and context.job is not None and self._m.held(context) and self._can_drop(context):
                self._drop(context, "held")
                return True
        return False

    def preempt_newest(self) -> None:
        """Take all frames from the newest job that has any; it goes back into the queue at its place."""
        holders = [c for c in self._sched.queue if self._can_drop(c)]
        holders += [c for c in self._sched.decoding.values() if self._can_drop(c)]
        held = [c for c in self._m.contexts_of(self._device.index) if c.job and self._m.held(c) and self._can_drop(c)]
        if held:
            self._drop(held[-1], "held")
            return
        if not holders:
            raise Panic(f"{self._device.name}: no frame can be found and nobody can be preempted")
        victim = max(holders, key=lambda c: (c.process.nice, c.job.order if c.job else 0))
        if len(holders) == 1 and victim.slot in self._sched.decoding:
            self._m.finish(victim, "length")  # alone and still too large: the pool is its window
            return
        self._core.stop_running(victim.slot)
        self._sched.decoding.pop(victim.slot, None)
        self._drop(victim, "running")
        self._sched.add(victim)
