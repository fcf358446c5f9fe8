"""Many deadlines behind one timer: there is one Timer event outstanding, however many things wait for their time.

What is over before its time stays in the heap until it comes up or until most of the heap is such (a timer cannot be
unset, and neither need an alarm be).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

LONGEST_TIMER_NS = 600_000_000_000  # timers cannot be unset: none outlives its use by more than this
_SPARE = 64  # alarms that are over and may stay anyway


class Alarms(Generic[T]):
    """set_timer(at_ns) asks for one Timer event; alive(what) says whether an alarm is still wanted."""

    def __init__(self, set_timer: Callable[[int], int], alive: Callable[[T], bool]) -> None:
        self._set_timer = set_timer
        self._alive = alive
        self._heap: list[tuple[int, int, T]] = []
        self._number = 0
        self._over = 0  # of those in the heap, how many are wanted no more
        self._armed_ns = 0  # when the earliest outstanding timer fires; 0: none

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_ns: int, what: T, now_ns: int) -> None:
        self._number += 1
        heapq.heappush(self._heap, (at_ns, self._number, what))
        self._arm(now_ns)

    def over(self, count: int = 1) -> None:
        """So many alarms are wanted no more, and `alive` says so from now on."""
        self._over += count
        if 2 * self._over > len(self._heap) + _SPARE:
            self._heap = [entry for entry in self._heap if self._alive(entry[2])]
            heapq.heapify(self._heap)
            self._over = 0

    def due(self, now_ns: int) -> list[T]:
        """A timer fired: those whose time has come, in order.  They are out of the heap."""
        if self._armed_ns and now_ns >= self._armed_ns:
            self._armed_ns = 0
        found: list[T] = []
        while self._heap and (self._heap[0][0] <= now_ns or not self._alive(self._heap[0][2])):
            _, _, what = heapq.heappop(self._heap)
            if self._alive(what):
                found.append(what)
            else:
                self._over = max(0, self._over - 1)
        if self._heap:
            self._arm(now_ns)
        return found

    def pending(self) -> list[T]:
        """Every alarm that is still wanted, in no order; for fsck."""
        return [entry[2] for entry in self._heap if self._alive(entry[2])]

    def _arm(self, now_ns: int) -> None:
        at_ns = min(self._heap[0][0], now_ns + LONGEST_TIMER_NS)
        if not self._armed_ns or at_ns < self._armed_ns:
            self._armed_ns = at_ns
            self._set_timer(at_ns)
