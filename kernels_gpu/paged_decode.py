"""Attention of one new token per sequence over paged KV, split over the KV and merged."""

import torch

from .shapes import Batch, Frames, Launch, Numerics, PageTable, Rope


def decode_workspace(q_heads: int, head_dim: int, *, programs: int) -> int:
    """float32 elements that `paged_decode` needs in fast mode, whatever the batch; see `invariant_workspace`."""
    raise NotImplementedError


def paged_decode(
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
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One decode step over paged KV.  FlashDecoding's split and merge; online softmax (arXiv 1805.02867).

    q          [T, Hq, D]             bf16  hbm  roped at logical positions; sequence b's row is batch.row[b]
    frames     [F, L, 2, Hkv, P, D]   bf16, f16, f32, int8, e4m3  hbm
    pages      [S, N]                 hbm   the kernel's rows
    batch                             hbm   ntokens is 1 wherever entries is not 0
    workspace  [n]                    f32   hbm  None: allocated here; a captured graph must bring its own
    out        [T, Hq, D]             bf16  hbm  None: allocated here
    ->         out
    """
    raise NotImplementedError
