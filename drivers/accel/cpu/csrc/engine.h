/* The CPU compute engine of the accel driver: types shared by its files.
 *
 * Reading order: forward.c (one pass, phase by phase), isa_kernels.h (products and element-wise kernels), plan.c (who
 * attends to what), isa_attention.h (attention over the page table), gates.c (waiting for loads), pool.c (threads),
 * weights.c (packing), engine.c (life of an engine).
 *
 * Letters: M rows (tokens) of a pass, K inner dimension, N outputs, D head dim, G query heads per KV head,
 * P tokens per block, F frames, L layers.
 *
 * Everything an engine computes for a row is a function of that row's own tokens and KV alone, to the bit: each
 * output element is one accumulator summed in the order of k, attention tiles and splits begin at fixed logical
 * positions, and no reduction crosses threads.  So the engine is batch-invariant in every mode.
 */
#ifndef AX_ENGINE_H
#define AX_ENGINE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum {
    AX_PANEL = 32,      /* output columns of one packed weight panel */
    AX_MAX_MR = 12,     /* rows of the largest register block */
    AX_TILE = 64,       /* logical positions of one attention tile; tiles start at multiples of it */
    AX_SPLIT = 512,     /* logical positions of one partial softmax, merged in order */
    AX_Q_ROWS = 96,     /* query rows (tokens x heads of a group) of one attention task */
    AX_CHUNK = 512,     /* rows that go through all layers together; longer passes are cut */
    AX_SERIAL = 8,      /* with at most so many rows the small steps are done by one thread, inside a barrier */
    AX_MAX_HEAD = 256,  /* largest head_dim */
    AX_ALIGN = 64,
};

enum { AX_F32 = 0, AX_BF16 = 1, AX_INT8 = 2 };                                /* dtypes; int8 of KV alone */
enum { AX_PORTABLE = 0, AX_AVX2 = 1, AX_AVX512 = 2, AX_AVX512BF16 = 3 };      /* instruction sets */
enum { AX_OUT_STORE = 0, AX_OUT_ADD = 1, AX_OUT_SILU = 2 };                   /* what a product does with its result */
enum { AX_QKV = 0, AX_O = 1, AX_GATE_UP = 2, AX_DOWN = 3, AX_HEAD = 4, AX_EMBED = 5, AX_MATRICES = 6 };
enum { AX_NORM_ATTN = 0, AX_NORM_FFN = 1, AX_NORM_Q = 2, AX_NORM_K = 3, AX_BIAS_QKV = 4, AX_NORM_OUT = 5, AX_VECTORS = 6 };

enum { /* results of ax_forward; anything but AX_OK and the last two means that nothing was done */
    AX_OK = 0,
    AX_ENOTREADY = 1,   /* weights missing or no arena attached */
    AX_ESLOT = 2,       /* slot outside the rows */
    AX_ESTALE = 3,      /* generation differs: the row was released */
    AX_EENTRIES = 4,    /* entries outside 1..N */
    AX_ECOUNT = 5,      /* a count outside 0..P, or the counts do not cover start + ntokens */
    AX_EFRAME = 6,      /* a frame outside 0..capacity-1 */
    AX_ETOKEN = 7,      /* a token id outside the vocabulary, or token_offset outside the tokens */
    AX_EPOSITION = 8,   /* start < 0, ntokens < 1 or past the window */
    AX_EWANT = 9,       /* a wanted row outside the rows of the pass */
    AX_ECOPY = 10,      /* a copy's frame outside the arena */
    AX_ENOMEM = 11,
    AX_EGATE = 12,      /* a gate outside the gates that are attached */
    /* after these two the pass ended in the middle: what it was to write (its own KV, its copies' targets) is undefined */
    AX_ELOAD = 13,      /* a load that the pass waited for failed; detail: gate */
    AX_ELATE = 14,      /* a load did not come in time; detail: gate */
};

typedef struct { /* one record of the exec ABI, kernel/batch.py SEQ_FIELDS */
    int32_t slot; uint32_t generation; int32_t start, ntokens, write_from, entries, token_offset; uint32_t flags;
    float temperature, top_p, min_p; int32_t top_k; uint64_t seed;
    float repetition_penalty, presence_penalty, frequency_penalty; int32_t logprobs, score_from, prompt_tokens;
    uint64_t context; int32_t prompt_left, reserved;
} ax_seq;

