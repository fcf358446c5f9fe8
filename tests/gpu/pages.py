"""What stands where the kernel of the system stands: blocks scattered over frames, page-table rows filled by hand.

Everything that holds no token is NaN: frames past an entry's count, frames nobody maps, places that the pass may not see yet.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attnix.kernels_gpu import reference
from attnix.kernels_gpu.shapes import ELEMENTS, SCALED, Batch, Frames, KvDtype, PageTable, Rope

WINDOW = 2048
LAYERS = 2
Q_DTYPES = {"float32": torch.float32, "float16": torch.float16}  # the others' queries are bfloat16


@dataclass(frozen=True)
class Run:
    """Tokens that share a shift."""

    tokens: int
    shift: int = 0
    block_tokens: int = 0  # tokens an entry gets, fewer than a block could hold; 0: as many as fit
    empty: int = 0  # entries before them that hold no token


@dataclass(frozen=True)
class Sequence_:
    """A context and what this pass computes of it: its last `ntokens` before `unseen` more that are mapped already."""

    runs: tuple[Run, ...]
    ntokens: int = 1
    unseen: int = 0

    @property
    def tokens(self) -> int:
        return sum(run.tokens for run in self.runs)

    @property
    def start(self) -> int:
        return self.tokens - self.unseen - self.ntokens


@dataclass(frozen=True)
class Paged:
    """Arguments of a kernel."""

    q: torch.Tensor
    frames: Frames
    pages: PageTable
    batch: Batch
    rope: Rope
    scale: float

    def true(self, window: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return reference.paged_attention(
            self.q,
            self.frames,
            self.pages,
            self.batch,
            layer=1,
            scale=self.scale,
            rope=self.rope,
            window=window,
            dtype=dtype,
        )


def paged(
    sequences: Sequence[Sequence_],
    *,
    kv_dtype: KvDtype = "bfloat16",
    head_dim: int = 64,
    block_tokens: int = 16,
    kv_heads: int = 2,
    group: int = 2,
    seed: int = 0,
    device: torch.device,
) -> Paged:
    """KV and queries drawn from `seed`: a sequence's depend on its number in `sequences` alone, its frames on all."""
    draw = random.Random(seed)
    cut = [[n for run in s.runs for n in _entries(run, block_tokens)] for s in sequences]
    total = sum(map(len, cut))
    width = max(map(len, cut)) + 1
    free = draw.sample(range(total + 2), total + 2)
    element_bytes = head_dim * ELEMENTS[kv_dtype].itemsize + (4 if kv_dtype in SCALED else 0)
    arena = torch.full((total + 2, LAYERS * 2 * kv_heads * block_tokens * element_bytes), 0xFF, dtype=torch.uint8)
    frames = Frames.over(
        arena, kv_dtype, layers=LAYERS, kv_heads=kv_heads, block_tokens=block_tokens, head_dim=head_dim
    )
    slots = draw.sample(range(len(sequences) + 2), len(sequences))
    frame = torch.full((len(sequences) + 2, width), -1, dtype=torch.int32)
    shift, count = torch.zeros_like(frame), torch.zeros(frame.shape, dtype=torch.int16)
    entries, queries = [], []
    for i, (sequence, slot) in enumerate(zip(sequences, slots, strict=True)):
        numbers = torch.Generator().manual_seed(1000 * seed + i)
        kv = torch.randn(LAYERS, 2, kv_heads, sequence.tokens, head_dim, generator=numbers)
        queries.append(
            torch.randn(sequence.tokens, kv_heads * group, head_dim, generator=numbers)[sequence.start :][
                : sequence.ntokens
            ]
        )
        shifts = [run.shift for run in sequence.runs for _ in _entries(run, block_tokens)]
        at, needed = 0, 0
        for e, (n, moved) in enumerate(zip(cut[i], shifts, strict=True)):
            frame[slot, e], shift[slot, e], count[slot, e] = free.pop(), moved, n
            written = max(0, min(n, sequence.start + sequence.ntokens - at))
            _write(frames, int(frame[slot, e]), kv[:, :, :, at : at + written], kv_dtype)
            at += n
            if at - n < sequence.start + sequence.ntokens:
                needed = e + 1
        entries.append(needed)

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    pages = PageTable(frame.to(device), shift.to(device), count.to(device))
    frames = (
        Frames(frames.kv.to(device), None if frames.scale is None else frames.scale.to(device))
        if device.type != "cpu"
        else frames
    )
    batch = Batch.of(
        pages,
        ints(slots),
        ints(entries),
        ints([s.start for s in sequences]),
        ints([s.ntokens for s in sequences]),
        max_entries=width,
    )
    q = torch.cat(queries).to(Q_DTYPES.get(kv_dtype, torch.bfloat16)).to(device)
    rope = Rope.of(10000.0 ** (-torch.arange(head_dim // 2, device=device) / (head_dim // 2)), WINDOW)
    return Paged(q, frames, pages, batch, rope, head_dim**-0.5)


def only(p: Paged, sequences: Sequence[int]) -> Paged:
    """A batch of these sequences alone, over the same frames."""
    b = p.batch
    chosen = torch.tensor(sequences, device=b.slot.device)
    rows = torch.cat([torch.arange(int(b.row[i]), int(b.row[i] + b.ntokens[i])) for i in sequences])
    batch = Batch.of(
        p.pages, b.slot[chosen], b.entries[chosen], b.start[chosen], b.ntokens[chosen], max_entries=b.max_entries
    )
    return replace(p, q=p.q[rows.to(p.q.device)], batch=batch)


def chunk(p: Paged, sequence: int, begin: int, end: int) -> Paged:
    """Rows [begin, end) of what the pass computes of one sequence, as a pass of their own, with the entries it would have."""
    b, one = p.batch, slice(sequence, sequence + 1)
    first = b.first[sequence]
    stop = int(b.start[sequence]) + end
    entries = torch.tensor(
        [int((first[: int(b.entries[sequence])] < stop).sum())], dtype=torch.int32, device=first.device
    )
    start, ntokens = b.start[one] + begin, torch.full_like(entries, end - begin)
    batch = Batch.of(p.pages, b.slot[one], entries, start.to(torch.int32), ntokens, max_entries=b.max_entries)
    row = int(b.row[sequence])
    return replace(p, q=p.q[row + begin : row + end], batch=batch)


def within(got: torch.Tensor, same: torch.Tensor, true: torch.Tensor, size: float = 0.0) -> None:
    """flash-attention's rule: at most twice the error of the same-dtype reference.

    The little on top is for the cases in which the reference happens to be exact: half a unit in the last place of the
    largest value, or of `size`, the largest that was summed.
    """
    floor = max(float(true.abs().max()), size) * torch.finfo(same.dtype).eps / 2
    assert got.shape == true.shape and not got.isnan().any()
    assert float((got.double() - true).abs().max()) <= 2 * float((same.double() - true).abs().max()) + floor


def _entries(run: Run, block_tokens: int) -> list[int]:
    each, left = run.block_tokens or block_tokens, run.tokens
    return [0] * run.empty + [min(each, left - at) for at in range(0, left, each)]


def _write(frames: Frames, frame: int, kv: torch.Tensor, kv_dtype: KvDtype) -> None:
    n = kv.shape[3]
    if frames.scale is not None:
        kv, scale = reference.quantise_int8(kv) if kv_dtype == "int8" else reference.quantise_fp8(kv)
        frames.scale[frame, :, :, :, :n] = scale
    frames.kv[frame, :, :, :, :n] = kv.to(frames.kv.dtype)
