/* Tables for fsck, policies and the inspector.  Nothing here changes anything. */
#include "state.h"

enum { MAP_FULL = 1, MAP_INDEXED = 2, MAP_VALID = 4, MAP_WIRED = 8 }; /* flags of pagemap */

int32_t core_free_frames(Core *core, int32_t device) {
    CHECK_DEVICE(core, device);
    return core->pools[device].nfree;
}

int32_t core_reclaimable_frames(Core *core, int32_t device) {
    CHECK_DEVICE(core, device);
    return core->pools[device].reclaimable;
}

int32_t core_capacity(Core *core, int32_t device) {
    CHECK_DEVICE(core, device);
    return core->pools[device].capacity;
}

/* Frames named by a slot in flight, or source of a pending copy. */
int32_t core_wired_frames(Core *core, int32_t device) {
    CHECK_DEVICE(core, device);
    Pool *pool = &core->pools[device];
    int32_t wired = pool->wired;
    for (uint8_t mark = 1; mark != 255; mark--) /* once to count, once to take the marks away */
        for (int32_t k = 0; k < pool->nflight; k++) {
            const Slot *slot = &core->slots[pool->flight[k].slot];
            for (int32_t i = 0; i < slot->nframes; i++) {
                Frame *frame = &pool->frames[slot->frames[i]];
                if (mark && !frame->mark && !frame->wired) wired++;
                frame->mark = mark;
            }
        }
    return wired;
}

int32_t core_run_length(Core *core, int32_t device) {
    CHECK_DEVICE(core, device);
    return core->pools[device].nrun;
}

int32_t core_run_slots(Core *core, int32_t device) {
    CHECK_DEVICE(core, device);
    const Pool *pool = &core->pools[device];
    TRY(reserve_list(core, (size_t)pool->nrun));
    if (pool->nrun) memcpy(core->out.list, pool->run, (size_t)pool->nrun * sizeof *pool->run);
    return core->out.nlist = pool->nrun;
}

int32_t core_flight_length(Core *core, int32_t device) {
    CHECK_DEVICE(core, device);
    return core->pools[device].nflight;
}

int32_t core_is_running(Core *core, int32_t s) { return s >= 0 && s < core->nslots && core->slots[s].running; }

int32_t core_in_flight(Core *core, int32_t s) { return s >= 0 && s < core->nslots && core->slots[s].in_flight; }

int32_t core_slot_row(Core *core, int32_t s, int64_t *row) {
    CHECK_SLOT(core, s);
    const Slot *slot = &core->slots[s];
    const Frame *frames = core->pools[slot->device].frames;
    int64_t shared = 0, share_millionths = 0;
    for (int32_t i = 0; i < slot->nframes; i++) {
        int32_t refs = frames[slot->frames[i]].refs;
        shared += refs > 1;
        share_millionths += refs == 1 ? 1000000 : 1000000 / refs;
    }
    const int64_t values[ROW_FIELDS] = {
        slot->length, slot->computed, slot->nframes, shared, share_millionths, slot->computed_total, slot->hit_total,
        slot->recomputed_total, slot->generated_total,
    };
    memcpy(row, values, sizeof values);
    return 0;
}

int32_t core_entries(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    return core->slots[s].nframes;
}

/* Requires: an open slot, arrays of core_entries() items. */
void core_pagemap(Core *core, int32_t s, int32_t *frames, int16_t *counts, int32_t *sharers, uint8_t *flags,
                  int32_t *hits) {
    const Slot *slot = &core->slots[s];
    const Pool *pool = &core->pools[slot->device];
    int32_t size = core->block_tokens;
    for (int32_t i = 0; i < slot->nframes; i++) {
        const Frame *frame = &pool->frames[slot->frames[i]];
        frames[i] = slot->frames[i];
        counts[i] = slot->counts[i];
        sharers[i] = frame->refs;
        hits[i] = core->blocks[frame->block].hits;
        flags[i] = (uint8_t)((counts[i] == size ? MAP_FULL : 0) | (frame->indexed ? MAP_INDEXED : 0) |
                             (frame->state == VALID || slot->computed >= i * size + counts[i] ? MAP_VALID : 0) |
                             (frame->wired || slot->in_flight ? MAP_WIRED : 0));
    }
}

