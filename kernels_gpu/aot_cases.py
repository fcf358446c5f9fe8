"""What the ahead-of-time checks compile: one case is one wrapper, called once, with a head dim, a block size and a KV dtype.

All of them: every kernel that has launch rows, at every architecture, head dim and block size, with every dtype of KV.
The subset, which CI takes: every head dim with bf16 KV, every dtype of KV with one head dim, all in blocks of 16, shifts
and windows, and what has neither head dim nor blocks, on every architecture.  It takes every launch row (aot.py checks that).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, get_args

import torch

from .copy_frames import copy_frames
from .launch import ARCHITECTURES
from .matmul import matmul
from .paged_decode import paged_decode
from .paged_prefill import paged_prefill
from .rmsnorm import rmsnorm
from .rope_write import Places, rope_write
from .shapes import BLOCK_TOKENS, ELEMENTS, FP8_CAPABILITY, HEAD_DIMS, SCALED, Batch, Frames, KvDtype, PageTable, Rope
from .silu_mul import silu_mul

SUBSET: Final[tuple[tuple[int, int, KvDtype], ...]] = (
    (64, 16, "bfloat16"),
    (96, 16, "bfloat16"),
    (128, 16, "bfloat16"),
    (256, 16, "bfloat16"),
    (64, 16, "float16"),
    (64, 16, "float32"),
    (128, 16, "int8"),
    (128, 16, "float8_e4m3"),
)
VARIED: Final = (128, 16, "bfloat16")  # the subset's geometry that every variant is compiled with
VARIANTS: Final = ("", "shift", "window shift", "invariant")  # of attention; the first is what most passes run
LAYERS: Final = 2
KV_HEADS: Final = 2
GROUP: Final = 4  # query heads of a KV head, Llama-3-8B's
WINDOW: Final = 256
HIDDEN: Final = 4096


class Case(NamedTuple):
    """head_dim, block_tokens 0 and kv_dtype "": the kernel has none.  variant: what else is asked of it."""

    kernel: str
    architecture: int
    head_dim: int = 0
    block_tokens: int = 0
    kv_dtype: str = ""
    variant: str = ""

    @property
    def title(self) -> str:
        geometry = f"D{self.head_dim} P{self.block_tokens} {self.kv_dtype}" if self.head_dim else ""
        return " ".join(filter(None, (geometry, self.variant)))

    @property
    def multiplies(self) -> bool:
        """Whether its products are the matrix units': float32 is multiplied in float32 (ieee), which they do not do."""
        return self.kv_dtype != "float32"


def cases(*, every: bool) -> list[Case]:
    return [case for architecture in ARCHITECTURES for case in _of(architecture, every)]


def run(case: Case) -> None:
    """Call the wrapper with host tensors.  Requires: nothing is launched (aot.compiled_instead), or the interpreter."""
    _RUNS[case.kernel](case)


def _of(architecture: int, every: bool) -> Iterator[Case]:
    for dtype in ("bfloat16", "float32") if every else ("bfloat16",):
        yield Case("rmsnorm", architecture, variant=dtype)
        yield Case("rmsnorm", architecture, variant=f"{dtype} residual")
        yield Case("silu_mul", architecture, variant=dtype)
    yield Case("copy_frames", architecture)
    for dtype in ("bfloat16", "float32") if every else ("bfloat16",):
        yield Case("matmul", architecture, kv_dtype=dtype)
    for head_dim, block_tokens, kv_dtype in _geometries(architecture, every):
        yield Case("rope_write", architecture, head_dim, block_tokens, kv_dtype)
        if kv_dtype == "bfloat16":
            yield Case("rope_write", architecture, head_dim, block_tokens, kv_dtype, "norm")
        plain = (head_dim, block_tokens, kv_dtype) == VARIED
        for variant in VARIANTS if every or plain else VARIANTS[:1]:
            yield Case("paged_decode", architecture, head_dim, block_tokens, kv_dtype, variant)
            yield Case("paged_prefill", architecture, head_dim, block_tokens, kv_dtype, variant)


def _geometries(architecture: int, every: bool) -> Iterator[tuple[int, int, KvDtype]]:
    chosen: Sequence[tuple[int, int, KvDtype]] = SUBSET
    if every:
        chosen = [(d, p, kv) for d in HEAD_DIMS for p in BLOCK_TOKENS for kv in get_args(KvDtype)]
    for head_dim, block_tokens, kv_dtype in chosen:
        if kv_dtype != "float8_e4m3" or architecture >= 10 * FP8_CAPABILITY[0] + FP8_CAPABILITY[1]:
            yield head_dim, block_tokens, kv_dtype


