"""What every kernel must compute, in plain torch: slow, and clear.

Attention is given one sequence after another, one token after another, and gathers K and V by position; there is no
tile, no running maximum and no tensor that the kernels could share a mistake with.

`dtype` is the dtype of the arithmetic.  float32 or float64 is the truth; the dtype of `q` gives the reference of the same
dtype, whose error against the truth is the measure of a kernel's (flash-attention's rule: at most twice).
"""

from __future__ import annotations

import torch

from .shapes import Batch, Frames, PageTable, Rope


def rotate(x: torch.Tensor, position: int, rope: Rope) -> torch.Tensor:
    """x [..., D] turned on by `position` (negative: back), halves paired; in x's dtype, float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cosine, sine = rope.cosine[abs(position)].to(wide), rope.sine[abs(position)].to(wide)
    if position < 0:
        sine = -sine
    a, b = x.to(wide).chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


def gather(
    frames: Frames, pages: PageTable, slot: int, entries: int, *, layer: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Keys and values of a row in order of position, and each position's shift.

    ->  [n, Hkv, D] keys, [n, Hkv, D] values, n shifts
    """
    keys, values, shifts = [], [], []
    for e in range(entries):
        count = int(pages.count[slot, e])
        if count == 0:
            continue
        block = frames.kv[int(pages.frame[slot, e]), layer, :, :, :count].to(torch.promote_types(dtype, torch.float32))
        if frames.scale is not None:
            block = block * frames.scale[int(pages.frame[slot, e]), layer, :, :, :count, None]
        keys.append(block[0].transpose(0, 1).to(dtype))
        values.append(block[1].transpose(0, 1).to(dtype))
        shifts += [int(pages.shift[slot, e])] * count
    return torch.cat(keys), torch.cat(values), shifts


def paged_attention(
    q: torch.Tensor,
    frames: Frames,
    pages: PageTable,
    batch: Batch,
    *,
    layer: int,
    scale: float,
    rope: Rope | None = None,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of every query row over its sequence's KV; what paged_decode and paged_prefill compute.

    q       [T, Hq, D]            roped at their logical positions
    frames  [F, L, 2, Hkv, P, D]
    layer   which of L
    scale                         of the scores, 1/sqrt(D)
    rope                          needed when an entry has a shift: the query is turned back by it for that entry
    window                        positions that a token sees, itself included; 0: all before it
    ->      [T, Hq, D]  dtype     rows of no sequence are 0
    """
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    group = q.shape[1] // frames.kv_heads
    for b in range(batch.slot.numel()):
        entries, start = int(batch.entries[b]), int(batch.start[b])
        if entries == 0:
            continue
        keys, values, shifts = gather(frames, pages, int(batch.slot[b]), entries, layer=layer, dtype=dtype)
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        for t in range(int(batch.ntokens[b])):
            row, position = int(batch.row[b]) + t, start + t
            low = max(0, position + 1 - window) if window else 0
            scores = torch.empty(q.shape[1], position + 1 - low, dtype=dtype, device=q.device)
            for shift in set(shifts[low : position + 1]):
                turned = q[row].to(dtype) if shift == 0 else rotate(q[row].to(dtype), -shift, _given(rope)).to(dtype)
                run = torch.tensor([s == shift for s in shifts[low : position + 1]], device=q.device)
                scores[:, run] = torch.einsum("hd,nhd->hn", turned * scale, keys[low : position + 1][run])
            weights = scores.softmax(-1)
            out[row] = torch.einsum("hn,nhd->hd", weights, values[low : position + 1])
    return out


def _given(rope: Rope | None) -> Rope:
    if rope is None:
        raise ValueError("an entry has a shift, and no rotary tables were given")
    return rope


def quantise_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> int8 [..., D] and f32 scales [...]: x ~ int8 * scale, as the CPU engine's to_int8 does it.

    A row whose largest is below 1e-30 becomes 0 with scale 0; one with an infinity or NaN 0 with scale NaN.
    """
    x = x.float()
    peak = x.abs().amax(-1)
    bad, tiny = ~torch.isfinite(x).all(-1), peak < 1e-30
    factor = torch.where(bad | tiny, 0.0, 127.0 / peak)
    elements = torch.nan_to_num(x * factor[..., None]).round().clamp(-127, 127).to(torch.int8)
    elements = torch.where(bad[..., None], torch.zeros_like(elements), elements)
    return elements, torch.where(bad, torch.nan, torch.where(tiny, 0.0, peak / 127.0))


def quantise_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> e4m3 [..., D] and f32 scales [...]; the same rules, with 448, e4m3's largest, for 127."""
    x = x.float()
    peak = x.abs().amax(-1)
    bad, tiny = ~torch.isfinite(x).all(-1), peak < 1e-30
    factor = torch.where(bad | tiny, 0.0, 448.0 / peak)
    scaled = torch.where(bad[..., None], 0.0, torch.nan_to_num(x * factor[..., None])).clamp(-448, 448)
    return scaled.to(torch.float8_e4m3fn), torch.where(bad, torch.nan, torch.where(tiny, 0.0, peak / 448.0))


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """x [T, K] . weight [N, K]^T (+ bias [N]) -> [T, N] of dtype."""
    y = x.to(dtype) @ weight.to(dtype).T
    return y if bias is None else y + bias.to(dtype)
