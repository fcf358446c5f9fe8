/* Admission: which frames a log gets, what it shares, and what makes a block findable. */
#include "state.h"

/* I5: entry i may be written if this slot alone names it and nobody can find it or has yet to copy it, or if this slot
 * is the one that fills it for all. */
bool writable(const Core *core, int32_t s, int32_t i) {
    const Slot *slot = &core->slots[s];
    const Frame *frame = &core->pools[slot->device].frames[slot->frames[i]];
    if (frame->indexed) return frame->state == FILLING && frame->filler == s;
    return frame->refs == 1 && frame->wired == 0;
}

int32_t copy_on_write(Core *core, int32_t s, int32_t i) {
    Slot *slot = &core->slots[s];
    Pool *pool = &core->pools[slot->device];
    int32_t src = slot->frames[i];
    int32_t f = frame_alloc(core, slot->device, s);
    TRY(f);
    map_entry(core, s, i, f, slot->counts[i]);
    if (slot->computed > i * core->block_tokens && slot->pending_entry != i) {
        if (slot->pending_src >= 0) return fail(core, CORE_PANIC, "slot %d waits for two copies", s);
        slot->pending_src = src;
        slot->pending_entry = i;
        if (pool->frames[src].wired++ == 0) pool->wired++;
    }
    TRY(frame_put(core, slot->device, src, s));
    core->n_cow++;
    return 0;
}

/* Make entry i one that this slot may write. */
int32_t open_entry(Core *core, int32_t s, int32_t i) {
    if (!writable(core, s, i)) return copy_on_write(core, s, i);
    Frame *frame = frame_of(core, &core->slots[s], i);
    if (!frame->indexed) { /* it may be VALID: a private block that was cut */
        frame->state = FILLING;
        frame->filler = s;
    }
    return 0;
}

/* The block indexed under key i, verified: parent, domain and tokens must be equal too (I6).  -1: none or another. */
static int32_t find_block(Core *core, const Slot *slot, int32_t i, int32_t parent) {
    int32_t b = index_find(core, slot->keys[i]);
    if (b < 0) return -1;
    const Block *block = &core->blocks[b];
    size_t size = (size_t)core->block_tokens;
    if (block->parent != parent || block->domain != slot->domain ||
        memcmp(core->block_tokens_at + (size_t)b * size, slot->log + (size_t)i * size, size * 4) != 0) {
        core->n_collisions++;
        return -1;
    }
    return b;
}

/* In a pool of a million blocks every lookup misses the caches four times.  All keys are known beforehand, so the lines
 * of the blocks to come are asked for while the present one is compared: the index 24 blocks ahead, then the block it
 * names and that block's tokens, then its frame. */
enum { AHEAD_INDEX = 24, AHEAD_BLOCK = 12, AHEAD_FRAME = 6, GUESSES = 16 };

static inline void look_ahead(const Core *core, const Slot *slot, int32_t i, int32_t end, int32_t *guesses) {
    if (i + AHEAD_INDEX < end) index_prefetch(core, slot->keys[i + AHEAD_INDEX]);
    if (i + AHEAD_BLOCK < end) {
        int32_t b = guesses[(i + AHEAD_BLOCK) % GUESSES] = index_guess(core, slot->keys[i + AHEAD_BLOCK]);
        if (b >= 0) {
            __builtin_prefetch(&core->blocks[b], 1);
            __builtin_prefetch(core->block_tokens_at + (size_t)b * (size_t)core->block_tokens);
        }
    }
    if (i + AHEAD_FRAME < end) {
        int32_t b = guesses[(i + AHEAD_FRAME) % GUESSES];
        if (b >= 0 && core->blocks[b].copies[slot->device] >= 0)
            __builtin_prefetch(&core->pools[slot->device].frames[core->blocks[b].copies[slot->device]], 1);
    }
}

