"""`attnix stat`: everything about one context."""

from __future__ import annotations

from typing import Annotated

import typer

from attnix.syscalls.types import ContextRow, Usage

from ..output import FromOption, JsonOption, SocketOption, cid_number, look_at, print_json, show, table
from ..units import count, duration, size


def stat(
    cid: Annotated[
        int, typer.Argument(metavar="CTX", help="The context's cid, as `attnix ps -c` shows it.", parser=cid_number)
    ],
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """Show one context's state, size, sharing and usage."""
    with look_at(socket, "stat", source) as system:
        row = system.stat(0, cid)
    if as_json:
        print_json(row)
        return
    made = table("", "~")
    made.show_header = False
    for name, value in describe(row):
        made.add_row(name, value)
    show(made)


def describe(row: ContextRow) -> list[tuple[str, str]]:
    """(what, value) lines."""
    use = row.usage
    forked = f", forked from cid {row.parent}" if row.parent else ""
    lines = [
        ("context", f"cid {row.cid} of pid {row.pid} on {row.device}, {row.state}{forked}"),
        ("tokens", f"{count(row.tokens)}, {count(row.cached_tokens)} of them in hbm"),
        ("blocks", f"{count(row.blocks)}, {count(row.shared_blocks)} of them shared"),
        (
            "live KV",
            f"{size(row.kv_bytes)}; {size(row.proportional_bytes)} with shared frames divided by their sharers",
        ),
        ("computed", f"{count(use.computed_tokens)} tokens, {count(use.recomputed_tokens)} of them again"),
        ("hits", f"{count(use.hit_tokens)} tokens found instead of computed{_loaded(use)}"),
        ("generated", f"{count(use.generated_tokens)} tokens"),
        ("preemptions", count(use.preemptions)),
    ]
    if row.wait:
        lines.insert(1, ("waits for", f"{row.tool} (wait {row.wait}){_when(row)}"))
    return lines


def _when(row: ContextRow) -> str:
    due = (
        f", expected in {duration(row.due_ms * 1_000_000)}" if row.due_ms > 0 else ", overdue" if not row.due_ms else ""
    )
    end = f", given up in {duration(row.deadline_ms * 1_000_000)}" if row.deadline_ms > 0 else ""
    return due + end


def _loaded(use: Usage) -> str:
    """Of the hits, those that had to be loaded first, by tier; nothing where none had."""
    tiers = (("dram", use.dram_tokens), ("nvme", use.nvme_tokens), ("remote", use.remote_tokens))
    parts = [f"{count(tokens)} from {tier}" for tier, tokens in tiers if tokens]
    return f", {', '.join(parts)}" if parts else ""
