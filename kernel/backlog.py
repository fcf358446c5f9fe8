"""How long new work would wait before it begins, and the refusal of what would wait too long.

A queue that only grows serves nobody: everybody in it is late when his turn comes.  What matters is the time in the queue,
not its length (CoDel, Nichols & Jacobson, ACM Queue 2012).  By Little's law the newest of n that wait begins after n / r,
where r is the rate at which prompts are finished while there is a queue; r is measured, with whatever limits it: compute,
frames, limits of groups.  Work that would wait longer than the bound is refused at once, before anything is computed for it,
and told when to come again.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, Final

from .errors import E, Errno
from .look import alone, coarse_ms
from .params import RETRY_MS

if TYPE_CHECKING:
    from .context import Context
    from .machine import Machine

_MEMORY_NS: Final = 15e9  # a prompt finished this long ago counts 1/e of one finished now
_ENOUGH: Final = 4.0  # prompts before the rate is believed


class Backlog:
    """Of one compute device."""

    def __init__(self, machine: Machine, device: int) -> None:
        self._m = machine
        self._device = device
        self._begun = 0.0  # prompts finished ...
        self._busy_ns = 0.0  # ... in so much time during which somebody waited, both forgotten exponentially
        self._since_ns = -1  # the queue has not been empty since then; -1: it is

    def waiting(self, uid: int = -1) -> int:
        """Jobs whose prompt is not computed yet; of one uid only, if it is given."""
        queue = self._m.schedulers[self._device].queue
        return sum(1 for c in queue if c.job is not None and not c.job.begun and uid in (-1, c.process.uid))

    def begun(self) -> None:
        """A prompt is computed, and its context about to leave the queue."""
        self._pass_time()
        self._begun += 1

    def look(self) -> None:
        """The queue may have become empty, or not be any more."""
        busy = bool(self._m.schedulers[self._device].queue)
        if busy != (self._since_ns >= 0):
            self._pass_time()
            self._since_ns = self._m.now_ns if busy else -1

    def _pass_time(self) -> None:
        if self._since_ns >= 0:
            over_ns = self._m.now_ns - self._since_ns
            kept = exp(-over_ns / _MEMORY_NS)
            self._begun *= kept
            self._busy_ns = self._busy_ns * kept + _MEMORY_NS * (1 - kept)
            self._since_ns = self._m.now_ns

    def wait_ns(self, ahead: int) -> int:
        """What whoever comes behind so many waits; -1: not known yet."""
        if self._begun < _ENOUGH:
            return 0 if ahead == 0 else -1
        return round(ahead * self._busy_ns / self._begun)

    def check(self, context: Context, tokens: int = 0) -> None:
        """EAGAIN when new work on this context would wait for longer than sysctl allows; tokens: so many are to be appended.
        Never refused is what has its place already."""
        if context.job is None:
            self.check_new(context, tokens)

    def check_new(self, context: Context, tokens: int) -> None:
        """As `check`, of work that has no place, whatever the context is doing.

        Never refused is what goes on with what has begun: a context that has its frames and at most a block to compute.  Else
        a search, or a reply that is sampled token by token, would be refused half-way.
        """
        m = self._m
        longest, most = m.sysctl.max_wait_ms, m.sysctl.max_queue
        if not (longest or most):
            return
        row = m.core.slot_row(context.slot)
        if context.admitted and row.computed and row.tokens + tokens - row.computed <= m.config.block_tokens:
            return
        ahead = self.waiting()
        wait_ms = -(-self.wait_ns(ahead) // 1_000_000)
        if most and ahead >= most:
            share_ms = wait_ms * (ahead - most + 1) // ahead if wait_ms > 0 else RETRY_MS
            self._refuse(
                context, f"{most} jobs may wait for their turn (sysctl sched.max_queue)", share_ms, most, wait_ms
            )
        if longest and wait_ms > longest:
            text = f"it may wait for its turn for {longest} ms (sysctl sched.max_wait_ms)"
            self._refuse(context, text, wait_ms - longest, longest, wait_ms)

    def _refuse(self, context: Context, text: str, retry_after_ms: int, limit: int, wait_ms: int) -> None:
        """One of several uids is told of its own jobs only, and times in whole seconds."""
        m, uid = self._m, context.process.uid
        m.count("refused_overload")
        retry_after_ms, wait_ms = (coarse_ms(m, uid, ms) for ms in (max(1, retry_after_ms), wait_ms))
        queued = self.waiting() if alone(m, uid) else self.waiting(uid)
        would = f"and would wait {wait_ms} ms" if wait_ms > 0 else "and it is not known how long it would"
        raise Errno(
            E.EAGAIN, f"{text}, {would} behind {queued} others: try again in {retry_after_ms} ms",
            retry_after_ms=retry_after_ms, queued=queued, limit=limit, wait_ms=wait_ms,
        )  # fmt: skip
