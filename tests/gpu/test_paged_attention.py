"""paged_decode and paged_prefill against plain torch: at most twice the error of the same dtype against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnix.kernels_gpu.paged_decode import decode_workspace, paged_decode
from attnix.kernels_gpu.paged_prefill import paged_prefill
from attnix.kernels_gpu.shapes import KvDtype, Launch, Numerics

from .pages import Paged, Run, Sequence_, only, paged, within

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES: list[KvDtype] = ["bfloat16", "float16", "float32", "int8", "float8_e4m3"]
SMALL = Launch(block_m=32, block_n=16, warps=4, stages=2, programs=1)  # many tiles in few tokens

runs = st.builds(
    Run, st.integers(1, 24), st.sampled_from([0, 0, 0, 7, -40, 1900]), st.sampled_from([0, 0, 0, 5]), st.sampled_from([0, 0, 0, 1, 2])
)  # fmt: skip
contexts = st.lists(runs, min_size=1, max_size=3).map(tuple)


@st.composite
def sequences(draw: st.DrawFn, most: int) -> Sequence_:
    context = draw(contexts)
    tokens = sum(run.tokens for run in context)
    unseen = draw(st.sampled_from([0, 0, 1, 20])) % tokens
    return Sequence_(context, draw(st.integers(1, min(most, tokens - unseen))), unseen)


def batches(most: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "sequences": st.lists(sequences(most), min_size=1, max_size=3),
            "kv_dtype": st.sampled_from(DTYPES),
            "head_dim": st.sampled_from([64, 64, 96, 128, 256]),
            "block_tokens": st.sampled_from([16, 32, 64]),
            "kv_heads": st.integers(1, 2),
            "group": st.sampled_from([1, 2, 3, 7, 17, 32]),  # from 17 on decode's tile has 32 rows
            "seed": st.integers(0, 99),
        }
    )


def attend(kernel: Callable[..., torch.Tensor], p: Paged, window: int = 0, **options: Any) -> torch.Tensor:
    return kernel(p.q, p.frames, p.pages, p.batch, layer=1, scale=p.scale, rope=p.rope, window=window, **options)


def judge(got: torch.Tensor, p: Paged, window: int = 0) -> None:
    within(got, p.true(window, p.q.dtype), p.true(window))


@settings(max_examples=12)
@given(batch=batches(1), window=st.sampled_from([0, 0, 1, 17]), numerics=st.sampled_from(["fast", "invariant"]))
def test_decode(batch: dict[str, Any], window: int, numerics: Numerics) -> None:
    p = paged(**batch, device=DEVICE)
    judge(attend(paged_decode, p, window, numerics=numerics, launch=SMALL), p, window)


@settings(max_examples=8)
@given(batch=batches(12), window=st.sampled_from([0, 0, 1, 17]), numerics=st.sampled_from(["fast", "invariant"]))
def test_prefill(batch: dict[str, Any], window: int, numerics: Numerics) -> None:
    p = paged(**batch, device=DEVICE)
    judge(attend(paged_prefill, p, window, numerics=numerics, launch=SMALL), p, window)


@pytest.mark.parametrize(
    ("head_dim", "block_tokens", "kv_dtype"),
    [
        (64, 64, "float16"),
        (96, 16, "bfloat16"),
        (96, 32, "int8"),
        (128, 256, "bfloat16"),
        (128, 128, "float8_e4m3"),
        (256, 16, "float32"),
    ],
)
@pytest.mark.parametrize("kernel", [paged_decode, paged_prefill])
def test_every_head_dim_and_block_size(
    kernel: Callable[..., torch.Tensor], head_dim: int, block_tokens: int, kv_dtype: KvDtype
) -> None:
    """With the launch table's own tiles."""
    n = 1 if kernel is paged_decode else 3
    p = paged(
        [Sequence_((Run(20, 3), Run(2 * block_tokens)), n)], kv_dtype=kv_dtype, head_dim=head_dim, block_tokens=block_tokens, kv_heads=1, device=DEVICE
    )  # fmt: skip
    judge(attend(kernel, p), p)


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_decode_shares_end_anywhere(programs: int) -> None:
    """Shares of 3, 6 and 15 programs begin and end within heads, and one head is cut more than once."""
    p = paged([Sequence_((Run(n),)) for n in (70, 1, 33)], kv_heads=2, group=1, device=DEVICE)
    launch = Launch(16, 16, 4, 2, programs)
    judge(attend(paged_decode, p, launch=launch), p)


