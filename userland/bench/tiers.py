"""How fast frames move between tiers: `attnix bench tiers`.

hbm <-> dram against memcpy of the same bytes, dram <-> nvme against fio (direct=1, same file system, same block size), all
through the real driver processes, which also make, carry and verify headers and checksums.  On a GPU hbm <-> dram is against
cudaMemcpyAsync, and what the device does of it is measured alone as well (`copies alone`).  Ours and the peer take turns;
`ratio` is the median of the pairs' ratios.  On cuda-dry times are no speeds, and are not shown.  What measures is `attnix.bench_tiers`, a process below the system
calls.  fio comes from the distribution (`apt-get install fio`); without it the row says that it is missing.
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

MODULE = "attnix.bench_tiers"


def rows_of(case: dict[str, Any]) -> list[Row]:
    """Payload GB/s of both, and frames/s (fio's IOPS), of one measured case."""
    ours_ns, theirs_ns = case["ours_ns"], case["theirs_ns"]
    frames, frame_bytes, peer_bytes = case["frames"], case["frame_bytes"], case["peer_bytes"]
    title = f"{case['case']}, {frames} x {frame_bytes >> 10} KiB"
    mine = statistics.median(ours_ns)
    if not theirs_ns:
        peer = f"{case['peer'].split(' ')[0]} (missing: {case['missing']})"
        return [Row("tiers", title, frames * frame_bytes / mine, "GB/s", peer, None, None, None, None, len(ours_ns))]
    # Per frame moved, so that bytes which only one side moves (headers) count for nobody.
    ratio = statistics.median(theirs / ours for ours, theirs in zip(ours_ns, theirs_ns, strict=True))
    other = statistics.median(theirs_ns)
    made = [
        Row("tiers", title, frames * frame_bytes / mine, "GB/s", case["peer"], frames * frame_bytes / other, ratio, None,
            None, len(ours_ns)),
    ]  # fmt: skip
    if peer_bytes != frames * frame_bytes:  # a device: operations count, too
        made.append(
            Row("tiers", title, frames / mine * 1e9, "IOPS", case["peer"], frames / other * 1e9, ratio, None, None,
                len(ours_ns)),
        )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="attnix bench tiers", description="How fast frames move between tiers, against memcpy and fio."
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--model", default="smollm2", help="whose frames (default: %(default)s)")
    parser.add_argument("--dir", default="", help="file system of the nvme tier (default: the temporary directory's)")
    parser.add_argument("--rounds", type=int, default=7, help="pairs behind each median (default: %(default)s)")
    parser.add_argument("--nvme-frames", type=int, default=1024, help="frames of one transfer (default: %(default)s)")
    parser.add_argument(
        "--device", default="", help="what hbm is: cpu, cuda, cuda-dry (default: ATTNIX_DEVICE, or auto)"
    )
    options = parser.parse_args()
    command = [sys.executable, "-m", MODULE, "--model", options.model, "--rounds", str(options.rounds)]
    command += ["--nvme-frames", str(options.nvme_frames), *(["--dir", options.dir] if options.dir else [])]
    command += ["--device", options.device] if options.device else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    found = json.loads(done.stdout)
    if found["engines"]["hbm"].startswith("cuda-dry"):
        for case in found["cases"]:
            print(f"dry: {case['case']}: ran beside {case['missing'] or case['peer']}")
        return
    if not options.json:
        print("  ".join(f"{name}: {engine}" for name, engine in found["engines"].items()))
    show([row for case in found["cases"] for row in rows_of(case)], options.json)


if __name__ == "__main__":
    main()