/* Frames of the indexed blocks that continue the row at `tail`, into core->hits; *held: how many are reclaimable now. */
static int32_t lookup(Core *core, const Slot *slot, int32_t tail, int32_t *held) {
    const Pool *pool = &core->pools[slot->device];
    int32_t parent = -1, nhits = 0, end = blocks_in(core, slot->length);
    *held = 0;
    if (tail) {
        const Frame *frame = &pool->frames[slot->frames[tail - 1]];
        if (!frame->indexed) return 0;
        parent = frame->block;
    }
    int32_t guesses[GUESSES];
    for (int32_t k = 0; k < GUESSES; k++) guesses[k] = -1;
    for (int32_t i = tail; i < end && i < tail + AHEAD_INDEX; i++) index_prefetch(core, slot->keys[i]);
    for (int32_t i = tail; i < end; i++) {
        look_ahead(core, slot, i, end, guesses);
        int32_t b = find_block(core, slot, i, parent);
        int32_t f = b >= 0 ? core->blocks[b].copies[slot->device] : -1;
        if (f < 0) break;
        if (pool->frames[f].stamp) ++*held;
        core->hits[nhits++] = f;
        parent = b;
    }
    return nhits;
}

/* Will computing the rest of the log write the row's last entry, which is partial? */
static bool tail_written(const Core *core, const Slot *slot) {
    int32_t i = slot->nframes - 1;
    if (slot->length > i * core->block_tokens + slot->counts[i]) return true;
    return core->pools[slot->device].frames[slot->frames[i]].state != VALID && slot->length > slot->computed;
}

/* The block of entry i exists already in frame f.  Name that one instead, unless it is still being filled. */
static int32_t merge(Core *core, int32_t s, int32_t i, int32_t f) {
    Slot *slot = &core->slots[s];
    if (core->pools[slot->device].frames[f].state != VALID || slot->computed < (i + 1) * core->block_tokens) return 0;
    frame_take(core, slot->device, f);
    int32_t own = slot->frames[i];
    map_entry(core, s, i, f, core->block_tokens);
    TRY(frame_put(core, slot->device, own, s));
    core->n_merged++;
    return 0;
}

/* Make entry i, a full and unindexed block of this slot alone, findable under its key (if its parent is). */
int32_t index_entry(Core *core, int32_t s, int32_t i) {
    Slot *slot = &core->slots[s];
    Pool *pool = &core->pools[slot->device];
    int32_t f = slot->frames[i], parent = -1;
    Frame *frame = &pool->frames[f], *above = NULL;
    if (frame->indexed) return 0;
    if (i) {
        above = &pool->frames[slot->frames[i - 1]];
        if (!above->indexed) return 0;
        parent = above->block;
    }
    Key key = slot->keys[i];
    int32_t other = index_find(core, key);
    if (other >= 0) {
        if (find_block(core, slot, i, parent) < 0) return 0; /* a colliding key: this block stays private */
        Block *known = &core->blocks[other];
        if (known->copies[slot->device] >= 0) return merge(core, s, i, known->copies[slot->device]);
        block_free(core, frame->block); /* it exists on another device: this frame becomes its copy here */
        known->copies[slot->device] = f;
        frame->block = other;
    } else {
        Block *block = &core->blocks[frame->block];
        size_t size = (size_t)core->block_tokens;
        block->key = key;
        memcpy(core->block_tokens_at + (size_t)frame->block * size, slot->log + (size_t)i * size, size * 4);
        block->parent = parent;
        block->domain = slot->domain;
        block->depth = i * core->block_tokens;
        index_insert(core, key, frame->block);
        core->n_indexed++;
    }
    frame->indexed = 1;
    if (above) above->children++;
    return 0;
}

