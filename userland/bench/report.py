"""How a benchmark's rows are shown: one JSON list with `--json`, a table for people else."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .row import Row


def show(rows: Sequence[Row], as_json: bool) -> None:
    """To standard output."""
    if as_json:
        json.dump([row._asdict() for row in rows], sys.stdout, indent=1)
        print()
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(table(rows))


def table(rows: Sequence[Row]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("case", "attnix", "unit", "peer", "theirs", "times better", "limit", "of limit", "n"):
        made.add_column(heading, justify="left" if heading in ("case", "unit", "peer") else "right")
    before = ""
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:,.2f}" if row.ratio < 10 else f"{row.ratio:,.0f}"
        style = "" if row.ratio is None else "green" if row.ratio >= 1 else "red"
        made.add_row(
            "" if row.case == before else row.case, number(row.ours), row.unit, row.peer, number(row.theirs),
            f"[{style}]{ratio}[/]" if style else ratio, number(row.limit),
            "" if row.of_limit is None else f"{row.of_limit:.0%}", str(row.n),
        )  # fmt: skip
        before = row.case
    return made


def number(value: float | None) -> str:
    """Three significant digits, and no exponent."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
