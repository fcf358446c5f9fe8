/* Packing weights once, at load, into the order in which a product reads them (see ax_matrix).
 *
 * The arena of each matrix is on huge pages when the machine gives them: a decode step touches every page of the
 * model, and with 4 KiB pages the page walks cost a fifth of the bandwidth.  The packed copy is the only one kept; a
 * tied embedding is read out of the packed head (288 strided words of a row cost microseconds against a pass).
 */
#define _GNU_SOURCE
#include "engine.h"

#include <string.h>
#include <sys/mman.h>

static const size_t HUGE_BYTES = (size_t)2 << 20;

static size_t mapped(size_t bytes) { return (bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES; }

/* Zeroed memory on a 2 MiB boundary; small requests are not rounded up in what they touch. NULL without memory. */
void *ax_alloc_huge(size_t bytes) {
    size_t want = mapped(bytes == 0 ? 1 : bytes);
    uint8_t *p = mmap(NULL, want + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    size_t head = (HUGE_BYTES - (uintptr_t)p % HUGE_BYTES) % HUGE_BYTES;
    if (head > 0) munmap(p, head);
    if (HUGE_BYTES - head > 0) munmap(p + head + want, HUGE_BYTES - head);
    if (bytes >= HUGE_BYTES / 2) madvise(p + head, want, MADV_HUGEPAGE);
    return p + head;
}

void ax_free_huge(void *p, size_t bytes) {
    if (p != NULL) munmap(p, mapped(bytes == 0 ? 1 : bytes));
}

static size_t matrix_bytes(const ax_matrix *m) { return (size_t)m->panels * m->panel_words * 4; }

int ax_matrix_new(ax_matrix *m, int n, int k, int dtype) {
    int panels = ax_pad(n, AX_PANEL) / AX_PANEL;
    size_t words = (size_t)AX_PANEL * (dtype == AX_BF16 ? (size_t)(k + 1) / 2 : (size_t)k);
    *m = (ax_matrix){.n = n, .k = k, .dtype = dtype, .panels = panels, .panel_words = words};
    m->data = ax_alloc_huge(matrix_bytes(m));
    return m->data == NULL ? AX_ENOMEM : AX_OK;
}

void ax_matrix_free(ax_matrix *m) {
    if (m->data != NULL) ax_free_huge(m->data, matrix_bytes(m));
    m->data = NULL;
}

/* Put `rows` rows of a row-major source [rows, k] into the matrix.  Row i becomes output `first + i`, or, with
 * lane_step > 0, lane `lane + i % lane_step` of panel i / lane_step: that interleaves gate and up, 16 and 16. */
void ax_matrix_fill(ax_matrix *m, const void *source, int source_dtype, int rows, int first, int lane_step, int lane) {
    int k = m->k;
    for (int i = 0; i < rows; i++) {
        int output = first + i;
        size_t panel = lane_step > 0 ? (size_t)(i / lane_step) : (size_t)(output / AX_PANEL);
        int at = lane_step > 0 ? lane + i % lane_step : output % AX_PANEL;
        uint32_t *to = m->data + panel * m->panel_words + at;
        const float *f = (const float *)source + (size_t)i * (size_t)k;
        const uint16_t *h = (const uint16_t *)source + (size_t)i * (size_t)k;
        if (m->dtype == AX_F32) {
            for (int j = 0; j < k; j++) {
                float value = source_dtype == AX_F32 ? f[j] : ax_from_bf16(h[j]);
                memcpy(to + (size_t)j * AX_PANEL, &value, 4);
            }
        } else {
            for (int j = 0; j < k; j += 2) {
                uint32_t low = source_dtype == AX_BF16 ? h[j] : ax_to_bf16(f[j]);
                uint32_t high = j + 1 == k ? 0 : source_dtype == AX_BF16 ? h[j + 1] : ax_to_bf16(f[j + 1]);
                to[(size_t)(j / 2) * AX_PANEL] = low | high << 16;
            }
        }
    }
    m->filled += rows;
}

/* Read output row `row` back as float32 [k]: the embedding of a token. */
void ax_matrix_row(const ax_matrix *m, int row, float *y) {
    const uint32_t *from = m->data + (size_t)(row / AX_PANEL) * m->panel_words + row % AX_PANEL;
    if (m->dtype == AX_F32) {
        for (int j = 0; j < m->k; j++) memcpy(y + j, from + (size_t)j * AX_PANEL, 4);
        return;
    }
    for (int j = 0; j < m->k; j++) {
        uint32_t pair = from[(size_t)(j / 2) * AX_PANEL];
        y[j] = ax_from_bf16((uint16_t)(j % 2 == 0 ? pair & 0xffffu : pair >> 16));
    }
}
