"""`attnix fsck`: do the kernel's invariants hold, now?"""

from __future__ import annotations

import typer
from rich.text import Text

from ..output import FromOption, JsonOption, SocketOption, look_at, print_json, show


def fsck(as_json: JsonOption = False, socket: SocketOption = "", source: FromOption = "") -> None:
    """Check every invariant of the running kernel (docs/invariants.md).  Exit status 1 when one is broken."""
    with look_at(socket, "fsck", source) as system:
        found = system.fsck()
    if as_json:
        print_json(found)
    else:
        for problem in found.problems:
            show(Text(problem, "red"))
        verdict = f"{len(found.problems)} broken" if found.problems else "every invariant holds"
        show(f"{verdict} ({found.checked_blocks} blocks, {found.checked_contexts} contexts checked)")
    if found.problems:
        raise typer.Exit(1)
