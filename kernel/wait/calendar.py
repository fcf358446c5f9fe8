"""When to begin to bring contexts back, so that each is there when its answer is due.

A link carries one load after the other, so loads that must all end at the same time have to begin one before the other:
each is given the latest gap that ends in time (backward scheduling on one machine).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

_LOOKED_AT: Final = 64  # bookings that one booking is moved before, at most: an estimate needs no perfection


class Calendar:
    """Bookings of one compute device's link, by number of the wait."""

    def __init__(self) -> None:
        self._by_start: list[tuple[int, int, int]] = []  # (start, end, number)
        self._of: dict[int, tuple[int, int, int]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def book(self, number: int, end_ns: int, load_ns: int) -> int:
        """Start of a load of that length which ends at `end_ns` or as soon before that as the link is free."""
        self.cancel(number)
        at = bisect_left(self._by_start, (end_ns, 0, 0)) - 1  # the last one that starts before our end
        for _ in range(_LOOKED_AT):
            if at < 0 or self._by_start[at][1] <= end_ns - load_ns:
                break
            end_ns = min(end_ns, self._by_start[at][0])
            at -= 1
        booking = self._of[number] = (end_ns - load_ns, end_ns, number)
        insort(self._by_start, booking)
        return booking[0]

    def cancel(self, number: int) -> None:
        booking = self._of.pop(number, None)
        if booking is not None:
            del self._by_start[bisect_left(self._by_start, booking)]
