"""Every kernel of the CPU engine, on every instruction set of this machine, against torch in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attnix.drivers.accel.cpu import ops
from attnix.drivers.accel.cpu.ops import Isa

F32 = npt.NDArray[np.float32]
ISAS = pytest.mark.parametrize("isa", ops.available_isas(), ids=lambda isa: isa.name.lower())


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def as_bf16(x: F32) -> npt.NDArray[np.uint16]:
    return torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)


def rounded(x: F32) -> F32:
    return torch.from_numpy(x).bfloat16().float().numpy()


def test_bfloat16_is_the_nearest_with_ties_to_even() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32)
    ties = np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000
    x = np.concatenate([bits, ties, ties + 1, ties - 1]).view(np.float32)
    x = np.append(x[~np.isnan(x)], np.array([0.0, -0.0, np.inf, -np.inf], np.float32))[None]
    assert np.array_equal(ops.to_bfloat16(x), as_bf16(x))
    assert np.array_equal(ops.from_bfloat16(ops.to_bfloat16(x)), rounded(x))
    quiet, signalling = np.array([0x7FC00000, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(ops.from_bfloat16(ops.to_bfloat16(np.array([quiet, signalling, -quiet])))).all()


@ISAS
@pytest.mark.parametrize("rows", [*range(1, 14), 31, 64])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (33, 96), (70, 10), (5, 576)])
def test_linear_float32(isa: Isa, rows: int, n: int, k: int) -> None:
    x, w = normal(1, rows, k), normal(2, n, k)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(ops.linear(x, w, isa=isa), exact, atol=2e-6 * k, rtol=1e-5)


@ISAS
@pytest.mark.parametrize("rows", [*range(1, 14), 31, 64])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (33, 96), (70, 10), (5, 576)])
def test_linear_bfloat16(isa: Isa, rows: int, n: int, k: int) -> None:
    """On bfloat16 hardware x is rounded too; elsewhere only the weight is."""
    x, w = normal(3, rows, k), normal(4, n, k)
    seen = rounded(x) if isa is Isa.AVX512BF16 else x
    exact = seen.astype(np.float64) @ rounded(w).astype(np.float64).T
    np.testing.assert_allclose(ops.linear(x, as_bf16(w), isa=isa), exact, atol=2e-6 * k, rtol=1e-5)


@ISAS
@pytest.mark.parametrize("bits", ["float32", "bfloat16"])
def test_a_row_of_a_product_does_not_depend_on_its_company(isa: Isa, bits: str) -> None:
    x, w = normal(5, 24, 96), normal(6, 64, 96)
    weight = as_bf16(w) if bits == "bfloat16" else w
    whole = ops.linear(x, weight, isa=isa)
    for row_block in range(1, 13):
        assert np.array_equal(ops.linear(x, weight, isa=isa, row_block=row_block), whole)
    for row in (0, 11, 23):
        assert np.array_equal(ops.linear(x[row : row + 1], weight, isa=isa)[0], whole[row])


@ISAS
@pytest.mark.parametrize("n", [16, 63, 64, 576, 1000])
def test_rms_norm(isa: Isa, n: int) -> None:
    x, w = normal(7, 5, n), normal(8, n)
    exact = torch.nn.functional.rms_norm(torch.from_numpy(x).double(), (n,), torch.from_numpy(w).double(), 1e-5)
    np.testing.assert_allclose(ops.rms_norm(x, w, 1e-5, isa=isa), exact.numpy(), rtol=1e-5, atol=1e-6)


@ISAS
def test_silu_mul(isa: Isa) -> None:
    special = np.array([0, -0.0, 1e-30, -1e-30, 60, -60, 88, -88, 127, -127, 500, -500, 1, -1, 20, -20], np.float32)
    gate = np.concatenate([special, 4 * normal(9, 1600)])
    up = normal(10, gate.size)
    exact = torch.nn.functional.silu(torch.from_numpy(gate).double()) * torch.from_numpy(up).double()
    np.testing.assert_allclose(ops.silu_mul(gate, up, isa=isa), exact.numpy(), rtol=3e-6, atol=1e-30)


@ISAS
@pytest.mark.parametrize("head_dim", [2, 16, 64, 80, 96, 128])
def test_rope(isa: Isa, head_dim: int) -> None:
    """A rotation of the plane (i, i + D/2): multiplication of complex numbers."""
    x = normal(11, 7, head_dim)
    angle = 10 * normal(12, 7, head_dim // 2)
    half = head_dim // 2
    turned = (x[:, :half] + 1j * x[:, half:].astype(np.complex128)) * np.exp(1j * angle.astype(np.float64))
    exact = np.concatenate([turned.real, turned.imag], axis=1)
    np.testing.assert_allclose(ops.rope(x, np.cos(angle), np.sin(angle), isa=isa), exact, rtol=1e-5, atol=3e-6)


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNIX_CPU_ISA", "sse9")
    with pytest.raises(ValueError, match="sse9"):
        ops.chosen_isa()
    monkeypatch.setenv("ATTNIX_CPU_ISA", "portable")
    assert ops.chosen_isa() is Isa.PORTABLE


@ISAS
@pytest.mark.parametrize("n", [1, 7, 16, 31, 300, 1024, 1031, 49152, 50257])
def test_log_sums(isa: Isa, n: int) -> None:
    """Against float64, with the largest in every kind of place; equal ones give the first."""
    x = normal(3, 6, n) * 5
    x[1, n - 1] = x[2, 0] = x[3, n // 2] = 40
    x[4] = -3
    x[5, : n // 2] = -np.inf
    sums, best = ops.log_sums(x, isa=isa)
    exact = torch.from_numpy(x).double()
    np.testing.assert_allclose(sums, exact.logsumexp(-1).numpy(), atol=3e-6)
    assert best.tolist() == [int(np.flatnonzero(row == row.max())[0]) for row in x]
    alone, _ = ops.log_sums(x[3:4], isa=isa)
    assert alone[0] == sums[3]
    assert ops.log_sums(x[:0], isa=isa)[0].size == 0


@ISAS
@pytest.mark.parametrize("n", [5, 16, 300, 1040])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_log_sums_of_what_is_not_finite(isa: Isa, n: int, value: float) -> None:
    for place in {0, n // 2, n - 1}:
        x = normal(4, 2, n)
        x[1, place] = value
        sums, _ = ops.log_sums(x, isa=isa)
        assert np.isfinite(sums[0]) and np.isnan(sums[1]), place
    assert np.isnan(ops.log_sums(np.full((1, n), -np.inf, np.float32), isa=isa)[0]).all()
