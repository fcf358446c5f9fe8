"""Pressure stall information: how much of the time programs lose because frames are short (Weiner, Linux 4.20, 2018).

    some   at least one context with work waits for frames: to be admitted (again), for a load, or for one more to grow
    full   that, and no compute device does anything

Both are sums of time and averages over 10, 60 and 300 s.  The averages are exponential, in continuous time, so that they are
exact whenever they are looked at and nothing has to run in between: over t at a constant state x, a := x + (a - x) e^(-t/T).

They are kept of the machine and, as cgroups have them, of every uid: some is then one of its own contexts, and full that none
of its own computes either.  That is what one of several uids is shown: who else waits, and how long for, is not its affair,
and a stall that ends a block sooner would tell it that somebody's prompt was in the cache.

A connection may ask to be told when `some` reaches a share of a window: once per crossing, and again only after it has
been below.  A timer runs only while somebody stalls.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from math import exp
from typing import TYPE_CHECKING, Final

from .calls import PressureNote
from .events import Notify
from .look import alone, hbm_frames

if TYPE_CHECKING:
    from .machine import Machine

PERIODS_NS: Final = (10_000_000_000, 60_000_000_000, 300_000_000_000)
WINDOW_MS: Final = (100, 60_000)  # shortest and longest window of a subscription
_PARTS: Final = 16  # of a window


class Average:
    """One of the two states, over time."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._shares = [0.0] * len(PERIODS_NS)

    def add(self, over_ns: int, stalled: bool) -> None:
        if stalled:
            self.total_ns += over_ns
        x = 1.0 if stalled else 0.0
        self._shares = [x + (a - x) * exp(-over_ns / t) for a, t in zip(self._shares, PERIODS_NS, strict=True)]

    def permille(self) -> tuple[int, int, int]:
        ten, minute, five = (round(1000 * a) for a in self._shares)
        return ten, minute, five


class Stalls:
    """Of the machine or of one uid.  state: (some, full) since `_since_ns`."""

    def __init__(self, now_ns: int) -> None:
        self.some, self.full = Average(), Average()
        self.state = (False, False)
        self._since_ns = now_ns

    def settle(self, now_ns: int) -> None:
        """Account for the time until now."""
        over_ns = now_ns - self._since_ns
        if over_ns > 0:
            some, full = self.state
            self.some.add(over_ns, some)
            self.full.add(over_ns, full)
            self._since_ns = now_ns

    def become(self, state: tuple[bool, bool], now_ns: int) -> None:
        if state != self.state:
            self.settle(now_ns)
            self.state = state


