/* Single kernels of one instruction set on plain arrays: for the sampler, and so that each can be tested against a reference
 * by itself. */
#include "api.h"

#include <stdlib.h>
#include <string.h>

static const ax_kernels *table_of(int isa) {
#if defined(__x86_64__)
    if (isa == AX_AVX512BF16) return &ax_kernels_avx512bf16;
    if (isa == AX_AVX512) return &ax_kernels_avx512;
    if (isa == AX_AVX2) return &ax_kernels_avx2;
#endif
    (void)isa;
    return &ax_kernels_portable;
}

/* y[m, n] = x[m, k] . weight[n, k]^T, weight of `dtype`, in register blocks of at most `mr` rows (0: the largest). */
int ax_op_linear(int isa, int mr, const float *x, int m, int k, const void *weight, int dtype, int n, float *y) {
    const ax_kernels *isa_kernels = table_of(isa);
    int paired = isa == AX_AVX512BF16 && dtype == AX_BF16;
    if (mr < 1 || mr > isa_kernels->max_mr) mr = isa_kernels->max_mr;
    ax_matrix w;
    if (ax_matrix_new(&w, n, k, dtype) != AX_OK) return AX_ENOMEM;
    ax_matrix_fill(&w, weight, dtype, n, 0, 0, 0);
    ax_rows a = {.mr = mr, .rows = m, .k = k};
    a.block_words = (size_t)mr * (size_t)(paired ? (k + 1) / 2 : ax_pad(k, 2));
    a.data = calloc((size_t)((m + mr - 1) / mr) * a.block_words, 4);
    if (a.data == NULL) {
        ax_matrix_free(&w);
        return AX_ENOMEM;
    }
    for (int i = 0; i < m; i++) isa_kernels->store_row(x + (size_t)i * (size_t)k, dtype, &a, i);
    float c[AX_MAX_MR * AX_PANEL];
    for (int block = 0; block * mr < m; block++)
        for (int panel = 0; panel < w.panels; panel++) {
            isa_kernels->product[dtype][mr](dtype == AX_BF16 ? (k + 1) / 2 : k,
                                            (uint32_t *)a.data + (size_t)block * a.block_words,
                                            w.data + (size_t)panel * w.panel_words, c);
            int columns = n - panel * AX_PANEL < AX_PANEL ? n - panel * AX_PANEL : AX_PANEL;
            for (int i = 0; i < mr && block * mr + i < m; i++)
                memcpy(y + (size_t)(block * mr + i) * (size_t)n + panel * AX_PANEL, c + i * AX_PANEL, (size_t)columns * 4);
        }
    free(a.data);
    ax_matrix_free(&w);
    return AX_OK;
}

int ax_op_rms_norm(int isa, const float *x, const float *weight, float eps, int m, int n, float *y) {
    for (int i = 0; i < m; i++) table_of(isa)->rms_norm(x + (size_t)i * (size_t)n, weight, eps, n, y + (size_t)i * (size_t)n);
    return AX_OK;
}

/* y[i] = silu(gate[i]) * up[i] in float32; n a multiple of 16 */
int ax_op_silu_mul(int isa, const float *gate, const float *up, int n, float *y) {
    float c[AX_PANEL];
    for (int at = 0; at < n; at += 16) {
        memcpy(c, gate + at, 64);
        memcpy(c + 16, up + at, 64);
        ax_rows one = {.data = y + at, .mr = 1, .rows = 1, .k = 16, .block_words = 16};
        table_of(isa)->silu_block(c, AX_F32, &one, 0, 0);
    }
    return AX_OK;
}

/* Rotate m heads in place; cosine and sine: [m, head_dim / 2]. */
int ax_op_rope(int isa, float *x, const float *cosine, const float *sine, int m, int head_dim) {
    for (int i = 0; i < m; i++)
        table_of(isa)->rope(x + (size_t)i * (size_t)head_dim, cosine + (size_t)i * (size_t)(head_dim / 2),
                            sine + (size_t)i * (size_t)(head_dim / 2), head_dim);
    return AX_OK;
}

/* Of each row of x[m, n]: log(sum(exp)), NaN without a finite largest, and the index of the largest. */
int ax_op_log_sums(int isa, const float *x, int m, int n, double *sums, int32_t *best) {
    for (int i = 0; i < m; i++) sums[i] = table_of(isa)->log_sum(x + (size_t)i * (size_t)n, n, &best[i]);
    return AX_OK;
}

/* y[i] = x[i] as bfloat16, to the nearest, ties to even */
void ax_op_to_bf16(const float *x, int64_t n, uint16_t *y) {
    for (int64_t i = 0; i < n; i++) y[i] = ax_to_bf16(x[i]);
}
