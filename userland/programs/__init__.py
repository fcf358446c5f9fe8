"""Programs over system calls only, to use and to copy from: docs/writing-a-program.md."""

from .beam import Hypothesis, beam_search
from .best_of_n import Ranked, best_of_n, mean_logprob
from .samples import Sample
from .self_consistency import Vote, last_number, self_consistency

__all__ = [
    "Hypothesis",
    "Ranked",
    "Sample",
    "Vote",
    "beam_search",
    "best_of_n",
    "last_number",
    "mean_logprob",
    "self_consistency",
]
