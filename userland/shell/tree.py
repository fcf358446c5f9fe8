"""`attnix tree`: which context was forked from which, and how much they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from rich.text import Text

from attnix.syscalls.exceptions import SyscallError
from attnix.syscalls.types import ContextRow, ProcessRow

from ..errors import CommandError
from ..output import FromOption, JsonOption, SocketOption, System, console, look_at, print_json, show
from ..units import count
from .blocks import blocks_of, shared_tokens


class Fork(NamedTuple):
    """A context, what it shares with the one it was forked from (None: that is gone), and its own forks."""

    row: ContextRow
    name: str  # of its process
    shared_tokens: int | None
    forks: tuple[Fork, ...]


def tree(
    pid: Annotated[
        int, typer.Option("--pid", "-p", help="Only this process's contexts, and what was forked from them.")
    ] = 0,
    as_json: JsonOption = False,
    socket: SocketOption = "",
    source: FromOption = "",
) -> None:
    """Draw the fork tree: every context under the one it was forked from, with the tokens that both map to the same blocks."""
    with look_at(socket, "tree", source) as system:
        if pid:
            system.ps(pid)  # one that is gone is no empty tree
        own = system.server.pid
        processes = [row for row in system.ps().processes if row.pid != own]
        roots = forest(system, processes)
    if pid:
        roots = [fork for root in roots for fork in _of(root, pid)]
    if as_json:
        print_json({"forks": [_plain(fork) for fork in roots]})
        return
    for line in draw(roots):
        show(line, console())


def forest(system: System, processes: Sequence[ProcessRow]) -> list[Fork]:
    """Contexts whose parent is gone, or that have none, are roots."""
    names = {context.cid: row.name for row in processes for context in row.contexts}
    rows = {context.cid: context for row in processes for context in row.contexts}
    children: dict[int, list[int]] = {}
    for cid, row in rows.items():
        children.setdefault(row.parent if row.parent in rows else 0, []).append(cid)

    def grown(cid: int) -> Fork:
        row = rows[cid]
        shared = shared_with(system, rows[row.parent], row) if row.parent in rows else None
        return Fork(row, names[cid], shared, tuple(grown(child) for child in sorted(children.get(cid, ()))))

    return [grown(cid) for cid in sorted(children.get(0, ()))]


def shared_with(system: System, parent: ContextRow, child: ContextRow) -> int:
    """Tokens in blocks that both map.  Where a frame is missing their logs tell: full blocks of equal tokens are one block."""
    found = 0
    try:
        tables = [system.pagemap(0, row.cid) for row in (parent, child)]
        found, certain = shared_tokens(*map(blocks_of, tables))
        if certain:
            return found
        logs = [memoryview(system.read(0, row.cid).tokens).cast("i") for row in (parent, child)]
    except (SyscallError, CommandError):  # one of them ended, or this dump has no logs
        return found
    same = next((i for i, (a, b) in enumerate(zip(*logs, strict=False)) if a != b), min(map(len, logs)))
    return max(found, same // tables[0].block_tokens * tables[0].block_tokens)


def draw(roots: Sequence[Fork]) -> list[Text]:
    """A line per context; lines of one depth hang below their parent's."""
    lines: list[Text] = []

    def add(fork: Fork, lead: str, joint: str, below: str) -> None:
        row = fork.row
        line = (
            Text(lead + joint, "dim")
            .append(f"cid {row.cid}", "bold")
            .append(f"  {fork.name or '-'} (pid {row.pid})  {row.state}  ")
        )
        line.append(f"{count(row.tokens)} tokens")
        if fork.shared_tokens is not None:
            line.append(f", {count(fork.shared_tokens)} shared with cid {row.parent}", "yellow")
        elif row.parent:
            line.append(f", forked from cid {row.parent}, which is gone", "dim")
        lines.append(line)
        for number, child in enumerate(fork.forks, 1):
            last = number == len(fork.forks)
            add(child, lead + below, "└─ " if last else "├─ ", "   " if last else "│  ")

    for root in roots:
        add(root, "", "", "")
    return lines


def _of(fork: Fork, pid: int) -> list[Fork]:
    if fork.row.pid == pid:
        return [fork]
    return [found for child in fork.forks for found in _of(child, pid)]


def _plain(fork: Fork) -> Mapping[str, Any]:
    row = fork.row
    return {
        "cid": row.cid, "pid": row.pid, "name": fork.name, "state": row.state, "tokens": row.tokens, "parent": row.parent,
        "shared_tokens": fork.shared_tokens or 0, "forks": [_plain(child) for child in fork.forks],
    }  # fmt: skip
