/* Attention that reads the page table, for one instruction set.
 *
 * PagedAttention's indirection (Kwon et al., SOSP'23, section 4) with the online softmax (Milakov and Gimelshein,
 * arXiv 1805.02867) over tiles as in FlashAttention-2 (arXiv 2307.08691).  One task is up to AX_Q_ROWS query rows,
 * tokens x the G heads that share one KV head, so K and V are read once per KV head.  For each tile of AX_TILE logical
 * positions: follow frame, count and shift of the entries to one row pointer a position; transpose K into product
 * panels and interleave V into others (the same panels as weights, so the same product kernels do scores and values);
 * then scores, softmax, values for each register block of rows.
 *
 * Fixed order, so that a row's bits do not depend on its company: tiles begin at multiples of AX_TILE of the logical
 * position; within AX_SPLIT positions the softmax runs on; splits are merged one by one in order, whether one thread
 * did them all or many did one each.  A masked score contributes an exact 0.
 *
 * A run with shift s has its keys rotated at logical - s; the query is rotated to p - s for that run instead.
 */

#include "isa_tiles.h"

#define AX_FLOOR (-1.0e30f) /* the running maximum before any score */

/* Rotate the task's queries to position - shift and lay them out as A blocks in s->q. */
static void pack_queries(const ax_engine *e, const ax_task *task, const ax_span *span, int32_t shift, const ax_rows *q, float *row) {
    int head_dim = e->s.head_dim, half = head_dim / 2;
    float cosine[AX_MAX_HEAD / 2], sine[AX_MAX_HEAD / 2];
    for (int t = 0; t < task->tokens; t++) {
        int home = span->start + task->token + t - shift;
        const float *c = cosine, *s = sine;
        if (home >= 0 && home < e->rope_ready) {
            c = e->cosine + (size_t)home * (size_t)half;
            s = e->sine + (size_t)home * (size_t)half;
        } else {
            for (int i = 0; i < half; i++) {
                float angle = (float)home * e->inv_freq[i];
                cosine[i] = (float)__builtin_cos((double)angle);
                sine[i] = (float)__builtin_sin((double)angle);
            }
        }
        const float *from = e->qkv + (size_t)(span->row + task->token + t - e->chunk_row) * (size_t)e->qkv_columns;
        for (int g = 0; g < e->group; g++) {
            memcpy(row, from + (size_t)(task->kv_head * e->group + g) * (size_t)head_dim, (size_t)head_dim * 4);
            rope(row, c, s, head_dim);
            store_row_part(row, e->kv_kind, q, t * e->group + g, 0, head_dim);
        }
    }
}

/* total <- total and part, two softmax states over disjoint positions; one function so that it is one rounding */
static __attribute__((noinline)) void merge_row(int head_dim, float *total, float *total_m, float *total_l, const float *part, float m, float l) {
    float top = *total_m > m ? *total_m : m;
    vf scale = {0};
    scale[0] = *total_m - top;
    scale[1] = m - top;
    scale = vexp2(scale);
    float a = scale[0], b = scale[1];
    *total_m = top;
    *total_l = *total_l * a + l * b;
    for (int d = 0; d < head_dim; d += AX_VL) vstore(total + d, vload(total + d) * a + vload(part + d) * b);
}

static void finish_row(ax_engine *e, const ax_task *task, int row, const float *total, float l, float *scratch) {
    const ax_span *span = &e->spans[task->span];
    int head_dim = e->s.head_dim, token = task->token + row / e->group, head = task->kv_head * e->group + row % e->group;
    float factor = 1.0f / l;
    for (int d = 0; d < head_dim; d++) scratch[d] = total[d] * factor;
    store_row_part(scratch, e->s.dtype, &e->attended, span->row + token - e->chunk_row, head * head_dim, head_dim);
}

/* Softmax of one register block: scores [mr][AX_TILE] -> probabilities, the running maximum m and lane sums l, and
 * alpha, by which what was summed before must be scaled.  int8 KV: the scores get the scales of their keys, and the
 * probabilities, after they have been summed, those of their values. */
