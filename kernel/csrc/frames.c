/* Frames, blocks, and the ring of reclaimable frames. */
#include <stdlib.h>

#include "state.h"

static void sweep(Core *core);

int32_t block_alloc(Core *core) {
    if (core->nfree_blocks == 0) sweep(core);
    if (core->nfree_blocks == 0) return fail(core, CORE_PANIC, "no free block where one was counted");
    return core->free_blocks[--core->nfree_blocks];
}

void add_copy(Core *core, int32_t b, int32_t device, int32_t f) {
    Block *block = &core->blocks[b];
    if (indexed(block) && !has_copy(block)) core->nghosts--;
    block->copies[device] = f;
    if (block->parent >= 0) core->blocks[block->parent].children[device]++;
}

/* A frame for block b, which has none on this device.  Nobody maps it yet. */
int32_t copy_alloc(Core *core, int32_t device, int32_t b, int32_t owner) {
    Pool *pool = &core->pools[device];
    if (pool->nfree == 0) return fail(core, CORE_PANIC, "no free frame where one was counted");
    int32_t f = pool->free[--pool->nfree];
    Frame *frame = &pool->frames[f];
    frame->state = FILLING;
    frame->filler = -1;
    frame->known = 0;
    frame->block = b;
    frame->indexed = indexed(&core->blocks[b]);
    frame->owner = (uint16_t)owner;
    charge(core, device, owner, 1);
    add_copy(core, b, device, f);
    return f;
}

int32_t frame_alloc(Core *core, int32_t device, int32_t s) {
    Pool *pool = &core->pools[device];
    if (pool->nfree == 0) return fail(core, CORE_PANIC, "no free frame where one was counted");
    int32_t b = block_alloc(core);
    TRY(b);
    int32_t f = pool->free[--pool->nfree];
    Frame *frame = &pool->frames[f];
    frame->state = FILLING;
    frame->refs = 1;
    frame->filler = s;
    frame->known = 0;
    frame->block = b;
    frame->owner = (uint16_t)core->slots[s].group;
    charge(core, device, frame->owner, 1);
    core->blocks[b].copies[device] = f; /* a free block is blank: block_free made it so */
    return f;
}

void block_blank(Block *block) {
    memset(block, 0, sizeof *block);
    block->parent = block->depth = block->child = block->sibling = -1;
    block->priority = 50;
    for (int d = 0; d < MAX_DEVICES; d++) block->copies[d] = -1;
}

