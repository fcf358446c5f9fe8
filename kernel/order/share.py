"""Weighted fair shares of one compute device between groups: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM'96).

A group's tag is the service it has had, divided by its weight; the smallest tag is next.  The virtual time is the least tag
of a group that has work which was left out.  A group that comes, or that got all that it could use, has at least the
virtual time: so an idle group gathers no credit, and a group is charged for what it took while others waited only.

Service is the time of the passes, divided among their sequences by predicted cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Generic, TypeVar

T = TypeVar("T")


class Share(Generic[T]):
    """Tags by name of the group."""

    def __init__(self) -> None:
        self._tags: dict[str, float] = {}
        self._now = 0.0  # virtual time; it never goes back

    def tag(self, name: str) -> float:
        return self._tags.get(name, self._now)

    def present(self, left_out: Mapping[str, bool]) -> None:
        """The groups with work now, and whether some of it was left out of the last pass."""
        waiting = [self._tags[name] for name, left in left_out.items() if left and name in self._tags]
        here = waiting or [self._tags[name] for name in left_out if name in self._tags]
        if here:
            self._now = max(self._now, min(here))
        for name, left in left_out.items():
            if not left or name not in self._tags:
                self._tags[name] = max(self.tag(name), self._now)
        for name in [n for n, tag in self._tags.items() if n not in left_out and tag <= self._now]:
            del self._tags[name]  # as good as new

    def charge(self, name: str, service_ns: float, weight: int) -> None:
        self._tags[name] = self.tag(name) + service_ns / weight

    def merge(self, items: Mapping[str, Sequence[tuple[T, float]]], weights: Mapping[str, int]) -> list[T]:
        """All items, each with its cost in ns: a group's in their order, the groups by their tags as if each item had been
        charged for when it was taken."""
        heap = [(self.tag(name), name) for name, mine in items.items() if mine]
        heapify(heap)
        at = dict.fromkeys(items, 0)
        out: list[T] = []
        while heap:
            tag, name = heap[0]
            item, cost_ns = items[name][at[name]]
            out.append(item)
            at[name] += 1
            if at[name] == len(items[name]):
                heappop(heap)
            else:
                heapreplace(heap, (tag + cost_ns / weights[name], name))
        return out
