"""Rounding to the narrow dtypes of frames, inside kernels.

On a device a cast rounds to the nearest, ties to even.  Triton 3.9's interpreter does not: float32 -> bfloat16 truncates,
and float32 -> float8e4nv loses the carry when a mantissa rounds up to the next power of two (found by comparing both with
torch, value by value; tests/gpu/test_narrow.py still does).  So under the interpreter the value is rounded here first,
in float32 bits, and the cast that follows is exact.  A device compiles none of that: INTERPRETED is a constant.
"""

from __future__ import annotations

import os

from .lang import tl, triton

INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")

FP8_PEAK: tl.constexpr = tl.constexpr(448.0)  # the largest float8_e4m3fn
INT8_PEAK: tl.constexpr = tl.constexpr(127.0)
_LEAST_PEAK: tl.constexpr = tl.constexpr(1e-30)  # below it a head of a token is taken for zeros, as the CPU engine does
_INTEGER_MAGIC: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, half to even
_SUBNORMAL_MAGIC: tl.constexpr = tl.constexpr(24576.0)  # 1.5 * 2^14: adding it rounds to a multiple of 2^-9
_LEAST_NORMAL_FP8: tl.constexpr = tl.constexpr(0.015625)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """x, float32, rounded to nearest even in `dtype`: float32, bfloat16, float16 or float8e4nv (|x| <= 448)."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
            x = tl.where(x == x, rounded, x)
        if dtype == tl.float8e4nv:
            bits = x.to(tl.int32, bitcast=True)
            normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
            subnormal = (tl.abs(x) + _SUBNORMAL_MAGIC) - _SUBNORMAL_MAGIC
            signed = (subnormal.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)
            x = tl.where(x == x, tl.where(tl.abs(x) < _LEAST_NORMAL_FP8, signed, normal), x)
    return x.to(dtype)


@triton.jit
def quantised(x, factor, dtype: tl.constexpr):
    """x * factor as int8 or float8e4nv.  factor: from `scales`, which keeps the product within the dtype's range."""
    y = tl.where(factor == 0.0, 0.0, x) * factor
    if dtype == tl.int8:
        return ((y + _INTEGER_MAGIC) - _INTEGER_MAGIC).to(tl.int8)
    return narrow(tl.minimum(tl.maximum(y, -FP8_PEAK), FP8_PEAK), dtype)


@triton.jit
def scales(peak, dtype: tl.constexpr):
    """(scale, factor) for rows whose largest magnitude is `peak`: value = stored * scale, stored = value * factor.

    Symmetric, so zero stays zero.  A peak below 1e-30 gives 0 and 0; one that is not finite a NaN scale, so that what
    reads the row fails as it would with the other dtypes.
    """
    top = INT8_PEAK if dtype == tl.int8 else FP8_PEAK
    dead = peak < _LEAST_PEAK
    lost = (peak != peak) | (peak == float("inf"))
    safe = tl.where(dead | lost, 1.0, peak)
    scale = tl.where(lost, float("nan"), tl.where(dead, 0.0, safe / top))
    return scale, tl.where(dead | lost, 0.0, top / safe)
