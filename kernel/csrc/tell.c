/* What the pager and the policies are told about blocks (kernel/twin_tiers.py says what each call means). */
#include "state.h"

enum { NO_COPY = 255, FACT_BYTES = 40, GOING = 1, THERE = 2 };

static int32_t fastest(const Core *core, int32_t b, int32_t own) {
    const int32_t *copies = core->blocks[b].copies;
    if (copies[own] >= 0 && core->pools[own].frames[copies[own]].state == VALID) return own;
    for (int32_t d = 0; d < core->devices; d++)
        if (d != own && copies[d] >= 0 && core->pools[d].frames[copies[d]].state == VALID) return d;
    return NO_COPY;
}

int32_t core_residency(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    const Slot *slot = &core->slots[s];
    int32_t size = core->block_tokens, n = blocks_for(core, slot->length), full = blocks_in(core, slot->length), parent = -1;
    TRY(reserve_bytes(core, (size_t)n));
    for (int32_t i = 0; i < n; i++) {
        int32_t b = -1;
        if (i < slot->nframes) {
            const Frame *frame = frame_of(core, slot, i);
            b = frame->block;
            if (frame->state == VALID || slot->computed > i * size) {
                core->out.bytes[i] = (uint8_t)slot->device;
                parent = frame->indexed && slot->counts[i] == size ? b : -1;
                continue;
            }
            if (!frame->indexed) b = -1;
        } else if (i < full && (i == 0 || parent >= 0)) {
            b = find_block(core, slot, i, parent);
        }
        parent = b;
        if (b < 0 && slot->tail_block >= 0 && i * size < slot->tail_end && slot->tail_end <= (i + 1) * size) b = slot->tail_block;
        core->out.bytes[i] = (uint8_t)(b >= 0 ? fastest(core, b, slot->device) : NO_COPY);
    }
    return n;
}

int32_t core_loading(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    const Slot *slot = &core->slots[s];
    int32_t n = 0;
    for (int32_t i = 0; i < slot->nframes; i++) n += frame_of(core, slot, i)->state == LOADING;
    return n;
}

int32_t core_row_blocks(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    const Slot *slot = &core->slots[s];
    TRY(reserve_list(core, (size_t)slot->nframes));
    int32_t n = 0;
    for (int32_t i = slot->nframes - 1; i >= 0; i--) {
        const Frame *frame = frame_of(core, slot, i);
        if (slot->counts[i] == core->block_tokens && frame->state == VALID && frame->indexed) core->out.list[n++] = frame->block;
    }
    return core->out.nlist = n;
}

int32_t core_row_entries(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    const Slot *slot = &core->slots[s];
    TRY(reserve_list(core, 2 * (size_t)slot->nframes));
    for (int32_t i = 0; i < slot->nframes; i++) {
        core->out.list[2 * i] = frame_of(core, slot, i)->block;
        core->out.list[2 * i + 1] = slot->frames[i];
    }
    return core->out.nlist = 2 * slot->nframes;
}

int32_t core_log_blocks(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    const Slot *slot = &core->slots[s];
    int32_t full = blocks_in(core, slot->length), parent = -1, n = 0;
    TRY(reserve_list(core, (size_t)full + 1));
    for (int32_t i = 0; i < full; i++) {
        int32_t b = find_block(core, slot, i, parent);
        if (b < 0) break;
        core->out.list[n++] = parent = b;
    }
    return core->out.nlist = n;
}

/* A walk over keys alone: what is told is a hint, so no token is compared. */
int32_t core_prefix(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    TRY(reserve_list(core, 4));
    const Slot *slot = &core->slots[s];
    int32_t full = blocks_in(core, slot->length), parent = -1, here = 0, coming = 0, awaited = 0, stored = 0;
    for (int32_t i = 0; i < full; i++) {
        if (i + 4 < full) index_prefetch(core, slot->keys[i + 4]);
        int32_t b = index_find(core, slot->keys[i]);
        if (b < 0 || core->blocks[b].parent != parent || core->blocks[b].domain != slot->domain) break;
        parent = b;
        int32_t f = core->blocks[b].copies[slot->device];
        const Frame *frame = f < 0 ? NULL : &core->pools[slot->device].frames[f];
        uint8_t is = frame ? frame->state : FREE;
        bool computing = is == FILLING && frame->filler >= 0 && frame->filler != s;
        if (is == VALID && !coming && !awaited && !stored) here++;
        else if ((is == VALID || is == LOADING) && !awaited && !stored) coming++;
        else if ((is == VALID || is == LOADING || computing) && !stored) awaited++;
        else if (fastest(core, b, slot->device) != NO_COPY) stored++;
        else break;
    }
    core->out.list[0] = here;
    core->out.list[1] = coming;
    core->out.list[2] = awaited;
    core->out.list[3] = stored;
    return core->out.nlist = 4;
}

