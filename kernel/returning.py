"""Bringing contexts back before the tools that they wait for have answered.

A context that has lost frames while it waits is made resident again so that this ends when the answer is due, less what
such answers were early by before, out of a slower tier: nothing is computed before it is asked for, unless what comes back
is missing a part.  Loads that must end together begin one before the other (wait/calendar.py).  It takes frames that are
free, cached, or of contexts which are wanted later; never those of a context that runs or is due earlier.
When the answer is late the context is held for a while, as long as what is known of the tool promises it soon and coming
back once more would cost more; then it goes again, and comes back a few times at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .alarms import Alarms
from .records import NO_COPY
from .wait.calendar import Calendar

if TYPE_CHECKING:
    from .lifetimes import Wait
    from .machine import Machine

MOST_FETCHES: Final = 3  # times that one wait is brought back
SLACK_NS: Final = 1_000_000  # before it is due: the pass that is running then has to end
HELD_LOADS: Final = 4  # a late answer is waited for as long as so many loads would take


class Returning:
    """What is planned.  An alarm is (wait, its fetch_ns)."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._alarms: Alarms[tuple[Wait, int]] = Alarms(
            machine.set_timer, lambda plan: not plan[0].over and plan[0].fetch_ns == plan[1]
        )
        self._calendars: dict[int, Calendar] = {}  # by compute device

    def _calendar(self, wait: Wait) -> Calendar:
        return self._calendars.setdefault(wait.context.device, Calendar())

    def load_ns(self, wait: Wait) -> int:
        """To make the context resident."""
        m = self._m
        frames = -(-m.core.slot_row(wait.context.slot).tokens // m.config.block_tokens)
        return int(m.lifetimes.rebuild_ns(wait.context, frames))

    def plan(self, wait: Wait) -> None:
        """It is to be back when its answer is due, if there is anything to load it from: to compute it for nobody yet takes the
        device and its frames from those who are there (measured: docs/agents.md)."""
        m = self._m
        if not m.lifetimes.policy.fetches or not m.tiers.sources(m.devices[wait.context.device]):
            return
        if wait.fetches >= MOST_FETCHES or not m.core.slot_row(wait.context.slot).tokens:
            return
        due_ns = wait.due_ns
        if due_ns <= m.now_ns:
            due_ns = m.now_ns + m.lifetimes.remaining_ns(wait.context)
        early_ns = max(wait.early_ns, (m.now_ns + due_ns) // 2)  # however uncertain, not at once
        load_ns = self.load_ns(wait)
        end_ns = min(due_ns, early_ns) - SLACK_NS - load_ns // 8
        self._at(wait, max(m.now_ns + 1, self._calendar(wait).book(wait.number, end_ns, load_ns)))

    def _at(self, wait: Wait, at_ns: int) -> None:
        if wait.fetch_ns:
            self._alarms.over()
        wait.fetch_ns = at_ns
        self._alarms.add(at_ns, (wait, at_ns), self._m.now_ns)

    def cancel(self, wait: Wait) -> None:
        """The wait is over, or it is there."""
        self._calendar(wait).cancel(wait.number)
        if wait.fetch_ns:
            wait.fetch_ns = 0
            self._alarms.over()

    def due(self) -> None:
        """A timer fired."""
        for wait, _ in self._alarms.due(self._m.now_ns):
            wait.fetch_ns = 0
            self._fetch(wait)

    def _fetch(self, wait: Wait) -> None:
        m, context = self._m, wait.context
        self._calendar(wait).cancel(wait.number)
        if context.job is not None or m.held(context) or m.lifetimes.resident(context):
            return
        where = m.core.residency(context.slot)
        if 2 * where.count(NO_COPY) > len(where):
            return
        wait.fetches += 1
        m.count("wait_prefetches")
        # What is left until it is due, and then as long as it promises to come soon and fetching it again costs more.
        due_ns = max(wait.due_ns, m.now_ns)
        late_ns = m.lifetimes.tools_of(context).remaining_ns(wait.tool, due_ns - wait.begun_ns, wait.eta_ns)
        held_ns = HELD_LOADS * self.load_ns(wait)
        m.lifetimes.keep_until(wait, due_ns + max(SLACK_NS, min(max(0, late_ns), held_ns) if held_ns else late_ns))
        m.errands.arrive(0, 0, context, 0)

    def no_room(self, wait: Wait) -> None:
        """No frames were to be had for it: once more, a little later, as long as it is not due."""
        m, context = self._m, wait.context
        m.count("wait_prefetches_no_room")
        wait.keep_until_ns = 0
        if context.job is not None:
            m.finish(context, "cancelled")
        left_ns = wait.due_ns - m.now_ns
        if left_ns > 2 * SLACK_NS and wait.fetches < MOST_FETCHES:
            self._at(wait, m.now_ns + left_ns // 2)

    def problems(self, waits: list[Wait]) -> list[str]:
        """What fsck finds wrong here."""
        planned = {wait.number for wait, _ in self._alarms.pending()}
        return [
            f"wait {wait.number} is to be brought back and no alarm says when"
            for wait in waits
            if wait.fetch_ns and wait.number not in planned
        ]
