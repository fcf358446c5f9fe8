"""`attnix study`: questions about this design, answered with the system's own parts on this machine.

What measures lies below the system calls, so it is a process of its own (`python -m attnix.study_X`) that prints one JSON
document; this file makes tables of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from ..output import CommandError, JsonOption, show, table
from ..units import count, size

study = typer.Typer(no_args_is_help=True, help="Studies of the design on this machine.  All take --json.")

_BASE_BLOCK: Final = 16  # tokens; costs of attention are shown beside this one's


def measured(module: str, *flags: str) -> str:
    """The document that a study printed.  Error: CommandError when it failed; it has said why on standard error."""
    done = subprocess.run([sys.executable, "-m", module, *flags], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise CommandError(f"{module} ended with status {done.returncode}")
    return done.stdout


@study.command("fragmentation")
def fragmentation(
    seed: Annotated[int, typer.Option(help="Of the request lengths.")] = 1,
    attention: Annotated[bool, typer.Option(help="Measure attention at each block size, too.")] = True,
    as_json: JsonOption = False,
) -> None:
    """How many requests fit into 32,768 token slots: reservation, exact first fit, and pages of 1 to 256 tokens."""
    printed = measured("attnix.study_fragmentation", "--seed", str(seed), *[] if attention else ["--no-attention"])
    if as_json:
        sys.stdout.write(printed)
        return
    found = json.loads(printed)
    show(
        f"{count(found['pool_tokens'])} token slots, window {count(found['window_tokens'])}, request lengths of seed {seed}"
    )
    show("\nFilled until a request does not fit; then with requests that leave (means; free while one is refused)")
    show(_placements(found["placements"], {row["block_tokens"]: row["token_ns"] for row in found["attention"]}))
    for line in _notes(found):
        show(line)
    show("\nPrefix sharing: requests in groups with a common prefix of random length")
    show(_sharing(found["sharing"]))


def _placements(rows: list[dict[str, Any]], token_ns: dict[int, float]) -> Table:
    made = table(
        "METHOD", ">FIT", ">WASTE", ">SHARE", ">TABLE", ">MEAN", ">USED", ">FREE", ">STUCK", ">ns/TOKEN", ">COST"
    )
    base = token_ns.get(_BASE_BLOCK)
    for row in rows:
        cost = token_ns.get(row["block_tokens"])
        made.add_row(
            f"{row['method']} {row['block_tokens'] or ''}".rstrip(),
            count(row["admitted"]),
            count(row["waste"]),
            f"{row['waste_share']:.1%}",
            size(row["table_bytes"]) if row["block_tokens"] else "-",
            f"{row['mean_admitted']:.1f}",
            count(round(row["mean_used"])),
            count(round(row["mean_free"])),
            f"{row['refused_in_spite']}/{row['refused']}",
            f"{cost:.1f}" if cost else "-",
            f"{cost / base:.2f}" if cost and base else "-",
        )
    return made


def _notes(found: dict[str, Any]) -> list[str]:
    lines = [
        "FIT requests in the full pool; WASTE slots reserved and not used, SHARE of the reserved; TABLE page-table entries;",
        "MEAN requests and USED slots over the churn; STUCK refused though enough was free in total",
    ]
    if found["attention"]:
        row = found["attention"][0]
        lines.append(
            f"ns/TOKEN attention per cached token and layer, decoding {row['contexts']} contexts of "
            f"{count(row['tokens'])} tokens in scattered frames; COST beside blocks of {_BASE_BLOCK}"
        )
    return lines


def _sharing(rows: list[dict[str, Any]]) -> Table:
    made = table(">BLOCK", ">REQUESTS", ">TOKENS", ">SHAREABLE", ">HIT", ">SHARE", ">HELD")
    for row in rows:
        cells = [count(row[name]) for name in ("block_tokens", "requests", "tokens", "possible", "hit")]
        made.add_row(*cells, f"{row['hit_share']:.1%}", count(row["held"]))
    return made