static void softmax_block(const ax_engine *e, const ax_task *task, const ax_span *span, int tile, const tile_t *t, int row,
                          int rows, float scale, ax_scratch *s) {
    enum { STEPS = AX_TILE / AX_VL };
    float *m = s->m + row, shrink[16];
    const int scaled = e->s.kv_dtype == AX_INT8;
    for (int i = 0; i < 16; i++) shrink[i] = 0;
    for (int r = 0; r < rows; r++) {
        float *score = s->scores + r * AX_TILE;
        int position = span->start + task->token + (row + r) / e->group;
        for (int i = 0; scaled && i < AX_TILE; i += AX_VL) vstore(score + i, vload(score + i) * vload(t->k_scale + i));
        int high = position + 1 - tile, low = e->s.sliding_window > 0 ? position + 1 - e->s.sliding_window - tile : 0;
        if (high < AX_TILE || low > 0)
            for (int i = 0; i < AX_TILE; i++) score[i] = i < high && i >= low ? score[i] : -__builtin_inff();
        vf best = vload(score);
#pragma GCC unroll 4
        for (int i = 1; i < STEPS; i++) best = vmax(best, vload(score + i * AX_VL));
        float top = vhmax(best) * scale;
        top = top > m[r] ? top : m[r];
        shrink[r] = m[r] - top;
        m[r] = top;
    }
    for (int i = 0; i < 16; i += AX_VL) vstore(s->alpha + i, vexp2(vload(shrink + i)));
    for (int r = 0; r < rows; r++) {
        float *score = s->scores + r * AX_TILE, *l = s->l + (size_t)(row + r) * AX_VL;
        vf sum = vload(l) * s->alpha[r], p[STEPS];
#pragma GCC unroll 16
        for (int i = 0; i < STEPS; i++) {
            p[i] = vexp2(vload(score + i * AX_VL) * scale - m[r]);
            sum += p[i];
        }
        vstore(l, sum);
#pragma GCC unroll 16
        for (int i = 0; scaled && i < STEPS; i++) p[i] *= vload(t->v_scale + i * AX_VL);
#if AX_PAIRED
        if (e->kv_kind == AX_BF16) {
#pragma GCC unroll 2
            for (int i = 0; i < STEPS; i += 2) {
                __m512bh both = _mm512_cvtne2ps_pbh((__m512)p[i + 1], (__m512)p[i]);
                memcpy(s->p + r * (AX_TILE / 2) + i * 8, &both, 64);
            }
            continue;
        }
#endif
#pragma GCC unroll 16
        for (int i = 0; i < STEPS; i++) vstore(s->p + r * AX_TILE + i * AX_VL, p[i]);
    }
}

/* Scores of one register block against a tile whose entries have more than one shift. */
static void mixed_scores(const ax_engine *e, const ax_task *task, const ax_span *span, const tile_t *t, const ax_rows *q,
                         int block, int words, ax_scratch *s) {
    float keep[AX_MAX_MR * AX_TILE];
    int done = 0;
    memset(keep, 0, sizeof keep);
    while (done < t->n) {
        int end = done;
        while (end < t->n && t->shift[end] == t->shift[done]) end++;
        pack_queries(e, task, span, t->shift[done], q, s->row);
        const uint32_t *a = (const uint32_t *)q->data + (size_t)block * q->block_words;
        for (int p = 0; p < t->n; p += AX_PANEL)
            scores_table[e->kv_kind][q->mr](words, a, (uint32_t *)s->k_panels + (size_t)(p / AX_PANEL) * (size_t)words * AX_PANEL, s->scores + p);
        for (int r = 0; r < q->mr; r++)
            memcpy(keep + r * AX_TILE + done, s->scores + r * AX_TILE + done, (size_t)(end - done) * 4);
        done = end;
    }
    memcpy(s->scores, keep, sizeof keep);
}

/* The oldest position that any query row of the task sees. */
static int oldest_seen(const ax_engine *e, const ax_span *span, const ax_task *task) {
    int oldest = span->start + task->token, window = e->s.sliding_window;
    return window > 0 && oldest + 1 > window ? oldest + 1 - window : 0;
}

