/* Attention that reads the page table, for one instruction set.
 *
 * PagedAttention's indirection (Kwon et al., SOSP'23, section 4) with the online softmax (Milakov and Gimelshein,
 * arXiv 1805.02867) over tiles as in FlashAttention-2 (arXiv 2307.08691).  One task is up to AX_Q_ROWS query rows,
 * tokens x the G heads that share one KV head, so K and V are read once per KV head; the tokens may be those of several
 * sequences whose page tables agree on the task's positions (plan.c).  For each tile of AX_TILE logical
 * positions: follow frame, count and shift of the entries to one row pointer a position; transpose K into product
 * panels and interleave V into others (the same panels as weights, so the same product kernels do scores and values);
 * then scores, softmax, values for each register block of rows.
 *
 * Fixed order, so that a row's bits do not depend on its company: tiles begin at multiples of AX_TILE of the logical
 * position; within AX_SPLIT positions the softmax runs on, over more than one task if need be; splits are merged one by
 * one in order, whether one thread did them all or many did one each.  A masked score contributes an exact 0.
 *
 * A run with shift s has its keys rotated at logical - s; the query is rotated to p - s for that run instead.
 */

#include "isa_tiles.h"

#define AX_FLOOR (-1.0e30f) /* the running maximum before any score */

/* The sequence of the task's first row, whose page table serves for all. */
static const ax_span *span_of(const ax_engine *e, const ax_task *task) {
    return &e->spans[e->row_span[e->order[task->first]]];
}

