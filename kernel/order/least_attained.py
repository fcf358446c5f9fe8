"""Least attained service by program (Autellix, arXiv 2502.13965, section 4): a program that has had little is likely to
end soon, so it goes first; what counts is all service of the program, not that of one call.

As there, service is put into a bounded number of queues whose thresholds grow by a factor, and within a queue the order is
first come first served by program, so that programs of about the same service do not take turns at each other's frames.
A job rises by one queue per AGE_NS that it waits (Autellix promotes by the ratio of waiting to service).

Bound: after (LEVELS - 1) * AGE_NS a job is in the first queue, where only older programs are before it; line.py's bound
besides: at most OVERTAKES later jobs.
"""

from __future__ import annotations

from typing import ClassVar, Final

from ..params import NICE_JOBS
from .protocol import Key, OrderPolicy, Waiting, stretch

LEVELS: Final = 8
FIRST_TOKENS: Final = 2048  # service that leaves the first queue
GROWTH: Final = 4  # of the thresholds, queue by queue
AGE_NS: Final = 4_000_000_000


class LeastAttained(OrderPolicy):
    name: ClassVar[str] = "least_attained"
    attains: ClassVar[bool] = True

    def key(self, job: Waiting) -> Key:
        served, level, threshold = job.served * stretch(job.nice), 0, FIRST_TOKENS
        while level < LEVELS - 1 and served >= threshold:
            level += 1
            threshold *= GROWTH
        return (max(0, level - job.waited_ns // AGE_NS), job.birth + NICE_JOBS * job.nice)
