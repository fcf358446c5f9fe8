"""`wait` calls that have no answer yet, and their deadlines.

A waiter hangs at the process that waits, and is answered in every case: a child ended, its child went to another waiter,
its last child went, the deadline came, it was cancelled, or the waiting process itself ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .alarms import Alarms
from .ids import Conn, Pid

if TYPE_CHECKING:
    from .process import Process


class Waiter:
    __slots__ = ("at_ns", "conn", "parent", "pid", "request")

    def __init__(self, conn: Conn, request: int, parent: Process, pid: Pid, at_ns: int) -> None:
        self.conn = conn
        self.request = request
        self.parent = parent
        self.pid = pid  # 0: any child of parent
        self.at_ns = at_ns  # deadline; 0: none


class Waiters:
    """All of them.  set_timer(at_ns) asks for one Timer event."""

    def __init__(self, set_timer: Callable[[int], int]) -> None:
        self._of_request: dict[tuple[int, int], Waiter] = {}
        self._deadlines: Alarms[Waiter] = Alarms(set_timer, self._waits)

    def __len__(self) -> int:
        return len(self._of_request)

    def add(self, waiter: Waiter, now_ns: int) -> None:
        self._of_request[waiter.conn, waiter.request] = waiter
        waiter.parent.waiters.setdefault(waiter.pid, []).append(waiter)
        if waiter.at_ns:
            self._deadlines.add(waiter.at_ns, waiter, now_ns)

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
            self._deadlines.over()

    def due(self, now_ns: int) -> list[Waiter]:
        """A timer fired: those whose deadline has come, still to be dropped and answered."""
        return self._deadlines.due(now_ns)

    def _waits(self, waiter: Waiter) -> bool:
        return self._of_request.get((waiter.conn, waiter.request)) is waiter