void core_counters(const Core *core, int64_t *counters) {
    const int64_t values[COUNTERS] = {core->n_hits,    core->n_misses,  core->n_evictions,    core->n_collisions,
                                      core->n_cow,     core->n_merged,  core->n_indexed,      core->n_freed,
                                      core->n_partial_hits, core->n_partial_tokens, core->nghosts};
    memcpy(counters, values, sizeof values);
}

/* Requires: a device that exists, arrays of its capacity. */
void core_frame_table(Core *core, int32_t device, uint8_t *state, int32_t *refs, int32_t *wired, int32_t *block,
                      uint64_t *stamp, int32_t *filler) {
    const Pool *pool = &core->pools[device];
    for (int32_t f = 0; f < pool->capacity; f++) {
        const Frame *frame = &pool->frames[f];
        state[f] = frame->state;
        refs[f] = frame->refs;
        wired[f] = frame->wired;
        block[f] = frame->block;
        stamp[f] = frame->stamp;
        filler[f] = frame->filler;
    }
}

int32_t core_blocks(const Core *core) { return core->nblocks; }

void core_block_table(Core *core, int32_t *parent, int32_t *domain, int32_t *depth, int32_t *hits, uint8_t *indexed,
                      uint8_t *keys, int32_t *copies, int32_t *children, int32_t *family) {
    for (int32_t b = 0; b < core->nblocks; b++) {
        const Block *block = &core->blocks[b];
        parent[b] = block->parent;
        domain[b] = block->domain;
        depth[b] = depth_of(block);
        hits[b] = block->depth < -1 ? 0 : block->hits;
        indexed[b] = block->depth >= 0;
        memcpy(keys + (size_t)b * sizeof block->key, &block->key, sizeof block->key);
        memcpy(copies + (size_t)b * (size_t)core->devices, block->copies, (size_t)core->devices * sizeof *copies);
        memcpy(children + (size_t)b * (size_t)core->devices, block->children, (size_t)core->devices * sizeof *children);
        family[2 * b] = block->nchildren;
        family[2 * b + 1] = block->depth < -1 ? block->child : 0;
    }
}

/* The number of tokens an indexed block stands for, written to `tokens`; 0 otherwise. */
int32_t core_block_tokens_of(Core *core, int32_t b, int32_t *tokens) {
    if (b < 0 || b >= core->nblocks) return fail(core, CORE_INVALID, "core: block %d does not exist", b);
    if (core->blocks[b].depth < 0) return 0;
    size_t size = (size_t)core->block_tokens;
    memcpy(tokens, core->block_tokens_at + (size_t)b * size, size * sizeof *tokens);
    return core->block_tokens;
}

int32_t core_key_of(Core *core, int32_t s, int32_t i, uint8_t *key) {
    CHECK_SLOT(core, s);
    const Slot *slot = &core->slots[s];
    if (i < 0 || i >= slot->length / core->block_tokens)
        return fail(core, CORE_INVALID, "core: slot %d has no full block %d", s, i);
    memcpy(key, &slot->keys[i], sizeof slot->keys[i]);
    return 0;
}

int32_t core_find_key(Core *core, const uint8_t *key) {
    Key wanted;
    memcpy(&wanted, key, sizeof wanted);
    return index_find(core, wanted);
}

/* The source frame, or -1.  (An error is below CORE_NOMEM.) */
int32_t core_pending_copy(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    return core->slots[s].pending_src;
}

int32_t core_slots_used(Core *core) {
    TRY(reserve_list(core, (size_t)core->nslots));
    int32_t n = 0;
    for (int32_t s = 0; s < core->nslots; s++)
        if (core->slots[s].used) core->out.list[n++] = s;
    return core->out.nlist = n;
}

int32_t core_slot_device(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    return core->slots[s].device;
}
