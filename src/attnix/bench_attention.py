"""The measuring half of `attnix bench attention`: our paged kernels against a GPU's limits and other implementations.

    python -m attnix.bench_attention [--rounds N] [--only TEXT] [--dry]       one JSON document on stdout

decode   bytes of K and V per second, of the copy bandwidth measured in the same run (bytes read plus bytes written)
prefill  floating-point operations per second of a causal prefill, of the measured peak of a bf16 product
frames   frames between hbm and pinned host memory by copy_frames, against one cudaMemcpy of as many bytes

Every case's contestants take turns, round by round, and before each the second-level cache is overwritten; the times are the
device's own (events).  `paged` means frames scattered at random, `in order` the same kernel over consecutive frames.
Frames hold one layer.  A case that does not fit into the device's memory is said to be skipped; where only a peer's own copy
does not fit, that peer is missing.  A case whose answer is not SDPA's is `wrong` and has no times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch

ROUNDS: Final = 7
DECODE_BATCHES: Final = (1, 8, 64, 256)
DECODE_CONTEXTS: Final = (128, 1024, 4096, 32_768, 131_072)
PREFILL_LENGTHS: Final = (128, 1024, 4096, 8192, 32_768, 131_072)
PREFILL_BATCHES: Final = (1, 8)
PREFILL_TOKENS: Final = 131_072  # more new tokens than that are no chunk that anybody runs
BLOCK_TOKENS: Final = 16
FLUSH_BYTES: Final = 256 << 20  # more than the second-level cache of any GPU so far
LIMIT_BYTES: Final = 1 << 30
MATMUL: Final = 8192
FRAME_BYTES: Final = 2 << 20  # Llama-3-8B, blocks of 16, bf16
FRAMES_MOVED: Final = 256
MARGIN: Final = 0.95  # of the free memory that a case may take

Call = Callable[[], Any]


class Heads(NamedTuple):
    name: str
    q: int
    kv: int
    dim: int


LLAMA: Final = (Heads("Llama-3-8B", 32, 8, 128), Heads("Llama-3-70B", 64, 8, 128))
DRY: Final = Heads("dry", 4, 2, 64)


class Case(NamedTuple):
    kind: str  # decode, prefill
    heads: Heads
    batch: int
    context: int

    @property
    def new(self) -> int:
        return 1 if self.kind == "decode" else self.context

    @property
    def title(self) -> str:
        return f"{self.kind}, {self.heads.name}, batch {self.batch} x {self.context}"

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * 2 * self.heads.kv * self.heads.dim * 2

    @property
    def q_bytes(self) -> int:
        return self.batch * self.new * self.heads.q * self.heads.dim * 2

    @property
    def needed_bytes(self) -> int:
        """To measure ours: K and V, queries, answers, and one sequence's copy for SDPA to compare with."""
        return self.kv_bytes + 3 * self.kv_bytes // self.batch + 6 * self.q_bytes

    @property
    def operations(self) -> int:
        """Two products, two operations per element, half of it masked."""
        pairs = self.batch * self.context * (self.context + 1) // 2
        return 4 * pairs * self.heads.q * self.heads.dim


def cases(dry: bool) -> list[Case]:
    if dry:
        return [Case("decode", DRY, 2, 40), Case("prefill", DRY, 1, 24)]
    decode = [Case("decode", heads, b, n) for heads in LLAMA for n in DECODE_CONTEXTS for b in DECODE_BATCHES]
    prefill = [
        Case("prefill", heads, b, n)
        for heads in LLAMA
        for n in PREFILL_LENGTHS
        for b in PREFILL_BATCHES
        if b * n <= PREFILL_TOKENS
    ]
    return decode + prefill


