/* Making and freeing a core, errors, and the keyed hash. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "state.h"

int32_t fail(Core *core, int32_t code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(core->message, sizeof core->message, format, args);
    va_end(args);
    return code;
}

/* Makes room for `want` items; false leaves the array as it was. */
bool grow_array(void **array, size_t *room, size_t want, size_t item_bytes) {
    if (want <= *room) return true;
    size_t more = *room + *room / 2 > want ? *room + *room / 2 : want;
    if (more > SIZE_MAX / item_bytes) return false;
    void *grown = realloc(*array, more * item_bytes);
    if (!grown) return false;
    *array = grown;
    *room = more;
    return true;
}

int32_t reserve_list(Core *core, size_t want) {
    if (grow_array((void **)&core->out.list, &core->list_room, want, sizeof(int32_t))) return 0;
    return fail(core, CORE_NOMEM, "core: no memory for %zu numbers", want);
}

int32_t reserve_bytes(Core *core, size_t want) {
    if (grow_array((void **)&core->out.bytes, &core->bytes_room, want, 1)) return 0;
    return fail(core, CORE_NOMEM, "core: no memory for %zu bytes", want);
}

void free_pool(Pool *pool) {
    free(pool->frames);
    free(pool->free);
    free(pool->ring_stamp);
    free(pool->ring_frame);
    free(pool->run);
    free(pool->run_spare);
    free(pool->flight);
    memset(pool, 0, sizeof *pool);
}

void core_free(Core *core) {
    if (!core) return;
    for (int32_t d = 0; d < core->devices; d++) free_pool(&core->pools[d]);
    for (int32_t s = 0; core->slots && s < core->nslots; s++) {
        Slot *slot = &core->slots[s];
        free(slot->log);
        free(slot->frames);
        free(slot->stops);
        free(slot->keys);
        free(slot->counts);
    }
    free(core->slots);
    free(core->free_slots);
    free(core->blocks);
    free(core->block_tokens_at);
    free(core->free_blocks);
    free(core->sweep_state);
    free(core->sweep_path);
    free(core->index);
    free(core->hits);
    free(core->loads);
    free(core->found);
    free(core->out.bytes);
    free(core->out.seqs);
    free(core->out.tokens);
    free(core->out.copies);
    free(core->out.streams);
    free(core->out.logprobs);
    free(core->out.kept);
    free(core->out.finished);
    free(core->out.list);
    free(core);
}

/* An array that free() takes back.  Large ones are put on huge pages where the system has them: their records are
 * touched in no order, and a page per record is a TLB miss per record. */
static void *table(size_t items, size_t item_bytes) {
    const size_t huge_bytes = 2 << 20;
    size_t bytes = items * item_bytes, align = bytes >= huge_bytes ? huge_bytes : 64;
    bytes = (bytes + align - 1) / align * align;
    void *array = aligned_alloc(align, bytes);
    if (!array) return NULL;
#ifdef MADV_HUGEPAGE
    if (align == huge_bytes) (void)madvise(array, bytes, MADV_HUGEPAGE);
#endif
    memset(array, 0, bytes); /* touched now: a page fault in the middle of a step would cost more than the step */
    return array;
}

/* nslots 0: a tier, where nothing runs. */
bool new_pool(Pool *pool, int32_t capacity, int32_t nslots) {
    size_t n = (size_t)(capacity ? capacity : 1), slots = (size_t)(nslots ? nslots : 1);
    pool->capacity = pool->nfree = capacity;
    pool->ring_room = 2 * capacity + 16;
    pool->frames = table(n, sizeof *pool->frames);
    pool->free = malloc(n * sizeof *pool->free);
    pool->ring_stamp = malloc((size_t)pool->ring_room * sizeof *pool->ring_stamp);
    pool->ring_frame = malloc((size_t)pool->ring_room * sizeof *pool->ring_frame);
    pool->run = malloc(slots * sizeof *pool->run);
    pool->run_spare = malloc(slots * sizeof *pool->run_spare);
    pool->flight = malloc(slots * sizeof *pool->flight);
    if (!pool->frames || !pool->free || !pool->ring_stamp || !pool->ring_frame || !pool->run || !pool->run_spare ||
        !pool->flight)
        return false;
    for (int32_t f = 0; f < capacity; f++) {
        pool->free[f] = capacity - 1 - f;
        pool->frames[f].filler = pool->frames[f].block = -1;
    }
    return true;
}

int32_t ghost_room(int32_t frames) { return frames / 8 > 64 ? frames / 8 : 64; }

