"""Self-consistency (Wang et al., arXiv 2203.11171): several chains of thought, and the answer that most of them reach."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar, Unpack

from attnix.syscalls import Context

from .choice import SamplingOptions
from .samples import Sample, draw

A = TypeVar("A")

_NUMBER: Final = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


class Vote(NamedTuple, Generic[A]):
    """What was decided.

    answer   what most samples say; None when no sample has an answer
    votes    of those samples that have one, by answer, most votes first
    samples  all of them, in the order of their seeds
    """

    answer: A | None
    votes: tuple[tuple[A, int], ...]
    samples: tuple[Sample, ...]


def last_number(text: str) -> float | None:
    """The last number in a text: where chains of thought about sums have their answer."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def self_consistency(
    context: Context,
    extract: Callable[[str], A | None],
    n: int = 5,
    max_tokens: int = 256,
    **options: Unpack[SamplingOptions],
) -> Vote[A]:
    """Let `n` forks of `context` answer, and take the answer that most of them give; of equal votes the one seen first.

    options  as those of `generate`; temperature is 0.7 unless given, as in the paper, and the i-th is drawn with `seed` + i
    extract  the answer in a text, in a form that is equal for equal answers and hashable; None: it has none, and no vote
    Error: as `draw`, and whatever `extract` raises.
    """
    samples = draw(context, n, max_tokens, {"temperature": 0.7, **options})
    answers = [extract(sample.text) for sample in samples]
    votes = Counter(answer for answer in answers if answer is not None).most_common()  # stable: first seen, first
    return Vote(votes[0][0] if votes else None, tuple(votes), tuple(samples))
