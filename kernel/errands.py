"""System calls that take several transfers: demote, prefetch, evict, attach_tier, detach_tier, sleep.

An errand is looked at once a step while it is open, does the next thing that can be done, and is answered once: when it
has got there, when nothing more can be done, at its deadline, when it is cancelled, or when its context goes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from .alarms import Alarms
from .calls import AttachTierResult, Empty, MovedResult
from .context import Job, JobKind
from .errors import Detail, E
from .events import DetachTier, SleepDriver
from .records import NO_COPY

AT_ONCE: Final = 16  # of one tier, that are looked at although they wait

if TYPE_CHECKING:
    from .context import Context
    from .device import Device
    from .machine import Machine


class Errand:
    """context: None for those about a device.  deadline_ns: 0 none.

    follows   number of the tier that it fills; -1: none.  Once begun it waits for transfers, and is looked at when some have ended
    """

    follows = -1

    def __init__(self, conn: int, request: int, context: Context | None, deadline_ns: int = 0) -> None:
        self.conn = conn
        self.request = request  # 0: nobody waits for the answer
        self.context = context
        self.deadline_ns = deadline_ns
        self.number = 0  # in the order in which they were begun

    def step(self, m: Machine) -> tuple[object, ...] | None:
        """Do what can be done now; the result when it is over."""
        raise NotImplementedError

    def sleeps(self) -> bool:
        """Nothing can be done before the job of its context has ended (`Errands.turned`), or its deadline comes."""
        return False

    def late(self, m: Machine) -> tuple[object, ...] | None:
        """The deadline has come: a result, or None for ETIMEDOUT."""
        return None

    def stop(self, m: Machine) -> None:
        """Cancelled, or too late: what has not begun shall not begin."""


def resident_blocks(m: Machine, context: Context, device: int) -> int:
    return m.core.residency(context.slot).count(device)


class Demotion(Errand):
    """Copy a context's blocks down to `target`, then let go of the faster copies."""

    demand = True  # somebody waits for it
    with_tail = True

    def __init__(self, conn: int, request: int, context: Context, target: Device) -> None:
        super().__init__(conn, request, context)
        self.target = target
        self.follows = target.index
        self.begun: set[tuple[int, int]] = set()  # (block, target of the hop): tried once each
        self.moved = 0

    def sleeps(self) -> bool:
        return self.context is not None and self.context.job is not None

    def step(self, m: Machine) -> tuple[object, ...] | None:
        context = self.context
        if context is None:
            return Empty()
        if context.job is not None or m.core.in_flight(context.slot):
            if context.job is not None and context.job.kind.value != "prefill":
                return self._result(m, 0)  # it is being used again
            return None
        pager = m.schedulers[context.device].pager
        if self.with_tail and not pager.save_tail(context):
            return None
        stage = m.tiers.stage
        if stage is None:
            return self._result(m, 0)
        blocks = m.core.log_blocks(context.slot)[::-1]
        tail = m.core.tail_of(context.slot)[0]
        if tail >= 0 and self.with_tail and self.target.tier != "remote":
            blocks.insert(0, tail)
        waiting = m.movers.busy(context.device) or m.movers.busy(self.target.index)
        todo_down, left = self._hops(m, blocks, context.device, stage)
        for (source, target), chosen in todo_down.items():
            room = m.tiers.evictors[target].room(len(chosen))
            chosen = chosen[:room]
            begun = m.movers.copy(source, target, chosen, "demote", context.cid, demand=self.demand)
            self.moved += begun
            self.begun.update((b, target) for b in chosen[:begun])
            waiting = waiting or begun > 0 or m.movers.moving()
        if (left and waiting) or m.movers.carries(set(blocks)):
            return None
        return self._let_go(m, context, blocks, len(left))

    def _hops(
        self, m: Machine, blocks: list[int], own: int, stage: Device
    ) -> tuple[dict[tuple[int, int], list[int]], list[int]]:
        """Copies to begin now, by hop, and the blocks that are not there yet."""
        there = m.core.copied(blocks, 1 << self.target.index)
        in_stage = m.core.copied(blocks, 1 << stage.index)
        here = m.core.copied(blocks, 1 << own)
        hops: dict[tuple[int, int], list[int]] = {}
        left: list[int] = []
        for b, at_end, staged, fast in zip(blocks, there, in_stage, here, strict=True):
            if at_end == 2:
                continue
            left.append(b)
            if at_end:
                continue
            if staged == 2:
                hop = (stage.index, self.target.index)
            elif not staged and fast == 2:
                hop = (own, stage.index)
            else:
                continue
            if hop[0] != hop[1] and (b, hop[1]) not in self.begun:
                hops.setdefault(hop, []).append(b)
        return hops, left

    def _let_go(self, m: Machine, context: Context, blocks: list[int], failed: int) -> tuple[object, ...]:
        if m.tiers.pinned(context):
            return self._result(m, failed)
        if m.core.slot_row(context.slot).entries and context.job is None:
            m.schedulers[context.device].pager.forget(context)
        there = m.core.copied(blocks, 1 << self.target.index)
        clean = [b for b, state in zip(blocks, there, strict=True) if state == 2]
        for device in m.devices[: self.target.index]:
            if device.tier == "hbm" or device.index < self.target.index:
                freed = m.core.evict(device.index, clean)
                if freed:
                    m.tiers.evictors[device.index].forgotten(clean)
        m.tiers.decide("demote", self.target, context.cid, tuple(blocks), f"asked for: {self.moved} blocks were copied")
        return self._result(m, failed)

    def _result(self, m: Machine, failed: int) -> MovedResult:
        resident = resident_blocks(m, self.context, self.target.index) if self.context else 0
        return MovedResult(self.moved, resident, failed)


