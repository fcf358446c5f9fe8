/* One tile of positions: follow the page table to row pointers, and put K and V into product panels.
 * Part of isa_attention.h, for one instruction set. */

enum { NO_SHIFT = INT32_MIN };
typedef struct {
    const uint8_t *key[AX_TILE]; /* a position's row of K; its row of V lies `value` bytes further on */
    size_t value, row_bytes;
    int32_t shift[AX_TILE]; int n, mixed;
    float k_scale[AX_TILE], v_scale[AX_TILE]; /* of int8 KV; 0 past n */
} tile_t;

static const uint8_t zero_row[AX_MAX_HEAD * 4] __attribute__((aligned(64)));

AX_INLINE int block_rows(int rows) { /* rows of a register block, spread evenly */
    int blocks = (rows + MAX_MR - 1) / MAX_MR;
    return (rows + blocks - 1) / blocks;
}

/* The row pointers of positions [at, at + n): `entry` is any entry at or before the one that holds `at`. */
static int gather_tile(const ax_engine *e, const ax_span *span, int layer, int kv_head, int at, int n, int entry, tile_t *t) {
    size_t row_bytes = e->element_bytes * (size_t)e->s.head_dim, head_row = (size_t)kv_head * (size_t)e->block_tokens;
    size_t rows = (size_t)e->s.kv_heads * (size_t)e->block_tokens;
    t->n = n;
    t->mixed = 0;
    t->value = e->plane_bytes;
    t->row_bytes = row_bytes;
    int i = 0;
    while (i < n) {
        while (span->first[entry + 1] <= at + i) entry++;
        int offset = at + i - span->first[entry], here = span->first[entry + 1] - at - i;
        const uint8_t *frame = e->arena + (size_t)span->frame[entry] * e->frame_bytes + (size_t)layer * e->layer_bytes;
        const uint8_t *key = frame + (head_row + (size_t)offset) * row_bytes;
        int32_t shift = span->shift[entry];
        if (i > 0 && shift != t->shift[0]) t->mixed = 1;
        if (e->s.kv_dtype == AX_INT8) {
            const float *scale = (const float *)(frame + 2 * e->plane_bytes) + head_row + offset;
            size_t some = (size_t)(here < n - i ? here : n - i) * sizeof *scale;
            memcpy(t->k_scale + i, scale, some);
            memcpy(t->v_scale + i, scale + rows, some);
        }
        for (int j = 0; j < here && i < n; j++, i++, key += row_bytes) {
            t->key[i] = key;
            t->shift[i] = shift;
        }
    }
    for (; e->s.kv_dtype == AX_INT8 && i < AX_TILE; i++) t->k_scale[i] = t->v_scale[i] = 0;
    return entry;
}

AX_INLINE void widen_row(const int8_t *x, uint16_t *y, int n) {
    int i = 0;
#if AX_PAIRED
    for (; i + 32 <= n; i += 32) {
        __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(x + i))));
        __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(x + i + 16))));
        __m512bh both = _mm512_cvtne2ps_pbh(high, low);
        memcpy(y + i, &both, 64);
    }
#endif
    for (; i < n; i++) {
        union { float f; uint32_t u; } v = {.f = (float)x[i]};
        y[i] = (uint16_t)(v.u >> 16);
    }
}

/* Make a tile of int8 rows one of bfloat16 rows in `to` [2][AX_TILE][D]: the integers as they are, which bfloat16 holds
 * exactly.  The scales are for the scores and the probabilities, where they cost one multiplication a position. */
