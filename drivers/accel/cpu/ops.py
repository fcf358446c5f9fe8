"""Instruction sets of the CPU engine, and its single kernels on numpy arrays (for the sampler, tests and measurements).

The forward pass does not come through here: `attnix.drivers.accel.model` makes one C call per pass.
"""

from __future__ import annotations

import enum
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from ._cpu import ffi, lib

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
U16 = npt.NDArray[np.uint16]

DTYPE_CODES = {"float32": 0, "bfloat16": 1, "int8": 2}


class Isa(enum.IntEnum):
    """Instruction sets in rising order; each machine that has one has those below it."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512BF16 = 3


def available_isas() -> list[Isa]:
    """The instruction sets this machine can run, lowest first."""
    return [isa for isa in Isa if isa <= lib.ax_best_isa()]


def chosen_isa() -> Isa:
    """The best instruction set, or what ATTNIX_CPU_ISA (portable, avx2, avx512, avx512bf16) says.

    Error: ValueError if the name is unknown or this machine lacks it.
    """
    name = os.environ.get("ATTNIX_CPU_ISA", "")
    if not name:
        return Isa(lib.ax_best_isa())
    known = {isa.name.lower(): isa for isa in available_isas()}
    if name not in known:
        raise ValueError(f"ATTNIX_CPU_ISA={name}: this machine runs {', '.join(known)}")
    return known[name]


def linear(x: F32, weight: F32 | U16, *, isa: Isa, row_block: int = 0) -> F32:
    """x . weight^T through packed panels, in register blocks of `row_block` rows (0: the largest).

    x       [M, K]  f32   rounded to bfloat16 on AVX512BF16 when the weight is bfloat16
    weight  [N, K]  f32, or bfloat16 as uint16 bit patterns
    ->      [M, N]  f32   each element one sum over k in order, so independent of M and row_block
    """
    x = np.ascontiguousarray(x, np.float32)
    packed: npt.NDArray[Any] = np.ascontiguousarray(weight)
    m, k = x.shape
    n = packed.shape[0]
    y = np.zeros((m, n), np.float32)
    dtype = DTYPE_CODES["bfloat16" if packed.dtype == np.uint16 else "float32"]
    if lib.ax_op_linear(isa, row_block, _f32(x), m, k, ffi.from_buffer(packed), dtype, n, _f32(y)) != 0:
        raise MemoryError("linear")
    return y


def rms_norm(x: F32, weight: F32, eps: float, *, isa: Isa) -> F32:
    """x / sqrt(mean(x^2) + eps) * weight, row by row (arXiv 1910.07467).  x [M, N], weight [N], f32."""
    x, weight = np.ascontiguousarray(x, np.float32), np.ascontiguousarray(weight, np.float32)
    y = np.empty_like(x)
    lib.ax_op_rms_norm(isa, _f32(x), _f32(weight), eps, x.shape[0], x.shape[1], _f32(y))
    return y


def silu_mul(gate: F32, up: F32, *, isa: Isa) -> F32:
    """silu(gate) * up, elementwise, f32.  Requires: equal shapes, size a multiple of 16."""
    gate, up = np.ascontiguousarray(gate, np.float32), np.ascontiguousarray(up, np.float32)
    if gate.shape != up.shape or gate.size % 16 != 0:
        raise ValueError("silu_mul wants equal shapes of a multiple of 16 elements")
    y = np.empty_like(gate)
    lib.ax_op_silu_mul(isa, _f32(gate), _f32(up), gate.size, _f32(y))
    return y


def rope(x: F32, cosine: F32, sine: F32, *, isa: Isa) -> F32:
    """Rotate heads, halves paired (arXiv 2104.09864).  x [M, D]; cosine, sine [M, D / 2]; f32."""
    y = np.array(x, np.float32, order="C")
    cosine, sine = np.ascontiguousarray(cosine, np.float32), np.ascontiguousarray(sine, np.float32)
    lib.ax_op_rope(isa, _f32(y), _f32(cosine), _f32(sine), y.shape[0], y.shape[1])
    return y


def log_sums(x: F32, *, isa: Isa) -> tuple[F64, I32]:
    """log(sum(exp(row))) of each row, and the lowest index of its largest value.

    x   [M, N]  f32
    ->  [M]     f64   NaN for a row with a NaN or without a finite largest; off by some 1e-6 from the true one
        [M]     i32
    """
    x = np.ascontiguousarray(x, np.float32)
    sums, best = np.empty(len(x), np.float64), np.empty(len(x), np.int32)
    to = ffi.cast("double *", ffi.from_buffer(sums)), ffi.cast("int32_t *", ffi.from_buffer(best))
    lib.ax_op_log_sums(isa, _f32(x), x.shape[0], x.shape[1], *to)
    return sums, best


def to_bfloat16(x: F32) -> U16:
    """Bit patterns of the nearest bfloat16, ties to even; NaN stays NaN."""
    x = np.ascontiguousarray(x, np.float32)
    y = np.empty(x.shape, np.uint16)
    lib.ax_op_to_bf16(_f32(x), x.size, ffi.cast("uint16_t *", ffi.from_buffer(y)))
    return y


def from_bfloat16(x: U16) -> F32:
    """What bit patterns of bfloat16 stand for."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def _f32(array: F32) -> Any:
    return ffi.cast("float *", ffi.from_buffer(array))
