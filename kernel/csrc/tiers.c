/* Copies in several devices, and the frames that transfers read and write (kernel/twin_tiers.py says what each call means). */
#include <stdlib.h>

#include "state.h"

#define CHECK_FRAMES(core, pool, list, n, what)                                                              \
    do {                                                                                                     \
        for (int32_t k_ = 0; k_ < (n); k_++)                                                                 \
            if ((list)[k_] < 0 || (list)[k_] >= (pool)->capacity)                                            \
                return fail(core, CORE_INVALID, "core: " what " names a frame that does not exist");         \
    } while (0)

int32_t core_set_capacity(Core *core, int32_t device, int32_t frames) {
    if (device < core->computes || device > core->devices || device >= MAX_DEVICES || frames < 0)
        return fail(core, CORE_INVALID, "core: device %d is no tier, or there are too many", device);
    int64_t total = frames;
    for (int32_t d = 0; d < core->devices; d++) total += d == device ? 0 : core->pools[d].capacity;
    if (total >= 1 << 29) return fail(core, CORE_INVALID, "core: at most 2^29 frames");
    Pool fresh = {0}, *pool = &core->pools[device];
    if (device < core->devices && pool->nfree != pool->capacity)
        return fail(core, CORE_PANIC, "set_capacity: device %d has frames in use", device);
    if (!new_pool(&fresh, frames, 0)) {
        free_pool(&fresh);
        return fail(core, CORE_NOMEM, "core: no memory for %d frames", frames);
    }
    Pool old = *pool;
    bool added = device == core->devices;
    *pool = fresh;
    core->devices += added;
    int32_t code = more_blocks(core);
    if (code < 0) {
        free_pool(pool);
        *pool = old;
        core->devices -= added;
        return code;
    }
    free_pool(&old);
    return 0;
}

/* -- transfers ------------------------------------------------------------------------------------------------ */

static void wire(Pool *pool, int32_t f) {
    if (pool->frames[f].wired++ == 0) pool->wired++;
}

static int32_t unwire(Core *core, int32_t device, int32_t f) {
    Pool *pool = &core->pools[device];
    Frame *frame = &pool->frames[f];
    if (frame->wired < 1) return fail(core, CORE_PANIC, "I4: frame %d of device %d is not wired", f, device);
    if (--frame->wired) return 0;
    pool->wired--;
    if (frame->refs == 0 && !frame->stamp) frame_retire(core, device, f);
    return 0;
}

int32_t core_loads(Core *core) {
    TRY(reserve_list(core, (size_t)core->nloads));
    if (core->nloads) memcpy(core->out.list, core->loads, (size_t)core->nloads * sizeof *core->loads);
    return core->out.nlist = core->nloads;
}

int32_t core_hit_blocks(Core *core) {
    TRY(reserve_list(core, (size_t)core->nfound));
    if (core->nfound) memcpy(core->out.list, core->found, (size_t)core->nfound * sizeof *core->found);
    return core->out.nlist = core->nfound;
}

static int32_t land_in(Core *core, int32_t device, int32_t b, int32_t owner) {
    int32_t g = copy_alloc(core, device, b, owner);
    TRY(g);
    core->pools[device].frames[g].state = LOADING;
    wire(&core->pools[device], g);
    return g;
}

int32_t core_begin_copy(Core *core, int32_t source, int32_t target, const int32_t *blocks, int32_t nblocks) {
    CHECK_DEVICE(core, source);
    CHECK_DEVICE(core, target);
    CHECK_BLOCKS(core, blocks, nblocks, "begin_copy");
    TRY(reserve_list(core, 3 * (size_t)nblocks));
    Pool *here = &core->pools[source], *there = &core->pools[target];
    int32_t n = 0;
    for (int32_t k = 0; k < nblocks; k++) {
        int32_t b = blocks[k], f = core->blocks[b].copies[source];
        if (f < 0 || here->frames[f].state != VALID || core->blocks[b].copies[target] >= 0) continue;
        if (!here->frames[f].indexed && !saved_tail(&core->blocks[b])) continue; /* private: nobody could find the copy */
        if (!there->nfree) break;
        if (!fits(core, target, here->frames[f].owner, 1)) continue;
        int32_t g = land_in(core, target, b, here->frames[f].owner);
        TRY(g);
        wire(here, f);
        core->out.list[n++] = b;
        core->out.list[n++] = f;
        core->out.list[n++] = g;
    }
    return core->out.nlist = n;
}

