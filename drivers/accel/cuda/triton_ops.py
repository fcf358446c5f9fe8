"""The operations of a forward pass by kernels_gpu's Triton kernels: on a CUDA device, or in Triton's interpreter.

Products are cuBLAS's in fast numerics and kernels_gpu's in invariant ones, where a row's bits must not depend on how many
rows there are.
"""

from __future__ import annotations

import torch

from attnix.kernels_gpu.copy_frames import copy_frames
from attnix.kernels_gpu.matmul import matmul
from attnix.kernels_gpu.paged_decode import paged_decode
from attnix.kernels_gpu.paged_prefill import paged_prefill
from attnix.kernels_gpu.rmsnorm import rmsnorm
from attnix.kernels_gpu.rope_write import Places, rope_write
from attnix.kernels_gpu.shapes import Batch, Frames, Numerics, PageTable, Rope
from attnix.kernels_gpu.silu_mul import silu_mul

from .ops import Attention


class TritonOps:
    def __init__(self, numerics: Numerics) -> None:
        self._numerics: Numerics = numerics

    def rmsnorm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return rmsnorm(x, weight, eps, residual=residual)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, wide: bool = False
    ) -> torch.Tensor:
        if self._numerics == "invariant":
            out = None
            if wide:
                out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
            return matmul(x, weight, bias, out=out)
        if wide and x.dtype != torch.float32 and x.is_cuda:
            y = torch.mm(x, weight.t(), out_dtype=torch.float32)
            return y if bias is None else y + bias
        y = torch.nn.functional.linear(x, weight, bias)
        return y.float() if wide else y

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up)

    def places(
        self, pages: PageTable, batches: list[Batch], write_from: list[torch.Tensor], tokens: int, max_tokens: int
    ) -> torch.Tensor:
        rows: torch.Tensor | None = None
        for batch, least in zip(batches, write_from, strict=True):
            made = Places.of(pages, batch, tokens=tokens, max_tokens=max_tokens, write_from=least).rows
            # Each has position -1 in the other's rows.
            rows = made if rows is None else torch.where(made[:, 3:] >= 0, made, rows)
        assert rows is not None
        return rows

    def rope_write(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, frames: Frames, places: torch.Tensor, rope: Rope, *,
        layer: int, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        return rope_write(q, k, v, frames, Places(places), rope, layer=layer, q_norm=q_norm, k_norm=k_norm, eps=eps)

    def attend(self, q: torch.Tensor, frames: Frames, how: Attention, layer: int) -> torch.Tensor:
        # Only a bucket has rows of no sequence.  Nobody reads those; zeros keep them from being junk that grows by layers.
        make = torch.zeros if how.prefill is None else torch.empty
        out = make(q.shape, dtype=q.dtype, device=q.device)
        scale = q.shape[2] ** -0.5
        if how.decode is not None:
            paged_decode(
                q, frames, how.pages, how.decode, layer=layer, scale=scale, rope=how.rope, window=how.window,
                numerics=self._numerics, out=out,
            )  # fmt: skip
        if how.prefill is not None:
            paged_prefill(
                q, frames, how.pages, how.prefill, layer=layer, scale=scale, rope=how.rope, window=how.window,
                numerics=self._numerics, out=out,
            )  # fmt: skip
        return out

    def copy_frames(
        self, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, *, layer_bytes: int, first_layer: int = 0,
        layers: int = 0,
    ) -> None:  # fmt: skip
        copy_frames(source, target, pairs, layer_bytes=layer_bytes, first_layer=first_layer, layers=layers)
