"""`attnix replay TRACE --waits`: how long agents take, by what the kernel does with their memory while their tools run.

Every variant runs the same sessions on the same device; what differs is `wait.policy`, and whether a wait says how long it
will take.  Between `lru` and `oracle` is what knowing the future is worth; `closed` is how much of it a variant gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from .engine import Frames, Replay, Waits
from .metrics import Result
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
    "lru's mean job and the oracle's. again: tokens computed that had been computed before.",
)


class Row(NamedTuple):
    """One run.  closed: of the gap lru -> oracle in the mean job; None where there is none to speak of (below 1%)."""

    capacity: str
    variant: str
    result: Result
    against_lru: float
    closed: float | None


def compare(
    workload: Workload, profile: Profile, sizes: Sequence[tuple[str, Frames]], variants: Sequence[str],
    policy: str = "lru", sysctl: Mapping[str, int | str] | None = None,
) -> list[Row]:  # fmt: skip
    """Each variant at each size.  KeyError: a variant that is not one."""
    rows: list[Row] = []
    for capacity, frames in sizes:
        runs = {
            name: Replay(workload, profile, frames, policy, waits=VARIANTS[name], sysctl=sysctl).run()
            for name in variants
        }
        lru = runs["lru"].job_s.mean if "lru" in runs else 0.0
        gap = lru - runs["oracle"].job_s.mean if lru and "oracle" in runs else 0.0
        for name, result in runs.items():
            mean = result.job_s.mean
            closed = (lru - mean) / gap if gap > 0.01 * lru else None
            rows.append(Row(capacity, name, result, mean / lru - 1 if lru else 0.0, closed))
    return rows


def table(settings: dict[str, Any], rows: Sequence[Row]) -> str:
    cells = [
        [
            "size",
            "waits",
            "job mean",
            "p50",
            "p95",
            "to lru",
            "closed",
            "tool TTFT p50",
            "p95",
            "found",
            "again",
            "busy",
        ]
    ]
    above = ""
    for row in rows:
        r = row.result
        cells.append(
            [
                row.capacity if row.capacity != above else "", row.variant,
                time_text(r.job_s.mean), time_text(r.job_s.p50), time_text(r.job_s.p95),
                f"{row.against_lru:+.1%}", "-" if row.closed is None else f"{row.closed:.0%}",
                time_text(r.tool_ttft_s.p50), time_text(r.tool_ttft_s.p95), f"{r.hit_ratio:.1%}",
                tokens_text(r.again_tokens), f"{r.busy:.0%}",
            ]
        )  # fmt: skip
        above = row.capacity
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    text = [
        f"{settings['trace']}: {settings['sessions']:,} sessions, {settings['turns']:,} requests, "
        f"{settings['distinct_blocks']:,} blocks of {settings['block_tokens']} tokens; {settings['profile']}, "
        f"about {settings['concurrency']:g} sessions at once",
        "",
    ]
    for line in cells:
        head = [line[0].ljust(widths[0]), line[1].ljust(widths[1])]
        text.append("  ".join(head + [c.rjust(w) for c, w in zip(line[2:], widths[2:], strict=True)]).rstrip())
    refused = {row.capacity: row.result.refused for row in rows if row.result.refused}
    text += ["", *ABOUT]
    text += [
        f"{n:,} requests are larger than the hbm of {capacity} and were left out." for capacity, n in refused.items()
    ]
    return "\n".join(text)


def document(settings: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "settings": settings,
        "rows": [
            {
                "capacity": row.capacity, "waits": row.variant, "against_lru": round(row.against_lru, 6),
                "closed": None if row.closed is None else round(row.closed, 6), "result": row.result.as_json(),
            }
            for row in rows
        ],
    }  # fmt: skip
