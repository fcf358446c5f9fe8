"""Several answers to one prompt: forks of one context that generate at the same time."""

from __future__ import annotations

from typing import NamedTuple

from attnix.syscalls import Context
from attnix.syscalls.client import GenerateOptions
from attnix.syscalls.records import unpack_ids

from .child import child_of


class Sample(NamedTuple):
    """One answer.  logprobs: of each token, under the model itself: temperature and penalties do not change them."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str

    @property
    def mean_logprob(self) -> float:
        """What the model thinks of it, whatever its length; -inf for an empty one."""
        return sum(self.logprobs) / len(self.logprobs) if self.logprobs else float("-inf")


def draw(context: Context, n: int, max_tokens: int, options: GenerateOptions) -> list[Sample]:
    """`n` answers; `context` stays as it is.

    options  as those of `generate`; the i-th answer is drawn with `seed` + i
    Error: ValueError for less than one; the system's own errors.  Nothing is left behind either way.
    """
    if n < 1:
        raise ValueError(f"{n} samples: ask for at least one")
    seed = options.get("seed", 0)
    with child_of(context, "samples") as root:
        streams = []
        for number, fork in enumerate([*(root.fork(n - 1) if n > 1 else ()), root]):
            drawing: GenerateOptions = {**options, "seed": seed + number, "logprobs": 1}
            streams.append(fork.stream(max_tokens, **drawing))  # does not wait: they run in the same passes
        results = [stream.result() for stream in streams]
    return [
        Sample(r.text, tuple(unpack_ids(r.tokens)), tuple(own for own, _, _ in r.logprobs), r.reason) for r in results
    ]
