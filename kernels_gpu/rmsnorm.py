"""RMSNorm, with the residual added on the way (arXiv 1910.07467).  One program a row, so a row's bits are its own."""

from __future__ import annotations

import torch

from .lang import tl, triton
from .launch import architecture_of, launch
from .narrow import narrow


@triton.jit
def rmsnorm_kernel(
    x, residual, weight, y, n, eps, x_step, residual_step, y_step, WIDTH: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = column < n
    value = tl.load(x + row * x_step + column, mask=there, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * residual_step + column
        total = narrow(value + tl.load(at, mask=there, other=0.0).to(tl.float32), residual.dtype.element_ty)
        tl.store(at, total, mask=there)
        value = total.to(tl.float32)  # as stored: who reads the residual later sees the same number
    factor = tl.rsqrt(tl.sum(value * value, 0) / n + eps)
    scale = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    tl.store(y + row * y_step + column, narrow(value * factor * scale, y.dtype.element_ty), mask=there)


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = v / sqrt(mean(v^2) + eps) * weight, where v = x, or residual + x, which is then left in `residual`.

    x         [T, hidden]  bf16, fp16 or f32   hbm  rows may be apart
    weight    [hidden]     bf16, fp16 or f32   hbm
    residual  [T, hidden]  bf16, fp16 or f32   hbm  rounded to its dtype before the norm
    out       [T, hidden]  where to write; may be x
    ->        [T, hidden]  dtype of x, or `out`
    Error: at most 2x that of torch in the same dtype against float32.  Tested on: the interpreter.
    """
    rows, n = x.shape
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device) if out is None else out
    if x.stride(1) != 1 or y.stride(1) != 1 or not weight.is_contiguous() or weight.shape != (n,):
        raise ValueError("rmsnorm wants contiguous rows and one weight per column")
    if residual is not None and (residual.shape != x.shape or residual.stride(1) != 1):
        raise ValueError(f"the residual is {tuple(residual.shape)}, x {tuple(x.shape)}")
    if rows == 0:
        return y
    how = launch("rmsnorm", architecture_of(x.device))
    other = x if residual is None else residual
    rmsnorm_kernel[(rows,)](
        x,
        other,
        weight,
        y,
        n,
        eps,
        x.stride(0),
        other.stride(0),
        y.stride(0),
        WIDTH=triton.next_power_of_2(n),
        ADD=residual is not None,
        num_warps=how.warps,
        num_stages=how.stages,
    )
    return y
