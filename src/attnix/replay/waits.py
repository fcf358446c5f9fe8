"""`attnix replay TRACE --waits`: how long agents take, by what the kernel does with their memory while their tools run.

Every variant runs the same sessions on the same device; what differs is `wait.policy`, and whether a wait says how long it
will take.  Between `lru` and `oracle` is what knowing the future is worth; `closed` is how much of it a variant gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import log
from statistics import stdev
from typing import Any, Final, NamedTuple

from .engine import Replay, Waits, share_of
from .metrics import Quantiles, Result, quantiles
from .profile import Profile
from .report import time_text, tokens_text
from .workload import Workload

VARIANTS: Final[dict[str, Waits]] = {
    "lru": Waits("lru"),
    "ttl": Waits("ttl"),
    "cachettl": Waits("cachettl"),
    "cost": Waits("cost"),
    "noisy": Waits("cost", "noisy"),
    "oracle": Waits("cost", "exact"),
}
ABOUT: Final = (
    "lru: waiting contexts lose their frames least recently used first. ttl: kept for 2 s. cachettl: kept for a time worked",
    "out from what was learnt of the tool. cost: keep, demote or drop by the three wastes, durations as learnt. noisy: cost,",
    "told an eta that is off by up to half. oracle: cost, told the exact duration of every wait.",
    "job: a session without its pauses. tool TTFT: from a tool's answer to the next token. closed: share of the gap between",
    "lru's mean job and the oracle's. +-: standard error of the ratio to lru over the orders of arrival. again: tokens computed that had been computed before.",
)


class Row(NamedTuple):
    """One variant at one size, over all orders of arrival: sessions and turns of all of them together.

    found        share of the prompts' tokens that was not computed for them
    again        tokens computed that had been computed before
    against_lru  of the mean job
    closed       of the gap lru -> oracle in the mean job; None where that is below 1%
    by_order_s   mean job of each order of arrival
    error        standard error of the ratio to lru, from how much it differs between the orders; None of one order
    """

    capacity: str
    variant: str
    job_s: Quantiles
    tool_ttft_s: Quantiles
    found: float
    again: int
    busy: float
    refused: int
    against_lru: float
    closed: float | None
    by_order_s: tuple[float, ...] = ()
    error: float | None = None


def compare(
    workloads: Sequence[Workload], profile: Profile, capacities: Sequence[str], variants: Sequence[str],
    policy: str = "lru", sysctl: Mapping[str, int | str] | None = None, say: Callable[[str], None] = lambda text: None,
) -> list[Row]:  # fmt: skip
    """say: how far it is.  workloads: one trace in several orders: a closed loop is chaotic, and one order proves little.

    KeyError: a variant that is not one.  ValueError: a capacity that is not one.
    """
    rows: list[Row] = []
    for capacity in capacities:
        made: dict[str, Row] = {}
        for name in variants:
            made[name] = _row(workloads, profile, capacity, name, policy, sysctl)
            say(f"{capacity} {name}: job mean {time_text(made[name].job_s.mean)}")
        lru = made["lru"].job_s.mean if "lru" in made else 0.0
        gap = lru - made["oracle"].job_s.mean if lru and "oracle" in made else 0.0
        for row in made.values():
            closed = (lru - row.job_s.mean) / gap if gap > 0.01 * lru else None
            error = standard_error(row.by_order_s, made["lru"].by_order_s) if lru and row.variant != "lru" else None
            rows.append(row._replace(against_lru=row.job_s.mean / lru - 1 if lru else 0.0, closed=closed, error=error))
    return rows


def standard_error(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Of the mean of log(ours / theirs), one pair an order.  None: fewer than two pairs."""
    ratios = [log(a / b) for a, b in zip(ours, theirs, strict=True)]
    return stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None


def _row(
    workloads: Sequence[Workload], profile: Profile, capacity: str, variant: str, policy: str,
    sysctl: Mapping[str, int | str] | None,
) -> Row:  # fmt: skip
    jobs_s: list[float] = []
    by_order_s: list[float] = []
    ttfts_s: list[float] = []
    results: list[Result] = []
    for workload in workloads:
        run = Replay(workload, profile, share_of(workload, capacity), policy, waits=VARIANTS[variant], sysctl=sysctl)
        results.append(run.run())
        jobs_s += run.jobs_s
        by_order_s.append(sum(run.jobs_s) / max(1, len(run.jobs_s)))
        ttfts_s += run.tool_ttfts_s
    found = sum(sum(r.hit_tokens.values()) for r in results) / max(1, sum(r.prompt_tokens for r in results))
    busy = sum(r.busy * r.makespan_s for r in results) / max(1e-9, sum(r.makespan_s for r in results))
    return Row(
        capacity, variant, quantiles(jobs_s), quantiles(ttfts_s), found, sum(r.again_tokens for r in results), busy,
        sum(r.refused for r in results), 0.0, None, tuple(by_order_s),
    )  # fmt: skip


def table(settings: dict[str, Any], rows: Sequence[Row]) -> str:
    cells = [
        [
            "size",
            "waits",
            "job mean",
            "p50",
            "p95",
            "to lru",
            "+-",
            "closed",
            "tool TTFT mean",
            "p50",
            "p95",
            "found",
            "again",
            "busy",
        ]
    ]
    above = ""
    for row in rows:
        times = [row.job_s.mean, row.job_s.p50, row.job_s.p95]
        ttfts = [row.tool_ttft_s.mean, row.tool_ttft_s.p50, row.tool_ttft_s.p95]
        cells.append(
            [
                row.capacity if row.capacity != above else "", row.variant, *map(time_text, times),
                f"{row.against_lru:+.1%}", "-" if row.error is None else f"{row.error:.1%}", "-" if row.closed is None else f"{row.closed:.0%}", *map(time_text, ttfts),
                f"{row.found:.1%}", tokens_text(row.again), f"{row.busy:.0%}",
            ]
        )  # fmt: skip
        above = row.capacity
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    text = [
        f"{settings['trace']}: {settings['sessions']:,} sessions, {settings['turns']:,} requests, "
        f"{settings['distinct_blocks']:,} blocks of {settings['block_tokens']} tokens; {settings['profile']}, about "
        f"{settings['concurrency']:g} sessions at once, {settings['seeds']} orders of arrival",
        "",
    ]
    for line in cells:
        head = [line[0].ljust(widths[0]), line[1].ljust(widths[1])]
        text.append("  ".join(head + [c.rjust(w) for c, w in zip(line[2:], widths[2:], strict=True)]).rstrip())
    refused = {row.capacity: row.refused for row in rows if row.refused}
    text += ["", *ABOUT]
    text += [
        f"{n:,} requests are larger than the hbm of {capacity} and were left out." for capacity, n in refused.items()
    ]
    return "\n".join(text)


def document(settings: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    found = []
    for row in rows:
        fields = row._asdict() | {"job_s": asdict(row.job_s), "tool_ttft_s": asdict(row.tool_ttft_s)}
        found.append({name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()})
    return {"settings": settings, "rows": found}
