"""Attention of one new token per sequence over paged KV, split over the KV and merged.

All query heads of a KV head are the rows of one tile, so K and V are read once.  Two kernels: `decode_pieces` leaves a
softmax state for every piece of a (sequence, KV head) that one program did not do whole, `merge_pieces` merges them in
the order of places.  How the work is cut:

fast       Every program takes an equal share of the tiles of all sequences and heads, end to end; a share may begin and
           end in the middle of a head (stream-K, arXiv 2301.03598; for attention LeanAttention, arXiv 2405.10480).  All
           programs end together whatever the lengths, and the workspace does not grow with the context.  The cuts are
           computed on the device from the batch, so one captured graph serves every length.
invariant  Cuts lie at multiples of SPLIT places and tiles are those of prefill, so that a row's bits are a function of its own
           sequence (attend.py says why a tile's other rows do not matter).  Programs take pieces in turn.
"""

from typing import Any

import torch

from .attend import FLOOR, attend_range, finished, merged
from .lang import tl, triton
from .shapes import Batch, Frames, Launch, Numerics, PageTable, Rope
from .tiles import INVARIANT_PLACES, checked, compute_type, decode_launch, invariant_launch, padded, processors


@triton.jit
def visible(entries_ptr, start_ptr, first_ptr, first_stride, b, ok, P: tl.constexpr, WINDOW: tl.constexpr):
    """Places [low, high) in which sequence b's row sees anything; none when it has no entries.

    `high` may be a little too far where entries in the middle are not full: every token after the row's takes at least a place.
    """
    n = tl.load(entries_ptr + b, mask=ok, other=0)
    position = tl.load(start_ptr + b, mask=ok, other=0)
    tokens = tl.load(first_ptr + b.to(tl.int64) * first_stride + n, mask=ok, other=0)
    high = tl.where(n > 0, n * P - (tokens - 1 - position), 0)
    low = position * 0
    if WINDOW > 0:
        low = tl.minimum(tl.maximum(position + 1 - WINDOW, 0), high)
    return low, high, position


