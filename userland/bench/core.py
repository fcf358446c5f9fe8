"""What the kernel's own work costs: `attnix bench core`.

Admission of 4,096-token prompts, frames, fork, eviction and decode steps, in the C core, in its Python twin and in vLLM's
block manager and scheduler.  Each runs in a process of its own that measures when asked (the median of a few operations,
or the least of 32 steps), and they are asked in turn, so a slow minute of the machine hits all of them.  Medians of rounds.

The limit of an admission is the time of the 256 chained keys of its prompt: each needs the one before it.
A peer that is not installed is said to be missing (`make peers` installs vLLM's CPU build into .venv-peers).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from .report import show
from .row import Row

ROUNDS: Final = 7
TWIN_ROUNDS: Final = 5  # the twin takes seconds for what the core does in milliseconds
SMALL: Final = 16_384  # blocks
LARGE: Final = 1 << 20
CONTEXTS: Final = (64, 256, 1024)
PEERS: Final = Path(__file__).parent / "peers"
TWIN: Final = "python twin"


class Case(NamedTuple):
    """title of the row; method and arguments as attnix/bench_core.py has them; unit; who has a counterpart."""

    title: str
    method: str
    frames_or_contexts: int
    case: str  # of a pool, "" for steps
    unit: str
    twin: bool
    vllm: bool


def cases() -> list[Case]:
    every = []
    for frames, size in ((SMALL, "16 thousand"), (LARGE, "1 million")):
        small = (
            frames == SMALL
        )  # at a million blocks the twin needs a gigabyte and minutes; its cost does not depend on it
        pool = f"{size} blocks"
        every += [
            Case(f"admit 4,096 tokens, full hit, {pool}", "pool", frames, "admit_hit", "us", small, True),
            Case(
                f"admit 4,096 tokens, full miss with eviction, {pool}", "pool", frames, "admit_miss", "us", small, True
            ),
            Case(f"allocate 256 frames, {pool}", "pool", frames, "allocate", "us", small, True),
            Case(f"free a context of 256 blocks, {pool}", "pool", frames, "free", "us", small, True),
            Case(f"fork a context of 4,096 tokens, {pool}", "pool", frames, "fork", "us", small, False),
            Case(f"evict, per block, {pool}", "pool", frames, "evict_block", "ns", small, False),
        ]
    for n in CONTEXTS:
        every.append(Case(f"plan and commit, {n} decoding contexts", "decode", n, "", "us", True, False))
        every.append(Case(f"whole decode step, {n} contexts", "whole_step", n, "", "us", True, True))
    return every


class Missing(Exception):
    """A peer is not there, or fails; the message says why."""


class Server:
    """A process that speaks the protocol of peers/serve.py."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        if not os.path.exists(command[0]):
            raise Missing(f"{command[0]} does not exist")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        try:
            self.version = str(self._answer())
        except Missing:
            self._close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def seconds(self, method: str, *arguments: str | int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._process.stdin.flush()
        return float(str(self._answer()))

    def _answer(self) -> object:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Missing(f"it ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Missing(str(answer["error"]))
        return answer["ok"]


def ask(server: Server, kind: str, case: Case, turn: int) -> float:
    """One repetition, in the case's unit."""
    if case.case:
        took = server.seconds(case.method, kind, case.frames_or_contexts, case.case, turn)
    else:
        took = server.seconds(case.method, kind, case.frames_or_contexts, turn)
    return took * (1e9 if case.unit == "ns" else 1e6)


def measure(case: Case, ours: Server, twin: Server, vllm: Server | None, rounds: int) -> list[Row]:
    mine: list[float] = []
    keys: list[float] = []
    theirs: dict[str, list[float]] = {}
    for turn in range(rounds + 1):  # the first makes pools and contexts, and does not count
        mine.append(ask(ours, "core", case, turn))
        if case.case.startswith("admit"):
            keys.append(ours.seconds("pool", "core", case.frames_or_contexts, "keys", turn) * 1e6)
        if case.twin and turn <= TWIN_ROUNDS:
            theirs.setdefault(TWIN, []).append(ask(twin, "twin", case, turn))
        if case.vllm and vllm is not None:
            theirs.setdefault(vllm.version, []).append(ask(vllm, "vllm", case, turn))
    cost = statistics.median(mine[1:])
    limit = statistics.median(keys[1:]) if keys else None
    of_limit = limit / cost if limit else None
    rows = []
    for peer, values in theirs.items():
        other = statistics.median(values[1:])
        rows.append(
            Row("core", case.title, cost, case.unit, peer, other, other / cost, limit, of_limit, len(values) - 1)
        )
    if case.vllm and vllm is None:
        rows.append(Row("core", case.title, cost, case.unit, "vllm (missing)", None, None, limit, of_limit, rounds))
    if not rows:
        rows.append(Row("core", case.title, cost, case.unit, "none at this size", None, None, limit, of_limit, rounds))
    return rows


def run(said: Callable[[str], None], rounds: int = ROUNDS, only: str = "", peers_python: str = "") -> list[Row]:
    """Measure every case whose title contains `only`, and tell `said` what is being done.

    peers_python  interpreter of the peers' venv; "": .venv-peers in the working directory or beside the source tree
    """
    command = [sys.executable, "-m", "attnix.bench_core"]
    with ExitStack() as stack:
        ours, twin = (stack.enter_context(Server(command)) for _ in range(2))
        vllm = None
        try:
            python = peers_python or find_peers()
            vllm = stack.enter_context(Server([python, str(PEERS / "serve.py"), "vllm_core_engine", "{}"]))
        except Missing as missing:
            said(f"vLLM is missing: {missing}")
        rows: list[Row] = []
        for case in cases():
            if only in case.title:
                said(case.title)
                rows += measure(case, ours, twin, vllm, rounds)
        return rows


def find_peers() -> str:
    tried = (Path.cwd(), Path(__file__).resolve().parents[2])
    found = [root / ".venv-peers" / "bin" / "python" for root in tried]
    return str(next((python for python in found if python.exists()), found[0]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="attnix bench core", description="Costs of the kernel's hot operations.")
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose title contains TEXT")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="repetitions behind each median (%(default)s)")
    parser.add_argument("--python", default="", metavar="PATH", help="interpreter of the peers' venv")
    options = parser.parse_args()
    rows = run(lambda text: print(text, file=sys.stderr, flush=True), options.rounds, options.only, options.python)
    show(rows, options.json)


if __name__ == "__main__":
    main()