/* Where the task's first tile begins. */
static int first_tile(const ax_engine *e, const ax_task *task) {
    int at = oldest_seen(e, &e->spans[task->span], task) / AX_TILE * AX_TILE;
    return at > task->split_lo * AX_SPLIT ? at : task->split_lo * AX_SPLIT;
}

/* The position past the last one that the task sees. */
static int end_of(const ax_engine *e, const ax_task *task) {
    int end = e->spans[task->span].start + task->token + task->tokens;
    return end < task->split_hi * AX_SPLIT ? end : task->split_hi * AX_SPLIT;
}

/* Gather the tile at `at`; n = 0 when the task has none there. Returns the entry from which to go on. */
static int tile_at(const ax_engine *e, const ax_task *task, int layer, int at, int entry, tile_t *t) {
    int end = end_of(e, task);
    t->n = 0;
    if (at >= end) return entry;
    return gather_tile(e, &e->spans[task->span], layer, task->kv_head, at, end - at < AX_TILE ? end - at : AX_TILE, entry, t);
}

static void open_split(int rows, int depth, ax_scratch *s) {
    for (int r = 0; r < rows; r++) s->m[r] = AX_FLOOR;
    memset(s->l, 0, (size_t)rows * AX_VL * 4);
    memset(s->out, 0, (size_t)rows * (size_t)depth * 4);
}

/* Merge the state of one split into the task's, or leave it for merge() when the splits are shared out. */
static void close_split(ax_engine *e, const ax_task *task, int rows, int depth, ax_scratch *s) {
    float *part = task->partial >= 0 ? e->partials + (size_t)task->partial * e->partial_floats : NULL;
    for (int r = 0; r < rows; r++) {
        const float *out = s->out + (size_t)r * (size_t)depth;
        float l = vhsum(vload(s->l + (size_t)r * AX_VL));
        if (part == NULL) {
            merge_row(depth, s->total + (size_t)r * (size_t)depth, &s->total_m[r], &s->total_l[r], out, s->m[r], l);
            continue;
        }
        part[0] = s->m[r];
        part[1] = l;
        memcpy(part + 2, out, (size_t)depth * 4);
        part += depth + 2;
    }
}

/* Scores of one register block against a tile -> s->scores [mr][AX_TILE]. */
static void score_block(const ax_engine *e, const ax_task *task, const ax_span *span, const tile_t *t, const ax_rows *q,
                        int block, int words, ax_scratch *s) {
    if (t->mixed) {
        mixed_scores(e, task, span, t, q, block, words, s);
        return;
    }
    const uint32_t *a = (const uint32_t *)q->data + (size_t)block * q->block_words, *k = (const uint32_t *)s->k_panels;
    for (int p = 0; p < t->n; p += AX_PANEL, k += (size_t)words * AX_PANEL)
        scores_table[e->kv_kind][q->mr](words, a, k, s->scores + p);
}

AX_INLINE int is_thin(int kind, int rows, int words) {
#if AX_PAIRED
    return kind == AX_BF16 && rows <= THIN_ROWS && words % 4 == 0;
#else
    (void)kind, (void)rows, (void)words;
    return 0;
#endif
}

/* A tile against one register block of few rows, without panels. */
AX_INLINE void thin_tile(const ax_engine *e, const ax_task *task, const ax_span *span, int at, const tile_t *t,
                         const tile_t *next, const ax_rows *q, int depth, int words, float scale, ax_scratch *s) {
#if AX_PAIRED
    thin_scores_table[q->mr](t, next, words, q->data, s->scores);
    softmax_block(e, task, span, at, t, 0, q->mr, scale, s);
    thin_values_table[q->mr](t, next, e, (const uint32_t *)s->p, s->out, depth, s->alpha);
#else
    (void)e, (void)task, (void)span, (void)at, (void)t, (void)next, (void)q, (void)depth, (void)words, (void)scale, (void)s;
#endif
}