class Window:
    """How much of the last `window_ns` was stalled: exact at its ends, even within each of its 16 parts."""

    def __init__(self, window_ns: int) -> None:
        self.window_ns = window_ns
        self.part_ns = window_ns // _PARTS
        self._parts: deque[tuple[int, int]] = deque()  # (number since boot, ns stalled), those that are not 0

    def add(self, start_ns: int, end_ns: int) -> None:
        """A stall; they come in order and do not overlap."""
        start_ns = max(start_ns, end_ns - self.window_ns - self.part_ns)
        while start_ns < end_ns:
            number = start_ns // self.part_ns
            until_ns = min(end_ns, (number + 1) * self.part_ns)
            stalled_ns = until_ns - start_ns
            if self._parts and self._parts[-1][0] == number:
                stalled_ns += self._parts.pop()[1]
            self._parts.append((number, stalled_ns))
            start_ns = until_ns

    def stalled_ns(self, now_ns: int) -> int:
        number, into_ns = divmod(now_ns, self.part_ns)
        while self._parts and self._parts[0][0] < number - _PARTS:
            self._parts.popleft()
        total = sum(ns for _, ns in self._parts)
        if self._parts and self._parts[0][0] == number - _PARTS:
            total -= self._parts[0][1] * into_ns // self.part_ns
        return total

    def permille(self, now_ns: int) -> int:
        return min(1000, 1000 * self.stalled_ns(now_ns) // (_PARTS * self.part_ns))


class Subscription:
    """Of one connection."""

    def __init__(self, uid: int, threshold_permille: int, window_ns: int) -> None:
        self.uid = uid
        self.threshold_permille = threshold_permille
        self.some = Window(window_ns)
        self.full = Window(window_ns)
        self.told = False  # above, and said so

    def left_ns(self, now_ns: int) -> int:
        """How long a stall that goes on has to last at least until it reaches the threshold; 0: it has."""
        wanted_ns = max(1, self.threshold_permille * self.some.part_ns * _PARTS // 1000)
        return max(0, wanted_ns - self.some.stalled_ns(now_ns))


class Psi:
    """machine: of everybody."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self.machine = Stalls(0)
        self.busy = False  # there was work at the end of the last step
        self._uids: dict[int, Stalls] = {}  # of those that ever stalled
        self._stalled: dict[int, tuple[bool, bool]] = {}  # by uid, of those that do now
        self._since_ns = 0  # what subscriptions have been told of
        self._subscriptions: dict[int, Subscription] = {}  # by connection
        self._armed_ns = 0  # when the outstanding timer fires; 0: none

    def subscribe(self, conn: int, uid: int, threshold_permille: int, window_ms: int) -> None:
        """In the place of what it had.  The window begins now, empty."""
        self._pass_time()
        self._subscriptions[conn] = Subscription(uid, threshold_permille, window_ms * 1_000_000)
        self._tell()

    def unsubscribe(self, conn: int) -> None:
        self._subscriptions.pop(conn, None)

    def seen(self, uid: int) -> Stalls:
        """What a uid may know of, until now."""
        m = self._m
        stalls = self.machine if alone(m, uid) else self._uids.get(uid) or Stalls(m.now_ns)
        stalls.settle(m.now_ns)
        return stalls

    def look(self) -> None:
        """Once per step, after all devices have been given what there is to do."""
        m = self._m
        some = any(s.stalled() for s in m.schedulers)
        full = some and not any(d.flight is not None for d in m.devices[: m.tiers.computes])
        stalled = self._whose(full) if some else {}
        if (some, full) != self.machine.state or stalled != self._stalled:
            self._pass_time()
            self.machine.become((some, full), m.now_ns)
            for uid in self._stalled.keys() - stalled.keys():
                self._uids[uid].become((False, False), m.now_ns)
            for uid, state in stalled.items():
                self._uids.setdefault(uid, Stalls(m.now_ns)).become(state, m.now_ns)
            self._stalled = stalled
        if self._subscriptions and (some or self._armed_ns):
            self._pass_time()
            self._tell()

    def _whose(self, full: bool) -> dict[int, tuple[bool, bool]]:
        """(some, full) of every uid that stalls."""
        m = self._m
        if len(m.uids) == 1:
            return dict.fromkeys(m.uids, (True, full))
        flying = [m.by_slot[q.slot] for d in m.devices[: m.tiers.computes] for q in d.flight_seqs()]
        computing = {c.process.uid for c in flying if c.job is not None}
        waiting: set[int] = set()
        for context in chain.from_iterable(s.stalled_contexts() for s in m.schedulers):
            waiting.add(context.process.uid)
            if len(waiting) == len(m.uids):
                break  # thousands may stand in line
        return {uid: (True, uid not in computing) for uid in sorted(waiting)}

    def _pass_time(self) -> None:
        """What subscribers have seen until now."""
        now_ns = self._m.now_ns
        for subscription in self._subscriptions.values():
            some, full = self._state(subscription)
            if some:
                subscription.some.add(self._since_ns, now_ns)
            if full:
                subscription.full.add(self._since_ns, now_ns)
        self._since_ns = now_ns

    def _state(self, subscription: Subscription) -> tuple[bool, bool]:
        if alone(self._m, subscription.uid):
            return self.machine.state
        return self._stalled.get(subscription.uid, (False, False))

    def _tell(self) -> None:
        """Those for whom the threshold is reached now; and the timer for the next one."""
        now_ns = self._m.now_ns
        if self._armed_ns <= now_ns:
            self._armed_ns = 0
        next_ns = 0
        for conn, subscription in self._subscriptions.items():
            left_ns = subscription.left_ns(now_ns)
            if left_ns:
                subscription.told = False
                if self._state(subscription)[0]:
                    at_ns = now_ns + max(left_ns, subscription.some.part_ns // 4)
                    next_ns = min(next_ns or at_ns, at_ns)
            elif not subscription.told:
                subscription.told = True
                free, reclaimable = hbm_frames(self._m, subscription.uid)
                some, full = subscription.some.permille(now_ns), subscription.full.permille(now_ns)
                self._m.emit(Notify(conn, "pressure", PressureNote(some, full, free, reclaimable)))
                self._m.count("pressure_notes")
        if next_ns and (not self._armed_ns or next_ns < self._armed_ns):
            self._armed_ns = next_ns
            self._m.set_timer(next_ns)
