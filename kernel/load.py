"""Load control of one compute device: how many contexts may be admitted at once, and what they are left to grow into.

When the contexts that run want more memory together than there is, they take it from one another, and the machine spends
its time on bringing back what it has just thrown out.  More admitted contexts then mean less work done: thrashing (Denning,
"Thrashing: its causes and prevention", AFIPS 1968; "Working sets past and present", IEEE TSE 1980, on load control).  The
cure is to run fewer at a time.  The growth reserve (kernel/growth.py) keeps that from happening when lengths are as usual;
the guard sees it happen and lowers the admitted set.

What the guard looks at is the share of work done twice: tokens that admitted contexts lost to others and were given
back (loaded or computed again), beside fresh tokens, over a window.  Above one threshold the admitted set shrinks by a quarter;
below another, for two windows in a row, it grows by few: additive increase, multiplicative decrease (Chiu & Jain 1989), with
hysteresis.  What idle and waiting contexts lose does not count: running fewer others would not let them run sooner.

The guard refuses admissions and takes nothing from anybody, so whoever is admitted goes on; the queue's first is admitted
when nobody is, whatever the limit says.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from .context import JobKind
from .growth import Lengths, Need, reserve

if TYPE_CHECKING:
    from .context import Context
    from .machine import Machine
    from .sched import Scheduler

_PASSES: Final = 32  # a window has at least so many: what was preempted in it should be back within it
_CALM: Final = 2  # windows below the lower threshold before the set grows
_WAITERS: Final = 64  # looked at for the frames that they hold
_STALE: Final = 4  # log2 of passes after which the growth of those that run is looked at again
_SAY_NS: Final = 10_000_000_000  # between two lines in dmesg


class Growth:
    """What the contexts of one device will still need.  lengths: of the whole system."""

    def __init__(self, machine: Machine, device: int, lengths: Lengths) -> None:
        self._m = machine
        self._device = device
        self._lengths = lengths
        self._key: tuple[int, ...] = ()
        self._active: list[Need] = []
        self._available = 0  # frames, when `_active` was looked at

    def reserve(self, context: Context) -> int:
        """Frames to leave when this one is admitted beside those that are; 0: nothing is known."""
        if not self._m.sysctl.growth_permille or not self._lengths.known():
            return 0
        scheduler = self._m.schedulers[self._device]
        seq = self._m.devices[self._device].seq
        core = self._m.core
        available = core.free_frames(self._device) + core.reclaimable_frames(self._device)
        key = (scheduler.moves, len(scheduler.decoding), seq >> _STALE)
        if key != self._key:
            self._key = key
            self._available = available
            running = (*scheduler.decoding.values(), *(c for c in scheduler.queue if c.admitted))
            self._active = [self._of(c) for c in running if c is not context]
        size = self._m.config.block_tokens
        tokens = core.slot_row(context.slot).tokens
        frames = -(-tokens // size)
        joining = Need(frames, frames * size - tokens, self._more(context, tokens))
        grown = max(0, self._available - available)  # by those that run, since
        return self._beyond_waiting(context, reserve(self._active, joining, size) - grown)

    def _beyond_waiting(self, context: Context, frames: int) -> int:
        """Of these, those that cannot be had from contexts that wait behind: they lose theirs before anybody who runs does."""
        queue = self._m.schedulers[self._device].queue
        for other in islice(reversed(queue), _WAITERS):
            if frames <= 0 or other is context:
                break
            if not other.admitted:
                row = self._m.core.slot_row(other.slot)
                frames -= row.entries - row.shared
        return max(0, frames)

    def _of(self, context: Context) -> Need:
        row = self._m.core.slot_row(context.slot)
        room = row.entries * self._m.config.block_tokens - row.tokens
        return Need(row.entries - row.shared, room, self._more(context, row.tokens))

    def _more(self, context: Context, tokens: int) -> int:
        job = context.job
        if job is None or job.kind is not JobKind.GENERATE:
            return 0
        most = min(job.args.max_tokens, self._m.config.window_tokens - job.start)
        return self._lengths.more(tokens - job.start, most, self._m.sysctl.growth_permille / 1000)


class Guard:
    """The admitted set of one device.  limit: contexts that may be admitted at once, 0: as many as fit."""

    def __init__(self, machine: Machine, device: int) -> None:
        self._m = machine
        self._device = device
        self.limit = 0
        self._began_ns = 0
        self.fewest = _PASSES
        self._passes = 0
        self._worked = 0  # tokens of this window's passes
        self._again = 0  # tokens that admitted contexts lost and were given back in this window ...
        self._loaded = 0  # ... of them, those that were loaded
        self._calm = 0
        self._said = ""
        self._said_ns = -_SAY_NS

    def full(self, active: int) -> bool:
        """Nobody else is to be admitted now."""
        most = self._m.sysctl.max_admitted
        return 0 < self.limit <= active or 0 < most <= active

    def brought_back(self, again_tokens: int, loaded_tokens: int) -> None:
        """A context that was preempted is admitted again, without so many tokens that it had."""
        self._again += again_tokens
        self._loaded += min(loaded_tokens, again_tokens)
        self._m.count("thrash_tokens", again_tokens)

    def passed(self, scheduler: Scheduler, computed_tokens: int) -> None:
        """A pass of the device has ended."""
        self._passes += 1
        self._worked += computed_tokens
        over_ns = self._m.now_ns - self._began_ns
        if self._passes >= self.fewest and over_ns >= self._m.sysctl.thrash_window_ms * 1_000_000:
            self._judge(scheduler)
            self._began_ns = self._m.now_ns
            self._passes = self._worked = self._again = self._loaded = 0

    def _judge(self, scheduler: Scheduler) -> None:
        fresh = max(0, self._worked - (self._again - self._loaded))
        share = 1000 * self._again // max(1, self._again + fresh)
        self._calm = self._calm + 1 if share < self._m.sysctl.thrash_low_permille else 0
        if share > self._m.sysctl.thrash_high_permille:
            active = max(1, scheduler.active())
            self._set(max(1, min(self.limit or active, active) * 3 // 4), "lowered", share)
        elif self.limit and self._calm >= _CALM:
            if scheduler.active() < self.limit:
                self._set(0, "lifted", share)  # it keeps nobody waiting
            else:
                self._set(self.limit + 1 + self.limit // 16, "raised", share)

    def _set(self, limit: int, how: str, share: int) -> None:
        if limit == self.limit:
            return
        self.limit = limit
        self._m.count(f"admitted_limit_{how}")
        name = self._m.devices[self._device].name
        if how != self._said and self._m.now_ns - self._said_ns >= _SAY_NS:
            self._said_ns, self._said = self._m.now_ns, how
            said = f"{limit} contexts may run at once" if limit else "as many contexts as fit may run"
            text = f"{name}: {said} ({how}): {share / 10:.1f}% of the work was for what had been preempted"
            self._m.log("warning" if how == "lowered" else "info", text)
