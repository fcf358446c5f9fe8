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

enum { NO_SHIFT = INT32_MIN };
#define AX_FLOOR (-1.0e30f) /* the running maximum before any score */

typedef struct { const uint8_t *key[AX_TILE]; int32_t shift[AX_TILE]; int n, mixed; } tile_t;

static const uint8_t zero_row[AX_MAX_HEAD * 4] __attribute__((aligned(64)));

AX_INLINE int block_rows(int rows) { /* rows of a register block, spread evenly */
    int blocks = (rows + MAX_MR - 1) / MAX_MR;
    return (rows + blocks - 1) / blocks;
}

/* The row pointers of positions [at, at + n): `entry` is any entry at or before the one that holds `at`. */
static int gather_tile(const ax_engine *e, const ax_span *span, int layer, int kv_head, int at, int n, int entry, tile_t *t) {
    size_t element = e->s.kv_dtype == AX_BF16 ? 2 : 4, row_bytes = element * (size_t)e->s.head_dim;
    size_t inside = (size_t)layer * 2 * e->plane_bytes + (size_t)kv_head * (size_t)e->block_tokens * row_bytes;
    t->n = n;
    t->mixed = 0;
    int i = 0;
    while (i < n) {
        while (span->first[entry + 1] <= at + i) entry++;
        int offset = at + i - span->first[entry], here = span->first[entry + 1] - at - i;
        const uint8_t *key = e->arena + (size_t)span->frame[entry] * e->frame_bytes + inside + (size_t)offset * row_bytes;
        int32_t shift = span->shift[entry];
        if (i > 0 && shift != t->shift[0]) t->mixed = 1;
        for (int j = 0; j < here && i < n; j++, i++, key += row_bytes) {
            t->key[i] = key;
            t->shift[i] = shift;
        }
    }
    return entry;
}

static int find_entry(const ax_span *span, int position) { /* the last entry that starts at or before it */
    int low = 0, high = span->entries - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (span->first[middle] <= position) low = middle;
        else high = middle - 1;
    }
    return low;
}

#if AX_VL == 16
/* Transpose 16 rows of 16 words: out[w][32] gets word w of every row, in lanes 0..15. */
AX_INLINE void transpose_16(const uint8_t *const *row, size_t at, uint32_t *out) {
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(row[i] + at);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        __m512i c = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd), d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        _mm512_storeu_si512(out + (size_t)i * AX_PANEL, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_storeu_si512(out + (size_t)(i + 8) * AX_PANEL, _mm512_shuffle_i32x4(a, b, 0xdd));
        _mm512_storeu_si512(out + (size_t)(i + 4) * AX_PANEL, _mm512_shuffle_i32x4(c, d, 0x88));
        _mm512_storeu_si512(out + (size_t)(i + 12) * AX_PANEL, _mm512_shuffle_i32x4(c, d, 0xdd));
    }
}
#endif

/* K of a tile -> [AX_TILE / 32][words][32]: a word is a float32, or a pair of bfloat16 along D. */
static void pack_keys(const tile_t *t, int words, uint32_t *out) {
    const uint8_t *row[AX_TILE];
    for (int i = 0; i < AX_TILE; i++) row[i] = i < t->n ? t->key[i] : zero_row;
    for (int p = 0; p < t->n; p += AX_PANEL) {
        uint32_t *panel = out + (size_t)(p / AX_PANEL) * (size_t)words * AX_PANEL;
        int w = 0;
#if AX_VL == 16
        for (; w + 16 <= words; w += 16) {
            transpose_16(row + p, (size_t)w * 4, panel + (size_t)w * AX_PANEL);
            transpose_16(row + p + 16, (size_t)w * 4, panel + (size_t)w * AX_PANEL + 16);
        }
#endif
        for (int i = 0; i < AX_PANEL; i++)
            for (int j = w; j < words; j++) memcpy(panel + (size_t)j * AX_PANEL + i, row[p + i] + (size_t)j * 4, 4);
    }
}

