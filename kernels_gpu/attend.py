"""The loop that decode and prefill share: query rows against a range of places of one sequence, for one KV head.

PagedAttention's indirection (Kwon et al., SOSP'23, section 4) inside FlashAttention-2's loop (arXiv 2307.08691) with the
online softmax (Milakov and Gimelshein, arXiv 1805.02867).  Scores are kept in base 2.

Tiles begin at multiples of BLOCK_N places, whatever the range; what a tile holds outside it is masked.  A masked score
is an exact nothing: it adds 0 to the sum, 0 to the values and never raises the maximum, which starts at a finite floor so
that a tile without a visible place changes no bit.  Hence a row's result depends on its own places alone, not on
which other rows share its tile, and not on how far the range reaches beyond what the row sees.

A run of entries with shift s has keys rotated at logical - s: the query rows are turned back by s for that run.  A tile in
which two runs meet is gone through once for each.
"""

from .lang import tl, triton
from .narrow import INTERPRETED, narrow

FLOOR = tl.constexpr(-1.0e30)  # the running maximum before any score
RUN_ENTRIES = tl.constexpr(256)  # entries looked at together for the end of a run


@triton.jit
def dot(a, b, acc):
    """acc + a . b, in float32.  The interpreter would multiply bfloat16's bit patterns as integers: it gets float32, exactly."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Elements of KV as the tensor cores multiply them; exact for int8 and e4m3.  The interpreter has no int8 -> bfloat16."""
    if INTERPRETED:
        return narrow(x.to(tl.float32), dtype)
    return x.to(dtype)