/* Have a block for every frame, and some for ghosts when there are tiers.  CORE_NOMEM leaves everything as it was. */
int32_t more_blocks(Core *core) {
    int32_t frames = 0, have = core->nblocks;
    for (int32_t d = 0; d < core->devices; d++) frames += core->pools[d].capacity;
    int32_t want = frames + (core->devices > core->computes ? ghost_room(frames) : 0);
    if (want <= have) return 0;
    size_t n = (size_t)want, row = (size_t)core->block_tokens, size = 16;
    while (size < 2 * n) size *= 2;
    Block *blocks = table(n, sizeof *blocks);
    int32_t *tokens = table(n, row * sizeof *tokens), *free_blocks = malloc(n * sizeof *free_blocks);
    uint64_t *index = table(size, sizeof *index);
    uint8_t *sweep_state = malloc(n);
    int32_t *sweep_path = malloc(n * sizeof *sweep_path);
    if (!blocks || !tokens || !free_blocks || !index || !sweep_state || !sweep_path) {
        free(sweep_state);
        free(sweep_path);
        free(blocks);
        free(tokens);
        free(free_blocks);
        free(index);
        return fail(core, CORE_NOMEM, "core: no memory for %d blocks", want);
    }
    if (have) {
        memcpy(blocks, core->blocks, (size_t)have * sizeof *blocks);
        memcpy(tokens, core->block_tokens_at, (size_t)have * row * sizeof *tokens);
    }
    int32_t fresh = want - have;
    if (core->nfree_blocks)
        memcpy(free_blocks + fresh, core->free_blocks, (size_t)core->nfree_blocks * sizeof *free_blocks);
    free(core->blocks);
    free(core->block_tokens_at);
    free(core->free_blocks);
    free(core->sweep_state);
    free(core->sweep_path);
    free(core->index);
    core->sweep_state = sweep_state;
    core->sweep_path = sweep_path;
    core->blocks = blocks;
    core->block_tokens_at = tokens;
    core->free_blocks = free_blocks;
    core->index = index;
    core->index_mask = size - 1;
    core->nblocks = want;
    int32_t kept = core->nfree_blocks;
    for (int32_t b = 0; b < have; b++)
        if (indexed(&core->blocks[b])) index_insert(core, core->blocks[b].key, b);
    core->nfree_blocks = 0;
    for (int32_t b = want - 1; b >= have; b--) {
        block_blank(&core->blocks[b]);
        core->free_blocks[core->nfree_blocks++] = b;
    }
    core->nfree_blocks += kept;
    return 0;
}

/* NULL: no memory.  The caller has checked every argument. */
Core *core_new(const uint8_t *secret, int32_t block_tokens, int32_t slots, int32_t entries, int32_t devices,
               int32_t computes, const int32_t *capacities, int32_t hash_bits) {
    Core *core = calloc(1, sizeof *core);
    if (!core) return NULL;
    uint64_t k0, k1;
    memcpy(&k0, secret, 8);
    memcpy(&k1, secret + 8, 8);
    core->keyed = sip_begin(k0, k1);
    core->mask.lo = hash_bits >= 64 ? UINT64_MAX : ((uint64_t)1 << hash_bits) - 1;
    core->mask.hi = hash_bits >= 128 ? UINT64_MAX : hash_bits <= 64 ? 0 : ((uint64_t)1 << (hash_bits - 64)) - 1;
    core->block_tokens = block_tokens;
    core->reciprocal = UINT64_MAX / (uint64_t)block_tokens + 1; /* wraps to 0 for 1 */
    core->nslots = core->nfree_slots = slots;
    core->entries = entries;
    core->devices = devices;
    core->computes = computes;
    core->ngroups = 1;
    for (int32_t k = 0; k < ROOTS; k++) core->roots[k] = -1;
    bool ok = true;
    for (int32_t d = 0; d < devices; d++) ok = new_pool(&core->pools[d], capacities[d], d < computes ? slots : 0) && ok;
    ok = ok && more_blocks(core) == 0;
    core->slots = table((size_t)slots, sizeof *core->slots);
    core->free_slots = malloc((size_t)slots * sizeof *core->free_slots);
    core->hits = malloc((size_t)entries * sizeof *core->hits);
    ok = grow_array((void **)&core->out.list, &core->list_room, (size_t)slots, sizeof(int32_t)) && ok;
    if (!ok || !core->slots || !core->free_slots || !core->hits) {
        core_free(core);
        return NULL;
    }
    for (int32_t s = 0; s < slots; s++) core->free_slots[s] = slots - 1 - s;
    return core;
}

void core_attach_rows(Core *core, int32_t device, uint8_t *frame, uint8_t *shift, uint8_t *count, uint8_t *generation) {
    Pool *pool = &core->pools[device];
    pool->row_frame = frame;
    pool->row_shift = shift;
    pool->row_count = count;
    pool->row_generation = generation;
    memset(frame, 0xff, (size_t)core->nslots * (size_t)core->entries * sizeof(int32_t));
}

CoreOut *core_out(Core *core) { return &core->out; }

const char *core_message(const Core *core) { return core->message; }

static Key masked(const Core *core, Key key) { return (Key){key.lo & core->mask.lo, key.hi & core->mask.hi}; }

void core_hash(const Core *core, const uint8_t *data, size_t size_bytes, uint8_t *digest) {
    Sip state = core->keyed;
    Key key = masked(core, sip_finish(&state, data, size_bytes, size_bytes));
    memcpy(digest, &key, sizeof key);
}

Key hash_block(const Core *core, Key previous, const int32_t *tokens) {
    Sip state = core->keyed;
    size_t size_bytes = (size_t)core->block_tokens * 4;
    sip_word(&state, previous.lo);
    sip_word(&state, previous.hi);
    return masked(core, sip_finish(&state, (const uint8_t *)tokens, size_bytes, size_bytes + sizeof previous));
}

void core_token_range(const uint8_t *tokens, int32_t ntokens, int32_t *least_greatest) {
    int32_t least = INT32_MAX, greatest = INT32_MIN;
    for (int32_t i = 0; i < ntokens; i++) {
        int32_t token;
        memcpy(&token, tokens + 4 * (size_t)i, 4);
        least = token < least ? token : least;
        greatest = token > greatest ? token : greatest;
    }
    least_greatest[0] = ntokens ? least : 0;
    least_greatest[1] = ntokens ? greatest : 0;
}
