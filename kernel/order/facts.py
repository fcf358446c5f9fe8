"""The facts of waiting jobs, read off the kernel's objects for a policy that is given no objects.

What a log finds in hbm costs a walk over its blocks, so one planning walks LOOK_BLOCKS blocks; jobs beyond that are taken
for what they were when they were last looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ..context import Context, Job
from ..params import NICE_JOBS
from .protocol import Waiting

if TYPE_CHECKING:
    from ..machine import Machine

LOOK_BLOCKS: Final = 8192  # half a millisecond


def facts(m: Machine, jobs: Sequence[tuple[Context, Job]], looks: bool, attains: bool = False) -> list[Waiting]:
    """One for each job, which its context has or would have, in order.  looks, attains: what a policy wants to know (protocol.py)."""
    served: dict[int, int] = {}
    budget = LOOK_BLOCKS
    found = []
    for context, job in jobs:
        process = context.process
        row = m.core.slot_row(context.slot)
        if attains and process.pid not in served:
            served[process.pid] = m.served_tokens(process)
        resident = arriving = awaited = stored = 0
        if looks and context.admitted:
            resident, arriving = (
                row.computed,
                min(row.tokens - row.computed, m.core.loading(context.slot) * m.config.block_tokens),
            )
        elif looks:
            if budget > 0 or job.seen is None:
                job.seen = _look(m, context, row.computed)
                budget -= sum(job.seen) // m.config.block_tokens + 1
            resident, arriving, awaited, stored = job.seen
        has = resident + arriving + awaited + stored if looks else row.computed
        found.append(
            Waiting(
                job.order, job.order + NICE_JOBS * process.nice, process.nice, process.pid, process.birth or job.order, served.get(process.pid, 0),
                max(1, row.tokens - has), resident, arriving, awaited, stored, m.now_ns - job.since_ns, job.since_ns,
                job.due_ns, job.args.tpot_ms * 1_000_000, job.passed, context.admitted, job.begun,
            )
        )  # fmt: skip
    return found


def _look(m: Machine, context: Context, computed: int) -> tuple[int, int, int, int]:
    """Tokens that are resident, arriving, awaited and stored, each from where the one before ends."""
    size = m.config.block_tokens
    here, coming, awaited, stored = m.core.prefix(context.slot)
    resident = max(here * size, min(computed, (here + 1) * size))  # a partial block of its own
    return resident, coming * size, awaited * size, stored * size