class Saving(Demotion):
    """A kept context is copied to the slowest tier, and stays where it is: what a restart of the daemon finds there need not be
    computed again.  (A tail cannot be found by key, so it is not worth the copy.)"""

    demand = False
    with_tail = False

    def _let_go(self, m: Machine, context: Context, blocks: list[int], failed: int) -> tuple[object, ...]:
        return self._result(m, failed)


class Promotion(Errand):
    """Bring a context's blocks up to `target`, a tier below hbm."""

    def __init__(self, conn: int, request: int, context: Context, target: Device, deadline_ns: int) -> None:
        super().__init__(conn, request, context, deadline_ns)
        self.target = target
        self.follows = target.index
        self.tried: set[int] = set()
        self.moved = 0

    def step(self, m: Machine) -> tuple[object, ...] | None:
        context = self.context
        if context is None:
            return Empty()
        blocks = m.core.log_blocks(context.slot)
        tail = m.core.tail_of(context.slot)[0]
        blocks += [tail] if tail >= 0 else []
        states = m.core.copied(blocks, (2 << self.target.index) - 1)  # there, or faster
        sources: dict[int, list[int]] = {}
        going = 0
        for b, state in zip(blocks, states, strict=True):
            going += state == 1
            if state or b in self.tried:
                continue
            for d, frame in enumerate(m.core.copies_of(b)):
                if d > self.target.index and frame >= 0 and m.tiers.readable(d):
                    sources.setdefault(d, []).append(b)
                    break
        for d, found in sources.items():
            chosen = found[::-1]  # a leaf first, so that it is older there than its parent
            room = m.tiers.evictors[self.target.index].room(len(chosen))
            begun = m.movers.copy(d, self.target.index, chosen[:room], "prefetch", context.cid)
            self.moved += begun
            m.prefetches.begun(self.target.index, chosen[:begun])
            self.tried.update(chosen[:begun])
            going += begun
        if going or (sources and m.movers.moving()):
            return None
        return self.late(m)

    def late(self, m: Machine) -> tuple[object, ...]:
        context = self.context
        resident = resident_blocks(m, context, self.target.index) if context is not None else 0
        return MovedResult(self.moved, resident, len(self.tried) - self.moved if self.moved < len(self.tried) else 0)

    def stop(self, m: Machine) -> None:
        if self.context is not None:
            m.movers.abandon(self.context.cid)