static void widen_tile(tile_t *t, int head_dim, uint16_t *to) {
    size_t value = (size_t)AX_TILE * (size_t)head_dim;
    for (int i = 0; i < t->n; i++) {
        const int8_t *row[2] = {(const int8_t *)t->key[i], (const int8_t *)(t->key[i] + t->value)};
        uint16_t *wide = to + (size_t)i * (size_t)head_dim;
        for (int plane = 0; plane < 2; plane++)
            widen_row(row[plane], wide + (size_t)plane * value, head_dim);
        t->key[i] = (const uint8_t *)wide;
    }
    t->value = value * sizeof *to;
    t->row_bytes = (size_t)head_dim * sizeof *to;
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
/* Four words of 16 rows, transposed: out[w] holds word w of every row in order.  Masked broadcasts put row i + 4k into
 * lane k, which leaves half of the shuffles of the usual 16 x 16 transpose. */
AX_INLINE void words_of_16(const uint8_t *const *row, size_t at, __m512i out[4]) {
    __m512i x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        x[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(row[i] + at)));
        x[i] = _mm512_mask_broadcast_i32x4(x[i], 0x00f0, _mm_loadu_si128((const __m128i *)(row[i + 4] + at)));
        x[i] = _mm512_mask_broadcast_i32x4(x[i], 0x0f00, _mm_loadu_si128((const __m128i *)(row[i + 8] + at)));
        x[i] = _mm512_mask_broadcast_i32x4(x[i], 0xf000, _mm_loadu_si128((const __m128i *)(row[i + 12] + at)));
    }
    __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpacklo_epi32(x[2], x[3]);
    __m512i c = _mm512_unpackhi_epi32(x[0], x[1]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    out[0] = _mm512_unpacklo_epi64(a, b);
    out[1] = _mm512_unpackhi_epi64(a, b);
    out[2] = _mm512_unpacklo_epi64(c, d);
    out[3] = _mm512_unpackhi_epi64(c, d);
}

typedef struct { __m512i low, high; } pairing_t; /* permutations that interleave two rows of 32 bfloat16 */

AX_INLINE pairing_t pairing(void) {
    const __m512i step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i low = _mm512_add_epi32(_mm512_mullo_epi32(step, _mm512_set1_epi32(0x00010001)), _mm512_set1_epi32(0x00200000));
    return (pairing_t){low, _mm512_add_epi32(low, _mm512_set1_epi32(0x00100010))};
}
#endif

/* Ask for `rows` rows of the tile that comes next.  Frames lie anywhere, so the hardware cannot foresee them; asked for a
 * tile ahead, their latency hides behind this tile's arithmetic. */
AX_INLINE void fetch_rows(const tile_t *next, int from, int rows, size_t offset) {
    for (int i = from; i < from + rows && i < next->n; i++)
        for (size_t b = 0; b < next->row_bytes; b += 64) __builtin_prefetch(next->key[i] + offset + b, 0, 2);
}

/* K of a tile -> [AX_TILE / 32][words][32]: a word is a float32, or a pair of bfloat16 along D. */
static void pack_keys(const tile_t *t, int words, uint32_t *out) {
    const uint8_t *row[AX_TILE];
    for (int i = 0; i < AX_TILE; i++) row[i] = i < t->n ? t->key[i] : zero_row;
    for (int p = 0; p < t->n; p += AX_PANEL) {
        uint32_t *panel = out + (size_t)(p / AX_PANEL) * (size_t)words * AX_PANEL;
        int w = 0;
#if AX_VL == 16
        for (; w + 4 <= words; w += 4) {
            __m512i column[4];
            for (int half = 0; half < 2; half++) {
                words_of_16(row + p + 16 * half, (size_t)w * 4, column);
                for (int i = 0; i < 4; i++) _mm512_storeu_si512(panel + (size_t)(w + i) * AX_PANEL + 16 * half, column[i]);
            }
        }
#endif
        for (int i = 0; i < AX_PANEL; i++)
            for (int j = w; j < words; j++) memcpy(panel + (size_t)j * AX_PANEL + i, row[p + i] + (size_t)j * 4, 4);
    }
}

