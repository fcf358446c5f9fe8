"""Casts inside kernels round to nearest even, in the interpreter as on a device: compared with torch, value by value."""

from __future__ import annotations

import pytest
import torch

from attnix.kernels_gpu.lang import tl, triton
from attnix.kernels_gpu.narrow import narrow, quantised, scales

N = 1 << 14


@triton.jit
def narrow_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, narrow(tl.load(x + at), y.dtype.element_ty))


@triton.jit
def plain_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


@triton.jit
def quantised_kernel(x, y, scale, N: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    each, factor = scales(tl.max(tl.abs(value), 0), y.dtype.element_ty)
    tl.store(scale, each)
    tl.store(y + at, quantised(value, factor, y.dtype.element_ty))


def values(device: torch.device, top: float) -> torch.Tensor:
    """Random ones of every magnitude, ties, the neighbours of powers of two, subnormals of the narrow dtypes."""
    draw = torch.Generator().manual_seed(3)
    spread = torch.randn(N, generator=draw) * torch.exp2(torch.randint(-12, 9, (N,), generator=draw).float())
    ties = torch.arange(-1024, 1024) / 1024.0 * 17
    spread[: len(ties)] = ties
    edges = torch.exp2(torch.arange(-11.0, 9.0))
    near = torch.stack([edges * (1 - e) for e in (1e-3, 1e-2, 3.1e-2, 6e-2)]).flatten()
    spread[len(ties) : len(ties) + len(near)] = near
    return spread.clamp(-top, top).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_narrowed_value_is_torchs_to_the_bit(dtype: torch.dtype, device: torch.device) -> None:
    x = values(device, 448.0)
    y = torch.empty(N, dtype=dtype, device=device)
    narrow_kernel[(1,)](x, y, N=N)
    assert torch.equal(y.view(torch.uint8), x.to(dtype).view(torch.uint8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="about the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_control_the_interpreters_own_cast_is_another(dtype: torch.dtype) -> None:
    """When this fails the interpreter has been mended, and narrow.py may go."""
    x = values(torch.device("cpu"), 448.0)
    y = torch.empty(N, dtype=dtype)
    plain_kernel[(1,)](x, y, N=N)
    assert not torch.equal(y.view(torch.uint8), x.to(dtype).view(torch.uint8))


def test_int8_keeps_within_half_a_step_and_fills_the_range(device: torch.device) -> None:
    x = values(device, 20.0)
    y, scale = torch.empty(N, dtype=torch.int8, device=device), torch.empty(1, device=device)
    quantised_kernel[(1,)](x, y, scale, N=N)
    assert float(scale) == pytest.approx(float(x.abs().max()) / 127, rel=1e-6)
    assert int(y.abs().max()) == 127
    assert float((y * scale - x).abs().max()) <= float(scale) / 2 * (1 + 1e-5)
