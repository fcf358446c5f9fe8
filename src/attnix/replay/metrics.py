"""What one run measured.  Times in seconds, sizes in tokens, unless the name says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Quantiles:
    """Nearest-rank percentiles (the value that at least so many of 100 do not exceed); 0 of nothing."""

    p50: float
    p90: float
    p99: float
    p95: float = 0.0
    mean: float = 0.0


def quantiles(values: Sequence[float]) -> Quantiles:
    ordered = sorted(values)
    if not ordered:
        return Quantiles(0.0, 0.0, 0.0)
    p50, p90, p95, p99 = (round(ordered[-(-len(ordered) * p // 100) - 1], 6) for p in (50, 90, 95, 99))
    return Quantiles(p50, p90, p99, p95, round(sum(ordered) / len(ordered), 6))


@dataclass(slots=True)
class Result:
    """One policy on one trace.

    prompt_tokens      of all answered requests
    hit_tokens         of them, not computed before the first token of their answer, by the tier that they were in;
                       their sum over prompt_tokens is the token hit ratio
    computed_tokens    prompt tokens computed, those of preempted contexts again
    first_tokens       the part of them that nobody could have had: first time in the trace, or in no block
    recomputed_tokens  the rest: computed before, and lost
    prefill_tokens     all that the device computed but the answers, what was computed for nobody (before it was asked for)
                       and what preempted answers cost again included
    refused            requests larger than the device's whole hbm; they are in none of the numbers
    ttft_s             arrival to first token
    tool_ttft_s        of them, the turns that a tool's answer begins
    job_s              first arrival of a session to its last token without the client's pauses; of requests where the trace
                       has no sessions
    answer_s           arrival to last token, per request
    moved_bytes        per link
    busy               share of the time from first arrival to last token in which the compute device was busy
    bound_hit_ratio    what no policy can exceed: see optimum.py
    """

    policy: str
    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    computed_tokens: int = 0
    first_tokens: int = 0
    recomputed_tokens: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    ttft_s: Quantiles = field(default_factory=lambda: quantiles(()))
    tool_ttft_s: Quantiles = field(default_factory=lambda: quantiles(()))
    answer_s: Quantiles = field(default_factory=lambda: quantiles(()))
    job_s: Quantiles = field(default_factory=lambda: quantiles(()))
    moved_bytes: dict[str, int] = field(default_factory=dict)
    busy: float = 0.0
    makespan_s: float = 0.0
    passes: int = 0
    steps: int = 0
    waited_s: float = 0.0
    bound_hit_ratio: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def again_tokens(self) -> int:
        """Of `prefill_tokens`, those that were computed before."""
        return max(0, self.prefill_tokens - self.first_tokens)

    @property
    def hit_ratio(self) -> float:
        return sum(self.hit_tokens.values()) / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        row["hit_ratio"] = round(self.hit_ratio, 6)
        row["tier_hit_ratio"] = {
            tier: round(tokens / self.prompt_tokens, 6) if self.prompt_tokens else 0.0
            for tier, tokens in self.hit_tokens.items()
        }
        return row
