"""Attention of chunks of new tokens over cached and new KV, causal, ragged over the batch.

One program is a tile of query rows (tokens x the query heads of one KV head) of one sequence, so K and V are read once per
KV head and tile.  Tiles of all sequences stand in one line; a program finds its own by the lengths on the device, so the
host waits for nothing.  Long tiles come first.

What the invariant mode needs, and how it gets it.  A row's bits must not depend on the batch, on where chunks begin and end,
or on whether its prefix was found or computed; KV that a decode step wrote must equal what a prefill would write.  So:
every row meets the same tiles of places (multiples of BLOCK_N from place 0) and the same splits (multiples of
INVARIANT_PLACES), each split begins a fresh softmax state, states are merged one by one in order by the one function
`attend.merged`, the tile shape, warps and hence instructions are the same whatever the chunk, for decode too; other
rows of a tile and places that a row does not see change none of its bits (attend.py).  Decode may share the splits out over
programs, because a merge of stored states is the same arithmetic.  Places are those of the page table: a context
with holes in it (`map`, `cut`) has bits of its own.
"""

import torch

from .attend import FLOOR, attend_range, finished, merged
from .lang import tl, triton
from .shapes import Batch, Frames, Launch, Numerics, PageTable, Rope
from .tiles import INVARIANT_PLACES, checked, compute_type, invariant_launch, padded, prefill_launch


