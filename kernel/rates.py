"""Tokens per second: groups that are held back above a rate, and groups that go first below one.

    hard  whoever has computed more than that is held until it has not (bucket.py); nothing is refused
    soft  whoever with work has computed less than that lately goes before those that have what they were promised:
          its jobs are first in line, and what goes behind it may not lengthen the passes in which it decodes

A promise takes no share from other uids for good: what a group got by it counts in start-time fair queueing (order/share.py) like
all else, so beyond what is promised the others catch up.  That the promises together can be kept is up to who makes them: what
a machine computes in a second is not known before it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .alarms import Alarms
from .bucket import Bucket, Meter

if TYPE_CHECKING:
    from .context import Context
    from .group import Group
    from .machine import Machine


def before(one: Group, other: Group, late: frozenset[int]) -> bool:
    """What `one` is promised goes before what `other` does.  late: numbers of the groups that have less than that.  A uid's own
    promise holds against other uids, a sub-group's against what else is in its uid's group."""
    mine, theirs = one.root, other.root
    if mine is not theirs:
        return mine.number in late and theirs.number not in late
    return one is not mine and one.number in late and (other is mine or other.number not in late)


def waiting(groups: Iterable[Group], late: frozenset[int]) -> dict[str, tuple[bool, bool]]:
    """By name: some group of another uid is before it, some of its own uid is."""
    groups = list(groups)
    others = any(g.root.number in late for g in groups)
    siblings = {g.root.number for g in groups if g is not g.root and g.number in late}
    return {
        g.name: (
            others and g.root.number not in late,
            g.root.number in siblings and (g is g.root or g.number not in late),
        )
        for g in groups
    }  # fmt: skip


def beside(groups: Iterable[Group], late: frozenset[int]) -> dict[str, int]:
    """By name: weights of the other groups that it is not before."""
    groups = list(groups)
    total = sum(g.weight for g in groups)
    # Whom a promise to another uid holds against, and, by uid, whom one to a sub-group does.
    strangers = sum(g.weight for g in groups if g.root.number not in late)
    siblings = Counter[int]()
    for g in groups:
        siblings[g.root.number] += g.weight if g is g.root or g.number not in late else 0
    found = {}
    for g in groups:
        behind = strangers if g.root.number in late else 0
        behind += siblings[g.root.number] if g is not g.root and g.number in late else 0
        found[g.name] = total - g.weight - behind
    return found


def _holds(held: tuple[Group, int]) -> bool:
    group, until_ns = held
    return group.bucket is not None and group.bucket.until_ns == until_ns


class Rates:
    """Of one machine.  limited, promised: groups with a hard, and with a soft limit on tokens."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._ends: Alarms[tuple[Group, int]] = Alarms(machine.set_timer, _holds)
        self.limited: list[Group] = []
        self.promised: list[Group] = []

    def set(self, group: Group, soft: int, hard: int) -> None:
        """0: none."""
        now_ns, served = self._m.now_ns, self._m.core.served(group.number)
        was_held = group.bucket is not None and group.bucket.until_ns > 0
        group.bucket = Bucket(hard, served, now_ns) if hard else None
        group.meter = Meter(soft, served, now_ns) if soft else None
        self.limited = [*(g for g in self.limited if g is not group), *([group] if hard else [])]
        self.promised = [*(g for g in self.promised if g is not group), *([group] if soft else [])]
        if was_held:
            self._ends.over()
            self._let_go(group)

    # -- what is held back ----------------------------------------------------------------------------------------

    def passed(self) -> None:
        """A pass has come back: groups that have computed more than their rate allows are held until it does again."""
        for group in self.limited:
            bucket = group.bucket
            if bucket is None:
                continue
            bucket.spend(self._m.core.served(group.number), self._m.now_ns)
            if bucket.level < 0 and not bucket.until_ns:
                self._hold(group, bucket)
                group.throttled += 1
                self._m.count("throttles")
                for context in self._jobs(group):
                    self._m.schedulers[context.device].hold(context)

    def _hold(self, group: Group, bucket: Bucket) -> None:
        bucket.hold(self._m.now_ns)
        self._ends.add(bucket.until_ns, (group, bucket.until_ns), self._m.now_ns)

    def due(self) -> None:
        """A timer fired."""
        for group, _ in self._ends.due(self._m.now_ns):
            bucket = group.bucket
            if bucket is None:
                continue
            bucket.spend(self._m.core.served(group.number), self._m.now_ns)
            if bucket.level < 0:  # a pass was in flight on another device
                self._hold(group, bucket)
                continue
            bucket.until_ns = 0
            self._let_go(group)

    def _jobs(self, group: Group) -> list[Context]:
        mine = [c for c in self._m.working.values() if c.process.group.within(group.number)]
        return sorted(mine, key=lambda c: c.born)

    def _let_go(self, group: Group) -> None:
        for context in self._jobs(group):
            if context.job is not None and not context.job.ending and not self._m.held(context):
                self._m.schedulers[context.device].add(context)

    # -- what goes first ------------------------------------------------------------------------------------------

    def late(self) -> frozenset[int]:
        """Numbers of the groups that have computed less than they are promised."""
        m = self._m
        return frozenset(
            g.number
            for g in self.promised
            if g.meter is not None and not g.meter.met(m.core.served(g.number), m.now_ns)
        )
