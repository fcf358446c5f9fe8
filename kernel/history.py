"""The last minutes, a sample at a time: rates are differences, and sums since boot hide what happens now.

A sample is taken in the first step after SAMPLE_NS have passed; while nothing happens none is, and nothing is missed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .calls import SampleRow
from .look import hbm_frames
from .params import SAMPLE_NS, SAMPLES

if TYPE_CHECKING:
    from .machine import Machine


class History:
    """Of one machine.  due_ns: when the next sample is wanted."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._samples: deque[SampleRow] = deque(maxlen=SAMPLES)
        self.due_ns = 0

    def look(self) -> None:
        """It is due.  What the machine was asleep for is in the next difference."""
        self._samples.append(self.now())
        self.due_ns = self._m.now_ns + SAMPLE_NS
        for scheduler in self._m.schedulers:
            scheduler.widest = 0

    def now(self) -> SampleRow:
        m = self._m
        m.psi.machine.settle(m.now_ns)
        counters, core = m.counters, m.core.counters()
        free, reclaimable = hbm_frames(m, 0)
        return SampleRow(
            m.now_ns, counters["computed_tokens"], counters["generated_tokens"], counters["compute_ns"],
            counters["thrash_tokens"], counters["preemptions_running"], counters["fault_blocks"], core.lookup_hits,
            core.lookup_misses, m.psi.machine.some.total_ns, m.psi.machine.full.total_ns, m.costs.late_ns(),
            counters["copy_waits"], sum(max(s.widest, s.active()) for s in m.schedulers), sum(len(s.queue) for s in m.schedulers), free, reclaimable,
        )  # fmt: skip

    def rows(self) -> tuple[SampleRow, ...]:
        """Oldest first; the last is of now."""
        return (*self._samples, self.now())
