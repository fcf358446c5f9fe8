"""Contexts of one compute device that have no job and perhaps frames, in the order in which they let go of them.

Least recently used first, unless the wait policy ranks them (Lifetimes.ranks): then of some that were used least recently and
some that are due last, the one whose frames are worth least is first: what it takes to bring a frame back, divided by the
time until somebody wants it.  A context that waits for a tool and is within its keep time is not in this order at all; it
comes when nothing else is left.  One whose keep time is over, or that was to be demoted or dropped at once, is the next.
Nor is one whose turn has just ended: its client has to have the time to say that it waits for a tool.  Where a queue stands
every frame is wanted by somebody, so without that all would be gone before any keep could begin.

Looking costs a bounded number of candidates, however many rest.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .context import Context
    from .lifetimes import Wait
    from .machine import Machine

CANDIDATES: Final = 16  # of each kind, that are compared at first


class Resting:
    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._order: OrderedDict[int, Context] = OrderedDict()  # by cid, least recently used first
        self._kept: OrderedDict[int, Context] = OrderedDict()  # within their keep time
        self._ends: list[tuple[int, int, Wait]] = []  # heap: when keep times end
        self._fresh: OrderedDict[int, tuple[Context, int]] = OrderedDict()  # their turn has just ended; when
        self._number = 0  # of heap entries, so that no two compare equal
        self._late: list[tuple[int, int, Wait]] = []  # heap: (-due_ns, ...) of those in _order that are due some time

    def __len__(self) -> int:
        return len(self._order) + len(self._kept) + len(self._fresh)

    def __contains__(self, context: object) -> bool:
        cid = getattr(context, "cid", 0)
        held = (self._order.get(cid), self._kept.get(cid), self._fresh.get(cid, (None,))[0])
        return any(found is context for found in held)

    def add(self, context: Context) -> None:
        """It was used until now, or what is known of its return has changed."""
        self.remove(context)
        wait = context.wait
        if wait is not None and wait.keep_until_ns > self._m.now_ns:
            self._kept[context.cid] = context
            heapq.heappush(self._ends, (wait.keep_until_ns, self._next(), wait))
            if len(self._ends) > 2 * len(self._kept) + 64:
                self._ends = list({end[2].number: end for end in self._ends if self._keeps(end)}.values())  # once each
                heapq.heapify(self._ends)
        else:
            self._file(context)

    def first(self, context: Context) -> None:
        """It is the next to go, unless it is within its keep time."""
        if context.cid in self._order:
            self._order.move_to_end(context.cid, last=False)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def remove(self, context: Context) -> None:
        self._order.pop(context.cid, None)
        self._kept.pop(context.cid, None)
        self._fresh.pop(context.cid, None)

    def settle(self, context: Context) -> None:
        """Its turn has just ended."""
        self.remove(context)
        self._fresh[context.cid] = (context, self._m.now_ns)

    def _settles_ns(self, ended_ns: int) -> int:
        """When a context whose turn ended then has had its time: by the sysctl as it is now, so that it counts at once."""
        return ended_ns + self._m.sysctl.grace_ms * 1_000_000

    def settled_ns(self) -> int:
        """When the next of those whose turn has just ended has had its time; 0: there are none."""
        ends = (self._settles_ns(ended_ns) for _, ended_ns in self._fresh.values())
        return next((end_ns for end_ns in ends if end_ns > self._m.now_ns), 0)

    def _file(self, context: Context) -> None:
        self._order[context.cid] = context
        wait = context.wait
        if wait is not None and wait.due_ns:
            heapq.heappush(self._late, (-wait.due_ns, self._next(), wait))
            if len(self._late) > 2 * len(self._order) + 64:
                self._late = [entry for entry in self._late if self._files(entry)]
                heapq.heapify(self._late)

    def _files(self, entry: tuple[int, int, Wait]) -> bool:
        """The entry says what is true of its context."""
        wait = entry[2]
        return not wait.over and -entry[0] == wait.due_ns and wait.context.cid in self._order

    def _keeps(self, entry: tuple[int, int, Wait]) -> bool:
        """Likewise, of a keep time."""
        wait = entry[2]
        return not wait.over and entry[0] == wait.keep_until_ns and wait.context.cid in self._kept

    def _expire(self) -> None:
        """Those whose turn has ended, when their time is over.  And keep times that are over: their contexts have rested for
        longer than most, and are the next to go."""
        while self._fresh:
            context, ended_ns = next(iter(self._fresh.values()))
            if self._settles_ns(ended_ns) > self._m.now_ns:
                break
            del self._fresh[context.cid]
            self._file(context)
        while self._ends and self._ends[0][0] <= self._m.now_ns:
            _, _, wait = heapq.heappop(self._ends)
            context = wait.context
            if not wait.over and wait.keep_until_ns <= self._m.now_ns and context.cid in self._kept:
                del self._kept[context.cid]
                self._file(context)
                self.first(context)

    def victims(self) -> Iterator[Context]:
        """Who lets go first, next, ...; for as long as nobody but these is added or removed."""
        self._expire()
        seen: set[int] = set()
        ranks = self._m.lifetimes.ranks
        want = CANDIDATES
        while True:
            fresh = list(islice((c for c in self._order.values() if c.cid not in seen), want))
            if ranks:
                fresh = self._ranked(fresh, seen, want)
            want *= 2  # they are small, or cannot go: looking again and again costs more than looking at more
            if not fresh:
                return
            for context in fresh:
                seen.add(context.cid)
                if context in self and not self._empty(context):
                    yield context

    def kept(self) -> Iterator[Context]:
        """Those within their keep time, when nothing else is left, and then those whose turn has just ended."""
        self._expire()
        seen: set[int] = set()
        while fresh := list(islice((c for c in self._kept.values() if c.cid not in seen), CANDIDATES)):
            seen.update(c.cid for c in fresh)
            fresh.sort(key=lambda c: (self._m.lifetimes.worth(c), c.cid))
            for context in fresh:
                if context in self and not self._empty(context):
                    yield context
        for context, _ in list(self._fresh.values()):
            if context in self and not self._empty(context):
                yield context

    def _empty(self, context: Context) -> bool:
        """Nothing can be taken from it until it has run again: it is left out until then."""
        if self._m.core.slot_row(context.slot).entries:
            return False
        self.remove(context)
        return True

    def _ranked(self, fresh: list[Context], seen: set[int], want: int) -> list[Context]:
        looked_at = {c.cid: c for c in fresh}
        back: list[tuple[int, int, Wait]] = []
        while self._late and len(back) < want + len(seen):
            entry = heapq.heappop(self._late)
            if not self._files(entry):
                continue
            back.append(entry)
            context = entry[2].context
            if context.cid not in seen:
                looked_at[context.cid] = context
        for entry in back:
            heapq.heappush(self._late, entry)
        worth = self._m.lifetimes.worth
        return sorted(looked_at.values(), key=lambda c: (worth(c), c.cid))

    def problems(self) -> list[str]:
        """What fsck finds wrong here."""
        found = []
        ends = {(at, wait.number) for at, _, wait in self._ends}
        late = {(-at, wait.number) for at, _, wait in self._late}
        for context in self._kept.values():
            wait = context.wait
            if wait is None or (wait.keep_until_ns, wait.number) not in ends:
                found.append(f"context {context.cid} is kept and nothing ends that")
        for context, _ in self._fresh.values():
            if context.wait is not None:
                found.append(f"context {context.cid} waits for a tool and is taken for one that may be about to")
        for context in self._order.values():
            wait = context.wait
            if wait is not None and wait.due_ns and (wait.due_ns, wait.number) not in late:
                found.append(f"context {context.cid} is due and not among those that are due some time")
        return found
