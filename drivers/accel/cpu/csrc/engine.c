/* The life of an engine: choose the instruction set, take the weights, attach the arena. */
#define _GNU_SOURCE
#include "engine.h"
#include "api.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const ax_kernels *kernels_of(int isa) {
    switch (isa) {
#if defined(__x86_64__)
    case AX_AVX512BF16: return &ax_kernels_avx512bf16;
    case AX_AVX512: return &ax_kernels_avx512;
    case AX_AVX2: return &ax_kernels_avx2;
#endif
    default: return &ax_kernels_portable;
    }
}

/* The best instruction set of this machine. */
int ax_best_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return AX_AVX512BF16;
    if (avx512) return AX_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AX_AVX2;
#endif
    return AX_PORTABLE;
}

static size_t rows_bytes(int k) { /* an A operand of a whole chunk, whatever its row blocks are */
    return (size_t)(AX_CHUNK + AX_MAX_MR) * (size_t)ax_pad(k, 16) * 4;
}

static int scratch_new(ax_engine *e, ax_scratch *s) {
    size_t rows = (size_t)ax_pad(e->group > AX_Q_ROWS ? e->group : AX_Q_ROWS, AX_MAX_MR) + AX_MAX_MR;
    size_t depth = (size_t)ax_pad(e->s.head_dim, AX_PANEL);
    size_t row = (size_t)ax_pad(e->s.hidden > AX_MAX_HEAD ? e->s.hidden : AX_MAX_HEAD, 16);
    size_t floats[] = {rows * depth, AX_MAX_MR * AX_TILE, AX_MAX_MR * AX_TILE, AX_TILE * depth, AX_TILE * depth,
                       AX_TILE * depth, /* K and V of a tile as bfloat16 */
                       rows * depth, rows * depth, row, rows, rows * 16, rows, rows, 16};
    float **field[] = {&s->q, &s->scores, &s->p, &s->k_panels, &s->v_panels, &s->widened, &s->out, &s->total, &s->row, &s->m, &s->l,
                       &s->total_m, &s->total_l, &s->alpha};
    size_t total = 0;
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) total += (floats[i] + 31) / 16 * 16;
    float *at = aligned_alloc(AX_ALIGN, total * 4);
    if (at == NULL) return AX_ENOMEM;
    memset(at, 0, total * 4);
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
        *field[i] = at;
        at += (floats[i] + 31) / 16 * 16;
    }
    return (s->position = malloc(rows * sizeof *s->position)) == NULL ? AX_ENOMEM : AX_OK;
}

