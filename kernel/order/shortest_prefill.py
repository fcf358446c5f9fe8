"""The job with fewest tokens to compute first: shortest remaining prefill, which gives the least mean time to first token.

Bound: a long prompt yields to short ones for as long as they come, so line.py's bound is what it has: at most OVERTAKES
later jobs.
"""

from __future__ import annotations

from typing import ClassVar

from .protocol import Key, OrderPolicy, Waiting, stretch


class ShortestPrefill(OrderPolicy):
    name: ClassVar[str] = "shortest_prefill"
    looks: ClassVar[bool] = True

    def key(self, job: Waiting) -> Key:
        return ((1 + job.left) * stretch(job.nice),)