/* V of a tile -> [D padded / 32][positions][32] float32, or [..][positions / 2][32] words that pair two positions. */
static void pack_values(const tile_t *t, const ax_engine *e, uint32_t *out) {
    int head_dim = e->s.head_dim, depth = e->s.kv_dtype == AX_BF16 ? AX_TILE / 2 : AX_TILE;
    const uint8_t *row[AX_TILE];
    for (int i = 0; i < AX_TILE; i++) row[i] = i < t->n ? t->key[i] + e->plane_bytes : zero_row;
    int used = e->s.kv_dtype == AX_BF16 ? (t->n + 1) / 2 : t->n;
    for (int d = 0; d < head_dim; d += AX_PANEL) {
        uint32_t *panel = out + (size_t)(d / AX_PANEL) * (size_t)depth * AX_PANEL;
        int n = head_dim - d < AX_PANEL ? head_dim - d : AX_PANEL;
        if (e->s.kv_dtype == AX_F32) {
            for (int i = 0; i < used; i++) memcpy(panel + (size_t)i * AX_PANEL, row[i] + (size_t)d * 4, (size_t)n * 4);
            continue;
        }
#if AX_VL == 16
        __mmask32 lanes = n == 32 ? 0xffffffffu : (1u << n) - 1u;
        for (int i = 0; i < used; i++) {
            __m512i a = _mm512_maskz_loadu_epi16(lanes, row[2 * i] + (size_t)d * 2);
            __m512i b = _mm512_maskz_loadu_epi16(lanes, row[2 * i + 1] + (size_t)d * 2);
            __m512i a0 = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(a)), b0 = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(b));
            __m512i a1 = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(a, 1)), b1 = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(b, 1));
            _mm512_storeu_si512(panel + (size_t)i * AX_PANEL, _mm512_or_si512(a0, _mm512_slli_epi32(b0, 16)));
            _mm512_storeu_si512(panel + (size_t)i * AX_PANEL + 16, _mm512_or_si512(a1, _mm512_slli_epi32(b1, 16)));
        }
#else
        for (int i = 0; i < used; i++) {
            const uint16_t *a = (const uint16_t *)row[2 * i] + d, *b = (const uint16_t *)row[2 * i + 1] + d;
            for (int j = 0; j < n; j++) panel[(size_t)i * AX_PANEL + j] = (uint32_t)a[j] | (uint32_t)b[j] << 16;
        }
#endif
    }
}

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
            store_row_part(row, e->s.kv_dtype, q, t * e->group + g, 0, head_dim);
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
 * alpha, by which what was summed before must be scaled. */