int32_t core_save_tail(Core *core, int32_t s, int32_t target) {
    CHECK_SLOT(core, s);
    CHECK_DEVICE(core, target);
    Slot *slot = &core->slots[s];
    CHECK_IDLE(core, slot);
    TRY(reserve_list(core, 3));
    Pool *pool = &core->pools[slot->device], *there = &core->pools[target];
    int32_t i = blocks_in(core, slot->computed), n = slot->computed - i * core->block_tokens;
    core->out.nlist = 0;
    if (!n || i >= slot->nframes || slot->pending_entry == i || slot->tail_end == slot->computed) return 0;
    int32_t f = slot->frames[i];
    if (pool->frames[f].state == LOADING || !there->nfree || !core->nfree_blocks || !fits(core, target, slot->group, 1)) return 0;
    if (pool->frames[f].state == FILLING && pool->frames[f].indexed) return 0; /* whoever fills it next begins at its first token */
    leave_tail(core, slot);
    int32_t b = block_alloc(core);
    TRY(b);
    Block *block = &core->blocks[b];
    block->depth = -2 - i * core->block_tokens;
    block->child = 1;
    block->hits = n;
    block->domain = slot->domain;
    memcpy(core->block_tokens_at + (size_t)b * (size_t)core->block_tokens, slot->log + (size_t)i * (size_t)core->block_tokens,
           (size_t)n * sizeof *slot->log);
    slot->tail_block = b;
    slot->tail_end = slot->computed;
    int32_t g = land_in(core, target, b, slot->group);
    TRY(g);
    wire(pool, f);
    core->out.list[0] = b;
    core->out.list[1] = f;
    core->out.list[2] = g;
    return core->out.nlist = 3;
}

int32_t core_wire(Core *core, int32_t device, const int32_t *frames, int32_t nframes) {
    CHECK_DEVICE(core, device);
    CHECK_FRAMES(core, &core->pools[device], frames, nframes, "wire");
    for (int32_t k = 0; k < nframes; k++) wire(&core->pools[device], frames[k]);
    return 0;
}

int32_t core_unwire(Core *core, int32_t device, const int32_t *frames, int32_t nframes) {
    CHECK_DEVICE(core, device);
    CHECK_FRAMES(core, &core->pools[device], frames, nframes, "unwire");
    for (int32_t k = 0; k < nframes; k++) TRY(unwire(core, device, frames[k]));
    return 0;
}

/* The content of frame f did not come: slots that counted on it have computed less than they thought. */
static void void_frame(Core *core, int32_t device, int32_t f) {
    Frame *frame = &core->pools[device].frames[f];
    frame->known = 0;
    if (!frame->refs) return;
    for (int32_t s = 0; s < core->nslots; s++) {
        Slot *slot = &core->slots[s];
        if (!slot->used || slot->device != device) continue;
        for (int32_t i = 0; i < slot->nframes; i++)
            if (slot->frames[i] == f) {
                if (slot->computed > i * core->block_tokens) slot->computed = i * core->block_tokens;
                break;
            }
    }
}

int32_t core_landed(Core *core, int32_t device, const int32_t *frames, int32_t nframes, const uint8_t *good) {
    CHECK_DEVICE(core, device);
    Pool *pool = &core->pools[device];
    CHECK_FRAMES(core, pool, frames, nframes, "landed");
    for (int32_t k = 0; k < nframes; k++) {
        int32_t f = frames[k];
        Frame *frame = &pool->frames[f];
        if (frame->state != LOADING) return fail(core, CORE_PANIC, "landed: frame %d of device %d is not loading", f, device);
        if (good[k] && (!frame->known || frame->known == core->block_tokens)) {
            frame->state = VALID;
            frame->filler = -1;
            frame->known = 0;
        } else {
            frame->state = FILLING;
            if (!good[k]) void_frame(core, device, f);
        }
    }
    /* blocks come parents first, and a leaf must be older in the ring than its parent */
    for (int32_t k = nframes - 1; k >= 0; k--) TRY(unwire(core, device, frames[k]));
    return 0;
}

int32_t core_forget_copies(Core *core, int32_t device, const int32_t *blocks, int32_t nblocks) {
    CHECK_DEVICE(core, device);
    CHECK_BLOCKS(core, blocks, nblocks, "forget_copies");
    Pool *pool = &core->pools[device];
    int32_t done = 0;
    for (int32_t k = 0; k < nblocks; k++) {
        int32_t f = core->blocks[blocks[k]].copies[device];
        if (f < 0 || !pool->frames[f].stamp || pool->frames[f].wired) continue;
        frame_free(core, device, f);
        done++;
    }
    return done;
}

int32_t core_forget_tail(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    leave_tail(core, &core->slots[s]);
    return 0;
}

