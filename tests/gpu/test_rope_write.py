"""rope_write against plain torch over ragged batches, shifts, partial blocks, head norms and every dtype of KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from attnix.kernels_gpu import reference, reference_ops
from attnix.kernels_gpu.rope_write import Places, rope_write
from attnix.kernels_gpu.shapes import ELEMENTS, SCALED, Batch, Frames, KvDtype, PageTable, Rope

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BASE = 10_000.0
WINDOW = 160
EPS = 1e-6


class Where(NamedTuple):
    """Of one query row: its frame (-1: not written), offset, home and logical position."""

    frame: int
    offset: int
    home: int
    position: int


@dataclass(frozen=True)
class Pass:
    """A ragged batch; `where` was worked out token by token, from the entries."""

    frames: Frames
    pages: PageTable
    batch: Batch
    write_from: torch.Tensor
    where: list[Where]
    max_tokens: int


def tensor(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def frames_of(kv_dtype: KvDtype, n: int, heads: int, block: int, dim: int) -> Frames:
    width = dim * ELEMENTS[kv_dtype].itemsize + (4 if kv_dtype in SCALED else 0)
    arena = torch.full((n, 2 * 2 * heads * block * width), 0xA5, dtype=torch.uint8, device=DEVICE)
    return Frames.over(arena, kv_dtype, layers=2, kv_heads=heads, block_tokens=block, head_dim=dim)


@st.composite
def passes(draw: st.DrawFn, kv_dtype: KvDtype, heads: int, block: int, dim: int) -> Pass:
    sequences = draw(st.integers(1, 2))
    slots, width = 4, 4
    frame, shift, count = ([[fill] * width for _ in range(slots)] for fill in (-1, 0, 0))
    free = draw(st.permutations(range(sequences * width)))
    where: list[Where] = []
    slot, entries, start, ntokens, write_from = [], [], [], [], []
    taken = draw(st.permutations(range(slots)))
    for number in range(sequences):
        row, n = taken[number], draw(st.integers(1, 3))
        tokens: list[Where] = []
        for e in range(n):
            last = e == n - 1
            held = draw(st.integers(1, block) if last else st.sampled_from([block, block, 0, block // 2]))
            moved = draw(st.sampled_from([0, 0, 3, -5]))
            frame[row][e], count[row][e], shift[row][e] = free.pop(), held, moved
            for offset in range(held):
                position = len(tokens)
                tokens.append(Where(frame[row][e], offset, position - moved, position))
        begin = draw(st.integers(0, len(tokens) - 1))
        first_written = draw(st.sampled_from([0, begin, len(tokens) - 1]))
        slot.append(row)
        entries.append(n)
        start.append(begin)
        ntokens.append(len(tokens) - begin)
        write_from.append(first_written)
        where += [t if t.position >= first_written else t._replace(frame=-1) for t in tokens[begin:]]
    pages = PageTable(tensor(frame), tensor(shift), tensor(count, torch.int16))
    batch = Batch.of(pages, tensor(slot), tensor(entries), tensor(start), tensor(ntokens), max_entries=width)
    frames = frames_of(kv_dtype, sequences * width, heads, block, dim)
    return Pass(frames, pages, batch, tensor(write_from), where, max(ntokens))


def rope_of(dim: int) -> tuple[Rope, torch.Tensor]:
    frequencies = 1.0 / BASE ** (torch.arange(0, dim, 2) / dim)
    made = Rope.of(frequencies, WINDOW)
    return Rope(made.cosine.to(DEVICE), made.sine.to(DEVICE)), frequencies


def expected(
    x: torch.Tensor, positions: list[int], frequencies: torch.Tensor, norm: torch.Tensor | None
) -> torch.Tensor:
    if norm is not None:
        x = reference_ops.rmsnorm(x, norm.to(x.dtype), EPS)
    return reference_ops.rope(x, torch.tensor(positions), frequencies)


def within(got: torch.Tensor, same: torch.Tensor, true: torch.Tensor) -> None:
    """flash-attention's rule.  The floor is two roundings of the float32 in which the kernel computes: by luck torch may
    make none where there is little to do (position 0 turns nothing)."""
    floor = 2 * float(true.abs().max()) * torch.finfo(torch.float32).eps
    error, theirs = float((got.double() - true).abs().max()), float((same.double() - true).abs().max())
    assert error <= 2 * theirs + floor, (error, theirs, floor, same.dtype)


def stored(frames: Frames, at: Where, plane: int) -> torch.Tensor:
    """[Hkv, D] as attention reads it."""
    kv = frames.kv[at.frame, 1, plane, :, at.offset].double().cpu()
    return kv if frames.scale is None else kv * frames.scale[at.frame, 1, plane, :, at.offset, None].double().cpu()


def round_trip(x: torch.Tensor, kv_dtype: KvDtype) -> torch.Tensor:
    """What plain torch would keep of x in that dtype."""
    if kv_dtype in SCALED:
        kept, scale = (reference.quantise_int8 if kv_dtype == "int8" else reference.quantise_fp8)(x.float())
        return kept.float() * scale[..., None]
    return x.to(ELEMENTS[kv_dtype])


@pytest.mark.parametrize("kv_dtype", sorted(ELEMENTS))
def test_rope_write(kv_dtype: KvDtype) -> None:
    @settings(max_examples=5, phases=[Phase.generate])  # shrinking here takes minutes
    @given(
        data=st.data(),
        shape=st.sampled_from([(1, 1, 16, 64), (4, 2, 16, 96), (3, 3, 32, 128), (2, 1, 16, 256)]),
        activations=st.sampled_from([torch.float32, torch.bfloat16]),
        normed=st.booleans(),
        seed=st.integers(0, 99),
    )
    def check(
        data: st.DataObject, shape: tuple[int, int, int, int], activations: torch.dtype, normed: bool, seed: int
    ) -> None:
        q_heads, heads, block, dim = shape
        p = data.draw(passes(kv_dtype, heads, block, dim))
        rope, frequencies = rope_of(dim)
        spare = 2  # rows of no sequence, as in a bucket of a captured graph
        tokens = len(p.where) + spare
        generator = torch.Generator().manual_seed(seed)
        qkv = torch.randn(tokens, (q_heads + 2 * heads) * dim, generator=generator).to(activations)
        weights = torch.randn(2, dim, generator=generator).to(activations) if normed else None
        q, k, v = qkv.view(tokens, -1, dim).split([q_heads, heads, heads], 1)
        on_device = qkv.to(DEVICE, copy=True)
        dq, dk, dv = on_device.view(tokens, -1, dim).split([q_heads, heads, heads], 1)
        norms = (None, None) if weights is None else (weights[0], weights[1])
        given_norms = [None if norm is None else norm.to(DEVICE) for norm in norms]
        before = p.frames.kv.view(torch.uint8).clone()
        places = Places.of(p.pages, p.batch, tokens=tokens, max_tokens=p.max_tokens, write_from=p.write_from)
        assert [Where(*row) for row in places.rows.tolist()[: len(p.where)]] == [
            at if at.frame >= 0 else at._replace(frame=-1) for at in p.where
        ]
        assert places.rows[len(p.where) :].eq(-1).all()
        out = rope_write(
            dq, dk, dv, p.frames, places, rope, layer=1, q_norm=given_norms[0], k_norm=given_norms[1], eps=EPS
        )
        assert out is dq

        real = len(p.where)
        positions, homes = [at.position for at in p.where], [at.home for at in p.where]
        within(
            out[:real].cpu(),
            expected(q[:real], positions, frequencies, norms[0]),
            expected(q[:real].double(), positions, frequencies, norms[0]),
        )
        assert torch.equal(out[real:].cpu(), q[real:])
        true_k = expected(k[:real].double(), homes, frequencies, norms[1])
        same_k = round_trip(expected(k[:real], homes, frequencies, norms[1]), kv_dtype)
        same_v = round_trip(v[:real], kv_dtype)
        written = [n for n, at in enumerate(p.where) if at.frame >= 0]
        if written:
            keys = torch.stack([stored(p.frames, p.where[n], 0) for n in written])
            values = torch.stack([stored(p.frames, p.where[n], 1) for n in written])
            within(keys, same_k[written], true_k[written])
            within(values, same_v[written], v[:real].double()[written])
        after = p.frames.kv.view(torch.uint8).clone()
        for n in written:  # nothing else was touched, in this layer or the other
            at = p.where[n]
            after[at.frame, 1, :, :, at.offset] = before[at.frame, 1, :, :, at.offset]
        assert torch.equal(after, before)

    check()


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_spoils_the_scale_of_its_head_alone(kv_dtype: KvDtype, poison: float) -> None:
    p, q, k, v, places, rope = small(kv_dtype)
    v[1, 0, 5] = poison
    v[1, 1] = 0.0
    rope_write(q, k, v, p, places, rope, layer=1)
    assert p.scale is not None
    assert p.scale[0, 1, 1, 0, 1].isnan() and p.scale[0, 1, 0, 0, 1].isfinite()
    assert p.scale[0, 1, 1, 1, 1] == 0 and p.kv[0, 1, 1, 1, 1].float().eq(0).all()


def test_an_angle_outside_the_tables_is_nan_and_no_other_angle() -> None:
    p, q, k, v, places, rope = small("float32")
    short = Rope(rope.cosine[:2], rope.sine[:2])
    rope_write(q, k, v, p, places, short, layer=1)
    assert q[:2].isfinite().all() and q[2:].isnan().all()


def test_repeats_in_any_order_of_programs_are_bit_equal(shuffled: Callable[[int], None], repeats: int) -> None:
    p, q, k, v, places, rope = small("int8")
    assert p.scale is not None
    out = torch.empty_like(q)
    rope_write(q, k, v, p, places, rope, layer=1, out=out)
    want, kv, scale = out.clone(), p.kv.clone(), p.scale.clone()
    for seed in range(repeats):
        shuffled(seed)
        p.kv[0], p.scale[0] = 0, 0
        rope_write(q, k, v, p, places, rope, layer=1, out=out)
        assert torch.equal(out, want)
        assert torch.equal(p.kv[0, 1, :, :, :3], kv[0, 1, :, :, :3])
        assert torch.equal(p.scale[0, 1, :, :, :3], scale[0, 1, :, :, :3])


def small(kv_dtype: KvDtype) -> tuple[Frames, torch.Tensor, torch.Tensor, torch.Tensor, Places, Rope]:
    """Three tokens at the beginning of a context of one block."""
    dim, heads = 64, 2
    frames = frames_of(kv_dtype, 1, heads, 16, dim)
    pages = PageTable(tensor([[0]]), tensor([[0]]), tensor([[3]], torch.int16))
    batch = Batch.of(pages, tensor([0]), tensor([1]), tensor([0]), tensor([3]), max_entries=1)
    places = Places.of(pages, batch, tokens=3, max_tokens=3)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, n, dim, generator=generator).to(DEVICE) for n in (4, heads, heads))
    return frames, q, k, v, places, rope_of(dim)[0]
