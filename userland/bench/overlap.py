"""Does loading hide behind computing?  `attnix bench overlap`.

A context of 4,096 tokens lies in a slower tier; n new tokens come.  Layer by layer loading lets the first pass start with
layer 0 while later layers are still on their way, so that the time to the first token, T_effective, comes near
max(T_compute, T_memory) instead of their sum.  Measured where that matters most: n is chosen so that

    T_compute   append n tokens and take the first one, everything in hbm
    T_memory    `prefetch` of the whole context, nothing else to do

are about the same.  The control does one after the other, prefetch and then append and first token, in the same turns.
Rows: nvme; a simulated tier of limited rate, attached for this; and dram, which is the same memory as hbm unless that is a
GPU's, so that row then says "emulated".  Numbers are a client's, through the daemon; medians over turns of the ratio of one turn.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from attnix.syscalls import Client, Context
from attnix.syscalls.records import unpack_ids

from .decode_engines import BenchError, Ours, booted, device_of
from .report import show
from .row import Row

TOKENS: Final = 4096
ROUNDS: Final = 7
HBM_BYTES: Final = 768 << 20
DRAM: Final = "768MiB"
NVME: Final = "1GiB"
SIM_BYTES_S: Final = 400_000_000  # of the rate-limited tier
SIM: Final = "sim"
FEWEST: Final = 1  # new tokens tried, and
MOST: Final = 512
TARGET: Final = 1.10
CONTROL: Final = 1.6
SEED: Final = 7


class Turn(NamedTuple):
    """Seconds."""

    compute: float
    memory: float
    effective: float
    sequential: float

    @property
    def bound(self) -> float:
        return max(self.compute, self.memory)


class Resumed:
    """A context that goes down to a tier and comes back with new tokens behind it."""

    def __init__(self, ours: Ours, tokens: int, seed: int = SEED) -> None:
        """seed: contexts of one daemon need different ones, or they share blocks, which then cannot leave hbm."""
        self.system: Client = ours.client
        self.tokens = tokens
        self._draw = random.Random(seed)
        self._vocabulary = range(64, ours.uname.vocab_tokens)
        self.context: Context = ours.client.alloc_context()
        self.block_tokens = ours.uname.block_tokens
        self.context.append(tokens=self._some(tokens))
        self.context.forward(1)  # answers when the whole prompt is computed

    def _some(self, n: int) -> list[int]:
        return self._draw.choices(self._vocabulary, k=n)

    def first_token(self, context: Context, new: Sequence[int]) -> float:
        """Append (nothing, when empty) and take one token; seconds."""
        began = time.perf_counter()
        if new:
            context.append(tokens=new)
        stream = context.stream(1, ignore_eos=True)
        for _ in stream:
            break
        seconds = time.perf_counter() - began
        if len(unpack_ids(stream.result().tokens)) != 1:
            raise BenchError("no token came")
        return seconds

    def prefetch(self) -> float:
        began = time.perf_counter()
        moved = self.system.prefetch(self.context.handle)
        seconds = time.perf_counter() - began
        if moved.failed_blocks:
            raise BenchError(f"{moved.failed_blocks} blocks did not come up")
        return seconds

    def down_to(self, tier: str) -> None:
        """Error: BenchError unless all of it is in that tier and in no faster one."""
        moved = self.system.demote(self.context.handle, tier)
        if moved.failed_blocks or moved.resident_blocks < self.tokens // self.block_tokens:
            raise BenchError(
                f"of {self.tokens} tokens {moved.resident_blocks} blocks went to {tier} and no other has them"
            )

    def compute(self, n: int) -> float:
        """n new tokens and the first one of the answer, in a fork whose own blocks are gone afterwards; the context is
        in hbm then, wherever it was.  Error: BenchError when more than the new tokens was computed.

        Blocks that stayed would be children of the context's last one, which then could not leave.
        """
        (fork,) = self.context.fork()
        new = self._some(n)
        seconds = self.first_token(fork, new)
        spent = fork.stat().usage.computed_tokens
        self.prefetch()
        self.system.evict(fork.handle)
        fork.release()
        if spent > n + 1:  # the last token may be computed twice
            raise BenchError(f"{spent} tokens were computed for {n} new ones: it was not loaded")
        return seconds

    def memory(self, tier: str) -> float:
        self.down_to(tier)
        return self.prefetch()

    def balanced(self, tier: str) -> int:
        """New tokens for which computing takes about as long as loading: bisection on a time that grows with n."""
        target = statistics.median(self.memory(tier) for _ in range(5))
        low, high = FEWEST, MOST
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            if statistics.median(self.compute(middle) for _ in range(5)) < target:
                low = middle
            else:
                high = middle
        return low

    def turn(self, tier: str, n: int) -> Turn:
        compute = self.compute(n)
        memory = self.memory(tier)
        self.down_to(tier)
        effective = self.compute(n)
        self.down_to(tier)
        sequential = self.prefetch() + self.compute(n)
        return Turn(compute, memory, effective, sequential)


def measure(resumed: Resumed, tier: str, rounds: int, say: Callable[[str], None]) -> tuple[int, list[Turn]]:
    resumed.down_to(tier)
    n = resumed.balanced(tier)
    say(f"{tier}: {n} new tokens")
    turns = [resumed.turn(tier, n) for _ in range(rounds + 1)][1:]  # the first does not count
    resumed.context.release()
    return n, turns


def rows_of(label: str, n: int, turns: Sequence[Turn]) -> list[Row]:
    """T_effective against max(T_compute, T_memory), with its parts; then the control."""
    medians = Turn(*(statistics.median(column) * 1e3 for column in zip(*turns, strict=True)))
    case = f"{label}, {n} new tokens"
    ratio = statistics.median(turn.effective / turn.bound for turn in turns)
    control = statistics.median(turn.sequential / turn.bound for turn in turns)
    bound = statistics.median(turn.bound for turn in turns) * 1e3
    count = len(turns)
    parts = f"compute {medians.compute:.1f}, memory {medians.memory:.1f} ms"
    return [
        Row("overlap", case, ratio, "x max", parts, bound, None, TARGET, None, count),
        Row("overlap", f"{case}, in sequence", control, "x max", parts, bound, None, CONTROL, None, count),
    ]


def label_of(tier: str, engine: str) -> str:
    """What its rows are called, on a machine where this engine computes."""
    device = device_of(engine)
    if device == "cuda-dry":
        return f"{tier} (dry run, no speed)"
    return "dram (emulated: one memory)" if tier == "dram" and device == "cpu" else tier


def run(
    model: str, tokens: int, rounds: int, tiers: Sequence[str], bytes_s: int, say: Callable[[str], None]
) -> list[Row]:
    """Error: BenchError."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="attnix-overlap-") as directory:
        flags = ["--dram", DRAM]
        with booted(model, directory, HBM_BYTES, [*flags, "--nvme", NVME]) as ours:
            for seed, tier in enumerate(tier for tier in tiers if tier != SIM):
                label = label_of(tier, ours.engine)
                rows += rows_of(label, *measure(Resumed(ours, tokens, seed), tier, rounds, say))
        if SIM in tiers:
            settings = json.dumps({"read_bytes_s": bytes_s})
            with booted(model, directory, HBM_BYTES, [*flags, "--sim-tier", f"512MiB,{settings}"]) as ours:
                tier = next((row.tier for row in ours.client.tiers().tiers if row.tier not in ("hbm", "dram")), "")
                label = label_of(f"simulated, {bytes_s / 1e9:.1f} GB/s", ours.engine)
                rows += rows_of(label, *measure(Resumed(ours, tokens), tier, rounds, say))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="attnix bench overlap",
        description="T_effective against max(T_compute, T_memory) when a context comes back.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--model", default="smollm2", help="a pulled model or GGUF file (%(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the context (%(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns behind each median (%(default)s)")
    parser.add_argument("--tiers", default="nvme,sim,dram", help="comma-separated (%(default)s)")
    parser.add_argument("--sim-bytes-s", type=int, default=SIM_BYTES_S, help="rate of the sim tier (%(default)s)")
    a = parser.parse_args()
    try:
        rows = run(
            a.model,
            a.tokens,
            a.rounds,
            a.tiers.split(","),
            a.sim_bytes_s,
            lambda text: print(text, file=sys.stderr, flush=True),
        )
    except BenchError as error:
        sys.exit(f"attnix bench overlap: {error}")
    show(rows, a.json)


if __name__ == "__main__":
    main()
