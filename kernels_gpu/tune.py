"""Find launch rows by measuring on this machine's GPU: `python -m attnix.kernels_gpu.tune [--write]`.

For every kernel with rows, head dim and block size it times the candidates (tile sizes, warps, stages; those that do not fit
the shared memory or fail are left out), five rounds in turns, and takes the best median.  A row is replaced only where
another is faster by more than 3%, so that noise moves nothing.  `--write` rewrites launch_table.py with the rows of this
architecture; without it they are printed.  Serving never tunes: launch.py says why.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from . import launch_table
from .launch import architecture_of, launch
from .launch_table import Row
from .paged_decode import paged_decode
from .paged_prefill import paged_prefill
from .shapes import HEAD_DIMS, Batch, Frames, Launch, PageTable

ROUNDS: Final = 5
GAIN: Final = 1.03
BLOCKS: Final = (16, 64)
KV_HEADS: Final = 8
GROUP: Final = 4
DECODE: Final = (64, 4096)  # sequences, tokens of each
PREFILL: Final = (2, 4096)
FLUSH_BYTES: Final = 256 << 20
TUNED: Final = ("paged_decode", "paged_prefill")  # the others move bytes, and their rows are nearly a matter of taste

Key = tuple[str, int, int, int]


def candidates(kernel: str, head_dim: int) -> Iterator[Launch]:
    if kernel == "paged_decode":
        for block_n, warps, stages, programs in itertools.product((16, 32, 64, 128), (4, 8), (2, 3, 4, 5), (1, 2, 3)):
            yield Launch(16, block_n, warps, stages, programs)
        return
    for block_m, block_n, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3)):
        if block_m * head_dim <= 128 * 256:
            yield Launch(block_m, block_n, warps, stages, 1)


def with_row(rows: Sequence[Row], key: Key, best: Launch) -> tuple[Row, ...]:
    """The rows with this key's replaced or added, sorted."""
    made: Row = (*key, best.block_m, best.block_n, best.warps, best.stages, best.programs)
    return tuple(sorted([row for row in rows if row[:4] != key] + [made]))


def table_text(rows: Sequence[Row], origin: str) -> str:
    """launch_table.py's text.  origin: one line about where the rows are from."""
    lines = "".join(f"    {row!r},\n".replace("'", '"') for row in sorted(rows))
    return (
        '"""The launch rows: kernel, architecture, head dim, block tokens (0 = any), then shapes.Launch: block_m, block_n, warps, '
        f'stages,\nprograms.\n\n{origin}\n"""\n\nfrom __future__ import annotations\n\nfrom typing import Final\n\n'
        "Row = tuple[str, int, int, int, int, int, int, int, int]\n\n"
        f"ROWS: Final[tuple[Row, ...]] = (\n{lines})\n"
    )


def work_of(kernel: str, head_dim: int, block_tokens: int, device: torch.device) -> Callable[[Launch], Any]:
    sequences, tokens = DECODE if kernel == "paged_decode" else PREFILL
    each, new = tokens // block_tokens, 1 if kernel == "paged_decode" else tokens
    kv = torch.randn(sequences * each, 1, 2, KV_HEADS, block_tokens, head_dim, device=device).to(torch.bfloat16)
    frame = torch.randperm(sequences * each, device=device).to(torch.int32).view(sequences, each)
    pages = PageTable(
        frame, torch.zeros_like(frame), torch.full(frame.shape, block_tokens, dtype=torch.int16, device=device)
    )
    slot = torch.arange(sequences, dtype=torch.int32, device=device)
    whole = torch.ones_like(slot)
    batch = Batch.of(pages, slot, whole * each, whole * (tokens - new), whole * new, max_entries=each)
    q = torch.randn(sequences * new, KV_HEADS * GROUP, head_dim, device=device).to(torch.bfloat16)
    attend = paged_decode if kernel == "paged_decode" else paged_prefill
    return lambda how: attend(q, Frames(kv), pages, batch, layer=0, scale=head_dim**-0.5, launch=how)


def fastest(work: Callable[[Launch], Any], choices: Sequence[Launch], flush: torch.Tensor) -> dict[Launch, float]:
    """Median milliseconds of every candidate that runs."""
    runs: dict[Launch, list[float]] = {}
    for how in choices:
        try:
            work(how)
            torch.cuda.synchronize()
            runs[how] = []
        except Exception as error:  # out of shared memory or registers: no candidate
            print(f"  {how}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
    for _ in range(ROUNDS):
        for how, times in runs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            begin.record()
            work(how)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return {how: statistics.median(times) for how, times in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="attnix.kernels_gpu.tune", description="Measure launch rows on this GPU.")
    parser.add_argument("--write", action="store_true", help="rewrite launch_table.py")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kernels whose name contains TEXT")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("attnix.kernels_gpu.tune: it needs a GPU, and torch sees none here")
    device = torch.device("cuda")
    architecture, rows = architecture_of(device), launch_table.ROWS
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    for kernel, head_dim, block_tokens in itertools.product(TUNED, HEAD_DIMS, BLOCKS):
        if options.only not in kernel:
            continue
        now = launch(kernel, architecture, head_dim, block_tokens)
        work = work_of(kernel, head_dim, block_tokens, device)
        times = fastest(work, list(dict.fromkeys([now, *candidates(kernel, head_dim)])), flush)
        best = min(times, key=times.__getitem__)
        if now not in times or times[now] > GAIN * times[best]:
            rows = with_row(rows, (kernel, architecture, head_dim, block_tokens), best)
            print(f"{kernel} D{head_dim} P{block_tokens}: {best}", flush=True)
    if options.write:
        origin = f"Those of sm_{architecture} were measured by tune.py on {torch.cuda.get_device_name(device)}."
        Path(launch_table.__file__).write_text(table_text(rows, origin))
    else:
        print(table_text(rows, "Measured by tune.py."))


if __name__ == "__main__":
    main()