int32_t core_tail_of(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    TRY(reserve_list(core, 2));
    core->out.list[0] = core->slots[s].tail_block;
    core->out.list[1] = core->slots[s].tail_end;
    return core->out.nlist = 2;
}

int32_t core_copied(Core *core, const int32_t *blocks, int32_t nblocks, int32_t devices) {
    CHECK_BLOCKS(core, blocks, nblocks, "copied");
    TRY(reserve_bytes(core, (size_t)nblocks));
    for (int32_t k = 0; k < nblocks; k++) {
        uint8_t state = 0;
        for (int32_t d = 0; d < core->devices; d++) {
            int32_t f = core->blocks[blocks[k]].copies[d];
            if (f < 0 || !(devices >> d & 1)) continue;
            uint8_t is = core->pools[d].frames[f].state;
            uint8_t says = is == VALID ? THERE : is == LOADING ? GOING : 0;
            if (says > state) state = says;
        }
        core->out.bytes[k] = state;
    }
    return nblocks;
}

int32_t core_copies_of(Core *core, int32_t block) {
    CHECK_BLOCKS(core, &block, 1, "copies_of");
    TRY(reserve_list(core, MAX_DEVICES));
    memcpy(core->out.list, core->blocks[block].copies, sizeof core->blocks[block].copies);
    return core->out.nlist = core->devices;
}

int32_t core_refs_of(Core *core, int32_t device, int32_t f) {
    CHECK_DEVICE(core, device);
    const Pool *pool = &core->pools[device];
    if (f < 0 || f >= pool->capacity) return fail(core, CORE_INVALID, "core: refs_of names a frame that does not exist");
    return pool->frames[f].refs;
}

int32_t core_key_heads(Core *core, const int32_t *blocks, int32_t nblocks) {
    CHECK_BLOCKS(core, blocks, nblocks, "key_heads");
    TRY(reserve_bytes(core, 8 * (size_t)nblocks));
    for (int32_t k = 0; k < nblocks; k++) memcpy(core->out.bytes + 8 * (size_t)k, &core->blocks[blocks[k]].key, 8);
    return 8 * nblocks;
}

int32_t core_describe(Core *core, const int32_t *blocks, int32_t nblocks) {
    CHECK_BLOCKS(core, blocks, nblocks, "describe");
    size_t size = (size_t)core->block_tokens, step = 48 + 4 * size;
    TRY(reserve_bytes(core, step * (size_t)nblocks));
    memset(core->out.bytes, 0, step * (size_t)nblocks);
    for (int32_t k = 0; k < nblocks; k++) {
        const Block *block = &core->blocks[blocks[k]];
        uint8_t *at = core->out.bytes + step * (size_t)k;
        int32_t n = indexed(block) ? core->block_tokens : block->depth < -1 ? block->hits : 0;
        int32_t numbers[4] = {block->domain, depth_of(block), n, !indexed(block)};
        memcpy(at, &block->key, 16);
        if (block->parent >= 0) memcpy(at + 16, &core->blocks[block->parent].key, 16);
        memcpy(at + 32, numbers, sizeof numbers);
        memcpy(at + 48, core->block_tokens_at + (size_t)blocks[k] * size, (size_t)n * 4);
    }
    return (int32_t)(step * (size_t)nblocks);
}

/* FACT records of kernel/records.py. */
int32_t core_facts(Core *core, const int32_t *blocks, int32_t nblocks) {
    CHECK_BLOCKS(core, blocks, nblocks, "facts");
    TRY(reserve_bytes(core, FACT_BYTES * (size_t)nblocks));
    for (int32_t k = 0; k < nblocks; k++) {
        const Block *block = &core->blocks[blocks[k]];
        uint8_t *at = core->out.bytes + FACT_BYTES * (size_t)k, mask = 0;
        for (int32_t d = 0; d < core->devices; d++) {
            int32_t f = block->copies[d];
            if (f >= 0 && core->pools[d].frames[f].state == VALID) mask |= (uint8_t)(1 << d);
        }
        int64_t times[2] = {block->used_ns, block->due_ns};
        int32_t numbers[5] = {depth_of(block), block->depth < -1 ? 0 : block->hits, block->turn, block->nchildren, block->domain};
        uint8_t rest[4] = {block->kind, block->priority, mask, indexed(block)};
        memcpy(at, times, 16);
        memcpy(at + 16, numbers, 20);
        memcpy(at + 36, rest, 4);
    }
    return FACT_BYTES * nblocks;
}

