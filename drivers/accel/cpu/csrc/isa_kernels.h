/* Products of a few rows with packed weights, and the element-wise kernels, for one instruction set.
 *
 * The product C[mr][32] = A[mr][K] . B[K][32] holds mr x 32 sums in registers and walks k once, so a weight panel is
 * read once for up to AX_MAX_MR rows: outer-product register blocking (Goto and van de Geijn, "Anatomy of
 * High-Performance Matrix Multiplication", 2008) on panels packed at load.  Three kinds: float32; bfloat16 weights
 * widened to float32 in registers; and bfloat16 pairs through VDPBF16PS (AX_PAIRED), where A is rounded to bfloat16
 * and one instruction does 32 multiply-adds.  Each sum runs over k in order whatever mr is: rows are independent.
 *
 * Requires AX_VL, AX_PAIRED and AX_NAME(x); included by isa_*.c after simd.h.
 */

enum { KIND_F32, KIND_WIDENED, KIND_PAIRED, BF16_KIND = AX_PAIRED ? KIND_PAIRED : KIND_WIDENED };
enum { MAX_MR = AX_VL == 16 ? 12 : 6 };

/* `k` counts float32 columns, or pairs.  A is [k][mr] (a_step 0) or rows a_step words apart.  With `alpha` the sums
 * start from C[m] * alpha[m], else from 0. */
AX_INLINE void multiply(const int mr, const int kind, const int a_step, const int ahead, long k, const void *a,
                        const uint32_t *b, float *c, long c_step, const float *alpha) {
#pragma GCC unroll 4
    for (int col = 0; col < AX_PANEL; col += 2 * AX_VL) {
        vf sum[AX_MAX_MR][2];
#pragma GCC unroll 12
        for (int m = 0; m < mr; m++) {
            sum[m][0] = alpha == NULL ? (vf){0} : vload(c + m * c_step + col) * alpha[m];
            sum[m][1] = alpha == NULL ? (vf){0} : vload(c + m * c_step + col + AX_VL) * alpha[m];
        }
        const uint32_t *w = b + col;
        for (long i = 0; i < k; i++, w += AX_PANEL) {
            if (ahead > 0 && col == 0) {
                __builtin_prefetch((const char *)w + ahead, 0, 2);
                __builtin_prefetch((const char *)w + ahead + 64, 0, 2);
            }
#if AX_PAIRED
            if (kind == KIND_PAIRED) {
                const uint32_t *pair = (const uint32_t *)a + (a_step == 0 ? i * mr : i);
                __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 16);
#pragma GCC unroll 12
                for (int m = 0; m < mr; m++) {
                    __m512bh x = (__m512bh)_mm512_set1_epi32((int)pair[a_step == 0 ? m : m * a_step]);
                    sum[m][0] = (vf)_mm512_dpbf16_ps((__m512)sum[m][0], w0, x);
                    sum[m][1] = (vf)_mm512_dpbf16_ps((__m512)sum[m][1], w1, x);
                }
                continue;
            }
#endif
            const float *x = (const float *)a;
            if (kind == KIND_F32) {
                vf w0 = vload((const float *)w), w1 = vload((const float *)w + AX_VL);
#pragma GCC unroll 12
                for (int m = 0; m < mr; m++) {
                    float v = x[a_step == 0 ? i * mr + m : m * a_step + i];
                    sum[m][0] += w0 * v;
                    sum[m][1] += w1 * v;
                }
            } else {
                vi p0 = *(const vi_any *)w, p1 = *(const vi_any *)(w + AX_VL);
                vf w0 = (vf)(p0 << 16), w1 = (vf)(p1 << 16);
#pragma GCC unroll 12
                for (int m = 0; m < mr; m++) {
                    float v = x[a_step == 0 ? 2 * i * mr + m : m * a_step + 2 * i];
                    sum[m][0] += w0 * v;
                    sum[m][1] += w1 * v;
                }
                w0 = (vf)(p0 & (int32_t)0xffff0000), w1 = (vf)(p1 & (int32_t)0xffff0000);
#pragma GCC unroll 12
                for (int m = 0; m < mr; m++) {
                    float v = x[a_step == 0 ? (2 * i + 1) * mr + m : m * a_step + 2 * i + 1];
                    sum[m][0] += w0 * v;
                    sum[m][1] += w1 * v;
                }
            }
        }
#pragma GCC unroll 12
        for (int m = 0; m < mr; m++) {
            vstore(c + m * c_step + col, sum[m][0]);
            vstore(c + m * c_step + col + AX_VL, sum[m][1]);
        }
    }
}

/* Bytes by which the second-level cache is asked for weights ahead of their use.  One row alone keeps the hardware's own
 * prefetcher busy enough (asking costs it a quarter); more rows leave it idle between loads (asking gains a tenth). */
