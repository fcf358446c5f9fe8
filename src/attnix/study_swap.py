"""The measuring half of `attnix study swap`: is it cheaper to load a context's blocks or to compute them again, here?

    python -m attnix.study_swap [--model NAME] [--dir DIR] [--rounds N]        one JSON document on stdout

The real model in its driver process, a dram arena, and the nvme driver on a file in DIR.  For n from one block to 4,096
tokens, turn by turn: load the n tokens' blocks from dram into hbm; load them from nvme into dram and on into hbm, one
transfer after the other (what a resume costs when nothing is hidden); compute them from nothing in passes of the
kernel's size.  All times are the daemon's side: from the message sent to the answer received.

The cost model is DESIGN.md §4's, per pass: t = a*n + b*n*(c + n/2) + k for n tokens on top of c; fitted to the measured
passes by least squares of relative errors, since a prefill decision is about a ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from attnix.boot import resolve_model
from attnix.tier_rig import DRAM, HBM, NVME, NvmeSpec, RigError, TierRig

LENGTHS: Final = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
CACHED: Final = (1024, 2048, 3072)  # passes of few tokens on top of so many: what tells b from a
SHORT: Final = (16, 128)  # tokens of those
ROUNDS: Final = 5
SLOT: Final = 0


class Row(NamedTuple):
    """n tokens, loaded and computed: medians, in nanoseconds."""

    tokens: int
    blocks: int
    kv_bytes: int
    dram_ns: float
    nvme_ns: float
    prefill_ns: float
    model_ns: float  # what the fitted model says of the prefill
    cheapest: str  # dram | nvme | recompute


class Fit(NamedTuple):
    """t = a*n + b*n*(c + n/2) + k, in nanoseconds; residuals are relative to what was measured, over passes."""

    a_ns: float
    b_ns: float
    k_ns: float
    passes: int
    mean_residual: float
    worst_residual: float
    worst_tokens: int
    worst_cached: int

    def predict(self, tokens: int, cached: int) -> float:
        return self.a_ns * tokens + self.b_ns * tokens * (cached + tokens / 2) + self.k_ns


class Pass(NamedTuple):
    tokens: int
    cached: int
    ns: float


def fit(passes: Sequence[Pass]) -> Fit:
    """Least squares of relative errors.  Requires: three passes that differ in n and in c."""
    n, c, t = (np.array(column, float) for column in zip(*passes, strict=True))
    terms = np.stack([n, n * (c + n / 2), np.ones_like(n)], 1)
    (a, b, k), *_ = np.linalg.lstsq(terms / t[:, None], np.ones_like(t), rcond=None)
    off = np.abs(terms @ np.array([a, b, k]) / t - 1)
    worst = int(off.argmax())
    return Fit(
        float(a), float(b), float(k), len(passes), float(off.mean()), float(off[worst]), int(n[worst]), int(c[worst])
    )


async def measure(rig: TierRig, lengths: Sequence[int], rounds: int) -> tuple[list[Row], Fit]:
    size = rig.block_tokens
    most = max(lengths)
    draw = np.random.default_rng(1)
    frames = draw.permutation(rig.hbm_frames)[: most // size].astype(np.int32)
    stored = draw.permutation(rig.dram_frames)[: most // size]
    tokens = draw.integers(0, rig.config.vocab, most).astype(np.int32)
    rig.map(SLOT, frames)
    blocks = range(len(frames))
    tags = rig.tags(blocks)
    each = len(tags) // len(blocks)
    hbm_dram = list(zip(frames.tolist(), stored.tolist(), strict=True))
    nvme_dram = list(enumerate(stored.tolist()))
    await rig.prefill(SLOT, tokens)  # makes the KV, and warms the engine
    await rig.transfer(HBM, "read", DRAM, hbm_dram, blocks, tags)
    await rig.transfer(NVME, "write", DRAM, nvme_dram, blocks, tags)
    times: dict[tuple[str, int], list[float]] = {}
    passes: dict[tuple[int, int], list[float]] = {}
    for turn in range(rounds + 1):  # the first does not count
        for n in lengths:
            count = n // size
            held = tags[: count * each]
            dram = await rig.transfer(HBM, "write", DRAM, hbm_dram[:count], blocks[:count], held)
            up = await rig.transfer(NVME, "read", DRAM, nvme_dram[:count], blocks[:count], held)
            on = await rig.transfer(HBM, "write", DRAM, hbm_dram[:count], blocks[:count], held)
            done = await rig.prefill(SLOT, tokens[:n])
            if turn:
                times.setdefault(("dram", n), []).append(dram.wall_ns)
                times.setdefault(("nvme", n), []).append(up.wall_ns + on.wall_ns)
                times.setdefault(("prefill", n), []).append(sum(ns for _, _, ns in done))
                for new, cached, ns in done:
                    passes.setdefault((new, cached), []).append(ns)
        for cached in (c for c in CACHED if c < most):
            for new in SHORT:
                (one,) = await rig.prefill(SLOT, tokens[: cached + new], cached)
                if turn:
                    passes.setdefault((new, cached), []).append(one[2])
    fitted = fit([Pass(n, c, median(ns)) for (n, c), ns in passes.items()])
    rows = []
    for n in lengths:
        dram_ns, nvme_ns, prefill_ns = (median(times[what, n]) for what in ("dram", "nvme", "prefill"))
        model_ns = sum(fitted.predict(new, at) for new, at in chunks(n))
        costs = {"dram": dram_ns, "nvme": nvme_ns, "recompute": prefill_ns}
        rows.append(
            Row(
                n,
                n // size,
                n // size * rig.frame_bytes,
                dram_ns,
                nvme_ns,
                prefill_ns,
                model_ns,
                min(costs, key=costs.__getitem__),
            )
        )
    return rows, fitted


def chunks(tokens: int, step: int = 512) -> list[tuple[int, int]]:
    """(tokens, tokens before) of the passes of one prefill."""
    return [(min(step, tokens - at), at) for at in range(0, tokens, step)]


async def study(model: str, directory: str, rounds: int, lengths: Sequence[int] = LENGTHS) -> dict[str, object]:
    blocks = max(lengths) // 16
    with tempfile.TemporaryDirectory(prefix="attnix-swap-", dir=directory or None) as folder:
        nvme = NvmeSpec(os.path.join(folder, "slots"), blocks)
        async with TierRig(model, hbm_frames=blocks + 16, dram_frames=blocks + 16, nvme=nvme) as rig:
            rows, fitted = await measure(rig, lengths, rounds)
            engines = {name: rig.probes[device].engine for name, device in (("hbm", HBM), ("nvme", NVME))}
    wins = {
        tier: [row.tokens for row in rows if row.prefill_ns < getattr(row, f"{tier}_ns")] for tier in ("dram", "nvme")
    }
    return {
        "model": os.path.basename(model),
        "engines": engines,
        "rounds": rounds,
        "rows": [row._asdict() for row in rows],
        "fit": fitted._asdict(),
        "recompute_wins": wins,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="attnix.study_swap")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dir", default="", help="where the nvme file goes (default: the temporary directory)")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    try:
        found = asyncio.run(study(resolve_model(options.model), options.dir, options.rounds))
    except RigError as error:
        sys.exit(f"attnix study swap: {error}")
    json.dump(found, sys.stdout)
    print()


if __name__ == "__main__":
    main()
