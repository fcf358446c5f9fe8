/* Who attends to what: cuts the attention of a chunk into tasks for the threads.
 *
 * Query rows of several sequences whose page tables begin with the same entries read the same K and V there.  They form
 * a group: one task takes each tile of that run through all of them, as in Hydragen (arXiv 2402.05099), RelayAttention
 * (arXiv 2402.14808) and the cascades of FlashInfer (arXiv 2501.01005), and leaves the state of each row's softmax; after
 * a barrier a task for each sequence goes on from there over what is its own.  Unlike those, which merge the two parts by
 * their sums, the second goes on from the very state that the row alone would have had: which rows were in a group does
 * not show in one bit of the result.
 *
 * The groups are found anew for each chunk, from the page-table rows as they are: sequences in the order of their entries
 * lie beside those with which they have most in common, so every group worth having is a stretch of that order, and the
 * best cut of it into stretches is found by dynamic programming.  A chunk of 16 sequences takes some microseconds.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <stdlib.h>
#include <string.h>

enum { TASKS_PER_THREAD = 4, LEAST_SHARED = 2 * AX_TILE };

int ax_queries_per_tile(const ax_engine *e) { return AX_Q_ROWS / e->group > 0 ? AX_Q_ROWS / e->group : 1; }

/* The most tasks that cutting the splits of few queries apart can make. */
size_t ax_most_parts(const ax_engine *e) {
    return (size_t)(TASKS_PER_THREAD * e->threads) * (size_t)(e->s.window / AX_SPLIT + 2);
}

/* Cut the chunk's rows into queries: tokens of one sequence that go through attention together, last ones first. */
static void lay_queries(ax_engine *e) {
    int per_tile = ax_queries_per_tile(e), begin = e->chunk_row, end = begin + e->chunk_rows, window = e->s.sliding_window;
    e->nqueries = 0;
    for (int i = e->first_span; i < e->last_span; i++) {
        const ax_span *span = &e->spans[i];
        int a = span->row < begin ? begin - span->row : 0, b = span->row + span->ntokens > end ? end - span->row : span->ntokens;
        for (int t = b; t > a;) {
            int tokens = (t - a) % per_tile == 0 ? per_tile : (t - a) % per_tile;
            t -= tokens;
            int oldest = span->start + t, from = window > 0 && oldest + 1 > window ? (oldest + 1 - window) / AX_TILE * AX_TILE : 0;
            e->queries[e->nqueries++] = (ax_query){i, span->row + t - begin, tokens, from, oldest + tokens, from};
        }
    }
}

/* How many entries two page tables have in common from their beginning. */
static int common_entries(const ax_span *a, const ax_span *b) {
    int n = a->entries < b->entries ? a->entries : b->entries, i = 0;
    while (i < n && a->frame[i] == b->frame[i] && a->shift[i] == b->shift[i] && a->count[i] == b->count[i]) i++;
    return i;
}

static int by_entries(const void *left, const void *right, void *engine) {
    const ax_engine *e = engine;
    const ax_query *p = &e->queries[*(const int32_t *)left], *q = &e->queries[*(const int32_t *)right];
    if (p->from != q->from) return p->from < q->from ? -1 : 1; /* a window may begin elsewhere */
    const ax_span *a = &e->spans[p->span], *b = &e->spans[q->span];
    int i = common_entries(a, b);
    if (i == a->entries || i == b->entries) return (a->entries > b->entries) - (a->entries < b->entries);
    if (a->frame[i] != b->frame[i]) return a->frame[i] < b->frame[i] ? -1 : 1;
    if (a->shift[i] != b->shift[i]) return a->shift[i] < b->shift[i] ? -1 : 1;
    return a->count[i] < b->count[i] ? -1 : 1;
}

/* The position up to which both read the same tiles, all of which every row of both sees but for its window. */
static int shared_by(const ax_engine *e, const ax_query *p, const ax_query *q) {
    if (p->from != q->from) return 0;
    const ax_span *a = &e->spans[p->span], *b = &e->spans[q->span];
    int run = a->first[common_entries(a, b)], older = p->to - p->tokens < q->to - q->tokens ? p->to - p->tokens : q->to - q->tokens;
    return (run < older + 1 ? run : older + 1) / AX_TILE * AX_TILE;
}