def test_a_place_kept_free_in_a_bucket_is_left_alone() -> None:
    p = paged([Sequence_((Run(20),)), Sequence_((Run(9),)), Sequence_((Run(40),))], device=DEVICE)
    whole = p.true()
    p.batch.entries[1] = 0
    for kernel in (paged_decode, paged_prefill):
        out = torch.full_like(p.q, 5.0)
        assert attend(kernel, p, out=out, launch=SMALL) is out
        assert (out[1] == 5).all()
        within(out[[0, 2]], p.true(dtype=p.q.dtype)[[0, 2]], whole[[0, 2]])


def test_decode_takes_a_workspace_and_says_when_it_is_small() -> None:
    p = paged([Sequence_((Run(50),))], device=DEVICE)
    needed = decode_workspace(p.frames, p.batch, p.q.shape[1], launch=SMALL)
    workspace = torch.full((needed,), torch.nan, device=DEVICE)
    judge(attend(paged_decode, p, launch=SMALL, workspace=workspace), p)
    with pytest.raises(ValueError, match="workspace"):
        attend(paged_decode, p, launch=SMALL, workspace=workspace[1:])


@pytest.mark.parametrize("kernel", [paged_decode, paged_prefill])
def test_every_mapped_token_counts_and_no_other(kernel: Callable[..., torch.Tensor]) -> None:
    """The control of every test that compares outputs: another key or value in a mapped block is another output."""
    p = paged([Sequence_((Run(16), Run(16, 5), Run(7)))], kv_heads=1, device=DEVICE)
    before = attend(kernel, p, launch=SMALL)
    slot = int(p.batch.slot[0])
    for entry in range(3):
        block = p.frames.kv[int(p.pages.frame[slot, entry]), 1]
        for plane in range(2):
            kept = block[plane, 0, 2].clone()
            block[plane, 0, 2] = -block[plane, 0, 2]
            assert not torch.equal(attend(kernel, p, launch=SMALL), before), (entry, plane)
            block[plane, 0, 2] = kept
    p.frames.kv[:, 0] = 3.0  # the other layer
    p.frames.kv[int(p.pages.frame[slot, 2]), 1, :, :, 7:] = 3.0  # past the count
    assert torch.equal(attend(kernel, p, launch=SMALL), before)


def test_a_shift_turns_the_query() -> None:
    p = paged([Sequence_((Run(16, 5), Run(9)))], kv_heads=1, device=DEVICE)
    moved = attend(paged_decode, p, launch=SMALL)
    p.pages.shift.zero_()
    assert not torch.equal(attend(paged_decode, p, launch=SMALL), moved)


@pytest.mark.parametrize("numerics", ["fast", "invariant"])
@pytest.mark.parametrize("kernel", [paged_decode, paged_prefill])
def test_repeats_are_equal_to_the_bit_in_any_order_of_programs(
    kernel: Callable[..., torch.Tensor], numerics: Numerics, shuffled: Callable[[int], None], repeats: int
) -> None:
    """On a device with as much to do as it has programs, so that they do run at once, and with the table's own tiles."""
    if DEVICE.type == "cuda":
        new = 1 if kernel is paged_decode else 200
        sequences, heads, launch = [Sequence_((Run(2048 - 83 * n),), new) for n in range(20)], (8, 4), None
    else:
        sequences, heads, launch = [Sequence_((Run(50),)), Sequence_((Run(9),))], (1, 1), Launch(16, 16, 4, 2, 2)
    p = paged(sequences, kv_heads=heads[0], group=heads[1], head_dim=128 if launch is None else 64, device=DEVICE)
    once = attend(kernel, p, numerics=numerics, launch=launch)
    for seed in range(repeats):
        shuffled(seed)
        assert torch.equal(attend(kernel, p, numerics=numerics, launch=launch), once)


def test_what_the_kernels_cannot_do_is_refused() -> None:
    p = paged([Sequence_((Run(9),))], device=DEVICE)
    with pytest.raises(ValueError, match="query heads"):
        paged_decode(p.q[:, :3], p.frames, p.pages, p.batch, layer=1, scale=1.0)
    with pytest.raises(ValueError, match="head_dim"):
        paged_prefill(p.q[..., :32], p.frames, p.pages, p.batch, layer=1, scale=1.0)


def test_a_batch_of_some_is_part_of_the_batch_of_all() -> None:
    """`only`, which the invariance tests rest on, picks what it says."""
    p = paged([Sequence_((Run(20),), 2), Sequence_((Run(30),), 3)], device=DEVICE)
    assert torch.equal(only(p, [1]).true(), p.true()[2:])
