"""RoPE of q and k and the write of k and v into their frames, in one pass over a layer's projections.

`Places` says once per pass, for all layers, where each query row's KV goes; it reads the page-table rows as they are.  A
program then takes a few heads of one row: query heads are rotated to the row's logical position, keys to the home position of
their entry (logical minus shift), and k and v are rounded or quantised on their way into the frame.  Halves are paired
(i, i + D/2) (arXiv 2104.09864).  Qwen3's RMSNorm of q and k heads is done in the same registers when weights are given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .lang import tl, triton
from .launch import architecture_of, has_fp8, launch
from .narrow import narrow, quantised, scales
from .shapes import Batch, Frames, PageTable, Rope

_TILE = 64  # rows that one program of `locate` looks up


@dataclass(frozen=True, slots=True)
class Places:
    """Where the KV of each query row of a pass goes.

    rows  [T, 4]  i32  hbm  frame (-1: nothing is written), offset in it, home position, logical position (-1: a row of no
                            sequence, which is left alone)
    """

    rows: torch.Tensor

    @classmethod
    def of(
        cls,
        pages: PageTable,
        batch: Batch,
        *,
        tokens: int,
        max_tokens: int,
        write_from: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> Places:
        """tokens      T, rows of the pass, those of no sequence among them
        max_tokens  at least the largest of batch.ntokens; the host knows it, so nothing waits for the device
        write_from  [B] i32  logical position below which nothing is written (it is there already); None: all is
        rows        memory to fill, [T, 4] i32 (a captured graph needs the same at each replay)
        """
        if rows is None:
            rows = torch.empty((tokens, 4), dtype=torch.int32, device=batch.slot.device)
        rows.fill_(-1)
        sequences = batch.slot.numel()
        if sequences and max_tokens:
            locate_kernel[(sequences, triton.cdiv(max_tokens, _TILE))](
                rows,
                pages.frame,
                pages.shift,
                batch.slot,
                batch.entries,
                batch.start,
                batch.ntokens,
                batch.row,
                batch.first,
                batch.start if write_from is None else write_from,
                pages.frame.stride(0),
                pages.shift.stride(0),
                batch.first.stride(0),
                batch.max_entries,
                STEPS=batch.max_entries.bit_length(),
                TILE=_TILE,
                num_warps=2,
            )
        return cls(rows)


@triton.jit
def locate_kernel(
    places, frame, shift, slot, entries, start, ntokens, row, first, write_from, frame_step, shift_step, first_step,
    width, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    count = tl.load(entries + sequence)
    there = token < tl.where(count > 0, tl.load(ntokens + sequence), 0)
    position = tl.load(start + sequence) + token
    begins = first + sequence.to(tl.int64) * first_step
    low = tl.zeros([TILE], tl.int32)  # the last entry that begins at or before the position: empty ones are passed over
    high = low + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        below = tl.load(begins + middle, mask=there & (low < high), other=0) <= position
        open_ = low < high
        low = tl.where(open_ & below, middle + 1, low)
        high = tl.where(open_ & (below == 0), middle, high)
    entry = tl.maximum(low - 1, 0)
    at = tl.load(slot + sequence).to(tl.int64)
    found = tl.load(frame + at * frame_step + entry, mask=there, other=-1)
    found = tl.where(position >= tl.load(write_from + sequence), found, -1)
    offset = position - tl.load(begins + entry, mask=there, other=0)
    home = position - tl.load(shift + at * shift_step + entry, mask=there, other=0)
    to = places + (tl.load(row + sequence) + token).to(tl.int64) * 4
    tl.store(to, found, mask=there)
    tl.store(to + 1, offset, mask=there)
    tl.store(to + 2, home, mask=there)
    tl.store(to + 3, position, mask=there)


@triton.jit
def _halves(x, weight, eps, head, head_step, heads, half, NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    """The two halves [HEADS, HALF] of some heads of a row, normalised when asked, in float32."""
    column = tl.arange(0, HALF)
    there = (head < heads)[:, None] & (column < half)[None, :]
    at = x + head[:, None] * head_step + column[None, :]
    a = tl.load(at, mask=there, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=there, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + eps)[:, None]
        a = a * factor * tl.load(weight + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
        b = b * factor * tl.load(weight + half + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
    return a, b


@triton.jit
def _rotated(a, b, cosine, sine, position, window, half, HALF: tl.constexpr):
    """Turned on by `position`, which may be negative.  Outside the tables: NaN, rather than a wrong angle."""
    column = tl.arange(0, HALF)
    row = tl.abs(position)
    known = column < tl.where(row < window, half, 0)
    unknown = tl.where(row < window, 0.0, float("nan"))
    c = tl.load(cosine + row.to(tl.int64) * half + column, mask=known, other=unknown)[None, :]
    s = tl.load(sine + row.to(tl.int64) * half + column, mask=known, other=unknown)[None, :]
    s = tl.where(position < 0, -s, s)
    return a * c - b * s, b * c + a * s


@triton.jit
def _put(
    a, b, kv, scale, head, heads, half, head_step, scale_head_step,
    SCALED: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Write some heads of one token into a plane of its frame."""
    column = tl.arange(0, HALF)
    there = (head < heads)[:, None] & (column < half)[None, :]
    at = kv + head[:, None] * head_step + column[None, :]
    if SCALED:
        large, other = tl.abs(a), tl.abs(b)
        lost = (a != a) | (b != b) | (large == float("inf")) | (other == float("inf"))  # a maximum may lose a NaN
        peak = tl.max(tl.maximum(large, other), 1)
        each, factor = scales(tl.where(tl.sum(lost.to(tl.int32), 1) > 0, float("nan"), peak), kv.dtype.element_ty)
        tl.store(scale + head * scale_head_step, each, mask=head < heads)
        tl.store(at, quantised(a, factor[:, None], kv.dtype.element_ty), mask=there)
        tl.store(at + half, quantised(b, factor[:, None], kv.dtype.element_ty), mask=there)
    else:
        tl.store(at, narrow(a, kv.dtype.element_ty), mask=there)
        tl.store(at + half, narrow(b, kv.dtype.element_ty), mask=there)


