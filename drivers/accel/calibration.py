"""What prefill costs here, from a few passes of the model over frames of its own, before there is anything to serve.

The kernel fits `t(n, c) = a*n + b*n*(c + n/2) + k` to them (DESIGN.md section 4) and goes on with the passes that it sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from attnix.kernel.batch import SAMPLE, SEQ_FIELDS
from attnix.kernel.geometry import RowLayout

from ..protocol import TimedPrefill
from .engine import Engine
from .model import PageRows

BUDGET_NS: Final = 1_000_000_000
WARM_UP_NS: Final = 60_000_000_000  # for compiling; the daemon waits five minutes for the probe, weights included
_ROUNDS: Final = 3  # of each point the fastest is told: what a neighbour took is not what a pass costs
_FIRST_TOKENS: Final = 16  # of the pass that is not counted: it takes the page faults and wakes the threads
# (tokens, cached), in the order in which they are worth their time: first one of each kind, for a slow model.  Of a
# window that is shorter, the whole is cached.
_POINTS: Final = (
    (16, 0), (64, 0), (64, 512), (16, 512), (64, 256), (256, 0), (256, 512), (256, 256), (16, 256),
)  # fmt: skip


def measure_prefill(model: Engine, block_tokens: int, budget_ns: int = BUDGET_NS) -> tuple[TimedPrefill, ...]:
    """Time passes of one prompt, until every point has had its rounds or another would exceed the budget.

    An engine that compiles its kernels runs every point once before, which counts for nothing: the first requests would have
    waited for that.

    Leaves the model attached to nothing that anybody else has: `attach` it afterwards.  Beyond the budget goes at most the
    first pass: a model that takes longer for that has nothing told of it.
    """
    window = model.config.window
    points = tuple(dict.fromkeys((n, min(c, window - n)) for n, c in _POINTS if n <= window))
    first = min(_FIRST_TOKENS, window)
    frames = -(-max([first, *map(sum, points)]) // block_tokens)
    layout = RowLayout(1, frames)
    rows = PageRows.over(np.zeros(layout.total_bytes, np.uint8), layout)
    rows.frame[0] = np.arange(frames)
    model.attach(model.scratch(block_tokens, frames), rows, block_tokens, frames)

    def pass_ns(tokens: int, cached: int) -> int:
        end = cached + tokens
        seq = np.zeros(1, np.dtype(SEQ_FIELDS))
        seq["start"] = seq["write_from"] = cached
        seq["ntokens"], seq["entries"], seq["flags"] = tokens, -(-end // block_tokens), SAMPLE
        rows.count[0] = np.clip(end - block_tokens * np.arange(frames), 0, block_tokens)
        ids = np.arange(tokens, dtype=np.int32) % model.config.vocab
        began_ns = time.perf_counter_ns()
        model.forward(seq, ids, np.empty((0, 2), np.int32), np.array([tokens - 1], np.int32))
        return time.perf_counter_ns() - began_ns

    if model.compiles:
        points = _compiled(points, pass_ns)
    spent_ns = pass_ns(first, 0)
    token_ns = spent_ns / first
    fastest: dict[tuple[int, int], int] = {}
    for tokens, cached in points * _ROUNDS:
        if spent_ns + token_ns * tokens > budget_ns:
            break
        elapsed_ns = pass_ns(tokens, cached)
        spent_ns += elapsed_ns
        token_ns = min(token_ns, elapsed_ns / tokens)
        fastest[tokens, cached] = min(elapsed_ns, fastest.get((tokens, cached), elapsed_ns))
    return tuple(TimedPrefill(*point, elapsed_ns) for point, elapsed_ns in fastest.items())


def _compiled(points: tuple[tuple[int, int], ...], pass_ns: Callable[[int, int], int]) -> tuple[tuple[int, int], ...]:
    """Run each once; those that had their turn before the time was over."""
    spent_ns = 0
    for done, point in enumerate(points):
        if spent_ns > WARM_UP_NS:
            return points[:done]
        spent_ns += pass_ns(*point)
    return points
