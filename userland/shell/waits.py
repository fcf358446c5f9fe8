"""How a wait for a tool is told: by `ps`, `lsctx`, `stat` and `top`."""

from __future__ import annotations

from collections.abc import Iterable

from attnix.syscalls.types import ContextRow

from ..units import duration

_MS = 1_000_000


def until(row: ContextRow) -> str:
    """`4.5 s` when it is expected back then, `overdue`, `by 59 s` when it is only known when it is given up, else `-`."""
    if row.due_ms > 0:
        return duration(row.due_ms * _MS)
    if row.due_ms == 0:
        return "overdue"
    return f"by {duration(row.deadline_ms * _MS)}" if row.deadline_ms > 0 else "-"


def soonest(contexts: Iterable[ContextRow]) -> tuple[str, str]:
    """(tool, until) of the wait of a process that ends first, with how many more it has; `-` without any."""
    waiting = sorted((row for row in contexts if row.wait), key=_order)
    if not waiting:
        return "-", "-"
    more = f" +{len(waiting) - 1}" if len(waiting) > 1 else ""
    return waiting[0].tool + more, until(waiting[0])


def _order(row: ContextRow) -> tuple[float, float]:
    never = float("inf")
    return (row.due_ms if row.due_ms >= 0 else never, row.deadline_ms if row.deadline_ms >= 0 else never)
