/* Frames, blocks, and the ring of reclaimable frames. */
#include "state.h"

int32_t frame_alloc(Core *core, int32_t device, int32_t s) {
    Pool *pool = &core->pools[device];
    if (pool->nfree == 0 || core->nfree_blocks == 0) return fail(core, CORE_PANIC, "no free frame where one was counted");
    int32_t f = pool->free[--pool->nfree];
    int32_t b = core->free_blocks[--core->nfree_blocks];
    Frame *frame = &pool->frames[f];
    frame->state = FILLING;
    frame->refs = 1;
    frame->filler = s;
    frame->block = b;
    core->blocks[b].copies[device] = f; /* a free block is blank: block_free made it so */
    return f;
}

static void block_blank(Block *block) {
    block->key = (Key){0, 0};
    block->parent = -1;
    block->domain = 0;
    block->depth = -1;
    block->hits = 0;
    for (int d = 0; d < MAX_DEVICES; d++) block->copies[d] = -1;
}

void block_free(Core *core, int32_t b) {
    block_blank(&core->blocks[b]);
    core->free_blocks[core->nfree_blocks++] = b;
}

/* The ring holds at most twice as many entries as there are frames; then those that count no longer are swept out. */
static void ring_push(Pool *pool, int32_t f, uint64_t stamp) {
    int32_t at = pool->ring_head + pool->ring_length;
    if (at >= pool->ring_room) at -= pool->ring_room;
    pool->ring_frame[at] = f;
    pool->ring_stamp[at] = stamp;
    if (++pool->ring_length < pool->ring_room) return;
    int32_t kept = 0;
    for (int32_t i = 0, from = pool->ring_head; i < pool->ring_length; i++) {
        if (pool->frames[pool->ring_frame[from]].stamp == pool->ring_stamp[from]) {
            int32_t to = pool->ring_head + kept++;
            if (to >= pool->ring_room) to -= pool->ring_room;
            pool->ring_frame[to] = pool->ring_frame[from];
            pool->ring_stamp[to] = pool->ring_stamp[from];
        }
        if (++from == pool->ring_room) from = 0;
    }
    pool->ring_length = kept;
}

/* No entry names frame f: keep it as cache if it can be found, free it otherwise. */
void frame_retire(Core *core, int32_t device, int32_t f) {
    Pool *pool = &core->pools[device];
    Frame *frame = &pool->frames[f];
    if (frame->state == VALID && frame->indexed) {
        frame->stamp = ++core->clock;
        pool->reclaimable++;
        ring_push(pool, f, frame->stamp);
    } else {
        frame_free(core, device, f);
    }
}

void frame_free(Core *core, int32_t device, int32_t f) {
    Pool *pool = &core->pools[device];
    Frame *frame = &pool->frames[f];
    Block *block = &core->blocks[frame->block];
    if (frame->indexed && block->parent >= 0) {
        int32_t above = core->blocks[block->parent].copies[device];
        if (above >= 0) pool->frames[above].children--;
    }
    block->copies[device] = -1;
    int32_t left = -1; /* any other copy? all bits stay set only if every entry is -1 */
    for (int d = 0; d < MAX_DEVICES; d++) left &= block->copies[d];
    if (left == -1) {
        if (frame->indexed) index_remove(core, block->key, frame->block);
        block_free(core, frame->block);
    }
    if (frame->stamp) {
        frame->stamp = 0;
        pool->reclaimable--;
    }
    frame->state = FREE;
    frame->indexed = 0;
    frame->block = -1;
    frame->filler = -1;
    frame->children = 0;
    pool->free[pool->nfree++] = f;
    core->n_freed++;
}

static inline int32_t ring_at(const Pool *pool, int32_t i) {
    int32_t at = pool->ring_head + i;
    return at >= pool->ring_room ? at - pool->ring_room : at;
}

int32_t core_oldest(Core *core, int32_t device, int32_t want) {
    CHECK_DEVICE(core, device);
    Pool *pool = &core->pools[device];
    if (want > pool->reclaimable) want = pool->reclaimable;
    if (want < 0) want = 0;
    TRY(reserve_list(core, (size_t)want));
    while (pool->ring_length && pool->frames[pool->ring_frame[pool->ring_head]].stamp != pool->ring_stamp[pool->ring_head]) {
        if (++pool->ring_head == pool->ring_room) pool->ring_head = 0;
        pool->ring_length--;
    }
    int32_t found = 0;
    for (int32_t i = 0; i < pool->ring_length && found < want; i++) {
        if (i + 12 < pool->ring_length) __builtin_prefetch(&pool->frames[pool->ring_frame[ring_at(pool, i + 12)]]);
        int32_t at = ring_at(pool, i);
        const Frame *frame = &pool->frames[pool->ring_frame[at]];
        if (frame->stamp == pool->ring_stamp[at]) core->out.list[found++] = frame->block;
    }
    return core->out.nlist = found;
}

int32_t core_evict(Core *core, int32_t device, const int32_t *blocks, int32_t nblocks) {
    CHECK_DEVICE(core, device);
    Pool *pool = &core->pools[device];
    for (int32_t i = 0; i < nblocks; i++)
        if (blocks[i] < 0 || blocks[i] >= core->nblocks)
            return fail(core, CORE_INVALID, "core: evict names a block that does not exist");
    int32_t done = 0;
    for (int32_t i = 0; i < nblocks && i < 24; i++) __builtin_prefetch(&core->blocks[blocks[i]], 1);
    for (int32_t i = 0; i < nblocks; i++) {
        if (i + 24 < nblocks) __builtin_prefetch(&core->blocks[blocks[i + 24]], 1);
        if (i + 12 < nblocks) {
            const Block *ahead = &core->blocks[blocks[i + 12]];
            if (ahead->copies[device] >= 0) __builtin_prefetch(&pool->frames[ahead->copies[device]], 1);
            index_prefetch(core, ahead->key);
        }
        int32_t f = core->blocks[blocks[i]].copies[device];
        if (f < 0) continue;
        const Frame *frame = &pool->frames[f];
        if (frame->stamp && frame->refs == 0 && frame->wired == 0 && frame->children == 0) {
            frame_free(core, device, f);
            core->n_evictions++;
            done++;
        }
    }
    return done;
}