class Arrival(Errand):
    """A context is being made resident in hbm by a prefill job without a client; over when that is.

    job: that one, if it was begun for this; None: it is resident, or something runs on it anyway."""

    def __init__(self, conn: int, request: int, context: Context, deadline_ns: int, job: Job | None) -> None:
        super().__init__(conn, request, context, deadline_ns)
        self.job = job
        self.loaded_before = sum(context.tier_hits.values())

    def step(self, m: Machine) -> tuple[object, ...] | None:
        context = self.context
        if context is None:
            return Empty()
        if context.job is not None or m.core.loading(context.slot):  # past gates the job ends before its loads
            return None
        return self.late(m)

    def sleeps(self) -> bool:
        return self.context is not None and self.context.job is not None

    def late(self, m: Machine) -> tuple[object, ...]:
        context = self.context
        if context is None:
            return MovedResult(0, 0, 0)
        where = m.core.residency(context.slot)
        loaded = sum(context.tier_hits.values()) - self.loaded_before
        moved = -(-loaded // m.config.block_tokens)  # a tail is one, too
        return MovedResult(moved, where.count(context.device), where.count(NO_COPY))

    def stop(self, m: Machine) -> None:
        """What has come stays as cache, as long as nobody needs the frames."""
        context = self.context
        if context is None or self.job is None or context.job is not self.job or m.core.in_flight(context.slot):
            return
        if m.core.loading(context.slot):
            m.finish(context, "cancelled")
            m.schedulers[context.device].pager.forget(context)
            m.movers.abandon(context.cid)


class Attach(Errand):
    """A new tier's driver is starting."""

    def __init__(self, conn: int, request: int, device: Device) -> None:
        super().__init__(conn, request, None)
        self.device = device

    def step(self, m: Machine) -> tuple[object, ...] | None:
        return AttachTierResult(self.device.name) if self.device.up else None


class Detach(Errand):
    """A tier is drained: what only it has goes to dram, as far as there is room; then its driver stops."""

    def __init__(self, conn: int, request: int, device: Device) -> None:
        super().__init__(conn, request, None)
        self.device = device
        self.tried: set[int] = set()

    def step(self, m: Machine) -> tuple[object, ...] | None:
        device, stage = self.device, m.tiers.stage
        if device.up and stage is not None and stage is not device:
            blocks = [b for b in m.core.oldest(device.index, device.capacity) if b not in self.tried]
            others = ((1 << len(m.devices)) - 1) & ~(1 << device.index)
            only = m.tiers.lacking(blocks, others)
            room = min(len(only), m.core.free_frames(stage.index))
            begun = m.movers.copy(device.index, stage.index, only[:room], "drain")
            self.tried.update(only[:begun])
        if m.movers.busy(device.index):
            return None
        m.core.lose(device.index)
        m.core.set_capacity(device.index, 0)
        device.up = False
        device.removed = True
        device.capacity = 0
        m.emit(DetachTier(device.index))
        m.log("info", f"{device.name}: detached, {len(self.tried)} of its blocks kept in dram")
        return Empty()


class Sleep(Errand):
    """Everything that hbm has goes to the tier below; then hbm's memory goes back to the machine."""

    def __init__(self, conn: int, request: int) -> None:
        super().__init__(conn, request, None)
        self.tried: set[int] = set()
        self.saved: set[int] = set()  # cids whose tail had its one turn (few may fit: they push each other out)
        self.asleep = 0  # drivers that have stopped
        self.asked = False

    def step(self, m: Machine) -> tuple[object, ...] | None:
        computes = m.devices[: m.tiers.computes]
        if self.asked:
            return Empty() if self.asleep >= len(computes) else None
        if any(device.flight for device in computes):
            return None
        begun = sum(self._empty(m, device) for device in computes)
        if begun or m.movers.moving():
            return None
        lost = 0
        for device in computes:
            for context in m.contexts_of(device.index):
                m.schedulers[device.index].pager.forget(context)
                if context.job is None:
                    m.schedulers[device.index].rest(context)
            lost += len(m.tiers.lacking(m.core.oldest(device.index, device.capacity), m.tiers.keepers(device)))
            m.core.lose(device.index)
            m.tiers.evictors[device.index].renew()
            device.up = False
            m.emit(SleepDriver(device.index))
        self.asked = True
        m.count("sleeps")
        m.log("info", f"asleep: hbm is given back; {lost} blocks found no room below and will be computed again")
        return None

    def _empty(self, m: Machine, device: Device) -> int:
        """Begin to copy down what only hbm has; how many blocks."""
        below = m.tiers.below(device.index)
        if below is None or not device.up:
            return 0
        waits = 0
        pager = m.schedulers[device.index].pager
        for context in m.contexts_of(device.index):
            if context.cid in self.saved or not m.core.slot_row(context.slot).entries:
                continue
            if pager.save_tail(context):
                self.saved.add(context.cid)
            else:
                waits += 1
        blocks = [b for c in m.contexts_of(device.index) for b in m.core.row_blocks(c.slot)]
        blocks = list(dict.fromkeys(blocks + list(m.core.oldest(device.index, device.capacity))))
        todo = [b for b in m.tiers.lacking(blocks, m.tiers.keepers(device)) if b not in self.tried]
        room = m.tiers.evictors[below.index].room(len(todo)) if todo else 0
        begun = m.movers.copy(device.index, below.index, todo[:room], "demote", demand=True)
        self.tried.update(todo[:begun])
        return begun + waits


class Wake(Errand):
    """hbm is taken again."""

    def step(self, m: Machine) -> tuple[object, ...] | None:
        if not all(device.up for device in m.devices[: m.tiers.computes]):
            return None
        m.asleep = False
        m.count("wakes")
        for context in list(m.contexts.values()):
            if context.job is not None and not m.held(context) and not context.job.ending:
                m.schedulers[context.device].add(context)
        return Empty()


class Errands:
    """The open ones, in the order in which they were begun.

    There may be as many as contexts, and more, and to look at one costs as much as its context has blocks.  So a step looks only
    at those that can have got further: not at contexts that are being made resident and wait for their turn, nor at those that
    wait for transfers before one has ended; and then, of each tier, until AT_ONCE are found that still wait."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._open: dict[int, Errand] = {}  # by number
        self._look: set[int] = set()  # numbers of those that the next step may take further
        self._following: dict[int, dict[int, Errand]] = {}  # those that wait for transfers: by tier, by number
        self._turn = 0  # of Movers.ended, when they were looked at last
        self._deadlines: Alarms[Errand] = Alarms(machine.set_timer, lambda e: self._open.get(e.number) is e)
        self._of: dict[int, list[Errand]] = {}  # by cid
        self._last = 0

    @property
    def open(self) -> Collection[Errand]:
        return self._open.values()

    def add(self, errand: Errand) -> None:
        self._last += 1
        errand.number = self._last
        self._open[errand.number] = errand
        self._look.add(errand.number)
        if errand.follows >= 0:
            self._following.setdefault(errand.follows, {})[errand.number] = errand
        if errand.context is not None:
            self._of.setdefault(errand.context.cid, []).append(errand)
        if errand.deadline_ns:
            self._deadlines.add(errand.deadline_ns, errand, self._m.now_ns)

    def arrive(self, conn: int, request: int, context: Context, deadline_ns: int) -> None:
        """Make a context resident in hbm."""
        m = self._m
        m.count("prefetches")
        row = m.core.slot_row(context.slot)
        job = None
        # A generation may end one token beyond the pool, since its last token needs no frame: that cannot be made resident.
        fits = -(-row.tokens // m.config.block_tokens) <= m.devices[context.device].capacity
        if context.job is None and row.tokens and (row.computed < row.tokens or not row.entries) and fits:
            job = Job(JobKind.PREFILL, m.next_order())
            m.start(context, job)
        self.add(Arrival(conn, request, context, deadline_ns, job))

    def about(self, context: Context) -> Sequence[Errand]:
        """The open ones of this context."""
        return self._of.get(context.cid, ())

    def advised(self, context: Context, kind: type[Errand]) -> bool:
        """There is one of that kind already that nobody waits for."""
        return any(type(e) is kind and not e.request for e in self.about(context))

    def withdraw(self, errand: Errand) -> None:
        """Nobody waits for it, and it is not wanted any more."""
        self._end(errand, 0, Empty())

    def turned(self, context: Context) -> None:
        """Its job has ended, or another has begun."""
        self._look.update(errand.number for errand in self.about(context))

    def adopted(self, context: Context) -> None:
        """Somebody waits for a context that was being made resident for nobody."""
        for errand in self.about(context):
            if isinstance(errand, Arrival):
                errand.job = None

    def fetching(self, context: Context) -> bool:
        """It is being made resident for nobody yet."""
        return any(
            isinstance(e, Arrival) and e.job is not None and e.job is context.job for e in self.about(context)
        )  # fmt: skip

    def save(self, context: Context) -> None:
        """Copy a kept context as far down as it goes, unless that is being done."""
        m = self._m
        stage = m.tiers.stage
        if stage is None or any(isinstance(e, Saving) for e in self.about(context)):
            return
        target = m.tiers.below(stage.index)
        if target is not None:
            self.add(Saving(0, 0, context, target))

    def run(self) -> None:
        for number in sorted(self._look):
            errand = self._open.get(number)
            if errand is not None and not self._ends(errand) and (errand.sleeps() or self._waits(errand)):
                self._look.discard(number)
        if self._turn != self._m.movers.ended:
            self._turn = self._m.movers.ended
            for following in self._following.values():
                waiting = 0
                for errand in list(following.values()):
                    open_ = errand.number in self._open  # one before it may have ended it
                    waiting += open_ and not errand.sleeps() and not self._ends(errand)
                    if waiting >= AT_ONCE:
                        break

    def _ends(self, errand: Errand) -> bool:
        """Take it further."""
        result = errand.step(self._m)
        if result is not None:
            self._end(errand, 0, result)
        return result is not None

    def _waits(self, errand: Errand) -> bool:
        """For transfers, and for nothing else."""
        return errand.follows >= 0 and not (errand.context is not None and self._m.core.in_flight(errand.context.slot))

    def due(self) -> None:
        for errand in self._deadlines.due(self._m.now_ns):
            if self._open.get(errand.number) is not errand:
                continue  # one before it has ended it
            result = errand.late(self._m)
            errand.stop(self._m)
            if result is not None:
                if isinstance(errand, (Promotion, Arrival)):
                    self._m.count("prefetches_late")
                self._end(errand, 0, result)
            else:
                self._end(errand, E.ETIMEDOUT, {"message": "the deadline has come"})

    def cancel(self, conn: int, request: int) -> bool:
        for errand in self.open:
            if (errand.conn, errand.request) == (conn, request):
                errand.stop(self._m)
                self._end(
                    errand, E.ECANCELED, {"message": "the call was cancelled; what it has moved stays where it is"}
                )
                return True
        return False

    def gone(self, context: Context) -> None:
        for errand in list(self.about(context)):
            self._end(errand, E.ESTALE, {"message": "the context was released meanwhile", "cid": context.cid})

    def driver_asleep(self) -> None:
        for errand in self.open:
            if isinstance(errand, Sleep):
                errand.asleep += 1

    def device_gone(self, device: Device) -> None:
        detail: Detail = {"message": f"{device.name} cannot be started: {device.gone}", "device": device.name}
        for errand in list(self.open):
            if isinstance(errand, Attach) and errand.device is device:
                device.removed = True
                self._end(errand, E.ENODEV, detail)
            elif isinstance(errand, Wake) and device.tier == "hbm":
                self._end(errand, E.ENODEV, detail)

    def problems(self) -> list[str]:
        """What fsck finds wrong here."""
        return [
            f"an errand about context {errand.context.cid if errand.context else 0} is not looked at"
            for number, errand in self._open.items()
            if number not in self._look
            and not errand.sleeps()
            and not (errand.follows >= 0 and (self._turn != self._m.movers.ended or not self._m.movers.idle()))
        ]

    def _end(self, errand: Errand, code: E | int, result: tuple[object, ...] | Detail) -> None:
        del self._open[errand.number]
        self._look.discard(errand.number)
        if errand.follows >= 0:
            del self._following[errand.follows][errand.number]
        if errand.deadline_ns:
            self._deadlines.over()
        if errand.context is not None:
            mine = self._of[errand.context.cid]
            mine.remove(errand)
            if not mine:
                del self._of[errand.context.cid]
        if errand.request:
            self._m.reply(errand.conn, errand.request, code, result)