int32_t core_note(Core *core, int32_t s, int32_t kind, int32_t turn, int64_t due_ns) {
    int32_t n = core_log_blocks(core, s);
    TRY(n);
    if (core->slots[s].tail_block >= 0) core->out.list[n++] = core->slots[s].tail_block;
    for (int32_t k = 0; k < n; k++) {
        Block *block = &core->blocks[core->out.list[k]];
        block->kind = (uint8_t)kind;
        block->turn = (uint16_t)(turn > MAX_TURN ? MAX_TURN : turn);
        block->due_ns = due_ns;
    }
    return 0;
}

int32_t core_prioritise(Core *core, int32_t s, int32_t start, int32_t end, int32_t priority) {
    int32_t n = core_log_blocks(core, s), done = 0;
    TRY(n);
    int32_t first = start <= 0 ? 0 : start > core->slots[s].length ? n : blocks_for(core, start);
    for (int32_t i = first, last = end > 0 ? blocks_in(core, end) : 0; i < last && i < n; i++, done++)
        core->blocks[core->out.list[i]].priority = (uint8_t)priority;
    return done;
}

static bool can_go(const Core *core, int32_t device, int32_t f) {
    const Frame *frame = &core->pools[device].frames[f];
    return frame->stamp && frame->wired == 0 && may_go(core, device, frame->owner);
}

int32_t core_sample(Core *core, int32_t device, int32_t want, uint64_t seed) {
    CHECK_DEVICE(core, device);
    Pool *pool = &core->pools[device];
    if (want < 0) want = 0;
    TRY(reserve_list(core, 2 * (size_t)want));
    int32_t *list = core->out.list, *frames = list + want, n = 0;
    uint64_t state = seed ^ 0x9E3779B97F4A7C15u;
    if (!state) state = 1;
    for (int64_t pick = 0; pool->capacity && pick < 8 * (int64_t)want && n < want; pick++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        int32_t f = (int32_t)((state >> 32) * (uint64_t)pool->capacity >> 32);
        if (!can_go(core, device, f) || pool->frames[f].mark || core->blocks[pool->frames[f].block].children[device]) continue;
        pool->frames[f].mark = 1;
        frames[n] = f;
        list[n++] = pool->frames[f].block;
    }
    for (int32_t k = 0; k < n; k++) pool->frames[frames[k]].mark = 0;
    return core->out.nlist = n;
}

int32_t core_evictable(Core *core, int32_t device, const int32_t *blocks, int32_t nblocks, int32_t want) {
    CHECK_DEVICE(core, device);
    CHECK_BLOCKS(core, blocks, nblocks, "evictable");
    Pool *pool = &core->pools[device];
    TRY(reserve_list(core, (size_t)nblocks));
    int32_t n = 0;
    for (int32_t k = 0; k < nblocks && n < want; k++) { /* children of those found are taken away, and given back below */
        Block *block = &core->blocks[blocks[k]];
        int32_t f = block->copies[device];
        if (f < 0 || !can_go(core, device, f) || block->children[device] || pool->frames[f].mark) continue;
        pool->frames[f].mark = 1;
        core->out.list[n++] = blocks[k];
        if (block->parent >= 0) core->blocks[block->parent].children[device]--;
    }
    for (int32_t k = 0; k < n; k++) {
        const Block *block = &core->blocks[core->out.list[k]];
        pool->frames[block->copies[device]].mark = 0;
        if (block->parent >= 0) core->blocks[block->parent].children[device]++;
    }
    return core->out.nlist = n;
}

int32_t core_chain(Core *core, int32_t device, int32_t leaf, int32_t want) {
    CHECK_DEVICE(core, device);
    CHECK_BLOCKS(core, &leaf, 1, "chain");
    TRY(reserve_list(core, (size_t)(want > 0 ? want : 0)));
    int32_t n = 0;
    for (int32_t b = leaf; b >= 0 && n < want; b = core->blocks[b].parent) {
        int32_t f = core->blocks[b].copies[device];
        if (f < 0 || !can_go(core, device, f) || core->blocks[b].children[device] != (n ? 1 : 0)) break;
        core->out.list[n++] = b;
    }
    return core->out.nlist = n;
}

int32_t core_ghosts(const Core *core) { return core->nghosts; }