/* V of a tile -> [D padded / 32][positions][32] float32, or [..][positions / 2][32] words that pair two positions. */
static void pack_values(const tile_t *t, const ax_engine *e, uint32_t *out) {
    int head_dim = e->s.head_dim, depth = e->kv_kind == AX_BF16 ? AX_TILE / 2 : AX_TILE;
    const uint8_t *row[AX_TILE];
    for (int i = 0; i < AX_TILE; i++) row[i] = i < t->n ? t->key[i] + t->value : zero_row;
    int used = e->kv_kind == AX_BF16 ? (t->n + 1) / 2 : t->n;
    for (int d = 0; d < head_dim; d += AX_PANEL) {
        uint32_t *panel = out + (size_t)(d / AX_PANEL) * (size_t)depth * AX_PANEL;
        int n = head_dim - d < AX_PANEL ? head_dim - d : AX_PANEL;
        if (e->kv_kind == AX_F32) {
            for (int i = 0; i < used; i++) memcpy(panel + (size_t)i * AX_PANEL, row[i] + (size_t)d * 4, (size_t)n * 4);
            continue;
        }
#if AX_VL == 16
        const pairing_t pair = pairing();
        __mmask32 lanes = n == 32 ? 0xffffffffu : (1u << n) - 1u;
        for (int i = 0; i < used; i++) {
            __m512i a = _mm512_maskz_loadu_epi16(lanes, row[2 * i] + (size_t)d * 2);
            __m512i b = _mm512_maskz_loadu_epi16(lanes, row[2 * i + 1] + (size_t)d * 2);
            _mm512_storeu_si512(panel + (size_t)i * AX_PANEL, _mm512_permutex2var_epi16(a, pair.low, b));
            _mm512_storeu_si512(panel + (size_t)i * AX_PANEL + 16, _mm512_permutex2var_epi16(a, pair.high, b));
        }
#else
        for (int i = 0; i < used; i++) {
            const uint16_t *a = (const uint16_t *)row[2 * i] + d, *b = (const uint16_t *)row[2 * i + 1] + d;
            for (int j = 0; j < n; j++) panel[(size_t)i * AX_PANEL + j] = (uint32_t)a[j] | (uint32_t)b[j] << 16;
        }
#endif
    }
}


#if AX_PAIRED
/* The same sums as packing and the product kernels make, bit for bit, with the panels left in registers: with the few
 * rows of a decode task, storing and reloading panels costs more than the products. */
enum { THIN_ROWS = 8 };

/* Four words of 16 rows of bfloat16 pairs, or of int8 fours, as the pairs along D that are multiplied: 4 or 8 vectors.  A
 * byte goes to the top of its lane, where the conversion reads it as 2^24 times what it is: one instruction less, and
 * exact; the sums are scaled back. */
AX_INLINE void pairs_of_16(const int narrow, const uint8_t *const *row, size_t at, __m512i out[8]) {
    if (!narrow) {
        words_of_16(row, at, out);
        return;
    }
    const __m512i low_first = _mm512_set4_epi32(0x0c808080, 0x08808080, 0x04808080, 0x00808080), one = _mm512_set1_epi32(0x01000000);
    __m512i fours[4];
    words_of_16(row, at, fours);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i index = low_first;
        __m512 byte[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            byte[j] = _mm512_cvtepi32_ps(_mm512_shuffle_epi8(fours[i], index));
            index = _mm512_add_epi32(index, one);
        }
        out[2 * i] = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32((__m512i)byte[0], 16), (__m512i)byte[1]);
        out[2 * i + 1] = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32((__m512i)byte[2], 16), (__m512i)byte[3]);
    }
}

/* Rows a and b of 16 values each as pairs (a, b). */
AX_INLINE __m512bh paired_bytes(const int8_t *a, const int8_t *b) {
    __m512i low = (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)a)));
    __m512i high = (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)b)));
    return (__m512bh)_mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(low, 16), high);
}

AX_INLINE void thin_scores(const int mr, const int narrow, const tile_t *t, const tile_t *next, int words, const uint32_t *q,
                           float *scores) {
    const int step = narrow ? 8 : 4;
    for (int p = 0; p < t->n; p += 16) {
        const uint8_t *row[16];
        for (int i = 0; i < 16; i++) row[i] = p + i < t->n ? t->key[p + i] : zero_row;
        fetch_rows(next, p, 16, 0);
        __m512 sum[THIN_ROWS];
#pragma GCC unroll 8
        for (int m = 0; m < mr; m++) sum[m] = _mm512_setzero_ps();
        for (int w = 0; w < words; w += step) {
            __m512i column[8];
            pairs_of_16(narrow, row, (size_t)w * (narrow ? 2 : 4), column);
#pragma GCC unroll 8
            for (int i = 0; i < step; i++)
#pragma GCC unroll 8
                for (int m = 0; m < mr; m++)
                    sum[m] = _mm512_dpbf16_ps(sum[m], (__m512bh)column[i], (__m512bh)_mm512_set1_epi32((int)q[(w + i) * mr + m]));
        }
#pragma GCC unroll 8
        for (int m = 0; m < mr; m++)
            _mm512_storeu_ps(scores + m * AX_TILE + p, narrow ? _mm512_mul_ps(sum[m], _mm512_set1_ps(0x1p-24f)) : sum[m]);
    }
}

