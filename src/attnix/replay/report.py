"""Runs side by side: a table to read, a document for programs, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .metrics import Result

_BYTES = ("B", "KB", "MB", "GB", "TB", "PB")


def _size(n: float) -> str:
    for unit in _BYTES:
        if n < 999.5 or unit == _BYTES[-1]:
            return f"{n:.0f} {unit}" if n >= 99.5 or unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    raise AssertionError


def time_text(seconds: float) -> str:
    if seconds >= 99.5:
        return f"{seconds:,.0f} s"
    return (
        f"{seconds:.1f} s"
        if seconds >= 9.95
        else f"{seconds:.2f} s"
        if seconds >= 0.995
        else f"{1000 * seconds:.0f} ms"
    )


def tokens_text(n: int) -> str:
    return f"{n / 1e6:,.1f}M" if n >= 999_500 else f"{n:,}"


def _rows(results: Sequence[Result]) -> list[list[str]]:
    tiers = list(results[0].hit_tokens)
    links = [name for name in results[0].moved_bytes if any(r.moved_bytes.get(name) for r in results)]
    head = ["policy", "hit", *(f"in {t}" for t in tiers if len(tiers) > 1), "bound", "computed", "again"]
    head += [name.replace("_", " ") for name in links]
    head += ["TTFT p50", "p90", "p99", "job p50", "p90", "p99", "busy"]
    rows = [head]
    for r in results:
        total = max(1, r.prompt_tokens)
        row = [r.policy, f"{100 * r.hit_ratio:.2f}%"]
        row += [f"{100 * r.hit_tokens[t] / total:.2f}%" for t in tiers if len(tiers) > 1]
        row += [f"{100 * r.bound_hit_ratio:.2f}%", tokens_text(r.computed_tokens), tokens_text(r.recomputed_tokens)]
        row += [_size(r.moved_bytes.get(name, 0)) for name in links]
        for q in (r.ttft_s, r.job_s):
            row += [time_text(q.p50), time_text(q.p90), time_text(q.p99)]
        rows.append([*row, f"{100 * r.busy:.0f}%"])
    return rows


def table(settings: Mapping[str, Any], results: Sequence[Result]) -> str:
    """Text; every column has its name, and the lines below say what the less plain ones are."""
    rows = _rows(results)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    first = results[0]
    lines = [
        f"{settings['trace']}: {first.requests:,} requests, {tokens_text(first.prompt_tokens)} prompt tokens, "
        f"{tokens_text(first.output_tokens)} output tokens; {settings['profile']}, "
        + ", ".join(f"{tier} {frames:,} frames" for tier, frames in settings["frames"].items())
        + f" of {settings['block_tokens']} tokens",
        "",
    ]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines += [
        "",
        "hit: prompt tokens that were not computed. bound: Belady's MIN, all tiers as one, for the same order of prompts.",
        "computed: prompt tokens; again: of them, had been computed before. job: "
        + ("a session without the client's pauses." if settings["has_sessions"] else "a request."),
    ]
    if first.refused:
        lines.append(f"{first.refused:,} requests are larger than hbm and were left out.")
    if any(r.busy > 0.98 for r in results):
        lines.append(
            "A device that is busy all the time has a queue that only grows: slow the arrivals down with --rate."
        )
    return "\n".join(lines)


def document(settings: Mapping[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """The same for programs.  Nothing in it depends on the machine that ran it."""
    return {"settings": dict(settings), "results": [r.as_json() for r in results]}


def plot(path: Path, settings: Mapping[str, Any], results: Sequence[Result]) -> None:
    """A PNG: hits per tier beside the bound, and TTFT.  RuntimeError: matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise RuntimeError("a plot needs matplotlib: pip install 'attnix[plot]'") from None
    names = [r.policy for r in results]
    figure, (hits, ttft) = pyplot.subplots(1, 2, figsize=(4 + 1.2 * len(results), 4.5), layout="constrained")
    floor = [0.0] * len(results)
    for tier in results[0].hit_tokens:
        heights = [100 * r.hit_tokens[tier] / max(1, r.prompt_tokens) for r in results]
        hits.bar(names, heights, bottom=floor, label=tier)
        floor = [a + b for a, b in zip(floor, heights, strict=True)]
    hits.scatter(
        names, [100 * r.bound_hit_ratio for r in results], marker="_", s=900, color="black", label="bound (MIN)"
    )
    hits.set_ylabel("prompt tokens found, %")
    hits.legend()
    for name in ("p50", "p90", "p99"):
        ttft.plot(names, [max(1e-4, getattr(r.ttft_s, name)) for r in results], marker="o", label=name)
    ttft.set_yscale("log")
    ttft.set_ylabel("time to first token, s")
    ttft.legend()
    for axes in (hits, ttft):
        axes.tick_params(axis="x", rotation=30)
    figure.suptitle(f"{settings['trace']} on {settings['profile']}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
