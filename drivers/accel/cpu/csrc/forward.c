/* One forward pass: every thread runs pass() from the copies to the logits; phases are separated by barriers.
 *
 * A chunk of up to AX_CHUNK rows (tokens of any sequences) goes through all layers, then the next chunk; a row sees
 * the keys of earlier rows of its own sequence, which an earlier phase of this chunk or an earlier chunk has written.
 * Per layer, in this order:
 *
 *   norm      x -> RMSNorm -> A blocks (bfloat16 pairs where the instruction set multiplies those)
 *   product   qkv = A . W_qkv (+ bias)
 *   keys      RMSNorm of q and k heads (Qwen3), rotate k, write k and v into their frames where position >= write_from
 *   attention over the page table (isa_attention.h), then the rest of what was shared out (plan.c) -> A blocks
 *   product   x += A . W_o
 *   norm, product  silu(A . W_gate) * (A . W_up) -> A blocks
 *   product   x += A . W_down
 *
 * and once a chunk the final norm and the head, for the wanted rows only.  A product's work is cut by weight panels
 * (each read once for all its rows) and, when the rows exceed the second-level cache, by groups of row blocks.
 */
#define _GNU_SOURCE
#include "api.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NS_OTHER, NS_NORM, NS_QKV, NS_KEYS, NS_ATTEND, NS_O, NS_FFN, NS_HEAD, NS_WAIT };
enum { GROUP_BYTES = 384 << 10 };

typedef struct { float *base; long step; float **rows; const float *bias; int how; const ax_rows *gated; int n; } out_t;

/* Wait for all; the last thread to come does `last` first. */
static void phase_end_with(ax_engine *e, int thread, int kind, int64_t *since, ax_work last, void *arg) {
    ax_pool_barrier(e->pool, thread, last, arg);
    if (thread != 0) return;
    int64_t now = ax_now_ns();
    e->ns[kind] += now - *since;
    *since = now;
}

static void phase_end(ax_engine *e, int thread, int kind, int64_t *since) {
    phase_end_with(e, thread, kind, since, NULL, NULL);
}

/* Cut `rows` rows into register blocks: the size that pads least, the largest of those. */
static ax_rows lay_rows(const ax_engine *e, void *data, int rows, int k) {
    int best = e->isa->max_mr;
    if (rows <= best) best = rows > 0 ? rows : 1;
    else
        for (int mr = best - 1; mr >= (e->isa->max_mr + 1) / 2; mr--)
            if (ax_pad(rows, mr) < ax_pad(rows, best)) best = mr;
    ax_rows r = {.data = data, .mr = best, .rows = rows, .k = k};
    r.block_words = (size_t)best * (size_t)(e->paired[e->s.dtype] ? (k + 1) / 2 : ax_pad(k, 2));
    return r;
}

static void put_block(const float *c, const out_t *o, const ax_rows *a, int block, int panel) {
    int column = panel * AX_PANEL, n = o->n - column < AX_PANEL ? o->n - column : AX_PANEL;
    int from = block * a->mr, to = from + a->mr < a->rows ? from + a->mr : a->rows;
    for (int row = from; row < to; row++, c += AX_PANEL) {
        float *y = (o->rows != NULL ? o->rows[row] : o->base + row * o->step) + column;
        if (o->how == AX_OUT_ADD)
            for (int i = 0; i < n; i++) y[i] += c[i];
        else if (o->bias != NULL)
            for (int i = 0; i < n; i++) y[i] = c[i] + o->bias[column + i];
        else
            memcpy(y, c, (size_t)n * 4);
    }
}

