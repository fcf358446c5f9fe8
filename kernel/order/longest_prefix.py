"""The job with most of its prompt in hbm, or on its way there, first: it costs least, and what it uses is not evicted
before it has used it.  SGLang's cache-aware order (arXiv 2312.07104, section 3.1), which is a depth-first walk of the radix tree.

A job that waits for what a running prefill publishes counts as if it had it.

Bound: that order starves whoever shares nothing; line.py's bound is all that a job has: at most OVERTAKES later jobs.
"""

from __future__ import annotations

from typing import ClassVar

from .protocol import Key, OrderPolicy, Waiting, stretch


class LongestPrefix(OrderPolicy):
    name: ClassVar[str] = "longest_prefix"
    looks: ClassVar[bool] = True

    def key(self, job: Waiting) -> Key:
        return (-(1 + job.resident + job.arriving + job.awaited) / stretch(job.nice),)
