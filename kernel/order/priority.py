"""Priority with ageing: the smallest nice value first, and a job gains a step of nice per second that it waits.

Bound: a job of nice n waits behind another only if that one arrived less than n - m seconds after it, m being the other's
nice value: 39 seconds at most.  That of line.py holds besides.
"""

from __future__ import annotations

from typing import ClassVar, Final

from .protocol import Key, OrderPolicy, Waiting

AGE_NS: Final = 1_000_000_000  # of waiting, for one step of nice


class Priority(OrderPolicy):
    name: ClassVar[str] = "priority"

    def key(self, job: Waiting) -> Key:
        return (job.nice * AGE_NS - job.waited_ns,)
