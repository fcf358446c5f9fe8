"""A product whose rows do not depend on the batch.

A library picks its tile, and whether it splits k, by the number of rows: the same token then gets other bits in another
batch ("Defeating Nondeterminism in LLM Inference", Thinking Machines, 2025).  Here the tile is a constant, k is summed
front to back in steps of one size into one float32 accumulator, and nothing is split: an element is a function of its
row of x and its row of the weight.  The price is paid where few rows meet few outputs, and cannot fill the machine.
"""

import torch

from .attend import dot
from .lang import tl, triton
from .narrow import narrow

BLOCK_M = 64  # rows; not a launch parameter: another tile is other numerics
BLOCK_N = 64
BLOCK_K = 64
GROUP_M = 8  # row tiles that go through the same weights together, for the second-level cache


@triton.jit(do_not_specialize=["m"])
def matmul_tiles(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    m,
    n,
    k,
    x_stride,
    weight_stride,
    y_stride,
    BIASED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_m = tl.cdiv(m, M)
    tiles_n = tl.cdiv(n, N)
    group = tl.program_id(0) // (GROUP * tiles_n)
    rows = tl.minimum(tiles_m - group * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * tiles_n)
    row = (group * GROUP + inside % rows) * M + tl.arange(0, M)
    column = inside // rows * N + tl.arange(0, N)
    depth = tl.arange(0, K)
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + depth[None, :]
    weight_at = weight_ptr + column.to(tl.int64)[:, None] * weight_stride + depth[None, :]
    acc = tl.zeros([M, N], tl.float32)
    for at in tl.range(0, k, K):
        left = k - at
        a = tl.load(x_at + at, mask=(row < m)[:, None] & (depth < left)[None, :], other=0.0)
        b = tl.load(weight_at + at, mask=(column < n)[:, None] & (depth < left)[None, :], other=0.0)
        acc = dot(a, tl.trans(b), acc)
    if BIASED:
        acc += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + row.to(tl.int64)[:, None] * y_stride + column[None, :]
    tl.store(y_at, narrow(acc, y_ptr.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


def matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x . weight^T (+ bias), each row's bits the same whatever the other rows are.  Tiled product; see the file's text.

    x       [T, K]  bf16  hbm  f16, f32 too
    weight  [N, K]  x's   hbm
    bias    [N]     x's   hbm
    out     [T, N]  x's   hbm  or f32 (logits); None: x's, allocated here
    ->      out
    Requires: the last dimension contiguous in all.  float32 is multiplied in float32, not in TF32.
    Error: at most 2x that of torch's product in x's dtype against float32.  Tested on: triton's interpreter.
    """
    rows, k = x.shape
    n = weight.shape[0]
    if weight.shape[1] != k or weight.dtype != x.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} by a weight {tuple(weight.shape)} {weight.dtype}")
    if out is None:
        out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if out.shape != (rows, n):
        raise ValueError(f"out is {tuple(out.shape)}, not {(rows, n)}")
    if x.stride(1) != 1 or weight.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the last dimension must be contiguous")
    if rows == 0:
        return out
    tile_k = BLOCK_K if x.dtype != torch.float32 else BLOCK_K // 2  # float32 operands go through registers
    grid = (-(-rows // BLOCK_M) * -(-n // BLOCK_N),)
    matmul_tiles[grid](
        x, weight, weight if bias is None else bias, out, rows, n, k, x.stride(0), weight.stride(0), out.stride(0),
        BIASED=bias is not None, M=BLOCK_M, N=BLOCK_N, K=tile_k, GROUP=GROUP_M, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