static void product(ax_engine *e, int thread, const ax_matrix *w, const ax_rows *a, const out_t *o) {
    _Alignas(AX_ALIGN) float c[AX_MAX_MR * AX_PANEL];
    ax_product multiply = e->isa->product[w->dtype][a->mr];
    long k = w->dtype == AX_BF16 ? (w->k + 1) / 2 : w->k, from, to;
    int blocks = (a->rows + a->mr - 1) / a->mr, per_group = (int)(GROUP_BYTES / (a->block_words * 4));
    if (per_group < 1) per_group = 1;
    int groups = (blocks + per_group - 1) / per_group;
    per_group = (blocks + groups - 1) / groups;
    while (ax_pool_take(e->pool, thread, (long)groups * w->panels, 1, &from, &to)) {
        for (long at = from; at < to; at++) {
            int group = (int)(at / w->panels), panel = (int)(at % w->panels);
            int last = (group + 1) * per_group < blocks ? (group + 1) * per_group : blocks;
            for (int block = group * per_group; block < last; block++) {
                multiply(k, (uint32_t *)a->data + (size_t)block * a->block_words, w->data + (size_t)panel * w->panel_words, c);
                if (o->how == AX_OUT_SILU) e->isa->silu_block(c, e->s.dtype, o->gated, block, panel * 16);
                else put_block(c, o, a, block, panel);
            }
        }
    }
}

static void norm_row(ax_engine *e, int thread, const float *weight, const ax_rows *to, int row, int from) {
    float *y = e->scratch[thread].row;
    e->isa->rms_norm(e->x + (size_t)from * (size_t)e->s.hidden, weight, e->s.norm_eps, e->s.hidden, y);
    e->isa->store_row(y, e->s.dtype, to, row);
}