@triton.jit
def rope_write_kernel(
    q, k, v, out, kv, scale, places, cosine, sine, q_norm, k_norm, eps, window,
    q_heads, kv_heads, q_step, k_step, v_step, out_step, q_head_step, k_head_step, v_head_step, out_head_step,
    frame_step, plane_step, scale_frame_step, scale_plane_step, block_tokens, half,
    NORM: tl.constexpr, SCALED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(places + row * 4 + 3)
    column = tl.arange(0, HALF)
    parts = tl.cdiv(q_heads, HEADS)
    if (part < parts) & (position >= 0):
        head = part * HEADS + tl.arange(0, HEADS)
        a, b = _halves(q + row * q_step, q_norm, eps, head, q_head_step, q_heads, half, NORM, HEADS, HALF)
        a, b = _rotated(a, b, cosine, sine, position, window, half, HALF)
        there = (head < q_heads)[:, None] & (column < half)[None, :]
        at = out + row * out_step + head[:, None] * out_head_step + column[None, :]
        tl.store(at, narrow(a, out.dtype.element_ty), mask=there)
        tl.store(at + half, narrow(b, out.dtype.element_ty), mask=there)
    frame = tl.load(places + row * 4).to(tl.int64)
    if (part >= parts) & (frame >= 0):
        offset = tl.load(places + row * 4 + 1)
        home = tl.load(places + row * 4 + 2)
        head = (part - parts) * HEADS + tl.arange(0, HEADS)
        token = kv + frame * frame_step + offset * 2 * half
        token_scale = scale + frame * scale_frame_step + offset
        plane_heads = block_tokens * 2 * half
        a, b = _halves(k + row * k_step, k_norm, eps, head, k_head_step, kv_heads, half, NORM, HEADS, HALF)
        a, b = _rotated(a, b, cosine, sine, home, window, half, HALF)
        _put(a, b, token, token_scale, head, kv_heads, half, plane_heads, block_tokens, SCALED, HALF)
        a, b = _halves(v + row * v_step, k_norm, eps, head, v_head_step, kv_heads, half, False, HEADS, HALF)
        _put(
            a, b, token + plane_step, token_scale + scale_plane_step, head, kv_heads, half, plane_heads, block_tokens,
            SCALED, HALF,
        )  # fmt: skip


def rope_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    frames: Frames,
    places: Places,
    rope: Rope,
    *,
    layer: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate q, rotate k, write k and v into their frames.

    q       [T, Hq, D]             bf16, fp16, f32              hbm  rows and heads may be apart (views of one projection)
    k, v    [T, Hkv, D]            the same
    frames  [F, L, 2, Hkv, P, D]   f32, f16, bf16, int8, e4m3   hbm  written
    places                                                      hbm  of this pass
    rope    [W, D / 2]             f32                          hbm  W > every |position| and |home position|
    layer                                                            which of L
    q_norm, k_norm  [D]            weights of the heads' RMSNorm, both or none; eps: its epsilon
    out     [T, Hq, D]             of any of q's dtypes              None: in place
    ->      out, or q
    Error: at most 2x that of torch in the same dtype against float32.  Tested on: the interpreter.
    """
    y = q if out is None else out
    tokens, q_heads, dim = q.shape
    kv_heads = frames.kv_heads
    if k.shape != (tokens, kv_heads, dim) or v.shape != k.shape or y.shape != q.shape or frames.head_dim != dim:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit frames of {dim}")
    if any(tensor.stride(2) != 1 for tensor in (q, k, v, y)) or (q_norm is None) != (k_norm is None):
        raise ValueError("rope_write wants contiguous heads, and the norms of q and k both or not at all")
    if rope.cosine.shape[1] != dim // 2 or places.rows.shape != (tokens, 4):
        raise ValueError(f"tables of {2 * rope.cosine.shape[1]} or places of {len(places.rows)} rows do not fit")
    if frames.kv.dtype == torch.float8_e4m3fn and not has_fp8(q.device):
        raise ValueError("fp8 frames need compute capability 8.9 or later")
    if tokens == 0:
        return y
    how = launch("rope_write", architecture_of(q.device), dim, frames.block_tokens)
    kv = frames.kv[:, layer]
    scale = None if frames.scale is None else frames.scale[:, layer]
    steps = (1, 1) if scale is None else (scale.stride(0), scale.stride(1))
    heads = min(how.block_m, triton.next_power_of_2(max(q_heads, kv_heads)))
    rope_write_kernel[(tokens, triton.cdiv(q_heads, heads) + triton.cdiv(kv_heads, heads))](
        q, k, v, y, kv, rope.cosine if scale is None else scale, places.rows, rope.cosine, rope.sine,
        rope.cosine if q_norm is None else q_norm, rope.cosine if k_norm is None else k_norm, eps, rope.cosine.shape[0],
        q_heads, kv_heads, q.stride(0), k.stride(0), v.stride(0), y.stride(0),
        q.stride(1), k.stride(1), v.stride(1), y.stride(1),
        kv.stride(0), kv.stride(1), *steps, frames.block_tokens, dim // 2,
        NORM=q_norm is not None, SCALED=scale is not None, HEADS=heads, HALF=triton.next_power_of_2(dim // 2),
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    return y
