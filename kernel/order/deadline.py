"""Earliest deadline first, by the targets of `generate`: ttft_ms after its arrival is when the first token is due.  A job
without a target comes after those with one.

A generation whose target the forecast (measured prefill cost, what is queued before it, the decode pass that it would join)
misses is refused before anything is done: EAGAIN with retry_after_ms.  Until costs have been measured nobody is refused.

Bound: a job with a deadline yields only to those with an earlier one, so to nobody that arrives later than its deadline; one
without has line.py's bound: at most OVERTAKES later jobs.
"""

from __future__ import annotations

from typing import ClassVar

from .protocol import Forecast, Key, OrderPolicy, Waiting, stretch


class Deadline(OrderPolicy):
    name: ClassVar[str] = "deadline"
    refuses: ClassVar[bool] = True

    def key(self, job: Waiting) -> Key:
        if job.begun and job.token_ns:
            return (0, job.since_ns)  # its reader waits for the next token, not the first
        if not job.due_ns:
            return (2, 0)
        return (1, job.since_ns + (job.due_ns - job.since_ns) * stretch(job.nice))

    def late_ns(self, job: Waiting, forecast: Forecast) -> int:
        late = job.since_ns + job.waited_ns + forecast.first_ns - job.due_ns if job.due_ns else 0
        if late <= 0 and job.token_ns and forecast.token_ns > job.token_ns:
            late = max(forecast.free_ns, forecast.token_ns)  # room comes when one of those that decode is done
        return max(0, late)
