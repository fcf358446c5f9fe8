"""Which token comes next: a draw from what `forward` says, with the options of `generate` that have the same names.

`forward` tells the likeliest tokens and no others, so a draw is always from at most MAX_LOGPROBS of them, as `generate` does
with such a `top_k`.  (The log-probabilities are those of the whole vocabulary all the same.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp
from random import Random
from typing import NamedTuple, Self, TypedDict

from attnix.syscalls.client import Tokens
from attnix.syscalls.types import MAX_LOGPROBS


class SamplingOptions(TypedDict, total=False):
    """How answers are drawn and what ends one; each is the option of `generate` of the same name."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: str | Sequence[str]
    stop_tokens: Tokens
    ignore_eos: bool


class Choice(NamedTuple):
    """top_k  how many tokens to ask `forward` for"""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, options: SamplingOptions) -> Self:
        """Error: TypeError for an option that there is not, ValueError for a value that makes no sense."""
        if unknown := sorted(set(options) - set(SamplingOptions.__annotations__)):
            raise TypeError(f"samples are drawn without {', '.join(unknown)}")
        temperature, top_p, min_p = (
            options.get("temperature", 0.0),
            options.get("top_p", 1.0),
            options.get("min_p", 0.0),
        )
        top_k = options.get("top_k", 0)
        for good, name, value, allowed in (
            (0 <= temperature <= 100, "temperature", temperature, "0..100"),
            (top_k >= 0, "top_k", top_k, ">= 0 (0: off)"),
            (1e-6 <= top_p <= 1, "top_p", top_p, "1e-6..1 (1: off)"),
            (0 <= min_p < 1, "min_p", min_p, "0 (off) to below 1"),
        ):
            if not good:
                raise ValueError(f"{name} is {allowed}, not {value}")
        among = 1 if temperature == 0 else min(top_k or MAX_LOGPROBS, MAX_LOGPROBS)
        return cls(temperature, among, top_p, min_p)

    def pick(self, likeliest: Sequence[tuple[int, float]], random: Random) -> tuple[int, float]:
        """One of these (token, log-probability), drawn; takes one number from `random` unless there is nothing to draw.

        Order: temperature, top-p, min-p, as in drivers/accel/sampler.py.  Requires: the likeliest comes first.
        """
        if self.temperature == 0:
            return likeliest[0]
        best = likeliest[0][1]
        weights = [exp((logprob - best) / self.temperature) for _, logprob in likeliest]
        upto = list(accumulate(weights))
        kept = 1  # whatever was asked for, the likeliest stays
        while kept < len(weights) and upto[kept - 1] < self.top_p * upto[-1] and weights[kept] >= self.min_p:
            kept += 1
        return random.choices(likeliest[:kept], cum_weights=upto[:kept])[0]
