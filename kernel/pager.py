"""The pager of one compute device: finds frames for those that need them, and brings back what they had.

A context that loses its frames keeps its log and its keys (I7).  When it is admitted again, each block comes from where
it is cheapest: hbm itself, a slower tier, or the model, which computes it once more.  The kernel decides that with
measured costs (kernel/cost.py) at the granularity of a block.

Frames are found in this order: free ones; reclaimable ones, chosen by the eviction policy (kernel/evictor.py copies them
to a slower tier first); those of idle contexts, least recently used first; and, only for contexts that decode already,
those of the newest job.  A context that is swapped out has its partial tail saved, which no key could find.

A group at its limit finds them in the same order among its own (`only`, a group's number; 0: no limit is in the way), and
never among others'.  Of other groups nothing is taken that they are guaranteed (`requester`: the group that wants frames).

With slower tiers a frame may have to wait for its content to be copied away: then an admission or a pass is put off,
and tried again when a transfer ends.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from .context import Context
from .cost import split
from .errors import E, Errno, Panic
from .look import alone
from .records import EVICT, FACT, NO_COPY, OK, OWN_EVICT, OWN_NOROOM, Admit, Plan

_NOWHERE = bytes((NO_COPY,))
IDLE_AT_ONCE = 32  # idle contexts that let go of their rows together, so that a policy has something to choose from

if TYPE_CHECKING:
    from .lifetimes import Wait
    from .machine import Machine
    from .sched import Scheduler

# From the flags of CoreApi.pagemap: 1 where an entry is full (1), but neither valid (4) nor wired (8).
_ABSENT: Final = bytes(1 if flags & 13 == 1 else 0 for flags in range(256))


class Pager:
    def __init__(self, machine: Machine, device: int, scheduler: Scheduler) -> None:
        self._m = machine
        self._core = machine.core
        self._device = machine.devices[device]
        self._sched = scheduler
        self.stuck = False  # what is reclaimable may not go: it is guaranteed to others, or kept by what is
        self.over = 0  # group whose limit refused the last admission; 0: none did
        self.waits = False  # a context could not be dropped yet: the tier below makes room for its tail
        self.full = False  # the last admission that failed found no room, and no transfer would make it any

    def evict(self, want_frames: int, requester: int = 0, only: int = 0) -> bool:
        """Free `want_frames` reclaimable frames.  Requires: there are that many.  False: not yet, their content is being
        copied away; a TransferDone is to come.  Or they may not go: `stuck`."""
        evictor = self._m.tiers.evictors[self._device.index]
        freed = 0
        self.stuck = False
        while freed < want_frames:
            more = evictor.free(want_frames - freed, requester, only)
            freed += more
            if not more:
                if self._m.movers.moving():
                    self._m.count("copy_waits")
                    return False
                if only or self._m.groups.guaranteed:
                    self.stuck = True
                    return False
                raise Panic(f"{self._device.name}: {want_frames - freed} reclaimable frames cannot be evicted")
        return True

    def _reserve(self, context: Context, active: int) -> int:
        """Frames an admission must leave: the watermark, and what those that run and the new one will probably grow by, or one
        for each of them.  None when it is alone."""
        if not active:
            return 0
        watermark = self._device.capacity * self._m.sysctl.watermark_permille // 1000
        return watermark + max(min(active, self._device.capacity // 4), self._sched.growth.reserve(context))

    def admit(self, context: Context, active: int, spare_frames: int = 0) -> bool:
        """Map the whole log of `context`, making room by caches and idle contexts only; with nobody else active, by all.
        False: not now (`over`: its group's limit is why), or never, and then its job has ended.
        spare_frames: to be left available besides the reserve."""
        self.full = False
        self.over = 0
        own = context.process.group.number
        sources, first_load = self._m.tiers.sources(self._device), 0
        mapped = self._core.slot_row(context.slot).entries
        if sources and self._m.costs.prefill[self._device.index].known() is not None:
            first_load = self._split(context)
        partial = self._m.tiers.partial_tokens(self._device)
        reserve = self._reserve(context, active) + spare_frames
        while True:
            result = self._core.admit(context.slot, reserve, sources, first_load, partial)
            short = result.shortage_frames
            mapped += result.mapped_frames
            if result.mapped_frames and self._m.tiers.evictors[self._device.index].policy.listens:
                self._m.tiers.evictors[self._device.index].policy.used(
                    self._m.view, self._device.index, self._core.hit_blocks()
                )
            if result.status == OK:
                context.told_blocks = max(context.told_blocks, mapped + result.loads)
                self._admitted(context, result)
                if self._m.tiers.exist and result.new_frames > result.loads:
                    self._explain_computed(context, max(mapped, first_load))
                return True
            only = result.group if result.status in (OWN_EVICT, OWN_NOROOM) else 0
            if result.status in (EVICT, OWN_EVICT):
                if self.evict(short, own, only):
                    continue
                if not self.stuck:
                    return False
            if only:
                if self._own_room(context, short, only):
                    continue
                return False
            if self.make_room(short, own, context.wait):
                continue
            if not self.waits and context.wait is None and self._break_foreign_keeps(context.process.uid, short, own):
                continue
            forced = not (
                self.waits or active or context.wait is not None or self._m.lifetimes.settling(self._device.index)
            )
            if forced and self._make_room_by_force(context, short):
                continue
            self.full = not self.waits
            if forced and self.full and self._m.groups.guaranteed and not self._m.movers.moving():
                self._refuse(context, short, 0)
            return False

    def _own_room(self, context: Context, short: int, only: int) -> bool:
        """Frames for a context whose group is at its limit, from the group itself.  False: not now, or never."""
        if self._own_spare(only, short, context.wait):
            return True
        self.over = only
        if context.wait is not None:
            self.full = not self.waits
            return False
        jobs = (*self._sched.queue, *self._sched.decoding.values())
        busy = any(c is not context and c.admitted and c.process.group.within(only) for c in jobs)
        if self.waits or busy:
            return False
        if self._make_room_by_force(context, short, only):
            return True
        if not self.waits and not self._m.movers.moving():  # frames under I/O come back
            self._refuse(context, short, only)
        return False

    def _refuse(self, context: Context, short: int, only: int) -> None:
        """There never will be room for this job as things are."""
        job = context.job
        if job is not None and job.begun:
            self._m.finish(context, "length")  # what it can have is its window
            return
        wanted = -(-self._core.slot_row(context.slot).tokens // self._m.config.block_tokens)
        group, name = self._m.groups.numbered(only), self._device.name
        if group is not None:
            account = self._core.account(self._device.index, only)
            self._m.fail(
                context,
                Errno(
                    E.EDQUOT,
                    f"{wanted} frames of {name} are wanted, {short} more than group {group.name} may have beside what it uses: "
                    f"its limit is {account.hard}; release some of its contexts, or have the limit raised (`attnix group set`)",
                    wanted=wanted, used=account.used, limit=account.hard, group=group.name, resource=self._device.tier,
                ),
            )  # fmt: skip
            return
        m, index, mine = self._m, self._device.index, context.process.group
        free, reclaimable = self._core.free_frames(index), self._core.reclaimable_frames(index)
        if not alone(m, context.process.uid):  # what others use of what they are guaranteed is not its affair
            free = self._device.capacity - m.groups.guaranteed_to_others(mine, self._device)
            short, reclaimable = wanted - free, self._core.account(index, mine.root.number).reclaimable
        m.fail(
            context,
            Errno(
                E.ENOMEM,
                f"{wanted} frames of {name} are wanted, and {short} of the others are guaranteed to other groups: try again when "
                "they use less, or have a guarantee lowered (`attnix group set --soft`)",
                wanted=wanted, free=free, reclaimable=reclaimable, group=mine.name,
            ),
        )  # fmt: skip

    def own_idle(self, only: int, shortage_frames: int, before: Wait | None = None) -> bool:
        """`make_room` within one group."""
        return self._drop_some(self._victims(self._resting(before), only, only), shortage_frames, "idle", only)

    def _own_spare(self, only: int, shortage_frames: int, before: Wait | None = None) -> bool:
        """Frames of a group that it can do without: of its idle contexts, and those that only others map any more."""
        return self.own_idle(only, shortage_frames, before) or (
            not self.waits and bool(self._core.disown(self._device.index, only))
        )

    def _resting(self, before: Wait | None) -> Iterator[Context]:
        """Idle contexts in the order in which they let go; for one that is in this wait, those that are wanted later than it."""
        later = self._m.lifetimes.later
        return (c for c in self._sched.idle.victims() if before is None or later(c, before))

    def grow(self, plan: Plan) -> bool:
        """Make room for a pass that has been planned.  False: not yet, a transfer is to end."""
        short, requester = plan.shortage_frames, plan.group
        only = requester if plan.status in (OWN_EVICT, OWN_NOROOM) else 0
        if plan.status in (EVICT, OWN_EVICT):
            if self.evict(short, requester, only):
                return True
            if not self.stuck:
                return False
        found = self._own_spare(only, short) if only else self.make_room(short, requester)
        return (
            found
            or (not self.waits and self.break_keeps(short, requester, only))
            or (not self.waits and self.preempt(short, requester, only))
        )

    def _admitted(self, context: Context, result: Admit) -> None:
        context.admitted = True
        if context.asked_ns:
            self._m.lifetimes.served(context)
        if context.lost_tokens:
            again = max(0, context.lost_tokens - self._core.slot_row(context.slot).computed)
            self._sched.guard.brought_back(again, result.loads * self._m.config.block_tokens)
            context.lost_tokens = 0
        demand = not self._m.errands.fetching(context)
        loads = self._core.loads() if result.loads else []
        if demand and self._m.tiers.exist:
            self._m.prefetches.wanted(context, loads)
            if self._core.loading(context.slot) > result.loads:  # begun for somebody else, or as a prefetch
                self._m.movers.urge(self._device.index, array("i", self._core.pagemap(context.slot)[0]))
        if loads:
            self._m.count("faults")
            self._m.count("fault_blocks", result.loads)
            for device, blocks in Counter(loads[1::4]).items():
                self._m.count(f"found_blocks_{self._m.devices[device].tier}", blocks)
            if len(self._m.schedulers) < len(self._m.devices):
                names = sorted({self._m.devices[loads[k + 1]].name for k in range(0, len(loads), 4)})
                self._m.tiers.decide(
                    "load",
                    self._device,
                    context.cid,
                    loads[0::4],
                    f"{result.loads} blocks from {', '.join(names)}" + self._numbers(loads),
                    plain=f"{result.loads} blocks from {', '.join(names)}",
                )
            if not demand:
                self._m.prefetches.begun(self._device.index, loads[0::4])
            compute_ns = self._compute_ns(context)
            context.gates = self._m.movers.load(loads, self._device.index, context.cid, demand, compute_ns)
            for source in sorted(set(loads[1::4])):
                evictor = self._m.tiers.evictors[source]
                if evictor.policy.listens:
                    used = [b for b, d in zip(loads[0::4], loads[1::4], strict=True) if d == source]
                    evictor.policy.used(self._m.view, source, used)

    def _compute_ns(self, context: Context) -> float:
        """What is left to compute of a context once its loads have come; below 0: unknown."""
        fit = self._m.costs.prefill[self._device.index].known()
        if fit is None:
            return -1.0
        where = self._core.residency(context.slot)
        missing = max(1, where.count(NO_COPY)) * self._m.config.block_tokens
        return fit.ns(missing, self._core.slot_row(context.slot).tokens - missing)

    def _numbers(self, loads: list[int]) -> str:
        """What loading these takes against computing them, where both are known."""
        m, own = self._m, self._device.index
        link = m.costs.link(*m.tiers.link_of(max(loads[1::4]), own))
        fit = m.costs.prefill[own].known()
        if fit is None or not link.bytes_s:
            return ""
        n, size = len(loads) // 4, m.config.block_tokens
        (first,) = FACT.iter_unpack(self._core.facts(loads[:1]))
        load_ns, compute_ns = link.ns(n * m.costs.frame_bytes), fit.ns(n * size, first[2])
        return f": loading takes {load_ns / 1e6:.2f} ms, computing {compute_ns / 1e6:.2f} ms"

    def _explain_computed(self, context: Context, first: int) -> None:
        """Full blocks from entry `first` on that no tier has: this context computes them, or waits for one that does."""
        absent = self._core.pagemap(context.slot)[4].translate(_ABSENT)
        size = self._m.config.block_tokens
        reached = max(first, context.reached // size)
        for what, start, end, why in (
            ("recompute", first, reached, "were computed before and are in no tier any more"),
            ("miss", reached, len(absent), "are in no tier"),
        ):
            n = absent.count(1, start, end)
            if n:
                self._m.count(f"{what}_blocks", n)
                at = absent.find(1, start, end) * size
                self._m.tiers.decide(
                    what, self._device, context.cid, (), f"{n} blocks from token {at} on {why}: they are computed"
                )

    def _split(self, context: Context) -> int:
        """First block to load rather than compute, of those that are not in hbm but in a slower tier."""
        where = self._core.residency(context.slot)
        own = self._device.index
        rest = where.lstrip(bytes((own,)))
        first = len(where) - len(rest)
        rest = rest.partition(_NOWHERE)[0]
        if not rest or max(rest) == own:
            return 0
        last, slowest = first + len(rest), max(rest)
        m = self._m
        costs = m.costs
        link = costs.link(*m.tiers.link_of(slowest, own))
        size = m.config.block_tokens
        choice = split(costs.prefill[own].known(), link, last - first, first * size, size, costs.frame_bytes)
        if choice.first_load:
            m.count("split_blocks", choice.first_load)
            m.tiers.decide(
                "split", self._device, context.cid, (),
                f"compute {choice.first_load} of {last - first} blocks ({choice.compute_ns / 1e6:.2f} ms) and load the others "
                f"from {m.devices[slowest].name} ({choice.load_ns / 1e6:.2f} ms); loading all takes {choice.all_load_ns / 1e6:.2f} ms, "
                f"computing all {choice.all_compute_ns / 1e6:.2f} ms",
                plain=f"compute {choice.first_load} of {last - first} blocks and load the others from {m.devices[slowest].name}",
            )  # fmt: skip
        return first + choice.first_load

    def make_room(self, shortage_frames: int, requester: int = 0, before: Wait | None = None) -> bool:
        """Drop idle contexts, in the order in which they let go, until that many frames are had.  False: there is none.
        before: for a context that is in this wait, only those that are wanted later than it.

        Their blocks stay as cache until the policy takes them.  A policy that looks at more than recency gets the blocks
        of some more contexts to choose from; a context that is used again finds those of its own that were left alone.
        """
        found = self._drop_some(self._fair(self._resting(before), requester), shortage_frames, "idle")
        if (
            found
            and not self.waits
            and self._m.tiers.exist
            and before is None
            and self._m.tiers.evictors[self._device.index].policy.name != "lru"
        ):
            # Where waits are ranked, nobody is taken from who waits for a tool before that is wanted.
            ranked = self._m.lifetimes.ranks
            for _, context in zip(range(IDLE_AT_ONCE), self._fair(self._sched.idle.victims(), requester), strict=False):
                if not (ranked and context.wait) and self._can_drop(context) and not self._drop(context, "idle"):
                    break
        return found

    def break_keeps(self, shortage_frames: int, requester: int = 0, only: int = 0) -> bool:
        """Frames of contexts that wait for a tool and are within their keep time, when there are no others: a keep is a wish."""
        return self._break(self._victims(self._sched.idle.kept(), requester, only), shortage_frames, only)

    def _break(self, kept: Iterable[Context], shortage_frames: int, only: int = 0) -> bool:
        found = self._drop_some(kept, shortage_frames, "kept", only)
        if found:
            self._m.count("keeps_broken")
        return found

    def _break_foreign_keeps(self, uid: int, shortage_frames: int, own: int) -> bool:
        """Of other users' keeps, those that have lasted for wait.ttl_ms: what is kept for longer, because it would take long to
        have back, holds up nobody but its own user.  Of other groups' any, where `own` has less than it is guaranteed."""
        m = self._m
        promised = m.groups.entitled(own, self._device.index)
        if len(m.uids) == 1 and not promised:
            return False
        since_ns = m.now_ns - m.sysctl.ttl_ms * 1_000_000

        def may_go(c: Context) -> bool:
            if promised and not c.process.group.within(own):
                return True
            return c.process.uid != uid and c.wait is not None and c.wait.begun_ns <= since_ns

        return self._break(filter(may_go, self._fair(self._sched.idle.kept(), own)), shortage_frames)

    def _fair(self, victims: Iterable[Context], requester: int) -> Iterator[Context]:
        """Those of them that may lose frames for a group."""
        return (c for c in victims if self._m.groups.fair_game(c, requester))

    def _drop_some(self, victims: Iterable[Context], shortage_frames: int, why: str, only: int = 0) -> bool:
        """Drop contexts in this order until `shortage_frames` more are available.  False: none could be dropped."""
        wanted = self._available(only) + shortage_frames
        dropped = self.waits = False
        for context in victims:
            if self._m.tiers.pinned(context) and self._core.slot_row(context.slot).entries:
                self._kept(context)
            if self._can_drop(context):
                if not self._drop(context, why):
                    self.waits = True
                    break
                dropped = True
                if self._available(only) >= wanted:
                    break
        return dropped

    def _kept(self, context: Context) -> None:
        """It would have to go, but for its pin: said once per pin."""
        if context.kept_until_ns != context.pinned_until_ns:
            context.kept_until_ns = context.pinned_until_ns
            left_ms = (context.pinned_until_ns - self._m.now_ns) / 1e6
            entries = self._core.slot_row(context.slot).entries
            why = f"{entries} frames are wanted, but pinned for another {left_ms:.0f} ms"
            self._m.tiers.decide("keep", self._device, context.cid, (), why)

    def _available(self, only: int = 0) -> int:
        if only:
            return self._m.groups.room(only, self._device.index)
        return self._core.free_frames(self._device.index) + self._core.reclaimable_frames(self._device.index)

    def _can_drop(self, context: Context) -> bool:
        return (
            not self._core.in_flight(context.slot)
            and not self._m.tiers.pinned(context)
            and self._core.slot_row(context.slot).entries > 0
        )

    def save_tail(self, context: Context) -> bool:
        """Copy its partial last block to the next tier, so that it need not be computed again.  Its frame stays until that
        is done, whatever becomes of the context.  False: not yet, that tier is making room."""
        below = self._m.tiers.below(self._device.index)
        row = self._core.slot_row(context.slot)
        if below is None or row.computed % self._m.config.block_tokens == 0:
            return True
        if not self._m.tiers.evictors[below.index].room(1):
            return not self._m.movers.moving()
        self._m.movers.save(
            self._core.save_tail(context.slot, below.index), self._device.index, below.index, context.cid
        )
        return True

    def forget(self, context: Context) -> None:
        """It loses its frames, and with them whatever was true of them."""
        context.reached = max(context.reached, self._core.slot_row(context.slot).computed)
        self._core.drop(context.slot)
        context.told_blocks = 0
        context.gates = []
        context.gated = False
        context.admitted = False
        self._sched.wake(context)
        if context.wait is not None:
            self._m.lifetimes.lost(context.wait)

    def _drop(self, context: Context, why: str) -> bool:
        """False: not yet (save_tail)."""
        if self._m.tiers.exist and not self.save_tail(context):
            return False
        if why == "running":
            context.lost_tokens = max(context.lost_tokens, self._core.slot_row(context.slot).computed)
        self.forget(context)
        context.preemptions += 1
        self._sched.moves += 1
        self._m.count("preemptions")
        self._m.count(f"preemptions_{why}")
        return True

    def _make_room_by_force(self, oldest: Context, shortage_frames: int, only: int = 0) -> bool:
        """Nothing runs and the oldest job does not fit: take the frames that are kept for contexts which wait for a tool; those
        of jobs that wait behind it, newest first; those of stopped and paused contexts; then its own, since a copy that it
        waits for keeps a frame which a recomputation does not need."""
        requester = oldest.process.group.number
        if self.break_keeps(shortage_frames, requester, only) or self.waits:
            return not self.waits
        behind = self._victims((c for c in reversed(self._sched.queue) if c is not oldest), requester, only)
        return (
            self._drop_some(behind, shortage_frames, "waiting", only)
            or self._drop_held(shortage_frames, requester, only)
            or self._drop_some((oldest,), shortage_frames, "waiting", only)
            or self._break_pins(oldest, shortage_frames, only)
        )

    def _victims(self, among: Iterable[Context], requester: int, only: int) -> Iterator[Context]:
        if only:
            return (c for c in among if c.process.group.within(only))
        return self._fair(among, requester)

    def _break_pins(self, oldest: Context, shortage_frames: int, only: int) -> bool:
        """A pin is a wish, not a way to stop the machine: when the oldest job fits no other way, pins end, newest first."""
        if self.waits:
            return False
        pinned = [c for c in self._m.pinned(self._device.index) if c is not oldest]
        for context in self._victims(pinned, oldest.process.group.number, only):
            self._break_pin(context, f"context {oldest.cid} has no other room")
            if self._drop_some((context,), shortage_frames, "pinned", only):
                return True
        return False

    def _break_pin(self, context: Context, why: str) -> None:
        context.pinned_until_ns = 0
        self._m.count("pins_broken")
        self._m.log("warning", f"context {context.cid} is pinned no more: {why}")

    def _break_newest_pin(self, requester: int, only: int) -> bool:
        """Of a context with frames: one without a job if there is any, the newest.  False: there is none."""
        pinned = [
            c for c in self._victims(self._m.pinned(self._device.index), requester, only)
            if self._core.slot_row(c.slot).entries and not self._core.in_flight(c.slot)
        ]  # fmt: skip
        if pinned:
            newest = max(pinned, key=lambda c: (c.job is None, c.job.order if c.job is not None else c.cid))
            self._break_pin(newest, "those that decode have no other room to grow")
        return bool(pinned)

    def _drop_held(self, shortage_frames: int, requester: int = 0, only: int = 0) -> bool:
        """Stopped and paused contexts, newest first."""
        held = self._m.held_back(self._device.index)
        return self._drop_some(self._victims(held, requester, only), shortage_frames, "held", only)

    def drop_all_but(self, waits: Context) -> int:
        """Pins end and everybody else loses his frames, tails that are not saved included: nothing else has helped.  How
        many frames that were."""
        frames = 0
        for context in [c for c in self._m.contexts_of(self._device.index) if c is not waits]:
            entries = self._core.slot_row(context.slot).entries
            if entries and self._m.tiers.pinned(context):
                self._break_pin(context, f"context {waits.cid} has no other room")
            if self._can_drop(context) and entries > self._core.loading(context.slot):  # what is under I/O stays
                frames += entries
                self.forget(context)
                self._m.movers.abandon(context.cid)
                self._requeue(context)
        return frames

    def _requeue(self, context: Context) -> None:
        """It has lost its frames: if it has a job, that waits for its turn again."""
        self._core.stop_running(context.slot)
        self._sched.decoding.pop(context.slot, None)
        if context.job is None:
            self._sched.rest(context)
        elif not self._m.held(context) and not context.job.ending:
            self._sched.add(context)

    def preempt(self, shortage_frames: int, requester: int = 0, only: int = 0) -> bool:
        """Take all frames from the newest jobs that have any, never from the oldest of several; of groups that have more than
        they are guaranteed first, when the one that wants frames has less.

        They go back into the queue at their place.  False: not yet, a transfer is to end.
        """
        if self._drop_held(shortage_frames, requester, only):
            return True
        if self.waits:
            return False
        jobs = (*self._sched.queue, *self._sched.decoding.values())
        holders = [c for c in self._victims(jobs, requester, only) if self._can_drop(c)]
        if self._m.groups.entitled(requester, self._device.index) and not only:
            holders = [c for c in holders if not c.process.group.within(requester)] or holders
        if not holders:
            if self._break_newest_pin(requester, only):
                return True  # the caller looks again
            if self._sched.oom.end_one(None):
                return True
            raise Panic(f"{self._device.name}: no frame can be found and nobody can be preempted")
        holders.sort(key=Context.place)
        if len(holders) == 1 and self._too_large(holders[0], requester, only):
            self._m.finish(holders[0], "length")  # alone and still too large: the pool is its window
            return True
        wanted = self._available(only) + shortage_frames
        while holders:
            victim = holders.pop()
            if not self._drop(victim, "running" if victim.admitted else "waiting"):
                return False
            self._requeue(victim)
            self._sched.short = victim
            wanted -= 1  # it needs none itself now
            if len(holders) <= 1 or self._available(only) >= wanted:
                break
        return True

    def _too_large(self, context: Context, requester: int, only: int) -> bool:
        """It would not fit even if it were the only one that can be preempted."""
        row = self._core.slot_row(context.slot)
        wanted = -(-row.tokens // self._m.config.block_tokens)
        index = self._device.index
        if only:
            return wanted > self._m.groups.room(only, index) + row.entries
        if self._m.groups.guaranteed:
            return wanted > self._core.free_frames(index) + self._core.spare_frames(index, requester) + row.entries
        return wanted > self._device.capacity
