"""The one shape in which every benchmark reports."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One measurement.

    ratio     above 1 means attnix is better, whether `unit` is a time or a rate
    limit     what the machine allows, in `unit`, measured in the same run; None where no limit was measured
    of_limit  share of that limit reached, at most about 1
    n         repetitions behind the medians
    """

    bench: str
    case: str
    ours: float
    unit: str
    peer: str
    theirs: float | None
    ratio: float | None
    limit: float | None
    of_limit: float | None
    n: int


def time_row(
    bench: str, case: str, ours: float, unit: str, peer: str, theirs: float, n: int, limit: float | None
) -> Row:
    """Less is better."""
    return Row(bench, case, ours, unit, peer, theirs, theirs / ours, limit, limit / ours if limit else None, n)


def rate_row(
    bench: str, case: str, ours: float, unit: str, peer: str, theirs: float, n: int, limit: float | None
) -> Row:
    """More is better."""
    return Row(bench, case, ours, unit, peer, theirs, ours / theirs, limit, ours / limit if limit else None, n)
