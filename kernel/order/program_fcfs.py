"""First come, first served by program: every job of a program has the place of the program's first one, so an agent that
comes back from a tool does not queue behind programs that began after it.

Bound: a job is overtaken only by jobs of older programs, a program at a time; when an old program never ends, line.py's
bound: at most OVERTAKES later jobs.
"""

from __future__ import annotations

from typing import ClassVar

from ..params import NICE_JOBS
from .protocol import Key, OrderPolicy, Waiting


class ProgramFcfs(OrderPolicy):
    name: ClassVar[str] = "program_fcfs"

    def key(self, job: Waiting) -> Key:
        return (job.birth + NICE_JOBS * job.nice,)
