"""The offline bound of a run: Belady's MIN for the very order in which the run's prompts came.

The cache of the bound holds as many blocks as all tiers of the run together, of equal size; each prompt, in the order in
which the run appended them, asks for its full blocks at once; MIN with bypass knows all later prompts (Belady 1966;
policy_lab.py has the algorithm and says why leaf-first costs it nothing).  So it bounds the share of prompt tokens that
any policy could have found in *any* tier for that order, with nothing prefetched that was not there, answers never found
(workload.py), and frames for running answers free.  It says nothing about time, nor about which tier.  In a closed loop
the order depends on how fast turns are answered, so each run has a bound of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnix.policy_lab import Tape, optimum

from .workload import Int64s


def bound(prompts: Sequence[Int64s], prompt_tokens: int, block_numbers: int, block_tokens: int, frames: int) -> float:
    """Share of `prompt_tokens` that MIN finds with `frames` frames.  prompts: block numbers, in order of arrival."""
    tape = Tape((), block_tokens)
    tape.paths = [p.astype(np.int32) for p in prompts]
    tape.distinct = block_numbers
    tape.input_tokens = prompt_tokens
    return optimum(tape, [frames])[0]