@triton.jit
def share_of(x, total, sharers):
    """The program whose share of `total` units, end to end, holds unit x."""
    return (((x + 1).to(tl.int64) * sharers - 1) // total).to(tl.int32)


@triton.jit(do_not_specialize=["layer", "sequences", "programs"])
def decode_pieces(
    q_ptr,
    out_ptr,
    kv_ptr,
    scale_ptr,
    frame_ptr,
    shift_ptr,
    slot_ptr,
    entries_ptr,
    start_ptr,
    row_ptr,
    first_ptr,
    cosine_ptr,
    sine_ptr,
    part_ptr,
    state_ptr,
    layer,
    sequences,
    programs,
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
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    SHIFTED: tl.constexpr,
    INVARIANT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Every piece: straight to `out` when it is all of its (sequence, head), else a state to part_ptr and state_ptr.

    part_ptr   [pieces, G, D]  f32  values, not yet divided
    state_ptr  [pieces, 2, G]  f32  maximum, sum
    A piece's number is its unit's (invariant), or 2 * program + (1 when it begins its head) (fast).
    """
    program = tl.program_id(0)
    every = tl.arange(0, B)
    lows, highs, _ = visible(entries_ptr, start_ptr, first_ptr, first_stride, every, every < sequences, P, WINDOW)
    units = tl.cdiv(highs, UNIT) - lows // UNIT
    before = (tl.cumsum(units, 0) - units) * HKV
    total = tl.sum(units, 0) * HKV
    x = program
    end = total
    if not INVARIANT:
        sharers = tl.maximum(tl.minimum(programs, total), 1)  # no share is empty: merge counts on a piece from each
        x = tl.minimum(program.to(tl.int64) * total // sharers, total).to(tl.int32)
        end = tl.minimum((program + 1).to(tl.int64) * total // sharers, total).to(tl.int32)

    g = tl.arange(0, M)
    d = tl.arange(0, DP)
    while x < end:
        b = tl.sum(((before + units * HKV) <= x).to(tl.int32), 0)
        base = tl.sum(tl.where(every == b, before, 0), 0)
        count = tl.sum(tl.where(every == b, units, 0), 0)
        head = (x - base) // count
        unit = (x - base) % count
        take = 1
        if not INVARIANT:
            take = tl.minimum(count - unit, end - x)
        low, high, position = visible(entries_ptr, start_ptr, first_ptr, first_stride, b, True, P, WINDOW)
        origin = low // UNIT * UNIT
        piece_low = tl.maximum(origin + unit * UNIT, low)
        piece_high = tl.minimum(origin + (unit + take) * UNIT, high)
        oldest = 0
        if WINDOW > 0:
            oldest = tl.maximum(position + 1 - WINDOW, 0)

        row = tl.load(row_ptr + b).to(tl.int64)
        table = tl.load(slot_ptr + b).to(tl.int64) * table_stride
        plane = layer.to(tl.int64) * kv_layer_stride + head * (P * D)
        scale_plane = layer.to(tl.int64) * scale_layer_stride + head * P
        acc, m, l = attend_range(
            q_ptr, row * q_stride + (head * G + g) * q_head_stride, g < G, tl.full([M], 0, tl.int32), oldest, position, piece_low, piece_high, piece_high, qk_scale,
            kv_ptr + plane, kv_ptr + plane + HKV * P * D, scale_ptr + scale_plane, scale_ptr + scale_plane + HKV * P,
            frame_ptr + table, shift_ptr + table, first_ptr + b.to(tl.int64) * first_stride, kv_stride, scale_stride, cosine_ptr, sine_ptr,
            M, D, DP, P, BLOCK_N, WINDOW, SCALED, SHIFTED, False, COMPUTE,
        )  # fmt: skip
        ok = (g < G)[:, None] & (d < D)[None, :]
        if take == count:
            to = out_ptr + row * out_stride + (head * G + g)[:, None] * D + d[None, :]
            tl.store(to, finished(acc, l, out_ptr.dtype.element_ty), mask=ok)
        else:
            piece = x.to(tl.int64)
            if not INVARIANT:
                piece = program.to(tl.int64) * 2 + (unit == 0)
            tl.store(part_ptr + piece * (G * D) + g[:, None] * D + d[None, :], acc, mask=ok)
            tl.store(state_ptr + piece * (2 * G) + g, m, mask=g < G)
            tl.store(state_ptr + piece * (2 * G) + G + g, l, mask=g < G)
        if INVARIANT:
            x += programs
        else:
            x += take


@triton.jit(do_not_specialize=["sequences", "programs"])
def merge_pieces(
    out_ptr,
    entries_ptr,
    start_ptr,
    row_ptr,
    first_ptr,
    part_ptr,
    state_ptr,
    sequences,
    programs,
    out_stride,
    first_stride,
    B: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    INVARIANT: tl.constexpr,
):
    """One (sequence, query head): its pieces in the order of places -> out.  Nothing is done where one piece was all."""
    b = tl.program_id(0)
    query_head = tl.program_id(1)
    head = query_head // G
    g = query_head % G
    every = tl.arange(0, B)
    lows, highs, _ = visible(entries_ptr, start_ptr, first_ptr, first_stride, every, every < sequences, P, WINDOW)
    units = tl.cdiv(highs, UNIT) - lows // UNIT
    total = tl.sum(units, 0) * HKV
    count = tl.sum(tl.where(every == b, units, 0), 0)
    low = tl.sum(tl.where(every < b, units, 0), 0) * HKV + head * count
    if INVARIANT:
        from_piece = low
        pieces = count
    else:
        # the programs whose shares hold the first and the last unit; all but the first came in the middle of the head
        sharers = tl.maximum(tl.minimum(programs, total), 1)
        from_piece = share_of(low, tl.maximum(total, 1), sharers)
        pieces = tl.where(count > 0, share_of(low + count - 1, tl.maximum(total, 1), sharers) - from_piece + 1, 0)
    if pieces > 1:
        d = tl.arange(0, DP)
        acc = tl.zeros([1, DP], tl.float32)
        m = tl.full([1], FLOOR, tl.float32)
        l = tl.zeros([1], tl.float32)
        one = tl.arange(0, 1)
        for i in tl.range(0, pieces, loop_unroll_factor=4):
            piece = (from_piece + i).to(tl.int64)
            if not INVARIANT:
                piece = piece * 2 + (i == 0)
            part = tl.load(
                part_ptr + piece * (G * D) + g * D + one[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0
            )
            part_m = tl.load(state_ptr + piece * (2 * G) + g + one)
            part_l = tl.load(state_ptr + piece * (2 * G) + G + g + one)
            acc, m, l = merged(acc, m, l, part, part_m, part_l)
        row = tl.load(row_ptr + b).to(tl.int64)
        to = out_ptr + row * out_stride + query_head * D + one[:, None] + d[None, :]
        tl.store(to, finished(acc, l, out_ptr.dtype.element_ty), mask=(d < D)[None, :])


def decode_pieces_bound(batch: Batch, frames: Frames, programs: int, numerics: Numerics) -> int:
    """Pieces that a decode of this batch may leave behind, from what the host knows."""
    if numerics == "fast":
        return 2 * programs
    places = batch.max_entries * frames.block_tokens
    return batch.slot.numel() * frames.kv_heads * -(-places // INVARIANT_PLACES)


def decode_workspace(
    frames: Frames, batch: Batch, q_heads: int, *, launch: Launch | None = None, numerics: Numerics = "fast"
) -> int:
    """float32 elements of workspace that `paged_decode` needs for batches of at most this size and `max_entries`."""
    launch = launch or decode_launch(frames.kv.device, frames)
    programs = launch.programs * processors(frames.kv.device)
    pieces = decode_pieces_bound(batch, frames, programs, numerics)
    return pieces * (q_heads // frames.kv_heads) * (frames.head_dim + 2)


def paged_decode(
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
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One decode step over paged KV.  PagedAttention (SOSP'23, section 4), FlashDecoding's split and merge, stream-K's shares.

    q          [T, Hq, D]            bf16  hbm  f16, f32 too; roped at logical positions; sequence b's row is batch.row[b]
    frames     [F, L, 2, Hkv, P, D]  bf16  hbm  or that of q's dtype, f32, f16, int8, e4m3
    pages      [S, N]                      hbm  the kernel's rows
    batch      [B]                         hbm  ntokens is 1 wherever entries is not 0
    rope       [W, D / 2]            f32   hbm  None: the caller knows that no entry has a shift (a leaner kernel; the same bits)
    window     int                              positions that a token sees, itself included; 0: all
    launch                                      None: the table's row; ignored in invariant mode
    workspace  [n]                   f32   hbm  n >= decode_workspace(...); None: allocated here (a captured graph brings its own)
    out        [T, Hq, D]            q's   hbm  contiguous; None: zeros, allocated here.  Rows of no sequence are left alone
    ->         out
    Requires: Hq % Hkv == 0, at most 32 query heads per KV head, D in HEAD_DIMS, P in BLOCK_TOKENS.
    Error: at most 2x that of the reference in q's dtype against float32.  Tested on: triton's interpreter.
    """
    group, head_dim = checked(q, frames, batch)
    fast = numerics == "fast"
    launch = (launch or decode_launch(q.device, frames)) if fast else invariant_launch(frames)
    programs = launch.programs * processors(q.device)
    pieces = decode_pieces_bound(batch, frames, programs, numerics)
    if workspace is None:
        workspace = torch.empty(pieces * group * (head_dim + 2), dtype=torch.float32, device=q.device)
    elif workspace.numel() < pieces * group * (head_dim + 2):
        raise ValueError(
            f"a workspace of {workspace.numel()} elements, where {pieces * group * (head_dim + 2)} are needed"
        )
    part, state = workspace[: pieces * group * head_dim], workspace[pieces * group * head_dim :]
    if out is None:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    scales = frames.scale if frames.scale is not None else part
    shape: dict[str, Any] = {
        "B": padded(batch.slot.numel(), 16),
        "HKV": frames.kv_heads,
        "G": group,
        "D": head_dim,
        "DP": padded(head_dim, 16),
        "P": frames.block_tokens,
        "UNIT": launch.block_n if fast else INVARIANT_PLACES,
        "WINDOW": window,
        "INVARIANT": not fast,
    }
    decode_pieces[(programs,)](
        q, out, frames.kv, scales, pages.frame, pages.shift, batch.slot, batch.entries, batch.start, batch.row, batch.first,
        rope.cosine if rope else part, rope.sine if rope else part, part, state,
        layer, batch.slot.numel(), programs, scale * 1.4426950408889634,
        q.stride(0), q.stride(1), out.stride(0), frames.kv.stride(0), frames.kv.stride(1), scales.stride(0), scales.stride(1) if frames.scale is not None else 0,
        pages.frame.stride(0), batch.first.stride(0),
        **shape,
        M=padded(group, 16) if fast else launch.block_m,
        BLOCK_N=launch.block_n,
        SCALED=frames.scale is not None,
        SHIFTED=rope is not None,
        COMPUTE=compute_type(q, frames),
        num_warps=launch.warps,
        num_stages=launch.stages,
        maxnreg=255,  # ptxas would rather spill a little than drop below three programs of four warps
    )  # fmt: skip
    merge_pieces[(batch.slot.numel(), q.shape[1])](
        out, batch.entries, batch.start, batch.row, batch.first, part, state, batch.slot.numel(), programs, out.stride(0), batch.first.stride(0),
        **shape,
        num_warps=4 if head_dim > 128 else 2,
    )  # fmt: skip
    return out
