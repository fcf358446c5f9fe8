"""`wait` calls that have no answer yet, and their deadlines.

A waiter hangs at the process that waits, and is answered in every case: a child ended, its child went to another waiter,
its last child went, the deadline came, it was cancelled, or the waiting process itself ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

from .ids import Conn, Pid

if TYPE_CHECKING:
    from .process import Process

LONGEST_TIMER_NS = 600_000_000_000  # timers cannot be unset: none outlives its use by more than this


class Waiter:
    __slots__ = ("at_ns", "conn", "parent", "pid", "request")

    def __init__(self, conn: Conn, request: int, parent: Process, pid: Pid, at_ns: int) -> None:
        self.conn = conn
        self.request = request
        self.parent = parent
        self.pid = pid  # 0: any child of parent
        self.at_ns = at_ns  # deadline; 0: none


class Waiters:
    """All of them.  set_timer(at_ns) asks for one Timer event; there is one outstanding, however many wait."""

    def __init__(self, set_timer: Callable[[int], int]) -> None:
        self._set_timer = set_timer
        self._of_request: dict[tuple[int, int], Waiter] = {}
        self._deadlines: list[tuple[int, int, int, Waiter]] = []  # heap; answered ones are skipped
        self._timed = 0  # waiters with a deadline
        self._armed_ns = 0  # when the earliest outstanding timer fires; 0: none
        self._number = 0

    def __len__(self) -> int:
        return len(self._of_request)

    def add(self, waiter: Waiter, now_ns: int) -> None:
        self._of_request[waiter.conn, waiter.request] = waiter
        waiter.parent.waiters.setdefault(waiter.pid, []).append(waiter)
        if waiter.at_ns:
            self._number += 1
            self._timed += 1
            heapq.heappush(self._deadlines, (waiter.at_ns, self._number, waiter.request, waiter))
            self._arm(now_ns)

    def find(self, conn: int, request: int) -> Waiter | None:
        return self._of_request.get((conn, request))

    def drop(self, waiter: Waiter) -> None:
        """It is being answered."""
        del self._of_request[waiter.conn, waiter.request]
        same = waiter.parent.waiters[waiter.pid]
        same.remove(waiter)
        if not same:
            del waiter.parent.waiters[waiter.pid]
        if waiter.at_ns:
            self._timed -= 1
            if len(self._deadlines) > 2 * self._timed + 64:
                self._deadlines = [d for d in self._deadlines if self._waits(d[3])]
                heapq.heapify(self._deadlines)

    def due(self, now_ns: int) -> list[Waiter]:
        """A timer fired: those whose deadline has come, still to be dropped and answered."""
        if self._armed_ns and now_ns >= self._armed_ns:
            self._armed_ns = 0
        found: list[Waiter] = []
        while self._deadlines and (self._deadlines[0][0] <= now_ns or not self._waits(self._deadlines[0][3])):
            waiter = heapq.heappop(self._deadlines)[3]
            if self._waits(waiter):
                found.append(waiter)
        if self._deadlines:
            self._arm(now_ns)
        return found

    def _waits(self, waiter: Waiter) -> bool:
        return self._of_request.get((waiter.conn, waiter.request)) is waiter

    def _arm(self, now_ns: int) -> None:
        at_ns = min(self._deadlines[0][0], now_ns + LONGEST_TIMER_NS)
        if not self._armed_ns or at_ns < self._armed_ns:
            self._armed_ns = at_ns
            self._set_timer(at_ns)