/* Do one task.  `follower` is the task this thread does next (or NULL): its first tile is fetched during our last. */
static void attend(ax_engine *e, int layer, const ax_task *task, const ax_task *follower, ax_scratch *s) {
    const ax_span *span = &e->spans[task->span];
    int kind = e->kv_kind, head_dim = e->s.head_dim, depth = ax_pad(head_dim, AX_PANEL);
    int rows = task->tokens * e->group, words = kind == AX_BF16 ? head_dim / 2 : head_dim;
    int per_panel = kind == AX_BF16 ? AX_TILE / 2 : AX_TILE;
    float scale = 1.4426950408889634f / __builtin_sqrtf((float)head_dim); /* softmax in base 2 */
    ax_rows q = {.data = s->q, .mr = block_rows(rows), .rows = rows, .k = head_dim};
    q.block_words = (size_t)q.mr * (size_t)(e->paired[kind] ? head_dim / 2 : head_dim);
    int padded = ax_pad(rows, q.mr), begin = first_tile(e, task), end = end_of(e, task), now = 0;
    int32_t packed_shift = NO_SHIFT;
    tile_t tiles[2];

    for (int r = 0; r < rows; r++) s->total_m[r] = AX_FLOOR, s->total_l[r] = 0;
    memset(s->total, 0, (size_t)rows * (size_t)depth * 4);
    open_split(padded, depth, s);
    int entry = tile_at(e, task, layer, begin, find_entry(span, begin), &tiles[0]);
    for (int at = begin; at < end; at += AX_TILE, now ^= 1) {
        tile_t *t = &tiles[now], *next = &tiles[now ^ 1];
        if (at + AX_TILE < end || follower == NULL) entry = tile_at(e, task, layer, at + AX_TILE, entry, next);
        else tile_at(e, follower, layer, first_tile(e, follower), 0, next);
        if (e->s.kv_dtype == AX_INT8) widen_tile(t, head_dim, (uint16_t *)s->widened);
        int thin = is_thin(kind, rows, words) && !t->mixed;
        if (!thin) {
            pack_keys(t, next, words, (uint32_t *)s->k_panels);
            pack_values(t, next, e, (uint32_t *)s->v_panels);
        }
        if (!t->mixed && t->shift[0] != packed_shift) {
            packed_shift = t->shift[0];
            pack_queries(e, task, span, packed_shift, &q, s->row);
        } else if (t->mixed) packed_shift = NO_SHIFT;
        if (thin) thin_tile(e, task, span, at, t, next, &q, depth, words, scale, s);
        for (int block = 0; !thin && block * q.mr < rows; block++) {
            score_block(e, task, span, t, &q, block, words, s);
            softmax_block(e, task, span, at, t, block * q.mr, q.mr, scale, s);
            const uint32_t *v = (const uint32_t *)s->v_panels;
            float *out = s->out + (size_t)(block * q.mr) * (size_t)depth;
            for (int d = 0; d < depth; d += AX_PANEL, v += (size_t)per_panel * AX_PANEL)
                values_table[kind][q.mr](kind == AX_BF16 ? (t->n + 1) / 2 : t->n, s->p, v, out + d, depth, s->alpha);
        }
        if ((at + AX_TILE) % AX_SPLIT == 0 && at + AX_TILE < end) {
            close_split(e, task, rows, depth, s);
            open_split(padded, depth, s);
        }
    }
    close_split(e, task, rows, depth, s);
    if (task->partial >= 0) return;
    for (int r = 0; r < rows; r++) finish_row(e, task, r, s->total + (size_t)r * (size_t)depth, s->total_l[r], s->row);
}

/* Merge the partial states that the threads left for one task, in the order of the splits. */
static void merge(ax_engine *e, const ax_task *task, ax_scratch *s) {
    int depth = ax_pad(e->s.head_dim, AX_PANEL), rows = task->tokens * e->group;
    for (int r = 0; r < rows; r++) {
        s->total_m[r] = AX_FLOOR, s->total_l[r] = 0;
        memset(s->total, 0, (size_t)depth * 4);
        for (int split = task->split_lo; split < task->split_hi; split++) {
            const float *part = e->partials + (size_t)(task->partial + split - task->split_lo) * e->partial_floats + (size_t)r * (size_t)(depth + 2);
            merge_row(depth, s->total, &s->total_m[r], &s->total_l[r], part + 2, part[0], part[1]);
        }
        finish_row(e, task, r, s->total, s->total_l[r], s->row);
    }
}
