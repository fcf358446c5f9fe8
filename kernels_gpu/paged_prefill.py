"""Attention of chunks of new tokens over cached and new KV, causal, ragged over the batch."""

import torch

from .shapes import Batch, Frames, Launch, Numerics, PageTable, Rope


def paged_prefill(
    q: torch.Tensor,
    frames: Frames,
    pages: PageTable,
    batch: Batch,
    *,
    layer: int,
    scale: float,
    rope: Rope | None = None,
    window: int = 0,
    numerics: Numerics = "fast",
    launch: Launch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Chunked prefill over paged KV that already holds the chunk's own keys and values.  FlashAttention-2 (arXiv 2307.08691).

    q       [T, Hq, D]             bf16  hbm  roped at logical positions; sequence b has rows row[b] .. row[b] + ntokens[b]
    frames  [F, L, 2, Hkv, P, D]   bf16, f16, f32, int8, e4m3  hbm
    pages   [S, N]                 hbm   the kernel's rows
    batch                          hbm   any ntokens >= 0
    out     [T, Hq, D]             bf16  hbm  None: allocated here
    ->      out
    """
    raise NotImplementedError