static void softmax_block(const ax_engine *e, const ax_task *task, const ax_span *span, int tile, int row, int rows,
                          float scale, ax_scratch *s) {
    enum { STEPS = AX_TILE / AX_VL };
    float *m = s->m + row, shrink[16];
    for (int i = 0; i < 16; i++) shrink[i] = 0;
    for (int r = 0; r < rows; r++) {
        float *score = s->scores + r * AX_TILE;
        int position = span->start + task->token + (row + r) / e->group;
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
#if AX_PAIRED
        if (e->s.kv_dtype == AX_BF16) {
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
            scores_table[e->s.kv_dtype][q->mr](words, a, (uint32_t *)s->k_panels + (size_t)(p / AX_PANEL) * (size_t)words * AX_PANEL, s->scores + p);
        for (int r = 0; r < q->mr; r++)
            memcpy(keep + r * AX_TILE + done, s->scores + r * AX_TILE + done, (size_t)(end - done) * 4);
        done = end;
    }
    memcpy(s->scores, keep, sizeof keep);
}

static void attend(ax_engine *e, int layer, const ax_task *task, ax_scratch *s) {
    const ax_span *span = &e->spans[task->span];
    int kind = e->s.kv_dtype, head_dim = e->s.head_dim, depth = ax_pad(head_dim, AX_PANEL);
    int rows = task->tokens * e->group, words = kind == AX_BF16 ? head_dim / 2 : head_dim;
    int k_values = kind == AX_BF16 ? AX_TILE / 2 : AX_TILE;
    float scale = 1.4426950408889634f / __builtin_sqrtf((float)head_dim); /* softmax in base 2 */
    ax_rows q = {.data = s->q, .mr = block_rows(rows), .rows = rows, .k = head_dim};
    q.block_words = (size_t)q.mr * (size_t)(e->paired[kind] ? head_dim / 2 : head_dim);
    int padded = ax_pad(rows, q.mr);
    int oldest = span->start + task->token, newest = oldest + task->tokens - 1;
    int from = e->s.sliding_window > 0 && oldest + 1 > e->s.sliding_window ? oldest + 1 - e->s.sliding_window : 0;
    int32_t packed_shift = NO_SHIFT;

    for (int r = 0; r < padded; r++) s->total_m[r] = AX_FLOOR, s->total_l[r] = 0;
    memset(s->total, 0, (size_t)padded * (size_t)depth * 4);
    for (int split = task->split_lo; split < task->split_hi; split++) {
        int begin = split * AX_SPLIT, end = begin + AX_SPLIT <= newest ? begin + AX_SPLIT : newest + 1;
        if (begin < from) begin = from / AX_TILE * AX_TILE;
        for (int r = 0; r < padded; r++) s->m[r] = AX_FLOOR;
        memset(s->l, 0, (size_t)padded * AX_VL * 4);
        memset(s->out, 0, (size_t)padded * (size_t)depth * 4);
        int entry = begin < end ? find_entry(span, begin) : 0;
        for (int tile = begin; tile < end; tile += AX_TILE) {
            tile_t t;
            entry = gather_tile(e, span, layer, task->kv_head, tile, end - tile < AX_TILE ? end - tile : AX_TILE, entry, &t);
            pack_keys(&t, words, (uint32_t *)s->k_panels);
            pack_values(&t, e, (uint32_t *)s->v_panels);
            if (!t.mixed && t.shift[0] != packed_shift) {
                packed_shift = t.shift[0];
                pack_queries(e, task, span, packed_shift, &q, s->row);
            }
            int used = kind == AX_BF16 ? (t.n + 1) / 2 : t.n;
            if (used > k_values) used = k_values;
            for (int block = 0; block * q.mr < rows; block++) {
                if (t.mixed) {
                    mixed_scores(e, task, span, &t, &q, block, words, s);
                    packed_shift = NO_SHIFT;
                } else {
                    const uint32_t *a = (const uint32_t *)q.data + (size_t)block * q.block_words;
                    for (int p = 0; p < t.n; p += AX_PANEL)
                        scores_table[kind][q.mr](words, a, (uint32_t *)s->k_panels + (size_t)(p / AX_PANEL) * (size_t)words * AX_PANEL, s->scores + p);
                }
                softmax_block(e, task, span, tile, block * q.mr, q.mr, scale, s);
                for (int d = 0; d < depth; d += AX_PANEL)
                    values_table[kind][q.mr](used, s->p, (uint32_t *)s->v_panels + (size_t)(d / AX_PANEL) * (size_t)k_values * AX_PANEL,
                                             s->out + (size_t)(block * q.mr) * (size_t)depth + d, depth, s->alpha);
            }
        }
        if (task->partial >= 0) {
            float *part = e->partials + (size_t)(task->partial + split - task->split_lo) * e->partial_floats;
            for (int r = 0; r < rows; r++, part += depth + 2) {
                part[0] = s->m[r];
                part[1] = vhsum(vload(s->l + (size_t)r * AX_VL));
                memcpy(part + 2, s->out + (size_t)r * (size_t)depth, (size_t)depth * 4);
            }
            continue;
        }
        for (int r = 0; r < rows; r++)
            merge_row(depth, s->total + (size_t)r * (size_t)depth, &s->total_m[r], &s->total_l[r],
                      s->out + (size_t)r * (size_t)depth, s->m[r], vhsum(vload(s->l + (size_t)r * AX_VL)));
    }
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
