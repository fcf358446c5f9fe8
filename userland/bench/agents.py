"""What agents get out of an engine: `attnix bench agents`.

The same agents (agents_workload.py: a shared system prompt, turns of tool result, generation and tool wait, all starting
together) through attnix, llama.cpp's server and vLLM's CPU build: the same weights, KV budget in bytes, threads and
machine; greedy, end-of-text ignored.  Printed per KV budget: how long the jobs took, the time to the first token after a
tool's return and at the start, and the prompt tokens that were computed; a peer's number stands beside ours of the same
command, and a peer that did not run is said to be missing.

Runs alternate between the engines.  With `--results FILE` every run is kept as a line of JSON, and a later command with the
same workload goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from attnix.syscalls.paths import home_dir
from attnix.syscalls.text import load_text
from attnix.syscalls.types import UnameResult

from .agents_engines import Engine, Outcome, Room, Weights, engines, peers_python
from .agents_resumption import resumption
from .agents_workload import BUILT_IN, Plan, Workload, draw, read_durations, sizes
from .decode import export
from .decode_engines import BenchError, PeerMissing, booted
from .report import show
from .row import Row

OURS: Final = "attnix"
NOBODY: Final = "none"
SPILL_BYTES: Final = 2 << 30
LIMIT_S: Final = 1200.0


class Options(NamedTuple):
    """What to measure.

    engines    names in agents_engines.engines
    sizes      names in agents_workload.sizes
    runs       of each engine and size
    trace      "" or a file with tool durations
    results    "" or where runs are kept
    limit_s    that one run may take
    """

    plan: Plan = Plan()
    engines: tuple[str, ...] = (OURS, "attnix-no-eta", "attnix-no-wait", "vllm", "llama.cpp", "llama.cpp-unified")
    sizes: tuple[str, ...] = ("all", "quarter", "shared")
    runs: int = 1
    trace: str = ""
    results: str = ""
    model: str = "smollm2"
    python: str = ""
    limit_s: float = LIMIT_S


class Runs(NamedTuple):
    """What was found out about one engine at one size."""

    done: list[Outcome]
    missing: str


Found = dict[tuple[str, str], Runs]  # (size, engine)


def run(options: Options, say: Callable[[str], None]) -> list[Row]:
    """Error: BenchError; ValueError for a trace that is none."""
    uname = asked(options.model)
    durations = read_durations(options.trace) if options.trace else []
    text = load_text(uname.tokenizer)
    work = draw(options.plan, lambda piece: text.encode_text(piece, 1), durations)
    exported = export(Path(uname.tokenizer))
    weights = Weights(options.model, str(exported / "bf16.gguf"), str(exported / "hf"), uname.vocab_tokens)
    python = peers_python(options.python)
    known = engines(python, home_dir() / "peers" / "vllm")
    found = measure(options, work, uname.token_bytes, weights, known, say)
    compare(found, options, say)
    return rows(found, options, work)


def measure(
    options: Options,
    work: Workload,
    token_bytes: int,
    weights: Weights,
    known: Mapping[str, Engine],
    say: Callable[[str], None],
) -> Found:
    """Every run that is not there yet, engines taking turns.  An engine that fails at a size is missing there."""
    chosen = [size for size in sizes(work).values() if size.name in options.sizes]
    for name, there in (("engine", (options.engines, known)), ("size", (options.sizes, sizes(work)))):
        unknown = set(there[0]) - set(there[1])
        if unknown:
            raise BenchError(f"no {name} is called {', '.join(sorted(unknown))}; there are {', '.join(there[1])}")
    kept = _Results(options.results, work.digest)
    found: Found = {(s.name, engine): Runs(kept.of(s.name, engine), "") for s in chosen for engine in options.engines}
    for number in range(options.runs):
        for size in chosen:
            room = Room(size.tokens * token_bytes, SPILL_BYTES, size.slots, size.tokens)
            for engine in options.engines:
                runs = found[size.name, engine]
                if len(runs.done) > number or runs.missing:
                    continue
                try:
                    outcome = known[engine](work, room, weights, options.limit_s)
                except PeerMissing as missing:
                    say(f"{engine}, {size.name}: missing: {missing}")
                    found[size.name, engine] = Runs([], str(missing)[:80])  # half a measurement is none
                    continue
                runs.done.append(outcome)
                kept.add(size.name, engine, outcome)
                say(f"{engine}, {size.name}, run {number + 1}: {told(outcome)}")
    return found


def told(outcome: Outcome) -> str:
    return (
        f"jobs {statistics.mean(outcome.jobs):.1f} s in the mean, {max(outcome.jobs):.1f} s all; first token after a return "
        f"{statistics.median(outcome.returns) * 1e3:.0f} ms, {outcome.prompt_tokens:,} prompt tokens ({outcome.version})"
    )


class _Results:
    """Runs on disk, a line of JSON each; those of another workload are left alone."""

    def __init__(self, path: str, digest: str) -> None:
        self._path = path
        self._digest = digest
        lines = Path(path).read_text().splitlines() if path and os.path.exists(path) else []
        self._lines: list[dict[str, Any]] = [line for line in map(json.loads, lines) if line["workload"] == digest]

    def of(self, size: str, engine: str) -> list[Outcome]:
        mine = [line for line in self._lines if (line["size"], line["engine"]) == (size, engine)]
        return [Outcome(**line["outcome"]) for line in mine]

    def add(self, size: str, engine: str, outcome: Outcome) -> None:
        if self._path:
            line = {"workload": self._digest, "size": size, "engine": engine, "outcome": outcome._asdict()}
            with open(self._path, "a") as file:
                file.write(json.dumps(line) + "\n")


def asked(model: str) -> UnameResult:
    """What the system says of a model.  Error: BenchError, also when its weights are no file that peers can share."""
    with tempfile.TemporaryDirectory(prefix="attnix-agents-") as directory, booted(model, directory, 64 << 20) as ours:
        uname = ours.uname
    if Path(uname.tokenizer).suffix != ".gguf":
        raise BenchError(f"{uname.tokenizer} is no GGUF file: the peers' weights are made from one")
    return uname


# -- what comes of it ---------------------------------------------------------------------------------------------------


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


MEASURES: Final[tuple[tuple[str, str, Callable[[Outcome, Workload], float]], ...]] = (
    ("job completion, mean", "s", lambda o, w: statistics.mean(o.jobs)),
    ("job completion, p50", "s", lambda o, w: quantile(o.jobs, 0.5)),
    ("job completion, p95", "s", lambda o, w: quantile(o.jobs, 0.95)),
    # No engine makes a tool faster: this is the part of a job that it has to do with.
    ("job less its tool waits, mean", "s", lambda o, w: statistics.mean(o.jobs) - statistics.mean(w.waits_s)),
    ("all jobs", "s", lambda o, w: max(o.jobs)),
    ("first token after a tool, p50", "ms", lambda o, w: quantile(o.returns, 0.5) * 1e3),
    ("first token after a tool, p95", "ms", lambda o, w: quantile(o.returns, 0.95) * 1e3),
    ("first token of the burst, p50", "s", lambda o, w: quantile(o.burst, 0.5)),
    ("first token of the burst, p95", "s", lambda o, w: quantile(o.burst, 0.95)),
    ("prompt tokens computed", "tokens", lambda o, w: float(o.prompt_tokens)),
)


def rows(found: Found, options: Options, work: Workload) -> list[Row]:
    """Medians over the runs, less is better; none when no engine of ours took part.  The limit of prompt tokens is what must
    be computed once."""
    made = []
    mine = ours_of(options.engines)
    others = [name for name in options.engines if name != mine] or [NOBODY]
    for size in [name for name in sizes(work) if name in options.sizes and mine]:
        ours = found[size, mine].done
        for title, unit, measured in MEASURES:
            limit = float(work.least_prompt_tokens) if unit == "tokens" else None
            median = statistics.median(measured(outcome, work) for outcome in ours)
            for name in others:
                runs = found.get((size, name), Runs([], ""))
                theirs = statistics.median(measured(outcome, work) for outcome in runs.done) if runs.done else None
                peer = f"{name} (missing: {runs.missing})" if runs.missing else name
                ratio = theirs / median if theirs is not None else None
                n = min(len(ours), len(runs.done)) if runs.done else len(ours)
                share = limit / median if limit else None
                made.append(Row("agents", f"{title}, {size}", median, unit, peer, theirs, ratio, limit, share, n))
    return made


def ours_of(names: Sequence[str]) -> str:
    """The engine that the others are compared with: the first of ours."""
    return next((name for name in names if name.startswith(OURS)), "")


def compare(found: Found, options: Options, say: Callable[[str], None]) -> None:
    """Say how far tokens are those of our engine: numerics differ, and where tokens part so does the context from there on."""
    mine = ours_of(options.engines)
    reference = next((runs.done[0] for (_, name), runs in found.items() if name == mine and runs.done), None)
    if reference is None:
        return
    for (size, name), runs in found.items():
        for outcome in runs.done[:1]:
            pairs = list(zip(reference.tokens, outcome.tokens, strict=True))
            turns = [ours == theirs for a, b in pairs for ours, theirs in zip(a, b, strict=True)]
            first = [alike(ours[0], theirs[0]) for ours, theirs in pairs]
            say(
                f"{name}, {size}: {sum(turns)} of {len(turns)} turns are token for token those of {mine}; of the first turn the first "
                f"token of {sum(map(bool, first))} of {len(first)} agents, and {statistics.median(first):.0f} tokens in the median"
            )


def alike(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before they part."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def main() -> None:
    default = Options()
    parser = argparse.ArgumentParser(
        prog="attnix bench agents",
        description="Agents that wait for tools, through attnix, llama.cpp's server and vLLM.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--model", default=default.model, help="a GGUF file or pulled model (%(default)s)")
    parser.add_argument("--engine", default=",".join(default.engines), help="comma-separated (%(default)s)")
    parser.add_argument("--size", default=",".join(default.sizes), help="KV budgets, comma-separated (%(default)s)")
    parser.add_argument(
        "--resumption", action="store_true", help="only how soon a context of attnix speaks when its tool returns"
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="attnix is told nothing of tools: only attnix-no-wait of it"
    )
    parser.add_argument("--runs", type=int, default=default.runs, help="behind each median (%(default)s)")
    parser.add_argument("--agents", type=int, default=default.plan.agents, help="%(default)s")
    parser.add_argument("--turns", type=int, default=default.plan.turns, help="%(default)s")
    parser.add_argument("--system-tokens", type=int, default=default.plan.system_tokens, help="%(default)s")
    waits = ", ".join(f"{tool} {median:g} s ({sigma:g})" for tool, (median, sigma) in BUILT_IN.items())
    parser.add_argument(
        "--trace", default="", metavar="PATH", help=f"tool durations; else log-normal, median (sigma): {waits}"
    )
    parser.add_argument("--scale", type=float, default=default.plan.scale, help="of the durations (%(default)s)")
    parser.add_argument("--seed", type=int, default=default.plan.seed, help="%(default)s")
    parser.add_argument(
        "--results", default="", metavar="FILE", help="keep runs there, and go on from those that are there"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="that a run may take (%(default)s)")
    parser.add_argument("--python", default="", metavar="PATH", help="interpreter of the peers' venv (.venv-peers)")
    a = parser.parse_args()
    names = tuple(filter(None, a.engine.split(",")))
    if a.no_wait:
        names = ("attnix-no-wait", *(name for name in names if not name.startswith(OURS)))
    plan = Plan(a.agents, a.turns, a.system_tokens, a.scale, a.seed)
    chosen = tuple(filter(None, a.size.split(",")))
    options = Options(plan, names, chosen, a.runs, a.trace, a.results, a.model, a.python, a.limit)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left running
    said = partial(print, file=sys.stderr, flush=True)
    try:
        if a.resumption:
            show(resumption(a.model, asked(a.model).token_bytes, a.system_tokens, said), a.json)
        else:
            show(run(options, said), a.json)
    except (BenchError, ValueError) as error:
        sys.exit(f"attnix bench agents: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