/* Find the groups: writes the rows of each behind the chunk's own in e->order, its length into e->groups. */
static void find_groups(ax_engine *e) {
    int32_t sorted[AX_CHUNK], shared[AX_CHUNK], best[AX_CHUNK + 1], size[AX_CHUNK + 1], n = 0;
    for (int i = 0; i < e->nqueries; i++) /* one that fills half a task reads each tile for enough rows already */
        if (2 * e->queries[i].tokens * e->group <= AX_Q_ROWS) sorted[n++] = i;
    e->ngroups = 0;
    if (n < 2) return;
    qsort_r(sorted, (size_t)n, sizeof *sorted, by_entries, e);
    for (int i = 1; i < n; i++) shared[i] = shared_by(e, &e->queries[sorted[i - 1]], &e->queries[sorted[i]]);
    best[0] = 0;
    for (int i = 0; i < n; i++) { /* best[i + 1]: tiles that the first i + 1 need not read again; size: of the last group */
        best[i + 1] = best[i];
        size[i + 1] = 1;
        int from = e->queries[sorted[i]].from, rows = e->queries[sorted[i]].tokens * e->group, run = INT32_MAX;
        for (int j = i - 1; j >= 0; j--) {
            run = shared[j + 1] < run ? shared[j + 1] : run;
            rows += e->queries[sorted[j]].tokens * e->group;
            if (run - from < LEAST_SHARED || rows > AX_Q_ROWS) break;
            int saved = best[j] + (i - j) * ((run - from) / AX_TILE);
            if (saved > best[i + 1]) best[i + 1] = saved, size[i + 1] = i + 1 - j;
        }
    }
    int32_t *order = e->order + e->chunk_rows;
    for (int i = n; i > 0; i -= size[i]) {
        if (size[i] == 1) continue;
        ax_group *g = &e->groups[e->ngroups++];
        *g = (ax_group){(int32_t)(order - e->order), 0, e->queries[sorted[i - 1]].from, INT32_MAX};
        for (int j = i - size[i] + 1; j < i; j++) g->to = shared[j] < g->to ? shared[j] : g->to;
        for (int j = i - size[i]; j < i; j++) {
            ax_query *q = &e->queries[sorted[j]];
            q->shared = g->to;
            for (int t = 0; t < q->tokens; t++) *order++ = q->row + t;
            g->tokens += q->tokens;
        }
    }
}

static int splits_before(int position) { return (position + AX_SPLIT - 1) / AX_SPLIT; }

/* Give each query whose splits are not all done by one task room for their states. */
static int lay_states(ax_engine *e, int parted) {
    size_t slots = 0;
    for (int i = 0; i < e->nqueries; i++) {
        const ax_query *q = &e->queries[i];
        int first = q->from / AX_SPLIT, splits = splits_before(q->to) - first;
        if (q->shared == q->from && !(parted && q->tokens == 1 && splits > 1)) continue;
        for (int t = 0; t < q->tokens; t++, slots += (size_t)splits * (size_t)e->s.kv_heads)
            e->parts[q->row + t] = (ax_parts){(int64_t)slots, first, splits};
    }
    if (slots <= e->states_room) return AX_OK;
    free(e->states);
    e->states_room = 0;
    slots += slots / 2;
    e->states = aligned_alloc(AX_ALIGN, (slots * (size_t)e->group * e->state_floats * 4 + AX_ALIGN - 1) / AX_ALIGN * AX_ALIGN);
    if (e->states == NULL) return AX_ENOMEM;
    e->states_room = slots;
    return AX_OK;
}

static void add_tasks(ax_engine *e, int first, int tokens, int from, int to, int how) {
    for (int h = 0; h < e->s.kv_heads; h++) e->tasks[e->ntasks++] = (ax_task){first, tokens, h, from, to, how};
}

/* A task per split of [from, to), which begins at a tile. */
static void add_splits(ax_engine *e, int first, int tokens, int from, int to) {
    for (int end; from < to; from = end) {
        end = (from / AX_SPLIT + 1) * AX_SPLIT;
        add_tasks(e, first, tokens, from, end < to ? end : to, AX_PART);
    }
}

/* Cut the attention of a chunk into tasks, groups and long ones first.  With fewer tasks than threads can share, a decode
 * row's splits become tasks of their own.  What the first e->ntasks tasks have left as states the next e->nrests finish. */
void ax_plan_attention(ax_engine *e) {
    for (int i = 0; i < e->chunk_rows; i++) e->order[i] = i;
    lay_queries(e);
    find_groups(e);
    int parted = e->threads > 1 && e->nqueries * e->s.kv_heads < TASKS_PER_THREAD * e->threads;
    if (lay_states(e, parted) != AX_OK) { /* no room: each does all of its own */
        for (int i = 0; i < e->nqueries; i++) e->queries[i].shared = e->queries[i].from;
        e->ngroups = parted = 0;
    }
    e->ntasks = e->nrests = e->tails = 0;
    for (int i = 0; i < e->ngroups; i++) add_splits(e, e->groups[i].first, e->groups[i].tokens, e->groups[i].from, e->groups[i].to);
    for (int i = 0; i < e->nqueries; i++) {
        const ax_query *q = &e->queries[i];
        int splits = splits_before(q->to) - q->from / AX_SPLIT;
        e->shared_tokens += (q->shared - q->from) * q->tokens;
        if (parted && q->tokens == 1 && splits > 1)
            add_splits(e, q->row, 1, q->shared == q->from ? q->from : splits_before(q->shared) * AX_SPLIT, q->to);
        else if (q->shared == q->from) add_tasks(e, q->row, q->tokens, q->from, q->to, AX_WHOLE);
    }
    int ready = e->ntasks;
    for (int i = 0; i < e->nqueries; i++) {
        const ax_query *q = &e->queries[i];
        int splits = splits_before(q->to) - q->from / AX_SPLIT, apart = parted && q->tokens == 1 && splits > 1;
        if (q->shared == q->from && !apart) continue;
        int from = q->shared == q->from ? q->from / AX_SPLIT * AX_SPLIT : q->shared, to = q->to;
        if (apart && splits_before(from) * AX_SPLIT < to) to = splits_before(from) * AX_SPLIT;
        e->tails += to - from;
        add_tasks(e, q->row, q->tokens, from, to, AX_REST);
    }
    e->nrests = e->ntasks - ready;
    e->ntasks = ready;
}
