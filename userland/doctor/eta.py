"""An eta that is always wrong.

`wait_tool` takes the caller's word for when its tool will be back.  The kernel corrects an eta by how wrong earlier ones were; it
cannot when they are wrong by another factor each time, or beyond all measure, and the first calls after a boot are believed.
"""

from __future__ import annotations

from attnix.syscalls.types import ToolRow

from ..units import duration
from .facts import Facts
from .finding import Finding

NAME = "eta"
FEWEST = 8  # etas that were judged
LATE, EARLY = 1500, 667  # permille of what was said: three quarters of the calls take longer, or less


def eta(facts: Facts) -> Finding | None:
    wrong = [tool for tool in facts.health.tools if _is_wrong(tool)]
    if not wrong:
        return None
    absent = sum(tool.absent for tool in wrong)
    lengths = [head.tokens for head in facts.heads]
    again = absent * (sum(lengths) / len(lengths) if lengths else 0.0)
    total_ns = facts.counters.get("compute_ns", 0)
    damage = min(1.0, again * facts.prompt_ns / total_ns) if total_ns else 0.0
    worst = max(wrong, key=lambda tool: tool.calls)
    return Finding(
        NAME, f"The eta of {', '.join(repr(tool.tool) for tool in wrong)} is always wrong", damage, "time",
        (
            *(_line(tool) for tool in wrong),
            f"{absent:,} answers found no frame of their context",
        ),
        tuple(
            f"Say {duration(tool.median_ns)} for {tool.tool!r}, or no eta at all: then what was learnt of it counts ("
            f"{tool.calls:,} calls)." for tool in wrong
        ),
        numbers={
            "tool": worst.tool, "calls": worst.calls, "ratio_p50_permille": worst.ratio_p50_permille,
            "median_ns": worst.median_ns, "absurd": worst.absurd, "absent": absent,
        },
    )  # fmt: skip


def _is_wrong(tool: ToolRow) -> bool:
    late = tool.ratio_p25_permille >= LATE
    early = 0 < tool.ratio_p75_permille <= EARLY
    return (tool.etas >= FEWEST and (late or early)) or tool.absurd >= FEWEST


def _line(tool: ToolRow) -> str:
    said = f"{tool.tool!r}: {tool.calls:,} calls take {duration(tool.median_ns)} (median)"
    if tool.etas:
        low, middle, high = (
            r / 1000 for r in (tool.ratio_p25_permille, tool.ratio_p50_permille, tool.ratio_p75_permille)
        )
        said += f", {middle:.2g} times what was said ({low:.2g} to {high:.2g} for the middle half of {tool.etas:,})"
    if tool.absurd:
        said += f"; {tool.absurd:,} etas were wrong by more than 64 times"
    return said
