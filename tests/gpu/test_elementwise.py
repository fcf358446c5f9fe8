"""rmsnorm and silu_mul against plain torch: at most twice the error of the same dtype against float64; rows of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnix.kernels_gpu import reference_ops as reference
from attnix.kernels_gpu.rmsnorm import rmsnorm
from attnix.kernels_gpu.silu_mul import silu_mul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
shapes = st.tuples(st.integers(1, 5), st.sampled_from([1, 3, 16, 96, 128, 576, 1000]))


def drawn(rows: int, n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, n, generator=generator) * 3).to(dtype).to(DEVICE)


def within(got: torch.Tensor, same: torch.Tensor, true: torch.Tensor) -> None:
    """flash-attention's rule, and on top of it what a result may be off by where the reference is exact by luck: two units in
    the last place of the largest number in float32, where there are several roundings; one of few elements in the others."""
    units = 2 if same.dtype == torch.float32 else 1 if true.numel() < 64 else 1 / 4
    floor = float(true.abs().max()) * torch.finfo(same.dtype).eps * units
    assert float((got.double() - true).abs().max()) <= 2 * float((same.double() - true).abs().max()) + floor


@settings(max_examples=25, derandomize=True)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_rmsnorm(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    x, weight = drawn(*shape, dtype, seed), drawn(1, shape[1], dtype, seed + 100)[0]
    true = reference.rmsnorm(x.double(), weight.double(), EPS)
    within(rmsnorm(x, weight, EPS), reference.rmsnorm(x, weight, EPS), true)


@settings(max_examples=25, derandomize=True)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), wide=st.booleans(), seed=st.integers(0, 99))
def test_rmsnorm_adds_the_residual_first_and_leaves_it(
    shape: tuple[int, int], dtype: torch.dtype, wide: bool, seed: int
) -> None:
    x, weight = drawn(*shape, dtype, seed), drawn(1, shape[1], dtype, seed + 100)[0]
    residual = drawn(*shape, torch.float32 if wide else dtype, seed + 200)
    total = (x.float() + residual.float()).to(residual.dtype)
    got = rmsnorm(x, weight, EPS, residual=residual)
    assert torch.equal(residual, total)
    same = reference.rmsnorm(total.to(dtype), weight, EPS)
    within(got, same, reference.rmsnorm(total.double(), weight.double(), EPS))


@settings(max_examples=25, derandomize=True)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    gate_up = drawn(shape[0], 2 * shape[1], dtype, seed)
    within(silu_mul(gate_up), reference.silu_mul(gate_up), reference.silu_mul(gate_up.double()))


def test_the_norm_takes_rows_that_are_apart_and_may_write_over_its_input() -> None:
    both = drawn(4, 192, torch.float32, 7)
    x, weight = both[:, 64:160], drawn(1, 96, torch.float32, 8)[0]
    want, beside = reference.rmsnorm(x, weight, EPS), both[:, 160:].clone()
    assert rmsnorm(x, weight, EPS, out=x) is x
    assert torch.allclose(x, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(both[:, 160:], beside)


def test_a_row_is_the_same_to_the_bit_whatever_its_company() -> None:
    x, weight = drawn(6, 576, torch.bfloat16, 1), drawn(1, 576, torch.bfloat16, 2)[0]
    gate_up = drawn(6, 2000, torch.bfloat16, 3)
    norm, gated = rmsnorm(x, weight, EPS), silu_mul(gate_up)
    for row in range(6):
        assert torch.equal(rmsnorm(x[row : row + 1], weight, EPS)[0], norm[row])
        assert torch.equal(silu_mul(gate_up[row : row + 1])[0], gated[row])


def test_repeats_in_any_order_of_programs_are_bit_equal(shuffled: Callable[[int], None], repeats: int) -> None:
    x, weight = drawn(3, 96, torch.bfloat16, 1), drawn(1, 96, torch.bfloat16, 2)[0]
    gate_up, residual = drawn(2, 3000, torch.bfloat16, 3), drawn(3, 96, torch.bfloat16, 4)
    want, gated, added = rmsnorm(x, weight, EPS), silu_mul(gate_up), residual.clone()
    want_added = rmsnorm(x, weight, EPS, residual=added)
    for seed in range(repeats):
        shuffled(seed)
        again = residual.clone()
        assert torch.equal(rmsnorm(x, weight, EPS), want)
        assert torch.equal(silu_mul(gate_up), gated)
        assert torch.equal(rmsnorm(x, weight, EPS, residual=again), want_added)
        assert torch.equal(again, added)


def test_what_does_not_fit_is_refused() -> None:
    x = drawn(2, 8, torch.float32, 0)
    with pytest.raises(ValueError, match="weight"):
        rmsnorm(x, x[0, :4], EPS)
    with pytest.raises(ValueError, match="residual"):
        rmsnorm(x, x[0], EPS, residual=x[:1])
    with pytest.raises(ValueError, match="gate"):
        silu_mul(x[:, :7])