#define AHEAD(mr) ((mr) == 1 ? 0 : 8192)
#define P_STEP(kind) ((kind) == KIND_PAIRED ? AX_TILE / 2 : AX_TILE) /* words of a row of probabilities */
#define AX_MULTIPLY(mr)                                                                                              \
    static void product_f32_##mr(long k, const void *a, const uint32_t *b, float *c) {                              \
        multiply(mr, KIND_F32, 0, AHEAD(mr), k, a, b, c, AX_PANEL, NULL);                                                \
    }                                                                                                                \
    static void product_bf16_##mr(long k, const void *a, const uint32_t *b, float *c) {                             \
        multiply(mr, BF16_KIND, 0, AHEAD(mr), k, a, b, c, AX_PANEL, NULL);                                               \
    }                                                                                                                \
    static void scores_f32_##mr(long k, const void *a, const uint32_t *b, float *c) {                               \
        multiply(mr, KIND_F32, 0, 0, k, a, b, c, AX_TILE, NULL);                                                    \
    }                                                                                                                \
    static void scores_bf16_##mr(long k, const void *a, const uint32_t *b, float *c) {                              \
        multiply(mr, BF16_KIND, 0, 0, k, a, b, c, AX_TILE, NULL);                                                   \
    }                                                                                                                \
    static void values_f32_##mr(long k, const void *a, const uint32_t *b, float *c, long step, const float *alpha) { \
        multiply(mr, KIND_F32, P_STEP(KIND_F32), 0, k, a, b, c, step, alpha);                                       \
    }                                                                                                                \
    static void values_bf16_##mr(long k, const void *a, const uint32_t *b, float *c, long step, const float *alpha) { \
        multiply(mr, BF16_KIND, P_STEP(BF16_KIND), 0, k, a, b, c, step, alpha);                                     \
    }
AX_MULTIPLY(1) AX_MULTIPLY(2) AX_MULTIPLY(3) AX_MULTIPLY(4) AX_MULTIPLY(5) AX_MULTIPLY(6)
#if AX_VL == 16
AX_MULTIPLY(7) AX_MULTIPLY(8) AX_MULTIPLY(9) AX_MULTIPLY(10) AX_MULTIPLY(11) AX_MULTIPLY(12)
#define AX_EACH_MR(f) {NULL, f##1, f##2, f##3, f##4, f##5, f##6, f##7, f##8, f##9, f##10, f##11, f##12}
#else
#define AX_EACH_MR(f) {NULL, f##1, f##2, f##3, f##4, f##5, f##6}
#endif

typedef void (*values_fn)(long k, const void *a, const uint32_t *b, float *c, long step, const float *alpha);
static const ax_product scores_table[2][AX_MAX_MR + 1] = {AX_EACH_MR(scores_f32_), AX_EACH_MR(scores_bf16_)};
static const values_fn values_table[2][AX_MAX_MR + 1] = {AX_EACH_MR(values_f32_), AX_EACH_MR(values_bf16_)};

/* y = x * weight / sqrt(mean(x^2) + eps)  (arXiv 1910.07467) */
static void rms_norm(const float *x, const float *weight, float eps, int n, float *y) {
    vf sums = {0};
    int i = 0;
    float sum = 0;
    for (; i + AX_VL <= n; i += AX_VL) sums += vload(x + i) * vload(x + i);
    for (; i < n; i++) sum += x[i] * x[i];
    float factor = 1.0f / __builtin_sqrtf((sum + vhsum(sums)) / (float)n + eps);
    for (i = 0; i + AX_VL <= n; i += AX_VL) vstore(y + i, vload(x + i) * factor * vload(weight + i));
    for (; i < n; i++) y[i] = x[i] * factor * weight[i];
}

static void to_bf16(const float *x, uint16_t *y, int n) {
    int i = 0;
#if AX_PAIRED
    for (; i + 16 <= n; i += 16) {
        __m256bh h = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + i));
        memcpy(y + i, &h, 32);
    }
#endif
    for (; i < n; i++) y[i] = ax_to_bf16(x[i]);
}

/* x[0..n) as int8 times one scale, which is returned: symmetric, so that the largest magnitude becomes 127 and zero stays
 * zero.  |x - y * scale| <= scale / 2, but for the roundings of a float32.  All of x below 1e-30 is taken for zeros. A value
 * that is not finite makes the scale NaN: the pass fails then, as with other dtypes, instead of going on with a wrong one. */
static float to_int8(const float *x, int8_t *y, int n) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: the addition rounds to an integer, half to even */
    float peak = 0, poison = 0;
    for (int i = 0; i < n; i++) {
        float a = __builtin_fabsf(x[i]);
        peak = a > peak ? a : peak;
        poison += a * 0.0f;
    }
    float factor = peak < 1e-30f || poison != 0 ? 0 : 127.0f / peak;
    for (int i = 0; i < n; i++) {
        union { float f; int32_t i; } rounded = {.f = x[i] * factor + magic};
        y[i] = (int8_t)(rounded.i - 0x4b400000);
    }
    return poison != 0 ? __builtin_nanf("") : factor == 0 ? 0 : peak / 127.0f;
}

