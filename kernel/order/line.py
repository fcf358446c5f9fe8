"""The line of those that wait on one compute device: a policy's order, within bounds that hold for every policy.

A job *overtakes* another of its group when its place (`Waiting.place`) is later and it gets its frames while the other has
none, or its first tokens computed while the other has frames and gets nothing.  A job that was overtaken OVERTAKES times is
*due*: due jobs go first, by place, and when the first of them does not fit nobody is let past it.  Hence nobody is overtaken
more than OVERTAKES times before its prompt is computed, but while it waits for a transfer or for what another computes.

    Proof.  Suppose X overtakes Y and Y is due.  X was before Y in the order, so X is due too and its place is the earlier
    one: X does not overtake Y.

What a running prefill is about to publish counts as found: a job that waits for it takes frames that are shared and none of
a pass, so nobody is held up by it, and its prefix is in use before it could be evicted.  Putting such jobs behind the others
was tried and was slower (docs/log.md).

Between groups the order is start-time fair queueing (share.py); a job that is due is due within its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .protocol import Key, OrderPolicy, Waiting

OVERTAKES: Final = 64  # as many as a step of nice is worth
LOOK: Final = 64  # jobs that are ordered: the first by place; those behind them wait for their turn to be looked at


def rank(policy: OrderPolicy, job: Waiting, overtakes: int = OVERTAKES) -> tuple[int, Key, int]:
    """What a line is sorted by."""
    if job.passed >= overtakes:
        return (0, (), job.place)
    return (1, policy.key(job), job.place)


def arranged(policy: OrderPolicy, jobs: Sequence[Waiting], overtakes: int = OVERTAKES) -> list[int]:
    """Indices of `jobs` in the order in which they are to be served."""
    ranks = [rank(policy, job, overtakes) for job in jobs]
    return sorted(range(len(jobs)), key=ranks.__getitem__)