typedef struct { /* the model's geometry, ModelConfig */
    int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, window, sliding_window;
    int32_t tied, qkv_bias, qk_norm, dtype, kv_dtype;
    float norm_eps;
} ax_shape;

/* A weight matrix [N, K] in panels of 32 outputs, so that a product streams it once, front to back:
 * float32 [panels][K][32]; bfloat16 [panels][K/2][32] words that hold the pair (k, k+1), low half first. */
typedef struct { int32_t n, k, dtype, panels; size_t panel_words; uint32_t *data; int32_t filled; } ax_matrix;

typedef struct { ax_matrix m[4]; float *v[AX_VECTORS]; } ax_layer;

typedef struct { /* what one sequence needs during a pass; made before the first layer */
    const int32_t *frame, *shift; const int16_t *count;
    int32_t *first;      /* [entries + 1] logical position where each entry starts */
    int32_t entries, start, ntokens, write_from;
    int32_t row;         /* its first row in the pass */
} ax_span;

typedef struct { /* tokens of one sequence that go through attention together: rows [row, row + tokens) of the chunk */
    int32_t span, row, tokens;
    int32_t from, to;    /* the positions they see: the tile in which a window begins, past the newest */
    int32_t shared;      /* a group reads [from, shared) for them */
} ax_query;

typedef struct { /* queries that read the same tiles of [from, to): e->order[first, first + tokens) */
    int32_t first, tokens, from, to;
} ax_group;

enum { AX_WHOLE, AX_PART, AX_REST }; /* finish the rows; leave their states; go on from such states and finish */
typedef struct { /* one attention task: rows e->order[first, first + tokens) against positions [from, to) of one KV head */
    int32_t first, tokens, kv_head, from, to, how;
} ax_task;

/* Where the states of a row's splits lie: that of KV head h and split k in slot + h * splits + k - first. */
typedef struct { int64_t slot; int32_t first, splits; } ax_parts;

typedef struct ax_pool ax_pool;
typedef struct ax_engine ax_engine;

typedef struct { /* per-thread memory of attention, carved out of one allocation */
    float *q, *scores, *p, *k_panels, *v_panels, *widened, *out, *total, *row, *m, *l, *total_m, *total_l, *alpha;
    int32_t *position; /* of each row */
} ax_scratch;

typedef struct { /* where a row's activations lie: row blocks of `mr` rows, [blocks][k][mr] */
    void *data; int32_t mr, rows, k; size_t block_words;
} ax_rows;

typedef void (*ax_product)(long k, const void *a, const uint32_t *b, float *c);

typedef struct { /* the kernels of one instruction set */
    const char *name;
    int32_t max_mr;
    /* one product C[mr][32] = A . B for each dtype of B and each mr */
    ax_product product[2][AX_MAX_MR + 1];
    void (*rms_norm)(const float *x, const float *weight, float eps, int n, float *y);
    void (*store_row)(const float *x, int dtype, const ax_rows *rows, int row);
    void (*silu_block)(const float *c, int dtype, const ax_rows *rows, int block, int column);
    void (*rope)(float *x, const float *cosine, const float *sine, int head_dim);
    void (*to_bf16)(const float *x, uint16_t *y, int n);
    float (*to_int8)(const float *x, int8_t *y, int n);
    double (*log_sum)(const float *x, int n, int32_t *best);
    void (*attend)(ax_engine *e, int layer, const ax_task *task, const ax_task *follower, ax_scratch *s);
} ax_kernels;