class _Pass(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    frames: Frames
    pages: PageTable
    batch: Batch
    rope: Rope


def pass_of(case: Case, ntokens: int) -> _Pass:
    """Four sequences of `ntokens` new tokens each, in frames of their own."""
    head_dim, block_tokens, sequences = case.head_dim, case.block_tokens, 4
    kv_dtype: KvDtype = case.kv_dtype  # type: ignore[assignment]
    width = head_dim * ELEMENTS[kv_dtype].itemsize + (4 if kv_dtype in SCALED else 0)
    used, entries = -(-ntokens // block_tokens), WINDOW // block_tokens + 1
    arena = torch.zeros(sequences * used, LAYERS * 2 * KV_HEADS * block_tokens * width, dtype=torch.uint8)
    frames = Frames.over(
        arena, kv_dtype, layers=LAYERS, kv_heads=KV_HEADS, block_tokens=block_tokens, head_dim=head_dim
    )
    pages = PageTable(
        torch.full((sequences, entries), -1, dtype=torch.int32),
        torch.zeros(sequences, entries, dtype=torch.int32),
        torch.zeros(sequences, entries, dtype=torch.int16),
    )
    pages.frame[:, :used] = torch.arange(sequences * used, dtype=torch.int32).view(sequences, used)
    pages.count[:, :used] = block_tokens
    slots = torch.arange(sequences, dtype=torch.int32)
    whole = torch.ones_like(slots)
    batch = Batch.of(pages, slots, whole * used, whole * 0, whole * ntokens, max_entries=entries)
    dtype = torch.float32 if kv_dtype == "float32" else torch.float16 if kv_dtype == "float16" else torch.bfloat16
    heads = KV_HEADS * GROUP
    qkv = torch.zeros(sequences * ntokens, (heads + 2 * KV_HEADS) * head_dim, dtype=dtype)
    q, k, v = qkv.view(len(qkv), heads + 2 * KV_HEADS, head_dim).split([heads, KV_HEADS, KV_HEADS], 1)
    return _Pass(q, k, v, frames, pages, batch, Rope.of(torch.ones(head_dim // 2), WINDOW))


def _rmsnorm(case: Case) -> None:
    dtype = torch.float32 if "float32" in case.variant else torch.bfloat16
    x = torch.zeros(2, HIDDEN, dtype=dtype)
    rmsnorm(x, x[0], 1e-5, residual=torch.zeros_like(x) if "residual" in case.variant else None)


def _silu_mul(case: Case) -> None:
    silu_mul(torch.zeros(2, 2 * HIDDEN, dtype=torch.float32 if case.variant == "float32" else torch.bfloat16))


def _copy_frames(case: Case) -> None:
    frames = torch.zeros(4, 8 * HIDDEN, dtype=torch.uint8)
    copy_frames(frames, frames, torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), layer_bytes=HIDDEN)


def _matmul(case: Case) -> None:
    x = torch.zeros(8, HIDDEN, dtype=torch.float32 if case.kv_dtype == "float32" else torch.bfloat16)
    matmul(x, x[:4])


def _rope_write(case: Case) -> None:
    p = pass_of(case, 1)
    places = Places.of(p.pages, p.batch, tokens=len(p.q), max_tokens=1)
    norm = torch.ones(case.head_dim, dtype=p.q.dtype) if case.variant == "norm" else None
    rope_write(p.q, p.k, p.v, p.frames, places, p.rope, layer=1, q_norm=norm, k_norm=norm)


def _attention(case: Case) -> dict[str, Any]:
    return {
        "layer": 1,
        "scale": 1.0,
        "window": 64 if "window" in case.variant else 0,
        "numerics": "invariant" if "invariant" in case.variant else "fast",
    }


def _paged_decode(case: Case) -> None:
    p = pass_of(case, 1)
    rope = p.rope if "shift" in case.variant else None
    paged_decode(p.q, p.frames, p.pages, p.batch, rope=rope, **_attention(case))


def _paged_prefill(case: Case) -> None:
    p = pass_of(case, 32)
    rope = p.rope if "shift" in case.variant else None
    paged_prefill(p.q, p.frames, p.pages, p.batch, rope=rope, **_attention(case))


_RUNS: Final[dict[str, Callable[[Case], None]]] = {
    "copy_frames": _copy_frames,
    "matmul": _matmul,
    "paged_decode": _paged_decode,
    "paged_prefill": _paged_prefill,
    "rmsnorm": _rmsnorm,
    "rope_write": _rope_write,
    "silu_mul": _silu_mul,
}