int32_t core_touch(Core *core, int32_t device, const int32_t *blocks, int32_t nblocks) {
    CHECK_DEVICE(core, device);
    CHECK_BLOCKS(core, blocks, nblocks, "touch");
    for (int32_t k = 0; k < nblocks; k++) {
        int32_t f = core->blocks[blocks[k]].copies[device];
        if (f < 0 || !core->pools[device].frames[f].stamp) continue;
        stamp_frame(core, device, f);
        core->blocks[blocks[k]].used_ns = core->out.now_ns;
    }
    return 0;
}

/* -- what a driver found at its start ------------------------------------------------------------------------- */

int32_t core_claim(Core *core, int32_t device, const int32_t *frames, int32_t nframes) {
    CHECK_DEVICE(core, device);
    Pool *pool = &core->pools[device];
    bool good = true;
    int32_t marked = 0;
    for (; marked < nframes && good; marked++) {
        int32_t f = frames[marked];
        good = f >= 0 && f < pool->capacity && pool->frames[f].state == FREE && !pool->frames[f].mark;
        if (good) pool->frames[f].mark = 1;
    }
    for (int32_t k = 0; k < marked - !good; k++) pool->frames[frames[k]].mark = 0;
    if (!good) return fail(core, CORE_INVALID, "core: claim names a frame that is not free, or one twice");
    for (int32_t k = 0; k < nframes; k++) {
        pool->frames[frames[k]].state = FILLING;
        pool->frames[frames[k]].wired = 1;
    }
    int32_t kept = 0;
    for (int32_t k = 0; k < pool->nfree; k++)
        if (pool->frames[pool->free[k]].state == FREE) pool->free[kept++] = pool->free[k];
    pool->nfree = kept;
    pool->wired += nframes;
    return 0;
}

static bool claimed(const Pool *pool, int32_t f) {
    return f >= 0 && f < pool->capacity && pool->frames[f].state == FILLING && pool->frames[f].block < 0;
}

int32_t core_unclaim(Core *core, int32_t device, int32_t f) {
    CHECK_DEVICE(core, device);
    Pool *pool = &core->pools[device];
    if (!claimed(pool, f)) return fail(core, CORE_PANIC, "unclaim: frame %d of device %d was not claimed", f, device);
    pool->frames[f].state = FREE;
    pool->frames[f].wired = 0;
    pool->wired--;
    pool->free[pool->nfree++] = f;
    return 0;
}

int32_t core_adopt(Core *core, int32_t device, int32_t f, int32_t domain, const uint8_t *root, int32_t parent,
                   const uint8_t *tokens, int32_t ntokens, int32_t group) {
    CHECK_DEVICE(core, device);
    CHECK_GROUP(core, group);
    Pool *pool = &core->pools[device];
    if (!claimed(pool, f) || ntokens != core->block_tokens || parent >= core->nblocks)
        return fail(core, CORE_PANIC, "adopt: frame %d of device %d was not claimed, or the block is not full", f, device);
    if ((parent >= 0 && !indexed(&core->blocks[parent])) || !fits(core, device, group, 1)) return -1;
    size_t size = (size_t)core->block_tokens;
    int32_t *log = malloc(size * sizeof *log); /* aligned */
    if (!log) return fail(core, CORE_NOMEM, "core: no memory for a block's tokens");
    memcpy(log, tokens, size * sizeof *log);
    Key key;
    memcpy(&key, root, sizeof key);
    key = hash_block(core, parent >= 0 ? core->blocks[parent].key : key, log);
    int32_t b = index_find(core, key);
    if (b >= 0) {
        const Block *known = &core->blocks[b];
        if (known->parent != parent || known->domain != domain || known->copies[device] >= 0 ||
            memcmp(core->block_tokens_at + (size_t)b * size, log, size * sizeof *log) != 0)
            b = -1;
    } else if (core->nfree_blocks) {
        b = block_alloc(core);
        Block *block = &core->blocks[b];
        block->key = key;
        memcpy(core->block_tokens_at + (size_t)b * size, log, size * sizeof *log);
        block->parent = parent;
        block->domain = domain;
        block->depth = parent >= 0 ? core->blocks[parent].depth + core->block_tokens : 0;
        block->used_ns = core->out.now_ns;
        index_insert(core, key, b);
        core->n_indexed++;
        if (parent >= 0) core->blocks[parent].nchildren++;
        core->nghosts++; /* until its copy is added */
    }
    free(log);
    if (b < 0) return -1;
    Frame *frame = &pool->frames[f];
    frame->block = b;
    frame->indexed = 1;
    add_copy(core, b, device, f);
    frame->state = VALID;
    frame->wired = 0;
    frame->owner = (uint16_t)group;
    charge(core, device, group, 1);
    pool->wired--;
    count_reclaimable(core, device, group, 1);
    stamp_frame(core, device, f);
    return b;
}
