"""How long a context takes to speak again: `attnix bench resume`.

Time to first token of a context of 4,096 tokens, as a client sees it, by where its KV is: in hbm, in dram, on nvme, on
nvme after the daemon was stopped and booted again, and nowhere (computed again).  Every case draws the same first token,
or the measurement is an error; that the KV came from where it should is read off the system's own counters.

The peer is llama.cpp's slot save and restore of the same context, which is a file: restored with its pages in the page
cache (beside dram) and with them dropped first (beside nvme), then one token evaluated, as its server does.  The same
weights, taking turns; the daemon's processes idle meanwhile and the peer's are stopped.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from attnix.syscalls import Client, Context
from attnix.syscalls.records import unpack_ids

from .decode import LLAMA, Options, export, start
from .decode_engines import BenchError, Ours, Peer, PeerMissing, booted
from .report import show
from .row import Row, time_row

TOKENS: Final = 4096
ROUNDS: Final = 5
RESTARTS: Final = 3
RECOMPUTES: Final = 3
PATIENCE_S: Final = 30.0
HBM_BYTES: Final = 192 << 20
DRAM: Final = "256MiB"
NVME: Final = "512MiB"
NAME: Final = "bench-resume"
SEED: Final = 20261129


class Plan(NamedTuple):
    """What to measure; tokens is the length of the context."""

    model: str
    tokens: int
    rounds: int
    restarts: int
    recomputes: int
    python: str  # of the peers' venv


class Resumer:
    """One named context of a daemon, and its first next token from wherever it is."""

    def __init__(self, system: Client, context: Context) -> None:
        self.system = system
        self.context = context
        self.expected: list[int] = []

    def first_token(self, computed: range = range(1, 2)) -> float:
        """Seconds from the request to the first token; the context is as before afterwards.

        computed  how many tokens may be computed for it
        Error: BenchError when another token came, or more or fewer were computed.
        """
        length = self.context.stat().tokens
        before = self.context.stat().usage.computed_tokens
        began = time.perf_counter()
        stream = self.context.stream(1, ignore_eos=True)
        for _ in stream:
            break
        seconds = time.perf_counter() - began
        result = stream.result()
        got = unpack_ids(result.tokens)
        spent = self.context.stat().usage.computed_tokens - before
        self.expected = self.expected or got
        if got != self.expected:
            raise BenchError(f"the first token was {self.expected} and now is {got}")
        if spent not in computed:
            raise BenchError(f"{spent} tokens were computed, not {computed.start} to {computed.stop - 1}")
        self.context.truncate(length)
        return seconds

    def down_to(self, tier: str) -> float:
        """Demote; seconds.  Error: BenchError when some of it stayed."""
        began = time.perf_counter()
        moved = self.system.demote(self.context.handle, tier)
        seconds = time.perf_counter() - began
        blocks = self.context.stat().tokens // self.system.uname().block_tokens
        if moved.failed_blocks or moved.resident_blocks < blocks:
            raise BenchError(f"{moved.resident_blocks} of {blocks} blocks went to {tier} and no faster tier has them")
        return seconds

    def forget(self) -> None:
        """Drop every copy in every tier.  Error: BenchError when some stays (a copy on its way may, for a moment)."""
        end = time.monotonic() + PATIENCE_S
        while self.system.evict(self.context.handle).moved_blocks or self.held():
            if time.monotonic() > end:
                raise BenchError(f"{self.held()} frames are held after an eviction")
            time.sleep(0.05)

    def held(self) -> int:
        """Frames in use in all tiers; nobody else uses any."""
        return sum(row.capacity_frames - row.free_frames for row in self.system.tiers().tiers)

    def traffic(self, tier: str) -> int:
        """Bytes read out of a tier since boot."""
        return sum(row.read_bytes for row in self.system.tiers().tiers if row.tier == tier)


def prompt(vocab_tokens: int, tokens: int) -> list[int]:
    return random.Random(SEED).choices(range(64, vocab_tokens), k=tokens)


def run(plan: Plan, say: Callable[[str], None]) -> list[Row]:
    """Error: BenchError."""
    with tempfile.TemporaryDirectory(prefix="attnix-resume-") as directory, ExitStack() as stack:
        flags = ["--dram", DRAM, "--nvme", NVME, "--tier-write", "back"]  # else there is nothing left to save
        times: dict[str, list[float]] = {}
        with booted(plan.model, directory, HBM_BYTES, flags) as ours:
            peer, why = None, ""
            try:
                peer = started(plan, ours, directory)
                stack.callback(peer.end)
            except (PeerMissing, BenchError) as missing:
                why = str(missing)
                say(f"{LLAMA} is missing: {why}")
            ids = prompt(ours.uname.vocab_tokens, plan.tokens)
            if peer is not None:
                say(f"{LLAMA}: prefill and save")
                took, _ = peer.prefill([ids])
                times["peer recompute"] = [took]
                times["peer save"] = [peer.call("save", str(Path(directory) / "slot"))]
            expected = resumed(plan, ours, ids, peer, directory, times, say)
        say("after a restart")
        for _ in range(plan.restarts):
            with booted(plan.model, directory, HBM_BYTES, flags) as again:
                opened = again.client.sys.open(NAME)
                resumer = Resumer(again.client, Context(again.client, opened.ctx, opened.cid))
                resumer.expected = expected
                times.setdefault("restart", []).append(resumer.first_token())
                resumer.down_to("nvme")
    return rows(times, why, plan.tokens)


def resumed(
    plan: Plan, ours: Ours, ids: Sequence[int], peer: Peer | None, directory: str, times: dict[str, list[float]],
    say: Callable[[str], None],
) -> list[int]:  # fmt: skip
    """Everything but the restart; leaves the context on nvme.  The first token."""
    context = ours.client.alloc_context()
    context.append(tokens=ids)
    ours.client.publish(context.handle, NAME)
    resumer = Resumer(ours.client, context)
    resumer.first_token(range(plan.tokens + 2))  # when the prefill has ended
    payload = context.stat().kv_bytes
    for turn in range(plan.rounds + 1):  # the first does not count
        say(f"round {turn} of {plan.rounds}")
        found: dict[str, float] = {"hbm": resumer.first_token()}
        for tier in ("dram", "nvme"):
            resumer.down_to(tier)
            before = resumer.traffic(tier)
            found[tier] = resumer.first_token()
            if tier == "nvme" and resumer.traffic(tier) - before < payload * 9 // 10:
                raise BenchError(f"only {resumer.traffic(tier) - before} bytes of {payload} came from {tier}")
        if peer is not None:
            for case, cold in (("peer warm", False), ("peer cold", True)):
                found[case] = peer.call("resume", str(Path(directory) / "slot"), cold)[0]
        if turn:
            for case, seconds in found.items():
                times.setdefault(case, []).append(seconds)
    say("recompute")
    for _ in range(plan.recomputes):
        resumer.forget()
        took = resumer.first_token(range(plan.tokens, plan.tokens + 2))
        times.setdefault("recompute", []).append(took)
        times.setdefault("save", []).append(resumer.down_to("nvme"))  # a named context's turn has begun it already
    return resumer.expected


def started(plan: Plan, ours: Ours, directory: str) -> Peer:
    gguf = Path(ours.uname.tokenizer)
    if gguf.suffix != ".gguf":
        raise PeerMissing(f"{gguf} is no GGUF file: its weights are made from one")
    return start(LLAMA, Options(python=plan.python), gguf, export(gguf), directory)


def rows(times: dict[str, list[float]], why_missing: str, tokens: int) -> list[Row]:
    """Milliseconds; each case beside what of the peer is like it."""
    cases = (
        ("hbm", "first token, in hbm", ""),
        ("dram", "first token, from dram", "peer warm"),
        ("nvme", "first token, from nvme", "peer cold"),
        ("restart", "first token, from nvme after a restart", "peer cold"),
        ("recompute", "first token, computed again", "peer recompute"),
        ("save", "hbm to nvme, after a turn", "peer save"),
    )
    made = []
    for case, title, peer in cases:
        ours = [seconds * 1e3 for seconds in times[case]]
        theirs = [seconds * 1e3 for seconds in times.get(peer, [])]
        title = f"{title}, {tokens} tokens"
        if theirs:
            name = f"llama.cpp, {peer.removeprefix('peer ')}"
            made.append(
                time_row(
                    "resume", title, statistics.median(ours), "ms", name, statistics.median(theirs), len(ours), None
                )
            )
        else:
            name = f"{LLAMA} (missing: {why_missing})" if peer else "none"
            made.append(Row("resume", title, statistics.median(ours), "ms", name, None, None, None, None, len(ours)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="attnix bench resume", description="Time to first token of a long context, by where its KV is."
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--model", default="smollm2", help="a pulled model or GGUF file (%(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the context (%(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="repetitions behind each median (%(default)s)")
    parser.add_argument("--restarts", type=int, default=RESTARTS, help="of the daemon (%(default)s)")
    parser.add_argument("--python", default="", metavar="PATH", help="interpreter of the peers' venv (.venv-peers)")
    a = parser.parse_args()
    plan = Plan(a.model, a.tokens, a.rounds, a.restarts, RECOMPUTES, a.python)
    try:
        show(run(plan, lambda text: print(text, file=sys.stderr, flush=True)), a.json)
    except BenchError as error:
        sys.exit(f"attnix bench resume: {error}")


if __name__ == "__main__":
    main()
