"""SwiGLU's gate: silu(gate) * up (arXiv 2002.05202)."""

from __future__ import annotations

import torch

from .lang import tl, triton
from .launch import architecture_of, launch
from .narrow import narrow


@triton.jit
def silu_mul_kernel(gate_up, y, n, step, y_step, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < n
    gate = tl.load(gate_up + row * step + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * step + n + column, mask=there, other=0.0).to(tl.float32)
    tl.store(y + row * y_step + column, narrow(gate / (1.0 + tl.exp(-gate)) * up, y.dtype.element_ty), mask=there)


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up of one product's output.

    gate_up  [T, 2 * n]  bf16, fp16 or f32   hbm  gate first, then up
    ->       [T, n]      its dtype, or `out`
    Error: at most 2x that of torch in the same dtype against float32.  Tested on: the interpreter.
    """
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((rows, n), dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    if gate_up.stride(1) != 1 or y.stride(1) != 1 or gate_up.shape[1] != 2 * n or y.shape != (rows, n):
        raise ValueError(f"silu_mul wants contiguous rows of gate and up, not {tuple(gate_up.shape)}")
    if rows == 0:
        return y
    how = launch("silu_mul", architecture_of(gate_up.device))
    columns = how.block_n
    silu_mul_kernel[(rows, triton.cdiv(n, columns))](
        gate_up, y, n, gate_up.stride(0), y.stride(0), COLUMNS=columns, num_warps=how.warps, num_stages=how.stages
    )
    return y