/* Nobody has or wants it: forget it, and with it every ghost that was only kept for its sake. */
void block_free(Core *core, int32_t b) {
    while (b >= 0) {
        Block *block = &core->blocks[b];
        int32_t parent = block->parent;
        if (indexed(block)) index_remove(core, block->key, b);
        block_blank(block);
        core->free_blocks[core->nfree_blocks++] = b;
        if (parent < 0) return;
        Block *above = &core->blocks[parent];
        if (--above->nchildren || has_copy(above)) return;
        core->nghosts--;
        b = parent;
    }
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

/* Make a reclaimable frame the most recently used one. */
void stamp_frame(Core *core, int32_t device, int32_t f) {
    Pool *pool = &core->pools[device];
    pool->frames[f].stamp = ++core->clock;
    ring_push(pool, f, pool->frames[f].stamp);
}

/* No entry names frame f: keep it as cache if it can be found, or is a saved tail; free it otherwise. */
void frame_retire(Core *core, int32_t device, int32_t f) {
    Pool *pool = &core->pools[device];
    Frame *frame = &pool->frames[f];
    if (frame->state == VALID && (frame->indexed || saved_tail(&core->blocks[frame->block]))) {
        if (frame->indexed) core->blocks[frame->block].used_ns = core->out.now_ns;
        count_reclaimable(core, device, frame->owner, 1);
        stamp_frame(core, device, f);
    } else {
        frame_free(core, device, f);
    }
}

static void forget_tail(Core *core, int32_t b) {
    for (int32_t s = 0; s < core->nslots; s++) {
        Slot *slot = &core->slots[s];
        if (slot->used && slot->tail_block == b) {
            slot->tail_block = -1;
            slot->tail_end = 0;
        }
    }
    core->blocks[b].child = 0;
}

void frame_free(Core *core, int32_t device, int32_t f) {
    Pool *pool = &core->pools[device];
    Frame *frame = &pool->frames[f];
    int32_t b = frame->block;
    Block *block = &core->blocks[b];
    if (block->parent >= 0) core->blocks[block->parent].children[device]--;
    block->copies[device] = -1;
    if (!has_copy(block)) {
        if (saved_tail(block)) forget_tail(core, b);
        if (block->nchildren)
            core->nghosts++;
        else
            block_free(core, b);
    }
    if (frame->stamp) unstamp(core, device, frame);
    charge(core, device, frame->owner, -1);
    frame->owner = 0;
    frame->state = FREE;
    frame->indexed = 0;
    frame->block = -1;
    frame->filler = -1;
    frame->known = 0;
    pool->free[pool->nfree++] = f;
    core->n_freed++;
}

/* The slot will not come back to its saved tail. */
void leave_tail(Core *core, Slot *slot) {
    int32_t b = slot->tail_block;
    slot->tail_block = -1;
    slot->tail_end = 0;
    if (b < 0 || --core->blocks[b].child) return;
    int32_t copies[MAX_DEVICES];
    memcpy(copies, core->blocks[b].copies, sizeof copies);
    for (int32_t d = 0; d < core->devices; d++) {
        if (copies[d] < 0) continue;
        Frame *frame = &core->pools[d].frames[copies[d]];
        if (frame->wired == 0) {
            frame_free(core, d, copies[d]);
        } else if (frame->stamp) { /* no cache any more: freed when its transfer has ended */
            unstamp(core, d, frame);
        }
    }
}

/* Too many ghosts: give up what continues them in the tiers, and with that the ghosts themselves. */
static void sweep(Core *core) {
    enum { UNKNOWN, SAFE, DOOMED };
    uint8_t *state = core->sweep_state; /* had beforehand: an admission that is half done cannot run out of memory */
    int32_t *path = core->sweep_path;
    memset(state, UNKNOWN, (size_t)core->nblocks);
    for (int32_t first = 0; first < core->nblocks; first++) {
        int32_t length = 0, b = first;
        while (b >= 0 && state[b] == UNKNOWN) {
            path[length++] = b;
            const Block *block = &core->blocks[b];
            if (block->nchildren && !has_copy(block)) {
                state[b] = DOOMED;
            } else {
                b = block->parent;
            }
        }
        uint8_t verdict = b < 0 ? SAFE : state[b];
        for (int32_t k = 0; k < length; k++) state[path[k]] = verdict;
    }
    for (int32_t d = 0; d < core->devices; d++)
        for (int32_t f = 0; f < core->pools[d].capacity; f++) {
            const Frame *frame = &core->pools[d].frames[f];
            if (frame->stamp && frame->wired == 0 && state[frame->block] == DOOMED) frame_free(core, d, f);
        }
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
        if (frame->stamp == pool->ring_stamp[at] && may_go(core, device, frame->owner)) core->out.list[found++] = frame->block;
    }
    return core->out.nlist = found;
}

int32_t core_evict(Core *core, int32_t device, const int32_t *blocks, int32_t nblocks) {
    CHECK_DEVICE(core, device);
    Pool *pool = &core->pools[device];
    CHECK_BLOCKS(core, blocks, nblocks, "evict");
    int32_t done = 0;
    for (int32_t i = 0; i < nblocks && i < 24; i++) {
        __builtin_prefetch(&core->blocks[blocks[i]], 1);
        __builtin_prefetch(core->blocks[blocks[i]].children, 1);
    }
    for (int32_t i = 0; i < nblocks; i++) {
        if (i + 24 < nblocks) {
            __builtin_prefetch(&core->blocks[blocks[i + 24]], 1);
            __builtin_prefetch(core->blocks[blocks[i + 24]].children, 1);
        }
        if (i + 12 < nblocks) {
            const Block *ahead = &core->blocks[blocks[i + 12]];
            if (ahead->copies[device] >= 0) __builtin_prefetch(&pool->frames[ahead->copies[device]], 1);
            index_prefetch(core, ahead->key);
            if (ahead->parent >= 0) __builtin_prefetch(core->blocks[ahead->parent].children, 1);
        }
        int32_t f = core->blocks[blocks[i]].copies[device];
        if (f < 0) continue;
        const Frame *frame = &pool->frames[f];
        if (frame->stamp && frame->refs == 0 && frame->wired == 0 && core->blocks[blocks[i]].children[device] == 0 &&
            may_go(core, device, frame->owner)) {
            frame_free(core, device, f);
            core->n_evictions++;
            done++;
        }
    }
    return done;
}
