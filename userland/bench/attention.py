"""How near the attention kernels come to what a GPU can do: `attnix bench attention`.

Decode against the measured copy bandwidth, prefill against the measured peak of a bf16 product, frames between hbm and pinned
memory against cudaMemcpy; beside torch SDPA on contiguous KV, flex_attention on pages, and FlashInfer where it is
installed, all in the same run, taking turns.  What measures is `attnix.bench_attention`, a process below the system
calls.  Without a GPU it refuses; `--dry` runs tiny cases in Triton's interpreter, whose times are no speeds and are not
shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from .report import show
from .row import Row

MODULE = "attnix.bench_attention"
SCALE = {"GB/s": 1e9, "TFLOP/s": 1e12}


def rows_of(case: dict[str, Any]) -> list[Row]:
    """One row per contestant; `ratio` is the median of the rounds' ratios."""
    if "skipped" in case:
        return [Row("attention", case["case"], 0.0, "", f"skipped: {case['skipped']}", None, None, None, None, 0)]
    if "wrong" in case:
        return [Row("attention", case["case"], 0.0, "", f"WRONG: {case['wrong']}", None, None, None, None, 0)]
    ours_ns, unit, limit = case["ours_ns"], case["unit"], case["limit"]

    def rate(times_ns: list[float]) -> float:
        return float(case["work"] / (statistics.median(times_ns) / 1e9) / SCALE[unit])

    mine = rate(ours_ns)
    share = mine / limit if limit else None
    made = []
    for name, theirs_ns in case["peers"].items():
        ratio = statistics.median(theirs / own for own, theirs in zip(ours_ns, theirs_ns, strict=True))
        made.append(
            Row("attention", case["case"], mine, unit, name, rate(theirs_ns), ratio, limit, share, len(ours_ns))
        )
    for name, why in case["missing"].items():
        peer = f"{name} (missing: {why})"
        made.append(Row("attention", case["case"], mine, unit, peer, None, None, limit, share, len(ours_ns)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="attnix bench attention",
        description="Attention kernels, against a GPU's limits and other implementations.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--rounds", type=int, default=7, help="turns behind each median (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose title contains TEXT")
    parser.add_argument("--dry", action="store_true", help="without a GPU: tiny cases, interpreted; does it work")
    options = parser.parse_args()
    command = [sys.executable, "-m", MODULE, "--rounds", str(options.rounds), "--only", options.only]
    done = subprocess.run([*command, *(["--dry"] if options.dry else [])], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    found = json.loads(done.stdout)
    if options.dry:
        for case in found["cases"]:
            missing = "".join(f"; {name} is missing: {why}" for name, why in case["missing"].items())
            said = f"WRONG: {case['wrong']}" if "wrong" in case else f"ran beside {', '.join(case['peers'])}{missing}"
            print(f"dry: {case['case']}: {said}")
    else:
        if not options.json:
            limit = found["limits"]
            copy, product = limit["copy_bytes_s"] / 1e9, limit["product_flops_s"] / 1e12
            print(
                f"{found['device']}, torch {found['torch']}: copies {copy:,.0f} GB/s, bf16 products {product:,.0f} TFLOP/s"
            )
        show([row for case in found["cases"] for row in rows_of(case)], options.json)
    wrong = [case["case"] for case in found["cases"] if "wrong" in case]
    if wrong:
        sys.exit(f"attnix bench attention: {len(wrong)} answers are wrong, and have no speed: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