/* Put x[0..n) into columns [column, column + n) of one row of an A operand; n and column are even. */
static void store_row_part(const float *x, int dtype, const ax_rows *rows, int row, int column, int n) {
    uint32_t *block = (uint32_t *)rows->data + (size_t)(row / rows->mr) * rows->block_words + row % rows->mr;
    size_t mr = (size_t)rows->mr;
    if (AX_PAIRED && dtype == AX_BF16) {
        uint32_t pairs[64];
        for (int at = 0; at < n; at += 128) {
            int part = n - at < 128 ? n - at : 128;
            to_bf16(x + at, (uint16_t *)pairs, part);
            uint32_t *to = block + (size_t)((column + at) / 2) * mr;
            for (int i = 0; i < part / 2; i++) to[(size_t)i * mr] = pairs[i];
        }
        return;
    }
    for (int i = 0; i < n; i++) memcpy(block + (size_t)(column + i) * mr, x + i, 4);
}

static void store_row(const float *x, int dtype, const ax_rows *rows, int row) {
    store_row_part(x, dtype, rows, row, 0, rows->k);
}

/* Columns [column, column + 16) of one row block from C[mr][32] = 16 gate and 16 up values: silu(gate) * up. */
static void silu_block(const float *c, int dtype, const ax_rows *rows, int block, int column) {
    int n = rows->k - column < 16 ? rows->k - column : 16;
    for (int m = 0; m < rows->mr; m++, c += AX_PANEL) {
        float y[16];
        for (int i = 0; i < 16; i += AX_VL) {
            vf gate = vload(c + i);
            vf exponential = vexp2(vmax(gate, vsplat(-80.0f)) * -1.4426950f);
            vstore(y + i, gate / (1.0f + exponential) * vload(c + 16 + i));
        }
        store_row_part(y, dtype, rows, block * rows->mr + m, column, n);
    }
}

/* log(sum(exp(x))) of a row of logits, and the lowest index of its largest.  NaN when that is not a finite number, as with any
 * NaN in the row.  A stretch is summed in float32 lanes, the stretches in float64. */
static double log_sum(const float *x, int n, int32_t *best) {
    enum { STRETCH = 64 * AX_VL };
    const float log2e = 1.4426950408889634f;
    float peak = -__builtin_inff(), rest[AX_VL];
    int whole = n / AX_VL * AX_VL, found = 0, bad = 0;
    for (int i = 0; i < AX_VL; i++) rest[i] = whole + i < n ? x[whole + i] : -__builtin_inff();
    vi unordered = (vi)(vload(rest) != vload(rest));
    for (int from = 0; from < n; from += STRETCH) {
        vf top = from + STRETCH < whole ? vsplat(-__builtin_inff()) : vload(rest);
        int end = whole - from < STRETCH ? whole : from + STRETCH;
        for (int i = from; i < end; i += AX_VL) {
            vf v = vload(x + i);
            top = vmax(top, v);
            unordered |= (vi)(v != v);
        }
        float here = vhmax(top);
        if (here > peak) peak = here, found = from;
    }
    for (int i = 0; i < AX_VL; i++) bad |= unordered[i];
    *best = 0;
    if (bad || !(__builtin_fabsf(peak) < __builtin_inff())) return __builtin_nan("");
    while (x[found] != peak) found++;
    *best = found;
    double sum = (double)vhsum(vexp2((vload(rest) - peak) * log2e));
    for (int from = 0; from < whole; from += STRETCH) {
        vf part = {0};
        int end = whole - from < STRETCH ? whole : from + STRETCH;
        for (int i = from; i < end; i += AX_VL) part += vexp2((vload(x + i) - peak) * log2e);
        sum += (double)vhsum(part);
    }
    return (double)peak + __builtin_log(sum);
}

/* Rotary embedding of one head, halves paired (i, i + D/2)  (arXiv 2104.09864, Hugging Face's layout) */
static void rope(float *x, const float *cosine, const float *sine, int head_dim) {
    int half = head_dim / 2, i = 0;
    for (; i + AX_VL <= half; i += AX_VL) {
        vf a = vload(x + i), b = vload(x + half + i), c = vload(cosine + i), s = vload(sine + i);
        vstore(x + i, a * c - b * s);
        vstore(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[i] + a * sine[i];
    }
}

#include "isa_attention.h"

const ax_kernels AX_NAME(ax_kernels) = {
    .max_mr = MAX_MR,
    .product = {AX_EACH_MR(product_f32_), AX_EACH_MR(product_bf16_)},
    .rms_norm = rms_norm, .store_row = store_row, .silu_block = silu_block, .rope = rope, .to_bf16 = to_bf16, .to_int8 = to_int8, .log_sum = log_sum,
    .attend = attend,
};
