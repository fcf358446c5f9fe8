"""Best of n: several answers to one prompt, and the one that scores best."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Unpack

from attnix.syscalls import Context

from .choice import SamplingOptions
from .samples import Sample, draw


class Ranked(NamedTuple):
    """A sample and its score."""

    score: float
    sample: Sample


def mean_logprob(sample: Sample) -> float:
    """How likely the model finds each of its tokens, on average."""
    return sample.mean_logprob


def best_of_n(
    context: Context,
    n: int = 4,
    max_tokens: int = 256,
    *,
    score: Callable[[Sample], float] = mean_logprob,
    **options: Unpack[SamplingOptions],
) -> list[Ranked]:
    """`n` answers to what `context` holds, the best first; of equal scores the earlier drawn.

    options  as those of `generate`; temperature is 1 unless given, and the i-th answer is drawn with `seed` + i
    score    says how good an answer is; more is better.  A test that it passes, the judgement of another model, ...
    The prompt is computed once, and all answers are generated in the same passes.
    Error: as `draw`, and whatever `score` raises.
    """
    samples = draw(context, n, max_tokens, {"temperature": 1.0, **options})
    return sorted([Ranked(score(sample), sample) for sample in samples], key=lambda ranked: -ranked.score)