@triton.jit(do_not_specialize=["layer", "sequences"])
def prefill_tiles(
    q_ptr,
    out_ptr,
    kv_ptr,
    scale_ptr,
    frame_ptr,
    shift_ptr,
    slot_ptr,
    entries_ptr,
    start_ptr,
    ntokens_ptr,
    row_ptr,
    first_ptr,
    cosine_ptr,
    sine_ptr,
    layer,
    sequences,
    qk_scale,
    q_stride,
    q_head_stride,
    out_stride,
    kv_stride,
    kv_layer_stride,
    scale_stride,
    scale_layer_stride,
    table_stride,
    first_stride,
    B: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    SHIFTED: tl.constexpr,
    INVARIANT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Tile program_id // HKV of the line of tiles, for KV head program_id % HKV."""
    head = tl.program_id(0) % HKV
    tile = tl.program_id(0) // HKV
    every = tl.arange(0, B)
    lengths = tl.load(ntokens_ptr + every, mask=every < sequences, other=0)
    present = tl.load(entries_ptr + every, mask=every < sequences, other=0)
    tiles = tl.where(present > 0, tl.cdiv(lengths * G, M), 0)
    after = tl.cumsum(tiles, 0)
    b = tl.sum((after <= tile).to(tl.int32), 0)
    if b < sequences:
        begin = (tl.sum(tl.where(every == b, after, 0), 0) - 1 - tile) * M  # the sequence's last tile first
        ntokens = tl.load(ntokens_ptr + b)
        start = tl.load(start_ptr + b)
        entries = tl.load(entries_ptr + b)
        tokens = tl.load(first_ptr + b.to(tl.int64) * first_stride + entries)

        r = begin + tl.arange(0, M)
        row_ok = r < ntokens * G
        position = start + r // G
        oldest_row = start + begin // G
        newest_row = start + tl.minimum(ntokens - 1, (begin + M - 1) // G)
        # every token after the newest takes at least a place: no search for where it lies
        high = entries * P - (tokens - 1 - newest_row)
        low = 0
        if WINDOW > 0:
            low = tl.minimum(tl.maximum(oldest_row + 1 - WINDOW, 0), high)
        oldest = low
        full = (oldest_row + 1) // BLOCK_N * BLOCK_N  # a place never lies before its position

        row = tl.load(row_ptr + b).to(tl.int64) + r // G
        query_head = head * G + r % G
        row_at = row * q_stride + query_head * q_head_stride
        table = tl.load(slot_ptr + b).to(tl.int64) * table_stride
        k_ptr = kv_ptr + layer.to(tl.int64) * kv_layer_stride + head * (P * D)
        v_ptr = k_ptr + HKV * P * D
        k_scale_ptr = scale_ptr + layer.to(tl.int64) * scale_layer_stride + head * P
        v_scale_ptr = k_scale_ptr + HKV * P
        first_row = first_ptr + b.to(tl.int64) * first_stride
        if INVARIANT:
            acc = tl.zeros([M, DP], tl.float32)
            m = tl.full([M], FLOOR, tl.float32)
            l = tl.zeros([M], tl.float32)
            for split in range(low // SPLIT, tl.cdiv(high, SPLIT)):
                split_low = tl.maximum(split * SPLIT, low)
                split_high = tl.minimum(split * SPLIT + SPLIT, high)
                part, part_m, part_l = attend_range(
                    q_ptr, row_at, row_ok, position, oldest, newest_row, split_low, full, split_high, qk_scale,
                    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, frame_ptr + table, shift_ptr + table, first_row, kv_stride, scale_stride, cosine_ptr, sine_ptr,
                    M, D, DP, P, BLOCK_N, WINDOW, SCALED, SHIFTED, True, COMPUTE,
                )  # fmt: skip
                acc, m, l = merged(acc, m, l, part, part_m, part_l)
        else:
            acc, m, l = attend_range(
                q_ptr, row_at, row_ok, position, oldest, newest_row, low, full, high, qk_scale,
                k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, frame_ptr + table, shift_ptr + table, first_row, kv_stride, scale_stride, cosine_ptr, sine_ptr,
                M, D, DP, P, BLOCK_N, WINDOW, SCALED, SHIFTED, True, COMPUTE,
            )  # fmt: skip
        d = tl.arange(0, DP)
        to = out_ptr + (row * out_stride + query_head * D)[:, None] + d[None, :]
        tl.store(to, finished(acc, l, out_ptr.dtype.element_ty), mask=row_ok[:, None] & (d < D)[None, :])


def paged_prefill(
    q: torch.Tensor,
    frames: Frames,
    pages: PageTable,
    batch: Batch,
    *,
    layer: int,
    scale: float,
    rope: Rope | None = None,
    window: int = 0,
    numerics: Numerics = "fast",
    launch: Launch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Chunked prefill over paged KV that already holds the chunk's own keys and values.  FlashAttention-2 (arXiv 2307.08691).

    q       [T, Hq, D]            bf16  hbm  f16, f32 too; roped; sequence b has rows row[b] .. row[b] + ntokens[b]
    frames  [F, L, 2, Hkv, P, D]  bf16  hbm  or that of q's dtype, f32, f16, int8, e4m3
    pages   [S, N]                      hbm  the kernel's rows
    batch   [B]                         hbm  any ntokens >= 0
    rope    [W, D / 2]            f32   hbm  None: the caller knows that no entry has a shift
    window  int                              positions that a token sees, itself included; 0: all
    launch                                   None: the table's row; ignored in invariant mode
    out     [T, Hq, D]            q's   hbm  contiguous; None: zeros, allocated here.  Rows of no sequence are left alone
    ->      out
    Requires: Hq % Hkv == 0, at most 32 query heads per KV head, D in HEAD_DIMS, P in BLOCK_TOKENS.
    Error: at most 2x that of the reference in q's dtype against float32.  Tested on: triton's interpreter.
    """
    group, head_dim = checked(q, frames, batch)
    launch = (launch or prefill_launch(q.device, frames)) if numerics == "fast" else invariant_launch(frames)
    if out is None:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    scales = frames.scale
    unused = batch.first  # stands where a kernel without scales, or without shifts, reads nothing
    tiles = q.shape[0] * group // launch.block_m + batch.slot.numel()  # at least as many as there are
    prefill_tiles[(tiles * frames.kv_heads,)](
        q, out, frames.kv, unused if scales is None else scales, pages.frame, pages.shift,
        batch.slot, batch.entries, batch.start, batch.ntokens, batch.row, batch.first,
        unused if rope is None else rope.cosine, unused if rope is None else rope.sine,
        layer, batch.slot.numel(), scale * 1.4426950408889634,
        q.stride(0), q.stride(1), out.stride(0), frames.kv.stride(0), frames.kv.stride(1),
        0 if scales is None else scales.stride(0), 0 if scales is None else scales.stride(1),
        pages.frame.stride(0), batch.first.stride(0),
        B=padded(batch.slot.numel(), 16), HKV=frames.kv_heads, G=group, M=launch.block_m, D=head_dim, DP=padded(head_dim, 16), P=frames.block_tokens,
        BLOCK_N=launch.block_n, SPLIT=INVARIANT_PLACES, WINDOW=window, SCALED=scales is not None, SHIFTED=rope is not None,
        INVARIANT=numerics == "invariant", COMPUTE=compute_type(q, frames),
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return out
