"""Every trace's table, in Markdown, each under the command that printed it: `make replay-tables TRACES=../shared/traces`.

    python -m attnix.replay.tables ../shared/traces docs/replay.md

The section of the file between the two marks is written anew.  Arrival rates are such that LRU's machine is not busy all
the time at the middle capacity, where a trace has enough to do for that.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from . import __main__ as command
from .engine import policy_names

BEGIN: Final = "<!-- tables: written by make replay-tables -->"
END: Final = "<!-- end of tables -->"
_ORDER: Final = ("lru", "fifo", "lfu", "slru", "sieve", "s3fifo", "arc", "learned")


class Case(NamedTuple):
    trace: str
    options: tuple[str, ...]
    blocks: bool  # whether the trace says what is shared: else a policy makes no difference
    agents: bool = False  # whether there are tools to hint at


CASES: Final = (
    Case("mooncake_conversation.jsonl.gz", ("--rate", "0.3"), True),
    Case("mooncake_synthetic.jsonl.gz", ("--rate", "0.2"), True),
    Case("claude_code_weka.jsonl.gz", ("--concurrency", "16"), True, agents=True),
    Case("agentcgroup_tools.jsonl.gz", ("--concurrency", "16"), True, agents=True),
    Case("azure2023_code.csv.gz", (), False),
    Case("azure2023_conv.csv.gz", ("--rate", "0.7"), False),
)
CAPACITIES: Final = ("1%", "5%", "20%")


def commands() -> list[tuple[str, list[str]]]:
    """(trace, its options) for every table."""
    policies = ",".join(name for name in _ORDER if name in policy_names())
    found: list[tuple[str, list[str]]] = []
    for case in CASES:
        if not case.blocks:
            found.append((case.trace, [*case.options, "--policy", "lru"]))
            continue
        for capacity in CAPACITIES:
            found.append((case.trace, [*case.options, "--capacity", capacity, "--policy", policies]))
            if case.agents and "learned" in policy_names():
                found.append((case.trace, [*case.options, "--capacity", capacity, "--policy", policies, "--hints"]))
        found.append((case.trace, [*case.options, "--policy", policies]))
    return found


def run(folder: Path, trace: str, options: Sequence[str]) -> str:
    """One table, as text.  RuntimeError: it did not work."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = command.main([str(folder / trace), *options])
    if status:
        raise RuntimeError(f"{trace}: exit status {status}")
    return said.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m attnix.replay.tables", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", type=Path)
    parser.add_argument("document", type=Path)
    parser.add_argument("--only", default="", help="traces whose name contains this")
    args = parser.parse_args(argv)
    text = args.document.read_text()
    if BEGIN not in text or END not in text:
        parser.error(f"{args.document} has no section to write: it begins with {BEGIN} and ends with {END}")
    parts = []
    for trace, options in commands():
        if args.only in trace:
            print(f"{trace} {' '.join(options)}", file=sys.stderr)
            line = f"attnix replay {args.traces / trace} {' '.join(options)}"
            parts.append(f"```text\n$ {line}\n{run(args.traces, trace, options)}```\n")
    before, _, rest = text.partition(BEGIN)
    args.document.write_text(f"{before}{BEGIN}\n\n" + "\n".join(parts) + f"\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