@triton.jit
def turned_query(
    q_ptr,
    row_at,
    row_ok,
    shift,
    cosine_ptr,
    sine_ptr,
    D: tl.constexpr,
    DP: tl.constexpr,
    COMPUTE: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """Query rows [M, DP] turned back by `shift`; row_at [M]: where each begins.  Columns from D on are 0."""
    d = tl.arange(0, DP)
    ok = row_ok[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + row_at[:, None] + d[None, :], mask=ok, other=0.0)
    turned = narrow(q.to(tl.float32), COMPUTE)
    if SHIFTED:  # noqa: SIM102  (a constant: without it nothing below is compiled)
        if shift != 0:
            low = d < D // 2
            # halves are runs of at least 32 columns; said, so that both are loaded in wide pieces
            partner = tl.max_contiguous(tl.multiple_of(tl.where(low, d + D // 2, d - D // 2), 16), 16)
            pair = tl.max_contiguous(tl.multiple_of(tl.where(low, d, d - D // 2), 16), 16)
            angle = tl.abs(shift).to(tl.int64) * (D // 2) + pair
            cosine = tl.load(cosine_ptr + angle, mask=d < D, other=0.0)
            sine = tl.load(sine_ptr + angle, mask=d < D, other=0.0)
            # back by a positive shift: a cos + b sin, b cos - a sin
            sine = tl.where(low == (shift > 0), sine, -sine)
            other = tl.load(q_ptr + row_at[:, None] + partner[None, :], mask=ok, other=0.0)
            turned = narrow(q.to(tl.float32) * cosine[None, :] + other.to(tl.float32) * sine[None, :], COMPUTE)
    return turned


@triton.jit
def run_end(shift_ptr, shift, low, high, P: tl.constexpr):
    """The place where the run of `shift` that holds place `low` ends, at most `high`."""
    last = tl.cdiv(high, P)
    base = low // P
    end = last
    while base < last:
        entry = base + tl.arange(0, RUN_ENTRIES)
        other = tl.load(shift_ptr + entry, mask=entry < last, other=shift)
        end = tl.min(tl.where(other != shift, entry, last))
        base = tl.where(end < last, last, base + RUN_ENTRIES)
    return tl.minimum(end * P, high)


@triton.jit
def attend_places(
    acc,
    m,
    l,
    q,
    position,
    oldest,
    newest,
    low,
    high,
    qk_scale,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    frame_ptr,
    first_ptr,
    kv_stride,
    scale_stride,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Places [low, high) against rows whose softmax state is (acc [M, DP], m [M], l [M]).

    position  [M]        CAUSAL: a row sees up to its position, and WINDOW of them when that is not 0
    oldest, newest       positions outside hold nothing for any row (they may be unwritten)
    k_ptr, v_ptr         the planes of this layer and head in frame 0; kv_stride: from frame to frame
    """
    d = tl.arange(0, DP)
    column = tl.arange(0, BLOCK_N)
    for at in tl.range(low // BLOCK_N * BLOCK_N, high, BLOCK_N):
        place = at + column
        entry = place // P
        offset = place % P
        here = (place >= low) & (place < high)
        first = tl.load(first_ptr + entry, mask=here, other=0)
        after = tl.load(first_ptr + entry + 1, mask=here, other=0)
        frame = tl.load(frame_ptr + entry, mask=here, other=0).to(tl.int64)
        logical = first + offset
        here = here & (logical < after) & (logical >= oldest) & (logical <= newest)
        row = frame * kv_stride + offset * D
        ok = here[:, None]
        if DP != D:
            ok = ok & (d < D)[None, :]
        k = tl.load(k_ptr + row[:, None] + d[None, :], mask=ok, other=0.0)
        scores = dot(q, tl.trans(widened(k, q.dtype)), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
        if SCALED:
            scale_row = frame * scale_stride + offset
            scores = scores * tl.load(k_scale_ptr + scale_row, mask=here, other=0.0)[None, :]
        if CAUSAL:
            seen = here[None, :] & (logical[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (logical[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, -float("inf"))
        else:
            scores = tl.where(here[None, :], scores, -float("inf"))
        top = tl.maximum(m, tl.max(scores, 1) * qk_scale)
        p = tl.exp2(
            tl.fma(scores, tl.full(scores.shape, qk_scale, tl.float32), tl.broadcast_to(-top[:, None], scores.shape))
        )
        shrink = tl.exp2(m - top)
        l = tl.fma(l, shrink, tl.sum(p, 1))
        m = top
        if SCALED:
            p = p * tl.load(v_scale_ptr + scale_row, mask=here, other=0.0)[None, :]
        v = tl.load(v_ptr + row[:, None] + d[None, :], mask=ok, other=0.0)
        acc = dot(narrow(p, q.dtype), widened(v, q.dtype), acc * shrink[:, None])
    return acc, m, l


@triton.jit
def attend_range(
    q_ptr,
    row_at,
    row_ok,
    position,
    oldest,
    newest,
    low,
    full,
    high,
    qk_scale,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    frame_ptr,
    shift_ptr,
    first_ptr,
    kv_stride,
    scale_stride,
    cosine_ptr,
    sine_ptr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    SHIFTED: tl.constexpr,
    CAUSAL: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """The softmax state of M query rows over places [low, high), run by run of equal shift.

    CAUSAL: places before `full` are seen by every row, so those tiles need no mask by position.
    ->  acc [M, DP], m [M], l [M]
    """
    acc = tl.zeros([M, DP], tl.float32)
    m = tl.full([M], FLOOR, tl.float32)
    l = tl.zeros([M], tl.float32)
    at = low
    while at < high:
        end = high
        shift = 0
        if SHIFTED:
            shift = tl.load(shift_ptr + at // P)
            end = run_end(shift_ptr, shift, at, high, P)
        q = turned_query(q_ptr, row_at, row_ok, shift, cosine_ptr, sine_ptr, D, DP, COMPUTE, SHIFTED)
        if CAUSAL:
            middle = tl.minimum(tl.maximum(full, at), end)
            if WINDOW == 0:
                acc, m, l = attend_places(acc, m, l, q, position, oldest, newest, at, middle, qk_scale, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, frame_ptr, first_ptr, kv_stride, scale_stride, D, DP, P, BLOCK_N, WINDOW, SCALED, False)  # fmt: skip
            else:
                middle = at
            acc, m, l = attend_places(acc, m, l, q, position, oldest, newest, middle, end, qk_scale, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, frame_ptr, first_ptr, kv_stride, scale_stride, D, DP, P, BLOCK_N, WINDOW, SCALED, True)  # fmt: skip
        else:
            acc, m, l = attend_places(acc, m, l, q, position, oldest, newest, at, end, qk_scale, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, frame_ptr, first_ptr, kv_stride, scale_stride, D, DP, P, BLOCK_N, WINDOW, SCALED, False)  # fmt: skip
        at = end
    return acc, m, l


@triton.jit
def merged(acc, m, l, part, part_m, part_l):
    """Two softmax states over disjoint places, as one.  Written once: decode's merge and prefill's loop agree to the bit."""
    top = tl.maximum(m, part_m)
    keep = tl.exp2(m - top)
    add = tl.exp2(part_m - top)
    return acc * keep[:, None] + part * add[:, None], top, l * keep + part_l * add


@triton.jit
def finished(acc, l, dtype: tl.constexpr):
    """The rows' values; 0 for a row that saw nothing."""
    return narrow(acc / tl.where(l == 0.0, 1.0, l)[:, None], dtype)