class Timer:
    """Nanoseconds of a call, by the device's events; in a dry run by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES if self._cuda else 1, dtype=torch.uint8, device=device)

    def __call__(self, call: Call) -> float:
        self._flush.zero_()  # also keeps the device busy while the call is being launched
        if not self._cuda:
            began = time.perf_counter_ns()
            call()
            return float(time.perf_counter_ns() - began)
        event: Any = torch.cuda.Event  # torch leaves it untyped
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e6

    def turns(self, calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
        """All of them in every round; a round before the first does not count."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 1):
            for name, call in calls.items():
                took = self(call)
                if turn:
                    times[name].append(took)
        return times


def limits(device: torch.device, timer: Timer, rounds: int) -> dict[str, float]:
    """bytes/s of a copy within hbm, and operations/s of a bf16 product."""
    cuda = device.type == "cuda"
    n_bytes, n = (LIMIT_BYTES, MATMUL) if cuda else (1 << 16, 64)
    source, target = (torch.empty(n_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    times = timer.turns({"copy": lambda: target.copy_(source), "product": lambda: torch.mm(a, b)}, rounds)
    best = {name: statistics.median(each) / 1e9 for name, each in times.items()}
    return {"copy_bytes_s": 2 * n_bytes / best["copy"], "product_flops_s": 2 * n**3 / best["product"]}


def setting_of(case: Case, device: torch.device) -> Any:
    """Frames scattered at random."""
    from attnix.bench_attention_peers import Setting
    from attnix.kernels_gpu.shapes import Frames, PageTable

    heads, each = case.heads, -(-case.context // BLOCK_TOKENS)
    n = each * case.batch
    generator = torch.Generator(device=device).manual_seed(case.context)
    kv = torch.empty(n, 1, 2, heads.kv, BLOCK_TOKENS, heads.dim, dtype=torch.bfloat16, device=device)
    kv.normal_(generator=generator)
    numbers = list(range(n))
    random.Random(case.batch).shuffle(numbers)
    frame = torch.tensor(numbers, dtype=torch.int32, device=device).view(case.batch, each)
    count = torch.full((case.batch, each), BLOCK_TOKENS, dtype=torch.int16, device=device)
    count[:, -1] = case.context - (each - 1) * BLOCK_TOKENS
    q = torch.empty(case.batch * case.new, heads.q, heads.dim, dtype=torch.bfloat16, device=device)
    q.normal_(generator=generator)
    return Setting(q, Frames(kv), PageTable(frame, torch.zeros_like(frame), count), case.batch, case.context, case.new)


def ours(setting: Any) -> Call:
    from attnix.kernels_gpu.paged_decode import decode_workspace, paged_decode
    from attnix.kernels_gpu.paged_prefill import paged_prefill
    from attnix.kernels_gpu.shapes import Batch

    device, n = setting.q.device, setting.batch
    slot = torch.arange(n, dtype=torch.int32, device=device)
    whole = torch.ones_like(slot)
    entries = setting.pages.frame.shape[1]
    batch = Batch.of(
        setting.pages, slot, whole * entries, whole * (setting.context - setting.new), whole * setting.new,
        max_entries=entries,
    )  # fmt: skip
    how = {"layer": 0, "scale": setting.scale, "out": torch.zeros_like(setting.q)}
    if setting.new > 1:
        return lambda: paged_prefill(setting.q, setting.frames, setting.pages, batch, **how)
    size = decode_workspace(setting.frames, batch, setting.q.shape[1])
    how["workspace"] = torch.empty(size, dtype=torch.float32, device=device)
    return lambda: paged_decode(setting.q, setting.frames, setting.pages, batch, **how)


def free_bytes(device: torch.device) -> int:
    """What a case may take of the device now."""
    if device.type != "cuda":
        return 1 << 33
    torch.cuda.empty_cache()
    return int(MARGIN * torch.cuda.mem_get_info(device)[0])


def attention(case: Case, device: torch.device, timer: Timer, rounds: int, limit: dict[str, float]) -> dict[str, Any]:
    """One case, measured; "skipped" or "wrong" says why there are no times."""
    from attnix.bench_attention_peers import PEERS, PeerMissing, Wrong, check, prepared

    made: dict[str, Any] = {"case": case.title, "kind": case.kind, "peers": {}, "missing": {}}
    room = free_bytes(device)
    if case.needed_bytes > room:
        return made | {"skipped": f"it takes {case.needed_bytes / 2**30:.0f} GiB, and there are {room / 2**30:.0f}"}
    try:
        setting = setting_of(case, device)
        calls: dict[str, Call] = {"ours": ours(setting), "in order": ours(setting.in_order())}
        answer = calls["ours"]().clone()
        check(setting, answer)
        for name in PEERS:
            try:
                calls[name] = prepared(name, setting, answer, free_bytes(device))
            except PeerMissing as missing:
                made["missing"][name] = str(missing)
    except Wrong as wrong:
        return made | {"wrong": str(wrong)}
    except torch.OutOfMemoryError as error:
        return made | {"skipped": str(error).split(". ")[0]}
    times = timer.turns(calls, rounds)
    decode = case.kind == "decode"
    return made | {
        "work": case.kv_bytes if decode else case.operations,
        "unit": "GB/s" if decode else "TFLOP/s",
        "limit": limit["copy_bytes_s" if decode else "product_flops_s"] / (1e9 if decode else 1e12),
        "ours_ns": times.pop("ours"),
        "peers": times,
    }


def frames_moved(device: torch.device, timer: Timer, rounds: int, dry: bool) -> Iterator[dict[str, Any]]:
    """copy_frames between scattered frames of hbm and of pinned memory, against one copy of as many bytes."""
    from attnix.kernels_gpu.copy_frames import copy_frames

    n, frame_bytes = (4, 4096) if dry else (FRAMES_MOVED, FRAME_BYTES)
    hbm = torch.randint(0, 256, (n, frame_bytes), dtype=torch.uint8, device=device)
    host = torch.zeros(n, frame_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    order = random.Random(1).sample(range(n), n)
    pairs = torch.tensor(list(enumerate(order)), dtype=torch.int32, device=device)
    for title, source, target in (("hbm to dram", hbm, host), ("dram to hbm", host, hbm)):
        times = timer.turns(
            {
                "ours": lambda source=source, target=target: copy_frames(
                    source, target, pairs, layer_bytes=frame_bytes
                ),  # type: ignore[misc]
                "cudaMemcpy, one piece": lambda source=source, target=target: target.copy_(source, non_blocking=True),  # type: ignore[misc]
            },
            rounds,
        )
        copy_frames(source, target, pairs, layer_bytes=frame_bytes)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        wrong = (
            {} if torch.equal(target[order].cpu(), source.cpu()) else {"wrong": "the copies are not what was copied"}
        )
        yield wrong | {
            "case": f"frames, {title}, {n} x {frame_bytes >> 10} KiB", "kind": "frames", "work": n * frame_bytes,
            "unit": "GB/s", "limit": None, "ours_ns": times.pop("ours"), "peers": times, "missing": {},
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="attnix.bench_attention", description="Attention kernels against a GPU's limits."
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns behind each median (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose title contains TEXT")
    parser.add_argument(
        "--dry", action="store_true", help="tiny cases in Triton's interpreter: does it work; no speeds"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.dry:
        sys.exit("attnix bench attention: it measures a GPU, and torch sees none here (--dry tries it without one)")
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    device = torch.device("cpu" if options.dry else "cuda")
    timer = Timer(device)
    with torch.inference_mode():
        limit = limits(device, timer, options.rounds)
        found = []
        for case in cases(options.dry):
            if options.only in case.title:
                print(case.title, file=sys.stderr, flush=True)
                found.append(attention(case, device, timer, options.rounds, limit))
                if not options.dry:
                    torch.cuda.empty_cache()
        found += [
            row for row in frames_moved(device, timer, options.rounds, options.dry) if options.only in row["case"]
        ]
    name = "dry run, no device" if options.dry else torch.cuda.get_device_name(device)
    json.dump({"device": name, "torch": torch.__version__, "limits": limit, "cases": found}, sys.stdout)


if __name__ == "__main__":
    main()
