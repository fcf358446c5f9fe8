/* One tile of positions: follow the page table to row pointers, and put K and V into product panels.
 * Part of isa_attention.h, for one instruction set. */

enum { NO_SHIFT = INT32_MIN };
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

/* Ask for 32 rows of the tile that comes next.  Frames lie anywhere, so the hardware cannot foresee them; asked for a
 * tile ahead, their latency hides behind this tile's arithmetic. */
AX_INLINE void fetch_rows(const tile_t *next, int from, size_t offset, size_t row_bytes) {
    for (int i = from; i < from + AX_PANEL && i < next->n; i++)
        for (size_t b = 0; b < row_bytes; b += 64) __builtin_prefetch(next->key[i] + offset + b, 0, 3);
}

/* K of a tile -> [AX_TILE / 32][words][32]: a word is a float32, or a pair of bfloat16 along D. */
static void pack_keys(const tile_t *t, const tile_t *next, int words, uint32_t *out) {
    const uint8_t *row[AX_TILE];
    for (int i = 0; i < AX_TILE; i++) row[i] = i < t->n ? t->key[i] : zero_row;
    for (int p = 0; p < t->n; p += AX_PANEL) {
        fetch_rows(next, p, 0, (size_t)words * 4);
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
static void pack_values(const tile_t *t, const tile_t *next, const ax_engine *e, uint32_t *out) {
    int head_dim = e->s.head_dim, depth = e->s.kv_dtype == AX_BF16 ? AX_TILE / 2 : AX_TILE;
    const uint8_t *row[AX_TILE];
    for (int i = 0; i < AX_TILE; i++) row[i] = i < t->n ? t->key[i] + e->plane_bytes : zero_row;
    for (int i = 0; i < AX_TILE; i += AX_PANEL)
        fetch_rows(next, i, e->plane_bytes, (size_t)head_dim * (e->s.kv_dtype == AX_BF16 ? 2 : 4));
    int used = e->s.kv_dtype == AX_BF16 ? (t->n + 1) / 2 : t->n;
    for (int d = 0; d < head_dim; d += AX_PANEL) {
        uint32_t *panel = out + (size_t)(d / AX_PANEL) * (size_t)depth * AX_PANEL;
        int n = head_dim - d < AX_PANEL ? head_dim - d : AX_PANEL;
        if (e->s.kv_dtype == AX_F32) {
            for (int i = 0; i < used; i++) memcpy(panel + (size_t)i * AX_PANEL, row[i] + (size_t)d * 4, (size_t)n * 4);
            continue;
        }
#if AX_VL == 16
        const __m512i one = _mm512_set1_epi32(0x00200000), step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i low = _mm512_add_epi32(_mm512_mullo_epi32(step, _mm512_set1_epi32(0x00010001)), one); /* a[i], b[i] */
        const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(0x00100010));
        __mmask32 lanes = n == 32 ? 0xffffffffu : (1u << n) - 1u;
        for (int i = 0; i < used; i++) {
            __m512i a = _mm512_maskz_loadu_epi16(lanes, row[2 * i] + (size_t)d * 2);
            __m512i b = _mm512_maskz_loadu_epi16(lanes, row[2 * i + 1] + (size_t)d * 2);
            _mm512_storeu_si512(panel + (size_t)i * AX_PANEL, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(panel + (size_t)i * AX_PANEL + 16, _mm512_permutex2var_epi16(a, high, b));
        }
#else
        for (int i = 0; i < used; i++) {
            const uint16_t *a = (const uint16_t *)row[2 * i] + d, *b = (const uint16_t *)row[2 * i + 1] + d;
            for (int j = 0; j < n; j++) panel[(size_t)i * AX_PANEL + j] = (uint32_t)a[j] | (uint32_t)b[j] << 16;
        }
#endif
    }
}

