"""The pager of one device: finds frames for those that need them.

In this version a context that loses its frames is *recomputed*: its token log is complete (I7).  Frames are found in
this order: free ones; reclaimable ones, chosen by the eviction policy; those of idle contexts, least recently used
first; and, only for contexts that decode already, those of the newest job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from .context import Context
from .errors import Panic
from .records import EVICT, OK

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

    def _reserve(self, active: int) -> int:
        """Frames an admission must leave: the watermark, and one for each context that will grow.  None when it is alone."""
        if not active:
            return 0
        return self._device.capacity * self._m.sysctl.watermark_permille // 1000 + min(
            active, self._device.capacity // 4
        )

    def admit(self, context: Context, active: int) -> bool:
        """Map the whole log of `context`, making room by caches and idle contexts only; with nobody else active, by all."""
        while True:
            result = self._core.admit(context.slot, self._reserve(active))
            short = result.shortage_frames
            if result.status == OK:
                context.admitted = True
                return True
            if result.status == EVICT:
                self.evict(short)
            elif self.make_room(short):
                continue
            elif active or not self._make_room_by_force(context, short):
                return False

    def make_room(self, shortage_frames: int) -> bool:
        """Drop idle contexts, the least recently used first, until that many frames are had.  False: there is none."""
        return self._drop_some(self._idle(), shortage_frames, "idle")

    def _idle(self) -> Iterator[Context]:
        for context in list(self._sched.idle.values()):
            if self._core.slot_row(context.slot).entries:
                yield context
            else:
                self._sched.wake(context)  # nothing to take from it until it has run again

    def _drop_some(self, victims: Iterable[Context], shortage_frames: int, why: str) -> bool:
        """Drop contexts in this order until `shortage_frames` more are available.  False: none could be dropped."""
        wanted = self._available() + shortage_frames
        dropped = False
        for context in victims:
            if self._can_drop(context):
                self._drop(context, why)
                dropped = True
                if self._available() >= wanted:
                    break
        return dropped

    def _available(self) -> int:
        return self._core.free_frames(self._device.index) + self._core.reclaimable_frames(self._device.index)

    def _can_drop(self, context: Context) -> bool:
        return not self._core.in_flight(context.slot) and self._core.slot_row(context.slot).entries > 0

    def _drop(self, context: Context, why: str) -> None:
        self._core.drop(context.slot)
        context.admitted = False
        context.preemptions += 1
        self._sched.moves += 1
        self._sched.wake(context)
        self._m.count("preemptions")
        self._m.count(f"preemptions_{why}")

    def _make_room_by_force(self, oldest: Context, shortage_frames: int) -> bool:
        """Nothing runs and the oldest job does not fit: take the frames of those that wait behind it, newest first; then
        those of stopped and paused contexts; then its own, since a copy that it waits for keeps a frame which a
        recomputation does not need."""
        behind = (c for c in reversed(self._sched.queue) if c is not oldest)
        return (
            self._drop_some(behind, shortage_frames, "waiting")
            or self._drop_held(shortage_frames)
            or self._drop_some((oldest,), shortage_frames, "waiting")
        )

    def _drop_held(self, shortage_frames: int) -> bool:
        """Stopped and paused contexts, newest first."""
        held = [c for c in self._m.contexts_of(self._device.index) if c.job and self._m.held(c)]
        return self._drop_some(reversed(held), shortage_frames, "held")

    def preempt(self, shortage_frames: int) -> None:
        """Take all frames from the newest jobs that have any, never from the oldest of several.

        They go back into the queue at their place.
        """
        if self._drop_held(shortage_frames):
            return
        holders = [c for c in (*self._sched.queue, *self._sched.decoding.values()) if self._can_drop(c)]
        if not holders:
            raise Panic(f"{self._device.name}: no frame can be found and nobody can be preempted")
        holders.sort(key=Context.place)
        if len(holders) == 1 and -(-self._core.slot_row(holders[0].slot).tokens // self._m.config.block_tokens) > (
            self._device.capacity
        ):
            self._m.finish(holders[0], "length")  # alone and still too large: the pool is its window
            return
        wanted = self._available() + shortage_frames
        while holders:
            victim = holders.pop()
            self._core.stop_running(victim.slot)
            self._sched.decoding.pop(victim.slot, None)
            self._drop(victim, "running")
            self._sched.add(victim)
            wanted -= 1  # it needs none itself now
            if len(holders) <= 1 or self._available() >= wanted:
                return
