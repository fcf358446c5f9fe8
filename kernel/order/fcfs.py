"""First come, first served.  A step of nice is worth params.NICE_JOBS arrivals.

Bound: a job is overtaken by no later job, but for those that fit where it does not (line.py): at most OVERTAKES of them.
With nice, "later" is by place: a job of nice n yields to at most NICE_JOBS * (n + 20) jobs that arrived after it.
"""

from __future__ import annotations

from typing import ClassVar

from .protocol import Key, OrderPolicy, Waiting


class Fcfs(OrderPolicy):
    name: ClassVar[str] = "fcfs"
    plain: ClassVar[bool] = True

    def key(self, job: Waiting) -> Key:
        return (job.place,)