/* A new engine without weights; NULL without memory.  inv_freq: [head_dim / 2] rotary frequencies. */
ax_engine *ax_new(const ax_shape *shape, const float *inv_freq, int threads, int isa) {
    ax_engine *e = calloc(1, sizeof *e);
    if (e == NULL) return NULL;
    e->s = *shape;
    e->isa = kernels_of(isa);
    e->threads = threads;
    e->group = shape->heads / shape->kv_heads;
    e->qkv_columns = (shape->heads + 2 * shape->kv_heads) * shape->head_dim;
    e->paired[AX_BF16] = isa == AX_AVX512BF16;
    e->kv_kind = shape->kv_dtype == AX_F32 ? AX_F32 : AX_BF16;
    size_t half = (size_t)shape->head_dim / 2, table = half * (size_t)shape->window * 4;
    int bad = 0;
    e->inv_freq = malloc(half * 4);
    bad |= e->inv_freq == NULL;
    if (!bad) memcpy(e->inv_freq, inv_freq, half * 4);
    bad |= (e->cosine = ax_alloc_huge(table)) == NULL || (e->sine = ax_alloc_huge(table)) == NULL;
    bad |= (e->layer = calloc((size_t)shape->layers, sizeof *e->layer)) == NULL;
    bad |= (e->norm_out = malloc((size_t)shape->hidden * 4)) == NULL;
    int attention = shape->heads * shape->head_dim;
    for (int l = 0; l < shape->layers && !bad; l++) {
        ax_layer *layer = &e->layer[l];
        bad |= ax_matrix_new(&layer->m[AX_QKV], e->qkv_columns, shape->hidden, shape->dtype);
        bad |= ax_matrix_new(&layer->m[AX_O], shape->hidden, attention, shape->dtype);
        bad |= ax_matrix_new(&layer->m[AX_GATE_UP], 2 * ax_pad(shape->intermediate, 16), shape->hidden, shape->dtype);
        bad |= ax_matrix_new(&layer->m[AX_DOWN], shape->hidden, shape->intermediate, shape->dtype);
    }
    if (!bad) bad |= ax_matrix_new(&e->head, shape->vocab, shape->hidden, shape->dtype);
    if (!bad && !shape->tied) bad |= ax_matrix_new(&e->embed, shape->vocab, shape->hidden, shape->dtype);
    bad |= (e->x = ax_alloc_huge((size_t)AX_CHUNK * (size_t)shape->hidden * 4)) == NULL;
    bad |= (e->qkv = ax_alloc_huge((size_t)AX_CHUNK * (size_t)e->qkv_columns * 4)) == NULL;
    bad |= (e->norm_buffer = ax_alloc_huge(rows_bytes(shape->hidden))) == NULL;
    bad |= (e->attn_buffer = ax_alloc_huge(rows_bytes(attention))) == NULL;
    bad |= (e->ffn_buffer = ax_alloc_huge(rows_bytes(shape->intermediate))) == NULL;
    bad |= (e->head_buffer = ax_alloc_huge(rows_bytes(shape->hidden))) == NULL;
    bad |= (e->row_span = malloc(AX_CHUNK * sizeof *e->row_span)) == NULL;
    bad |= (e->queries = malloc(AX_CHUNK * sizeof *e->queries)) == NULL;
    bad |= (e->groups = malloc(AX_CHUNK / 2 * sizeof *e->groups)) == NULL;
    bad |= (e->order = malloc(2 * AX_CHUNK * sizeof *e->order)) == NULL;
    bad |= (e->parts = malloc(AX_CHUNK * sizeof *e->parts)) == NULL;
    e->state_floats = 32 + (size_t)ax_pad(shape->head_dim, AX_PANEL);
    bad |= (e->want_row = malloc(AX_CHUNK * sizeof *e->want_row)) == NULL;
    bad |= (e->want_out = malloc(AX_CHUNK * sizeof *e->want_out)) == NULL;
    bad |= (e->scratch = calloc((size_t)threads, sizeof *e->scratch)) == NULL;
    for (int t = 0; t < threads && !bad; t++) bad |= scratch_new(e, &e->scratch[t]);
    bad |= !bad && (e->pool = ax_pool_new(threads)) == NULL;
    if (bad) { ax_free(e); return NULL; }
    return e;
}

void ax_free(ax_engine *e) {
    if (e == NULL) return;
    ax_pool_free(e->pool);
    size_t table = (size_t)e->s.head_dim / 2 * (size_t)e->s.window * 4;
    for (int l = 0; e->layer != NULL && l < e->s.layers; l++) {
        for (int i = 0; i < 4; i++) ax_matrix_free(&e->layer[l].m[i]);
        for (int i = 0; i < AX_VECTORS; i++) free(e->layer[l].v[i]);
    }
    ax_matrix_free(&e->head);
    ax_matrix_free(&e->embed);
    ax_free_huge(e->cosine, table);
    ax_free_huge(e->sine, table);
    ax_free_huge(e->x, (size_t)AX_CHUNK * (size_t)e->s.hidden * 4);
    ax_free_huge(e->qkv, (size_t)AX_CHUNK * (size_t)e->qkv_columns * 4);
    ax_free_huge(e->norm_buffer, rows_bytes(e->s.hidden));
    ax_free_huge(e->attn_buffer, rows_bytes(e->s.heads * e->s.head_dim));
    ax_free_huge(e->ffn_buffer, rows_bytes(e->s.intermediate));
    ax_free_huge(e->head_buffer, rows_bytes(e->s.hidden));
    for (int t = 0; e->scratch != NULL && t < e->threads; t++) free(e->scratch[t].q), free(e->scratch[t].position);
    void *plain[] = {e->inv_freq, e->layer, e->norm_out, e->row_span, e->scratch, e->spans, e->firsts, e->tasks,
                     e->queries, e->groups, e->order, e->parts, e->states, e->want_out, e->want_row};
    for (size_t i = 0; i < sizeof plain / sizeof *plain; i++) free(plain[i]);
    free(e);
}