struct ax_engine {
    ax_shape s;
    const ax_kernels *isa;
    int32_t group, qkv_columns; /* G; (heads + 2 kv_heads) * head_dim */
    int32_t paired[2];          /* A operands of this dtype are bfloat16 pairs (AVX-512-BF16) */
    int32_t kv_kind;            /* the dtype that attention multiplies: int8 KV is widened to bfloat16, which is exact */
    ax_layer *layer;
    ax_matrix head, embed;
    float *norm_out;
    /* arena and rows, owned by the caller */
    /* A frame is [layers] of K plane, V plane and, for int8, their scales [2, kv_heads, P] float32: value = int8 * scale of
     * its head and token.  A plane is [kv_heads, P, D]. */
    uint8_t *arena; int32_t capacity, block_tokens; size_t frame_bytes, layer_bytes, plane_bytes, element_bytes;
    const int32_t *frame, *shift; const int16_t *count; const uint32_t *generation;
    int32_t slots, row_entries;
    const _Atomic int64_t *gates; int32_t ngates; /* shared with the drivers that load frames (gates.c) */
    /* rotary tables, filled up to `rope_ready` positions */
    float *inv_freq, *cosine, *sine; int32_t rope_ready;
    /* the pass */
    ax_pool *pool; int32_t threads;
    ax_scratch *scratch;
    float *x, *qkv;                 /* [AX_CHUNK, hidden], [AX_CHUNK, qkv_columns] */
    uint8_t *norm_buffer, *attn_buffer, *ffn_buffer, *head_buffer;
    ax_rows normed, attended, gated, wanted;
    ax_span *spans; int32_t *firsts; size_t spans_room, firsts_room;
    ax_query *queries; ax_group *groups; int32_t nqueries, ngroups;
    int32_t *order;                 /* the chunk's rows as they are, then those of each group */
    ax_task *tasks; size_t tasks_room;
    int32_t ntasks, nrests, tails;  /* tasks; after a barrier those that finish rows; the positions that these read */
    ax_parts *parts; float *states; /* of rows that AX_PART tasks see: [slots][G][state_floats] */
    size_t states_room, state_floats;
    int64_t shared_tokens;          /* positions of rows that a group read for them, of the whole pass */
    int32_t *row_span;
    float **want_out; int32_t *want_row; /* the wanted rows of a chunk and where their logits go */
    /* arguments of the pass */
    const ax_seq *seqs; int32_t nseqs; const int32_t *tokens; const int32_t *copies; int32_t ncopies;
    int32_t chunk_row, chunk_rows, first_span, last_span, nwanted;
    const int64_t *waits; int32_t nwaits; /* pairs (gate, ticket) */
    int64_t gate_deadline_ns, waited_ns;
    int32_t result;                 /* why a pass that has begun ends early */
    int32_t detail;                 /* which sequence, row or copy an error is about */
    int64_t ns[9];                  /* time per kind of phase, thread 0 */
};

/* pool.c */
typedef void (*ax_work)(void *arg, int thread);
ax_pool *ax_pool_new(int threads);
void ax_pool_free(ax_pool *pool);
void ax_pool_run(ax_pool *pool, ax_work work, void *arg);
void ax_pool_barrier(ax_pool *pool, int thread, ax_work last, void *arg);
/* the next share [*from, *to) of `total` pieces in this phase; 0 when none is left */
int ax_pool_take(ax_pool *pool, int thread, long total, long least, long *from, long *to);

/* plan.c */
int ax_queries_per_tile(const ax_engine *e);
size_t ax_most_parts(const ax_engine *e);
void ax_plan_attention(ax_engine *e);

/* gates.c */
int64_t ax_now_ns(void);
int ax_gates_closed(const ax_engine *e);
int ax_gates_wait(ax_engine *e, int layer);

/* weights.c */
void *ax_alloc_huge(size_t bytes);
void ax_free_huge(void *p, size_t bytes);
int ax_matrix_new(ax_matrix *m, int n, int k, int dtype);
void ax_matrix_free(ax_matrix *m);
void ax_matrix_fill(ax_matrix *m, const void *source, int source_dtype, int rows, int first, int lane_step, int lane);
void ax_matrix_row(const ax_matrix *m, int row, float *y);

/* one table per instruction set */
extern const ax_kernels ax_kernels_portable;
#if defined(__x86_64__)
extern const ax_kernels ax_kernels_avx2, ax_kernels_avx512, ax_kernels_avx512bf16;
#endif

static inline float ax_from_bf16(uint16_t h) {
    union { uint32_t u; float f; } v = {.u = (uint32_t)h << 16};
    return v.f;
}
static inline uint16_t ax_to_bf16(float x) { /* round to nearest even; NaN stays NaN */
    union { float f; uint32_t u; } v = {.f = x};
    if ((v.u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((v.u >> 16) | 0x40u);
    return (uint16_t)((v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16);
}
static inline void ax_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
static inline int ax_pad(int n, int step) { return (n + step - 1) / step * step; }

#endif
