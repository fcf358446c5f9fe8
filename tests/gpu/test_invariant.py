"""The invariant mode: a sequence's bits depend on nothing but the sequence.

Shown for attention with splits of 64 places instead of 1,024, so that short sequences have several, and for matmul.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnix.kernels_gpu import paged_decode as decode_module
from attnix.kernels_gpu import paged_prefill as prefill_module
from attnix.kernels_gpu import reference
from attnix.kernels_gpu.matmul import matmul
from attnix.kernels_gpu.paged_decode import paged_decode
from attnix.kernels_gpu.paged_prefill import paged_prefill
from attnix.kernels_gpu.shapes import KvDtype

from .pages import Paged, Run, Sequence_, chunk, only, paged, within

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decode_module, "INVARIANT_PLACES", 64)
    monkeypatch.setattr(prefill_module, "INVARIANT_PLACES", 64)
    yield


def options(p: Paged, window: int = 0) -> dict[str, Any]:
    return {"layer": 1, "scale": p.scale, "rope": p.rope, "window": window, "numerics": "invariant"}


def prefill(p: Paged, window: int = 0) -> torch.Tensor:
    return paged_prefill(p.q, p.frames, p.pages, p.batch, **options(p, window))


def decode(p: Paged, window: int = 0) -> torch.Tensor:
    return paged_decode(p.q, p.frames, p.pages, p.batch, **options(p, window))


@pytest.mark.parametrize(("kv_dtype", "window"), [("bfloat16", 0), ("int8", 0), ("float16", 40)])
def test_bits_do_not_depend_on_chunks_or_cache_hits_or_on_who_computes(kv_dtype: KvDtype, window: int) -> None:
    """100 tokens at once; in chunks; only the last ones, the rest being there already; and one by one as decode steps."""
    p = paged([Sequence_((Run(40), Run(20, 7), Run(40)), 100)], kv_dtype=kv_dtype, kv_heads=1, group=2, device=DEVICE)
    whole = prefill(p, window)
    for cuts in ((0, 1, 66, 100), (0, 48, 100)):
        parts = [prefill(chunk(p, 0, a, b), window) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole), cuts
    assert torch.equal(prefill(chunk(p, 0, 82, 100), window), whole[82:])
    for row in (0, 57, 99):
        assert torch.equal(decode(chunk(p, 0, row, row + 1), window), whole[row : row + 1]), row
    within(whole, p.true(window, p.q.dtype), p.true(window))


def test_bits_do_not_depend_on_the_batch() -> None:
    """Ten rows in a pass, and each alone, and in another order."""
    lengths = (70, 3, 16, 129, 40, 1, 64, 65, 90, 33)
    p = paged([Sequence_((Run(n),)) for n in lengths], kv_heads=1, group=1, device=DEVICE)
    together = decode(p)
    assert torch.equal(decode(only(p, [9, 3, 0])), together[[9, 3, 0]])
    for i in (0, 3, 9):
        assert torch.equal(decode(only(p, [i])), together[i : i + 1]), i


def test_bits_of_prefill_do_not_depend_on_the_batch() -> None:
    sequences = [Sequence_((Run(20, 5), Run(n - 20)), t) for n, t in ((70, 9), (33, 33), (90, 1))]
    p = paged(sequences, kv_heads=1, group=3, device=DEVICE)
    together = prefill(p)
    row = 0
    for i, sequence in enumerate(sequences):
        assert torch.equal(prefill(only(p, [i])), together[row : row + sequence.ntokens]), i
        row += sequence.ntokens


def test_the_control_another_value_gives_other_bits() -> None:
    p = paged([Sequence_((Run(130),))], kv_heads=1, group=1, device=DEVICE)
    before = decode(p)
    p.frames.kv[int(p.pages.frame[int(p.batch.slot[0]), 1]), 1, 1, 0, 0] *= -1
    assert not torch.equal(decode(p), before)


@settings(max_examples=10)
@given(
    rows=st.integers(1, 70),
    n=st.sampled_from([1, 64, 100]),
    k=st.sampled_from([8, 64, 200]),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_matmul(rows: int, n: int, k: int, dtype: torch.dtype, biased: bool, seed: int) -> None:
    x, weight, bias = _operands(rows, n, k, dtype, seed)
    true = reference.linear(x, weight, bias if biased else None, dtype=torch.float64)
    same = reference.linear(x, weight, bias if biased else None, dtype=dtype)
    within(
        matmul(x, weight, bias if biased else None),
        same,
        true,
        float((x.double().abs() @ weight.double().abs().T).max()),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_matmul_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight, _ = _operands(70, 80, 200, dtype, 0)
    together = matmul(x, weight)
    for rows in ([0], [69], [3, 64], list(range(17))):
        assert torch.equal(matmul(x[rows], weight), together[rows]), rows
    assert torch.equal(matmul(x.flip(0), weight), together.flip(0))


def test_repeats_of_matmul_are_equal_to_the_bit_in_any_order_of_programs(
    shuffled: Callable[[int], None], repeats: int
) -> None:
    sizes = (1000, 4000, 2048) if DEVICE.type == "cuda" else (70, 80, 64)
    x, weight, _ = _operands(*sizes, torch.bfloat16, 0)
    once = matmul(x, weight)
    for seed in range(repeats):
        shuffled(seed)
        assert torch.equal(matmul(x, weight), once)


def test_matmul_writes_wider_where_it_is_told() -> None:
    x, weight, _ = _operands(3, 16, 64, torch.bfloat16, 0)
    out = torch.empty(3, 16, dtype=torch.float32, device=DEVICE)
    assert matmul(x, weight, out=out) is out
    assert torch.equal(out.bfloat16(), matmul(x, weight))
    with pytest.raises(ValueError, match="by a weight"):
        matmul(x, weight.float())


def _operands(
    rows: int, n: int, k: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=draw) for shape in ((rows, k), (n, k), (n,))]
    x, weight, bias = (tensor.to(dtype).to(DEVICE) for tensor in made)
    return x, weight, bias