/* Rotate the task's queries to position - shift and lay them out as A blocks in s->q. */
static void pack_queries(const ax_engine *e, const ax_task *task, int32_t shift, const ax_rows *q, ax_scratch *scratch) {
    float *row = scratch->row;
    int head_dim = e->s.head_dim, half = head_dim / 2;
    float cosine[AX_MAX_HEAD / 2], sine[AX_MAX_HEAD / 2];
    for (int t = 0; t < task->tokens; t++) {
        int home = scratch->position[t * e->group] - shift;
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
        const float *from = e->qkv + (size_t)e->order[task->first + t] * (size_t)e->qkv_columns;
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
    int head_dim = e->s.head_dim, head = task->kv_head * e->group + row % e->group;
    float factor = 1.0f / l;
    for (int d = 0; d < head_dim; d++) scratch[d] = total[d] * factor;
    store_row_part(scratch, e->s.dtype, &e->attended, e->order[task->first + row / e->group], head * head_dim, head_dim);
}

/* Softmax of one register block: scores [mr][AX_TILE] -> probabilities, the running maximum m and lane sums l, and
 * alpha, by which what was summed before must be scaled.  int8 KV: the scores get the scales of their keys, and the
 * probabilities, after they have been summed, those of their values. */
static void softmax_block(const ax_engine *e, int tile, const tile_t *t, int row, int rows, float scale, ax_scratch *s) {
    enum { STEPS = AX_TILE / AX_VL };
    float *m = s->m + row, shrink[16];
    const int scaled = e->s.kv_dtype == AX_INT8;
    for (int i = 0; i < 16; i++) shrink[i] = 0;
    for (int r = 0; r < rows; r++) {
        float *score = s->scores + r * AX_TILE;
        int position = s->position[row + r];
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
static void mixed_scores(const ax_engine *e, const ax_task *task, const tile_t *t, const ax_rows *q, int block, int words, ax_scratch *s) {
    float keep[AX_MAX_MR * AX_TILE];
    int done = 0;
    memset(keep, 0, sizeof keep);
    while (done < t->n) {
        int end = done;
        while (end < t->n && t->shift[end] == t->shift[done]) end++;
        pack_queries(e, task, t->shift[done], q, s);
        const uint32_t *a = (const uint32_t *)q->data + (size_t)block * q->block_words;
        for (int p = 0; p < t->n; p += AX_PANEL)
            scores_table[e->kv_kind][q->mr](words, a, (uint32_t *)s->k_panels + (size_t)(p / AX_PANEL) * (size_t)words * AX_PANEL, s->scores + p);
        for (int r = 0; r < q->mr; r++)
            memcpy(keep + r * AX_TILE + done, s->scores + r * AX_TILE + done, (size_t)(end - done) * 4);
        done = end;
    }
    memcpy(s->scores, keep, sizeof keep);
}

/* Gather the tile at `at`; n = 0 when the task has none there. Returns the entry from which to go on. */
static int tile_at(const ax_engine *e, const ax_task *task, int layer, int at, int entry, tile_t *t) {
    t->n = 0;
    if (at >= task->to) return entry;
    return gather_tile(e, span_of(e, task), layer, task->kv_head, at, task->to - at < AX_TILE ? task->to - at : AX_TILE, entry, t);
}

static void open_split(int rows, int depth, ax_scratch *s) {
    for (int r = 0; r < rows; r++) s->m[r] = AX_FLOOR;
    memset(s->l, 0, (size_t)rows * AX_VL * 4);
    memset(s->out, 0, (size_t)rows * (size_t)depth * 4);
}

/* Where the state of a row within a split lies between tasks: maximum, then (from 16 on) the lanes of the sum, then (from
 * 32 on) the values. */
static float *state_at(const ax_engine *e, const ax_task *task, int row, int split) {
    const ax_parts *parts = &e->parts[e->order[task->first + row / e->group]];
    size_t slot = (size_t)parts->slot + (size_t)(task->kv_head * parts->splits + split - parts->first);
    return e->states + (slot * (size_t)e->group + (size_t)(row % e->group)) * e->state_floats;
}

static void leave_split(ax_engine *e, const ax_task *task, int split, int rows, int depth, const ax_scratch *s) {
    for (int r = 0; r < rows; r++) {
        float *state = state_at(e, task, r, split);
        state[0] = s->m[r];
        vstore(state + 16, vload(s->l + (size_t)r * AX_VL));
        memcpy(state + 32, s->out + (size_t)r * (size_t)depth, (size_t)depth * 4);
    }
}

static void resume_split(const ax_engine *e, const ax_task *task, int split, int rows, int depth, ax_scratch *s) {
    for (int r = 0; r < rows; r++) {
        const float *state = state_at(e, task, r, split);
        s->m[r] = state[0];
        vstore(s->l + (size_t)r * AX_VL, vload(state + 16));
        memcpy(s->out + (size_t)r * (size_t)depth, state + 32, (size_t)depth * 4);
    }
}

/* Merge the state of one split of row r, here or left by another task, into the row's. */
AX_INLINE void close_row(int r, int depth, float m, const float *lanes, const float *out, ax_scratch *s) {
    merge_row(depth, s->total + (size_t)r * (size_t)depth, &s->total_m[r], &s->total_l[r], out, m, vhsum(vload(lanes)));
}

static void close_split(int rows, int depth, ax_scratch *s) {
    for (int r = 0; r < rows; r++) close_row(r, depth, s->m[r], s->l + (size_t)r * AX_VL, s->out + (size_t)r * (size_t)depth, s);
}

/* Merge the states of splits [from, to), which other tasks have left. */
static void close_left(const ax_engine *e, const ax_task *task, int from, int to, int rows, int depth, ax_scratch *s) {
    for (int split = from; split < to; split++)
        for (int r = 0; r < rows; r++) {
            const float *state = state_at(e, task, r, split);
            close_row(r, depth, state[0], state + 16, state + 32, s);
        }
}

/* Scores of one register block against a tile -> s->scores [mr][AX_TILE]. */
static void score_block(const ax_engine *e, const ax_task *task, const tile_t *t, const ax_rows *q, int block, int words, ax_scratch *s) {
    if (t->mixed) {
        mixed_scores(e, task, t, q, block, words, s);
        return;
    }
    const uint32_t *a = (const uint32_t *)q->data + (size_t)block * q->block_words, *k = (const uint32_t *)s->k_panels;
    for (int p = 0; p < t->n; p += AX_PANEL, k += (size_t)words * AX_PANEL)
        scores_table[e->kv_kind][q->mr](words, a, k, s->scores + p);
}

AX_INLINE int is_thin(const ax_engine *e, int rows, int words) {
#if AX_PAIRED
    return e->kv_kind == AX_BF16 && rows <= THIN_ROWS && words % (e->s.kv_dtype == AX_INT8 ? 8 : 4) == 0;
#else
    (void)e, (void)rows, (void)words;
    return 0;
#endif
}

/* A tile against one register block of few rows, without panels. */
AX_INLINE void thin_tile(const ax_engine *e, int at, const tile_t *t, const tile_t *next, const ax_rows *q, int depth, int words,
                         float scale, ax_scratch *s) {
#if AX_PAIRED
    const int narrow = e->s.kv_dtype == AX_INT8;
    thin_scores_table[narrow][q->mr](t, next, words, q->data, s->scores);
    softmax_block(e, at, t, 0, q->mr, scale, s);
    thin_values_table[narrow][q->mr](t, next, e, (const uint32_t *)s->p, s->out, depth, s->alpha);
#else
    (void)e, (void)at, (void)t, (void)next, (void)q, (void)depth, (void)words, (void)scale, (void)s;
#endif
}

/* Do one task.  `follower` is the task this thread does next (or NULL): its first tile is fetched during our last. */
static void attend(ax_engine *e, int layer, const ax_task *task, const ax_task *follower, ax_scratch *s) {
    const ax_parts *parts = &e->parts[e->order[task->first]]; /* unless the task is a whole */
    int kind = e->kv_kind, head_dim = e->s.head_dim, depth = ax_pad(head_dim, AX_PANEL);
    int rows = task->tokens * e->group, words = kind == AX_BF16 ? head_dim / 2 : head_dim;
    int per_panel = kind == AX_BF16 ? AX_TILE / 2 : AX_TILE;
    float scale = 1.4426950408889634f / __builtin_sqrtf((float)head_dim); /* softmax in base 2 */
    ax_rows q = {.data = s->q, .mr = block_rows(rows), .rows = rows, .k = head_dim};
    q.block_words = (size_t)q.mr * (size_t)(e->paired[kind] ? head_dim / 2 : head_dim);
    int padded = ax_pad(rows, q.mr), blocks = padded / q.mr, begin = task->from, end = task->to, now = 0, open = begin < end;
    int32_t packed_shift = NO_SHIFT;
    tile_t tiles[2];

    for (int r = 0; r < padded; r++) {
        int row = e->order[task->first + (r < rows ? r / e->group : task->tokens - 1)];
        const ax_span *span = &e->spans[e->row_span[row]];
        s->position[r] = span->start + e->chunk_row + row - span->row;
    }
    for (int r = 0; r < rows; r++) s->total_m[r] = AX_FLOOR, s->total_l[r] = 0;
    memset(s->total, 0, (size_t)rows * (size_t)depth * 4);
    open_split(padded, depth, s);
    if (task->how == AX_REST) {
        close_left(e, task, parts->first, begin / AX_SPLIT, rows, depth, s);
        if (begin % AX_SPLIT != 0) {
            resume_split(e, task, begin / AX_SPLIT, rows, depth, s);
            open = 1;
        }
    }
    int entry = tile_at(e, task, layer, begin, find_entry(span_of(e, task), begin), &tiles[0]);
    for (int at = begin; at < end; at += AX_TILE, now ^= 1) {
        tile_t *t = &tiles[now], *next = &tiles[now ^ 1];
        if (at + AX_TILE < end || follower == NULL) entry = tile_at(e, task, layer, at + AX_TILE, entry, next);
        else tile_at(e, follower, layer, follower->from, find_entry(span_of(e, follower), follower->from), next);
        int thin = is_thin(e, rows, words) && !t->mixed;
        if (!thin) {
            if (e->s.kv_dtype == AX_INT8) widen_tile(t, head_dim, (uint16_t *)s->widened);
            pack_keys(t, words, (uint32_t *)s->k_panels);
            pack_values(t, e, (uint32_t *)s->v_panels);
        }
        if (!t->mixed && t->shift[0] != packed_shift) {
            packed_shift = t->shift[0];
            pack_queries(e, task, packed_shift, &q, s);
        } else if (t->mixed) packed_shift = NO_SHIFT;
        if (thin) thin_tile(e, at, t, next, &q, depth, words, scale, s);
        for (int block = 0; !thin && block < blocks; block++) { /* each asks for its part of the next tile, not all at once */
            int some = AX_TILE * block / blocks, more = AX_TILE * (block + 1) / blocks - some;
            fetch_rows(next, some, more, 0);
            score_block(e, task, t, &q, block, words, s);
            softmax_block(e, at, t, block * q.mr, q.mr, scale, s);
            const uint32_t *v = (const uint32_t *)s->v_panels;
            float *out = s->out + (size_t)(block * q.mr) * (size_t)depth;
            fetch_rows(next, some, more, next->value);
            for (int d = 0; d < depth; d += AX_PANEL, v += (size_t)per_panel * AX_PANEL)
                values_table[kind][q.mr](kind == AX_BF16 ? (t->n + 1) / 2 : t->n, s->p, v, out + d, depth, s->alpha);
        }
        if ((at + AX_TILE) % AX_SPLIT == 0 && at + AX_TILE < end) {
            close_split(rows, depth, s);
            open_split(padded, depth, s);
        }
    }
    if (task->how == AX_PART) {
        leave_split(e, task, begin / AX_SPLIT, rows, depth, s);
        return;
    }
    if (open) close_split(rows, depth, s);
    if (task->how == AX_REST) close_left(e, task, (end + AX_SPLIT - 1) / AX_SPLIT, parts->first + parts->splits, rows, depth, s);
    for (int r = 0; r < rows; r++) finish_row(e, task, r, s->total + (size_t)r * (size_t)depth, s->total_l[r], s->row);
}