static int span_entry(const ax_span *span, int position) {
    int low = 0, high = span->entries - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (span->first[middle] <= position) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* q/k norms in place; k rotated to its home position; k and v written to their frame. */
static void keys_row(ax_engine *e, int layer, int row) {
    const ax_shape *s = &e->s;
    const ax_span *span = &e->spans[e->row_span[row]];
    int position = span->start + e->chunk_row + row - span->row, d = s->head_dim;
    float *q = e->qkv + (size_t)row * (size_t)e->qkv_columns, *k = q + (size_t)s->heads * (size_t)d, *v = k + (size_t)s->kv_heads * (size_t)d;
    if (s->qk_norm)
        for (int h = 0; h < s->heads; h++)
            e->isa->rms_norm(q + (size_t)h * (size_t)d, e->layer[layer].v[AX_NORM_Q], s->norm_eps, d, q + (size_t)h * (size_t)d);
    if (position < span->write_from) return;
    int entry = span_entry(span, position), home = position - span->shift[entry];
    size_t row_bytes = e->element_bytes * (size_t)d, head_bytes = row_bytes * (size_t)e->block_tokens;
    size_t offset = (size_t)(position - span->first[entry]), rows = (size_t)s->kv_heads * (size_t)e->block_tokens;
    uint8_t *to = e->arena + (size_t)span->frame[entry] * e->frame_bytes + (size_t)layer * e->layer_bytes;
    float *scale = (float *)(to + 2 * e->plane_bytes) + offset; /* int8 only */
    to += offset * row_bytes;
    float cosine[AX_MAX_HEAD / 2], sine[AX_MAX_HEAD / 2];
    const float *c = cosine, *sn = sine;
    if (home >= 0 && home < e->rope_ready) {
        c = e->cosine + (size_t)home * (size_t)(d / 2);
        sn = e->sine + (size_t)home * (size_t)(d / 2);
    } else {
        for (int i = 0; i < d / 2; i++) {
            float angle = (float)home * e->inv_freq[i];
            cosine[i] = (float)cos((double)angle);
            sine[i] = (float)sin((double)angle);
        }
    }
    for (int h = 0; h < s->kv_heads; h++, k += d, v += d, to += head_bytes, scale += e->block_tokens) {
        if (s->qk_norm) e->isa->rms_norm(k, e->layer[layer].v[AX_NORM_K], s->norm_eps, d, k);
        e->isa->rope(k, c, sn, d);
        if (s->kv_dtype == AX_INT8) {
            scale[0] = e->isa->to_int8(k, (int8_t *)to, d);
            scale[rows] = e->isa->to_int8(v, (int8_t *)(to + e->plane_bytes), d);
        } else if (s->kv_dtype == AX_BF16) {
            e->isa->to_bf16(k, (uint16_t *)to, d);
            e->isa->to_bf16(v, (uint16_t *)(to + e->plane_bytes), d);
        } else {
            memcpy(to, k, (size_t)d * 4);
            memcpy(to + e->plane_bytes, v, (size_t)d * 4);
        }
    }
}

/* The small steps between products and attention.  Their pieces are rows, or tasks that finish some. */
typedef enum { STEP_NORM_ATTN, STEP_KEYS, STEP_REST, STEP_NORM_FFN, STEP_NORM_OUT } step_kind;
typedef struct { ax_engine *e; step_kind kind; int layer; } step_t;

static int pieces_of(const step_t *s) {
    if (s->kind == STEP_REST) return s->e->nrests;
    return s->kind == STEP_NORM_OUT ? s->e->nwanted : s->e->chunk_rows;
}

static void do_piece(const step_t *s, int thread, int i) {
    ax_engine *e = s->e;
    switch (s->kind) {
    case STEP_NORM_ATTN: norm_row(e, thread, e->layer[s->layer].v[AX_NORM_ATTN], &e->normed, i, i); break;
    case STEP_KEYS: keys_row(e, s->layer, i); break;
    case STEP_REST: e->isa->attend(e, s->layer, &e->tasks[e->ntasks + i], NULL, &e->scratch[thread]); break;
    case STEP_NORM_FFN: norm_row(e, thread, e->layer[s->layer].v[AX_NORM_FFN], &e->normed, i, i); break;
    case STEP_NORM_OUT: norm_row(e, thread, e->norm_out, &e->wanted, i, e->want_row[i]); break;
    }
}

static void do_all(void *step, int thread) {
    for (int i = 0; i < pieces_of(step); i++) do_piece(step, thread, i);
}

/* End a phase, then do a small step: by the last thread to arrive when it has few pieces, since one barrier costs
 * more than those (much more when a neighbour has a core), else by all. */
static void end_then(ax_engine *e, int thread, int kind, int64_t *since, step_t step) {
    if (pieces_of(&step) <= AX_SERIAL) {
        phase_end_with(e, thread, kind, since, do_all, &step);
        return;
    }
    phase_end(e, thread, kind, since);
    long from, to;
    while (ax_pool_take(e->pool, thread, pieces_of(&step), 1, &from, &to))
        for (long i = from; i < to; i++) do_piece(&step, thread, (int)i);
    phase_end(e, thread, step.kind == STEP_KEYS ? NS_KEYS : NS_NORM, since);
}

/* Copy `layers` layers, from `layer` on, of one pair of frames. */
static void copy_layers(ax_engine *e, int copy, long layer, long layers) {
    size_t at = (size_t)layer * e->layer_bytes;
    memmove(e->arena + (size_t)e->copies[2 * copy + 1] * e->frame_bytes + at,
            e->arena + (size_t)e->copies[2 * copy] * e->frame_bytes + at, (size_t)layers * e->layer_bytes);
}

/* A layer may go on: its loads are there, then its part of the copies (whose sources may be among the loads). */
static void open_layer(void *step, int thread) {
    step_t *s = step;
    ax_engine *e = s->e;
    int64_t before = e->waited_ns;
    (void)thread;
    e->result = ax_gates_wait(e, s->layer);
    e->ns[NS_WAIT] += e->waited_ns - before;
    e->ns[NS_QKV] -= e->waited_ns - before; /* the phase that this barrier ends is charged with it too */
    for (int i = 0; i < e->ncopies && e->result == AX_OK; i++) copy_layers(e, i, s->layer, 1);
}

/* The first chunk of a pass goes through the gates; when it is through, everything has been loaded. */
static int is_gated(const ax_engine *e) { return e->nwaits > 0 && e->chunk_row == 0; }

static void attend_to(ax_engine *e, int thread, int layer, const ax_task *tasks, int n) {
    long from, to;
    while (ax_pool_take(e->pool, thread, n, 1, &from, &to))
        for (long i = from; i < to; i++)
            e->isa->attend(e, layer, &tasks[i], i + 1 < to ? &tasks[i + 1] : NULL, &e->scratch[thread]);
}

static void layers(ax_engine *e, int thread, int64_t *since) {
    const ax_shape *s = &e->s;
    for (int l = 0; l < s->layers; l++) {
        const ax_layer *layer = &e->layer[l];
        product(e, thread, &layer->m[AX_QKV], &e->normed,
                &(out_t){.base = e->qkv, .step = e->qkv_columns, .bias = layer->v[AX_BIAS_QKV], .how = AX_OUT_STORE, .n = e->qkv_columns});
        step_t keys = {e, STEP_KEYS, l};
        if (is_gated(e)) { /* as late as possible: here the layer's frames are touched for the first time */
            phase_end_with(e, thread, NS_QKV, since, open_layer, &keys);
            if (e->result != AX_OK) return;
        }
        end_then(e, thread, NS_QKV, since, keys);
        attend_to(e, thread, l, e->tasks, e->ntasks);
        if (e->tails > 0) { /* much to do, even if it is in few pieces */
            phase_end(e, thread, NS_ATTEND, since);
            attend_to(e, thread, l, e->tasks + e->ntasks, e->nrests);
            phase_end(e, thread, NS_ATTEND, since);
        } else end_then(e, thread, NS_ATTEND, since, (step_t){e, STEP_REST, l});
        product(e, thread, &layer->m[AX_O], &e->attended, &(out_t){.base = e->x, .step = s->hidden, .how = AX_OUT_ADD, .n = s->hidden});
        end_then(e, thread, NS_O, since, (step_t){e, STEP_NORM_FFN, l});
        product(e, thread, &layer->m[AX_GATE_UP], &e->normed, &(out_t){.how = AX_OUT_SILU, .gated = &e->gated});
        phase_end(e, thread, NS_FFN, since);
        product(e, thread, &layer->m[AX_DOWN], &e->gated, &(out_t){.base = e->x, .step = s->hidden, .how = AX_OUT_ADD, .n = s->hidden});
        if (l + 1 < s->layers) end_then(e, thread, NS_FFN, since, (step_t){e, STEP_NORM_ATTN, l + 1});
        else phase_end(e, thread, NS_FFN, since);
    }
}

static void plan_chunk(ax_engine *e, int row, int total) {
    e->chunk_row = row;
    e->chunk_rows = total - row < AX_CHUNK ? total - row : AX_CHUNK;
    int end = row + e->chunk_rows, i = row == 0 ? 0 : e->last_span - 1;
    while (e->spans[i].row + e->spans[i].ntokens <= row) i++;
    e->first_span = i;
    for (; i < e->nseqs && e->spans[i].row < end; i++) {
        int a = e->spans[i].row < row ? row : e->spans[i].row, b = e->spans[i].row + e->spans[i].ntokens;
        for (int r = a; r < b && r < end; r++) e->row_span[r - row] = i;
    }
    e->last_span = i;
    e->normed = lay_rows(e, e->norm_buffer, e->chunk_rows, e->s.hidden);
    e->attended = lay_rows(e, e->attn_buffer, e->chunk_rows, e->s.heads * e->s.head_dim);
    e->gated = lay_rows(e, e->ffn_buffer, e->chunk_rows, e->s.intermediate);
    ax_plan_attention(e);
}

typedef struct { ax_engine *e; int total, nwant; const int32_t *want; float *logits; int next_want, next_row; } pass_t;

/* Choose the next wanted rows of this chunk, at most AX_CHUNK (a row may be wanted more than once), and go through the
 * caller's list no further than those. */
static void plan_head(void *pass, int thread) {
    pass_t *p = pass;
    ax_engine *e = p->e;
    (void)thread;
    e->nwanted = 0;
    for (; p->next_want < p->nwant && e->nwanted < AX_CHUNK; p->next_want++) {
        int r = p->want[p->next_want] - e->chunk_row;
        if (r < 0 || r >= e->chunk_rows) continue;
        e->want_row[e->nwanted] = r;
        e->want_out[e->nwanted++] = p->logits + (size_t)p->next_want * (size_t)e->s.vocab;
    }
    e->wanted = lay_rows(e, e->head_buffer, e->nwanted, e->s.hidden);
}

static void head(ax_engine *e, int thread, pass_t *p, int64_t *since) {
    for (;;) {
        phase_end_with(e, thread, NS_OTHER, since, plan_head, p);
        if (e->nwanted == 0) return;
        end_then(e, thread, NS_OTHER, since, (step_t){e, STEP_NORM_OUT, 0});
        product(e, thread, &e->head, &e->wanted, &(out_t){.rows = e->want_out, .how = AX_OUT_STORE, .n = e->s.vocab});
        phase_end(e, thread, NS_HEAD, since);
    }
}

static void start_chunk(void *pass, int thread) {
    pass_t *p = pass;
    (void)thread;
    plan_chunk(p->e, p->next_row, p->total);
    p->next_row += p->e->chunk_rows;
    p->next_want = 0;
}

static void pass(void *arg, int thread) {
    pass_t *p = arg;
    ax_engine *e = p->e;
    int64_t since = ax_now_ns();
    long from, to;
    for (int i = 0; i < e->ncopies && e->nwaits == 0; i++) { /* in order, each cut among the threads */
        while (ax_pool_take(e->pool, thread, e->s.layers, 1, &from, &to)) copy_layers(e, i, from, to - from);
        phase_end(e, thread, NS_OTHER, &since);
    }
    const ax_matrix *embed = e->s.tied ? &e->head : &e->embed;
    for (int row = 0; row < p->total; row += AX_CHUNK) {
        phase_end_with(e, thread, NS_OTHER, &since, start_chunk, p);
        while (ax_pool_take(e->pool, thread, e->chunk_rows, 1, &from, &to))
            for (long r = from; r < to; r++) {
                ax_matrix_row(embed, e->tokens[row + r], e->x + (size_t)r * (size_t)e->s.hidden);
                norm_row(e, thread, e->layer[0].v[AX_NORM_ATTN], &e->normed, (int)r, (int)r);
            }
        phase_end(e, thread, NS_OTHER, &since);
        layers(e, thread, &since);
        if (e->result != AX_OK) return;
        if (p->nwant > 0) head(e, thread, p, &since);
    }
}

static int fail(ax_engine *e, int code, int detail) {
    e->detail = detail;
    return code;
}

static int reserve(void *field, size_t *room, size_t want, size_t size) {
    if (want <= *room) return AX_OK;
    void *held; /* through memcpy: the field is a pointer of another type */
    memcpy(&held, field, sizeof held);
    held = realloc(held, (want + want / 2) * size);
    if (held == NULL) return AX_ENOMEM;
    memcpy(field, &held, sizeof held);
    *room = want + want / 2;
    return AX_OK;
}

/* Check everything about the sequences; lay out their spans.  Nothing the model can see has changed when this fails. */
static int decode_spans(ax_engine *e, int ntokens, int *newest) {
    size_t entries = 0, tasks = ax_most_parts(e);
    int row = 0;
    for (int i = 0; i < e->nseqs; i++) {
        const ax_seq *q = &e->seqs[i];
        if (q->slot < 0 || q->slot >= e->slots) return fail(e, AX_ESLOT, i);
        if (q->generation != e->generation[q->slot]) return fail(e, AX_ESTALE, i);
        if (q->entries < 1 || q->entries > e->row_entries) return fail(e, AX_EENTRIES, i);
        if (q->start < 0 || q->ntokens < 1 || q->ntokens > e->s.window - q->start) return fail(e, AX_EPOSITION, i);
        if (q->token_offset != row || q->ntokens > ntokens - row) return fail(e, AX_ETOKEN, i);
        row += q->ntokens;
        entries += (size_t)q->entries + 1;
        size_t queries = (size_t)(q->ntokens / ax_queries_per_tile(e) + 2), splits = (size_t)((q->start + q->ntokens) / AX_SPLIT + 2);
        tasks += 2 * (queries + splits) * (size_t)e->s.kv_heads; /* all of a chunk's, see plan.c */
    }
    if (row != ntokens) return fail(e, AX_ETOKEN, e->nseqs);
    for (int i = 0; i < ntokens; i++)
        if (e->tokens[i] < 0 || e->tokens[i] >= e->s.vocab) return fail(e, AX_ETOKEN, i);
    if (reserve(&e->spans, &e->spans_room, (size_t)e->nseqs, sizeof *e->spans) ||
        reserve(&e->firsts, &e->firsts_room, entries, sizeof *e->firsts) ||
        reserve(&e->tasks, &e->tasks_room, tasks, sizeof *e->tasks))
        return fail(e, AX_ENOMEM, 0);
    int32_t *first = e->firsts;
    row = 0;
    *newest = 0;
    for (int i = 0; i < e->nseqs; i++) {
        const ax_seq *q = &e->seqs[i];
        size_t at = (size_t)q->slot * (size_t)e->row_entries;
        ax_span *span = &e->spans[i];
        *span = (ax_span){e->frame + at, e->shift + at, e->count + at, first, q->entries, q->start, q->ntokens, q->write_from, row};
        int need = q->start + q->ntokens;
        int64_t position = 0;
        for (int j = 0; j < q->entries; j++) {
            if (span->count[j] < 0 || span->count[j] > e->block_tokens) return fail(e, AX_ECOUNT, i);
            if (position < need && (span->frame[j] < 0 || span->frame[j] >= e->capacity)) return fail(e, AX_EFRAME, i);
            *first++ = (int32_t)position;
            position += span->count[j];
        }
        *first++ = (int32_t)position;
        if (position < need) return fail(e, AX_ECOUNT, i);
        row += q->ntokens;
        if (need > *newest) *newest = need;
    }
    return AX_OK;
}

static void extend_rope(ax_engine *e, int positions) {
    int half = e->s.head_dim / 2;
    for (; e->rope_ready < positions; e->rope_ready++)
        for (int i = 0; i < half; i++) {
            /* the product in float32, as the models were trained and as the reference computes it */
            float angle = (float)e->rope_ready * e->inv_freq[i];
            e->cosine[(size_t)e->rope_ready * (size_t)half + (size_t)i] = (float)cos((double)angle);
            e->sine[(size_t)e->rope_ready * (size_t)half + (size_t)i] = (float)sin((double)angle);
        }
}

/* Run one pass (see kernel/batch.py for the records).  logits: [nwant, vocab].  gates: ngates pairs (gate, ticket), for
 * which the pass waits no longer than limit_ns together.  Any result but AX_OK, AX_ELOAD and AX_ELATE: nothing was done. */
int ax_forward(ax_engine *e, const void *seqs, int nseqs, const int32_t *tokens, int ntokens, const int32_t *copies,
               int ncopies, const int32_t *want, int nwant, const int64_t *gates, int ngates, int64_t limit_ns,
               float *logits) {
    if (e->arena == NULL || e->head.filled < e->s.vocab) return fail(e, AX_ENOTREADY, 0);
    e->seqs = seqs;
    e->nseqs = nseqs;
    e->tokens = tokens;
    e->copies = copies;
    e->ncopies = ncopies;
    e->waits = gates;
    e->nwaits = 0;
    e->waited_ns = e->shared_tokens = 0;
    e->result = AX_OK;
    int newest = 0, bad = decode_spans(e, ntokens, &newest);
    if (bad) return bad;
    for (int i = 0; i < 2 * ncopies; i++)
        if (copies[i] < 0 || copies[i] >= e->capacity) return fail(e, AX_ECOPY, i / 2);
    for (int i = 0; i < nwant; i++)
        if (want[i] < 0 || want[i] >= ntokens) return fail(e, AX_EWANT, i);
    for (int i = 0; i < ngates; i++)
        if (gates[2 * i] < 0 || gates[2 * i] >= e->ngates || gates[2 * i + 1] < 0) return fail(e, AX_EGATE, i);
    e->nwaits = ngates;
    if (!ax_gates_closed(e)) e->nwaits = 0; /* all is there: a pass like any other */
    e->gate_deadline_ns = ax_now_ns() + limit_ns;
    extend_rope(e, newest);
    pass_t p = {e, ntokens, nwant, want, logits, 0, 0};
    ax_pool_run(e->pool, pass, &p);
    return e->result;
}