/* Allocate entries from `first` on for the rest of the log.  Requires: enough free frames. */
static int32_t fill(Core *core, int32_t s, int32_t first, bool keeps_tail) {
    Slot *slot = &core->slots[s];
    Pool *pool = &core->pools[slot->device];
    int32_t size = core->block_tokens, needed = blocks_for(core, slot->length), full = blocks_in(core, slot->length);
    for (int32_t i = first; i < needed; i++) {
        int32_t count = slot->length - i * size < size ? slot->length - i * size : size;
        if (keeps_tail && i == first) {
            if (tail_written(core, slot)) TRY(open_entry(core, s, i));
            set_count(core, s, i, count);
        } else {
            if (pool->nfree > 8) __builtin_prefetch(&pool->frames[pool->free[pool->nfree - 8]], 1);
            if (core->nfree_blocks > 8) {
                size_t ahead = (size_t)core->free_blocks[core->nfree_blocks - 8];
                __builtin_prefetch(&core->blocks[ahead], 1);
                __builtin_prefetch(core->block_tokens_at + ahead * (size_t)size, 1);
            }
            if (i + 8 < full) index_prefetch(core, slot->keys[i + 8]);
            int32_t f = frame_alloc(core, slot->device, s);
            TRY(f);
            map_entry(core, s, i, f, count);
        }
        if (count == size) TRY(index_entry(core, s, i));
    }
    return 0;
}

static int32_t admitted(CoreOut *out, int32_t status, int32_t shortage, int32_t mapped, int32_t fresh) {
    out->status = status;
    out->shortage = shortage;
    out->mapped = mapped;
    out->fresh = fresh;
    return 0;
}

int32_t core_admit(Core *core, int32_t s, int32_t reserve) {
    CHECK_SLOT(core, s);
    Slot *slot = &core->slots[s];
    CHECK_IDLE(core, slot);
    Pool *pool = &core->pools[slot->device];
    int32_t size = core->block_tokens, needed = blocks_for(core, slot->length);
    if (needed > core->entries)
        return fail(core, CORE_INVALID, "core: %d tokens do not fit a row of %d entries", slot->length, core->entries);
    TRY(reserve_frames(core, slot, needed));
    int32_t tail = slot->nframes, held; /* tail: the first entry that is missing or partly filled */
    if (tail && slot->counts[tail - 1] < size) tail--;
    int32_t nhits = lookup(core, slot, tail, &held);
    bool keeps_tail = !nhits && tail < slot->nframes;
    int32_t fresh = needed - tail - nhits - keeps_tail;
    if (keeps_tail && tail_written(core, slot) && !writable(core, s, tail)) fresh++;
    int64_t available = (int64_t)pool->nfree + pool->reclaimable - held;
    if (nhits && tail < slot->nframes && slot->frames[tail] != core->hits[0]) {
        const Frame *old = frame_of(core, slot, tail); /* the partial tail that a whole block replaces */
        available += old->refs == 1 && old->wired == 0;
    }
    int64_t wanted = (int64_t)fresh + reserve;
    if (fresh && wanted > available) return admitted(&core->out, STATUS_NOROOM, (int32_t)(wanted - available), 0, 0);
    if (nhits) {
        for (int32_t k = 0; k < nhits; k++) { /* before anything is unmapped: it may be the last reference */
            frame_take(core, slot->device, core->hits[k]);
            core->blocks[pool->frames[core->hits[k]].block].hits++;
        }
        if (pool->frames[core->hits[0]].state != VALID && slot->computed > tail * size) slot->computed = tail * size;
        TRY(unmap(core, s, tail));
        for (int32_t k = 0; k < nhits; k++) map_entry(core, s, tail + k, core->hits[k], size);
        core->n_hits += nhits;
    }
    if (fresh > pool->nfree) return admitted(&core->out, STATUS_EVICT, fresh - pool->nfree, nhits, 0);
    core->n_misses += blocks_in(core, slot->length) - tail - nhits;
    TRY(fill(core, s, tail + nhits, keeps_tail));
    return admitted(&core->out, STATUS_OK, 0, nhits, fresh);
}