/* Put `rows` rows [rows, k] of `dtype` into a matrix of a layer, from output `first` on.  AX_GATE_UP: first 0 is the
 * gate, 16 the up projection.  AX_HEAD and AX_EMBED have no layer. */
int ax_load_matrix(ax_engine *e, int which, int layer, const void *source, int dtype, int rows, int first) {
    ax_matrix *m = which == AX_HEAD ? &e->head : which == AX_EMBED ? &e->embed : &e->layer[layer].m[which];
    if (m->data == NULL) return AX_ENOTREADY;
    if (which == AX_GATE_UP) ax_matrix_fill(m, source, dtype, rows, 0, 16, first);
    else ax_matrix_fill(m, source, dtype, rows, first, 0, 0);
    return AX_OK;
}

/* A norm weight or bias, float32 [n]. */
int ax_load_vector(ax_engine *e, int which, int layer, const float *source, int n) {
    if (which == AX_NORM_OUT) {
        memcpy(e->norm_out, source, (size_t)n * 4);
        return AX_OK;
    }
    float *copy = malloc((size_t)n * 4);
    if (copy == NULL) return AX_ENOMEM;
    memcpy(copy, source, (size_t)n * 4);
    free(e->layer[layer].v[which]);
    e->layer[layer].v[which] = copy;
    return AX_OK;
}

/* Use these frames and page-table rows from now on; they stay the caller's and must outlive the engine's use. */
void ax_attach(ax_engine *e, void *arena, int capacity, int block_tokens, const int32_t *frame, const int32_t *shift,
               const int16_t *count, const uint32_t *generation, int slots, int row_entries) {
    e->arena = arena;
    e->capacity = capacity;
    e->block_tokens = block_tokens;
    size_t rows = (size_t)e->s.kv_heads * (size_t)block_tokens; /* of a plane */
    e->element_bytes = e->s.kv_dtype == AX_INT8 ? 1 : e->s.kv_dtype == AX_BF16 ? 2 : 4;
    e->plane_bytes = rows * (size_t)e->s.head_dim * e->element_bytes;
    e->layer_bytes = 2 * (e->plane_bytes + (e->s.kv_dtype == AX_INT8 ? rows * sizeof(float) : 0));
    e->frame_bytes = e->layer_bytes * (size_t)e->s.layers;
    e->frame = frame;
    e->shift = shift;
    e->count = count;
    e->generation = generation;
    e->slots = slots;
    e->row_entries = row_entries;
}

/* Wait at these gates when a pass asks for it; they stay the caller's. */
void ax_attach_gates(ax_engine *e, const int64_t *gates, int ngates) {
    e->gates = (const _Atomic int64_t *)gates;
    e->ngates = ngates;
}

/* Of the last pass: nanoseconds spent at gates. */
int64_t ax_waited_ns(const ax_engine *e) { return e->waited_ns; }

/* Of the last pass: positions, summed over its rows, that were read for several rows at once (plan.c). */
int64_t ax_shared_tokens(const ax_engine *e) { return e->shared_tokens; }

int ax_error_detail(const ax_engine *e) { return e->detail; }

/* Nanoseconds of thread 0 in each kind of phase since the last call (see forward.c); for measurement. */
void ax_phase_ns(ax_engine *e, int64_t *ns) {
    memcpy(ns, e->ns, sizeof e->ns);
    memset(e->ns, 0, sizeof e->ns);
}