AX_INLINE void thin_values(const int mr, const int narrow, const tile_t *t, const tile_t *next, const ax_engine *e, const uint32_t *p,
                           float *out, long step, const float *alpha) {
    const pairing_t pair = pairing();
    const size_t plane = t->value;
    for (int d = 0; d < e->s.head_dim; d += AX_PANEL) {
        int n = e->s.head_dim - d < AX_PANEL ? e->s.head_dim - d : AX_PANEL;
        __mmask32 lanes = n == 32 ? 0xffffffffu : (1u << n) - 1u;
        __m512 sum[THIN_ROWS][2];
#pragma GCC unroll 8
        for (int m = 0; m < mr; m++)
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) sum[m][j] = (__m512)(vload(out + m * step + d + 16 * j) * alpha[m]);
        for (int i = 0; i < t->n; i += 2) {
            const uint8_t *first = t->key[i] + plane, *second = i + 1 < t->n ? t->key[i + 1] + plane : zero_row;
            __m512bh low, high;
            if (narrow) {
                low = paired_bytes((const int8_t *)first + d, (const int8_t *)second + d);
                high = n > 16 ? paired_bytes((const int8_t *)first + d + 16, (const int8_t *)second + d + 16) : low;
            } else {
                __m512i a = _mm512_maskz_loadu_epi16(lanes, first + (size_t)d * 2);
                __m512i b = _mm512_maskz_loadu_epi16(lanes, second + (size_t)d * 2);
                low = (__m512bh)_mm512_permutex2var_epi16(a, pair.low, b);
                high = (__m512bh)_mm512_permutex2var_epi16(a, pair.high, b);
            }
            if (d == 0) fetch_rows(next, i, 2, next->value);
#pragma GCC unroll 8
            for (int m = 0; m < mr; m++) {
                __m512bh x = (__m512bh)_mm512_set1_epi32((int)p[m * (AX_TILE / 2) + i / 2]);
                sum[m][0] = _mm512_dpbf16_ps(sum[m][0], low, x);
                sum[m][1] = _mm512_dpbf16_ps(sum[m][1], high, x);
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < mr; m++)
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) vstore(out + m * step + d + 16 * j, (vf)sum[m][j]);
    }
}

#define AX_THIN(mr, narrow, name)                                                                                       \
    static void thin_scores_##name##mr(const tile_t *t, const tile_t *next, int words, const uint32_t *q, float *scores) { \
        thin_scores(mr, narrow, t, next, words, q, scores);                                                             \
    }                                                                                                                   \
    static void thin_values_##name##mr(const tile_t *t, const tile_t *next, const ax_engine *e, const uint32_t *p,      \
                                       float *out, long step, const float *alpha) {                                     \
        thin_values(mr, narrow, t, next, e, p, out, step, alpha);                                                       \
    }
#define AX_EACH_THIN(narrow, name)                                                                                      \
    AX_THIN(1, narrow, name) AX_THIN(2, narrow, name) AX_THIN(3, narrow, name) AX_THIN(4, narrow, name)                 \
    AX_THIN(5, narrow, name) AX_THIN(6, narrow, name) AX_THIN(7, narrow, name) AX_THIN(8, narrow, name)
AX_EACH_THIN(0, bf16_)
AX_EACH_THIN(1, int8_)
#define AX_THIN_ROW(f) {NULL, f##1, f##2, f##3, f##4, f##5, f##6, f##7, f##8}

typedef void (*thin_scores_fn)(const tile_t *, const tile_t *, int, const uint32_t *, float *);
typedef void (*thin_values_fn)(const tile_t *, const tile_t *, const ax_engine *, const uint32_t *, float *, long, const float *);
static const thin_scores_fn thin_scores_table[2][THIN_ROWS + 1] = {AX_THIN_ROW(thin_scores_bf16_), AX_THIN_ROW(thin_scores_int8_)};
static const thin_values_fn thin_values_table[2][THIN_ROWS + 1] = {AX_THIN_ROW(thin_values_bf16_), AX_THIN_ROW(thin_values_int8_)};
#endif
