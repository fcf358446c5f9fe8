"""The facts of waiting jobs, read off the kernel's objects for a policy that is given no objects.

What a log finds in hbm costs a walk over its blocks, so one planning walks LOOK_BLOCKS blocks; jobs beyond that are taken
for what they were when they were last looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ..context import Context, Job
from ..params import NICE_JOBS
from ..records import FACT
from .protocol import Waiting

if TYPE_CHECKING:
    from ..machine import Machine

LOOK_BLOCKS: Final = 8192  # half a millisecond
_MASK: Final = 9  # field of a FACT: the devices with a frame for the block


def facts(m: Machine, jobs: Sequence[tuple[Context, Job]], looks: bool) -> list[Waiting]:
    """One for each job, which its context has or would have, in order.  looks: also what hbm and the tiers have of their prompts."""
    served: dict[int, int] = {}
    budget = LOOK_BLOCKS
    found = []
    for context, job in jobs:
        process = context.process
        row = m.core.slot_row(context.slot)
        if process.pid not in served:
            usage = m.usage_of(process)
            served[process.pid] = usage.computed_tokens
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
                job.order, job.order + NICE_JOBS * process.nice, process.nice, process.pid, process.birth or job.order, served[process.pid],
                max(1, row.tokens - has), resident, arriving, awaited, stored, m.now_ns - job.since_ns, job.since_ns,
                job.due_ns, job.args.tpot_ms * 1_000_000, job.passed, context.admitted, job.begun,
            )
        )  # fmt: skip
    return found


def _look(m: Machine, context: Context, computed: int) -> tuple[int, int, int, int]:
    """Tokens that are resident, arriving, awaited and stored, each from where the one before ends."""
    size, device = m.config.block_tokens, context.device
    blocks = m.core.log_blocks(context.slot)
    states = m.core.copied(blocks, 1 << device)
    here = len(states) - len(states.lstrip(b"\x02"))
    coming = here + _run(states, here, b"\x01\x02")
    masks = bytes(fact[_MASK] for fact in FACT.iter_unpack(m.core.facts(blocks[coming:])))
    filling = kept = 0
    for mask in masks:
        if mask >> device & 1 and not kept:
            filling += 1
        elif mask:
            kept += 1
        else:
            break
    resident = max(here * size, min(computed, (here + 1) * size))  # a partial block of its own
    return resident, (coming - here) * size, filling * size, kept * size


def _run(states: bytes, start: int, of: bytes) -> int:
    """Length of the run of bytes in `of` that begins at `start`."""
    rest = states[start:]
    return len(rest) - len(rest.lstrip(of))
