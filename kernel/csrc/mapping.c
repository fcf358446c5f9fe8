/* Admission: which frames a log gets, what it shares, and what makes a block findable. */
#include "state.h"

/* I5: entry i may be written if this slot alone names it and nobody can find it or has yet to copy it, or if this slot
 * is the one that fills it for all. */
bool writable(const Core *core, int32_t s, int32_t i) {
    const Slot *slot = &core->slots[s];
    const Frame *frame = &core->pools[slot->device].frames[slot->frames[i]];
    if (frame->indexed) return frame->state != VALID && frame->filler == s;
    if (frame->state == LOADING) return frame->refs == 1 && frame->filler == s;
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
    if (!frame->indexed && frame->state != LOADING) { /* it may be VALID: a private block that was cut */
        frame->state = FILLING;
        frame->filler = s;
    }
    return 0;
}

/* The block indexed under key i, verified: parent, domain and tokens must be equal too (I6).  -1: none or another. */
int32_t find_block(Core *core, const Slot *slot, int32_t i, int32_t parent) {
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

/* Known blocks that continue the row at `tail`, into core->hits; how many there are.  *hits: how many of them, from the
 * first, have a frame on this device; *held: how many of those are reclaimable now. */
static int32_t lookup(Core *core, const Slot *slot, int32_t tail, int32_t *hits, int32_t *held) {
    const Pool *pool = &core->pools[slot->device];
    int32_t parent = -1, n = 0, end = blocks_in(core, slot->length);
    *held = *hits = 0;
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
        if (b < 0) break;
        int32_t f = core->blocks[b].copies[slot->device];
        if (f >= 0 && *hits == n) {
            ++*hits;
            if (pool->frames[f].stamp) ++*held;
        }
        core->hits[n++] = b;
        parent = b;
    }
    return n;
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
    Frame *frame = &pool->frames[f];
    if (frame->indexed) return 0;
    if (i) {
        const Frame *above = &pool->frames[slot->frames[i - 1]];
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
        frame->block = other;
        add_copy(core, other, slot->device, f);
    } else {
        Block *block = &core->blocks[frame->block];
        size_t size = (size_t)core->block_tokens;
        block->key = key;
        memcpy(core->block_tokens_at + (size_t)frame->block * size, slot->log + (size_t)i * size, size * 4);
        block->parent = parent;
        block->domain = slot->domain;
        block->depth = i * core->block_tokens;
        block->used_ns = core->out.now_ns;
        index_insert(core, key, frame->block);
        core->n_indexed++;
        int32_t *newest = &core->roots[(uint32_t)slot->domain % ROOTS];
        if (parent >= 0) {
            Block *before = &core->blocks[parent];
            before->nchildren++;
            before->children[slot->device]++;
            newest = &before->child;
        }
        block->sibling = *newest;
        *newest = frame->block;
    }
    frame->indexed = 1;
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

/* Device d is among `sources` and has a copy of b that is there or on its way; one whose transfer failed is no source. */
static bool is_source(const Core *core, int32_t b, int32_t d, int32_t sources) {
    int32_t g = core->blocks[b].copies[d];
    return g >= 0 && (sources >> d & 1) && core->pools[d].frames[g].state != FILLING;
}

/* Make frame f wait for a copy of block b from the first device of `sources` that has one.  0: none has.
 * Requires: room in core->loads. */
static int32_t load_from(Core *core, int32_t b, int32_t sources, int32_t device, int32_t f) {
    for (int32_t d = 0; d < core->devices; d++) {
        if (!is_source(core, b, d, sources)) continue;
        int32_t g = core->blocks[b].copies[d];
        Frame *frame = &core->pools[device].frames[f], *source = &core->pools[d].frames[g];
        frame->state = LOADING;
        frame->filler = -1;
        if (frame->wired++ == 0) core->pools[device].wired++;
        if (source->wired++ == 0) core->pools[d].wired++;
        int32_t *load = core->loads + core->nloads;
        load[0] = b;
        load[1] = d;
        load[2] = g;
        load[3] = f;
        core->nloads += 4;
        return 1;
    }
    return 0;
}

/* Map known block b, which no frame before it in the row's chain leads to on this device: it is loaded, or computed by s. */
static int32_t bring(Core *core, int32_t s, int32_t i, int32_t b, int32_t sources) {
    Slot *slot = &core->slots[s];
    Pool *pool = &core->pools[slot->device];
    core->blocks[b].hits++;
    int32_t f = core->blocks[b].copies[slot->device];
    if (f >= 0) {
        frame_take(core, slot->device, f);
        map_entry(core, s, i, f, core->block_tokens);
        return 0;
    }
    f = copy_alloc(core, slot->device, b, slot->group);
    TRY(f);
    pool->frames[f].refs = 1;
    pool->frames[f].filler = s;
    map_entry(core, s, i, f, core->block_tokens);
    return load_from(core, b, sources, slot->device, f);
}

/* Load the first n tokens of block b into a frame of this slot's own for entry i.  0: nobody in `sources` has it. */
static int32_t borrow(Core *core, int32_t s, int32_t i, int32_t b, int32_t n, int32_t sources) {
    Slot *slot = &core->slots[s];
    bool there = false;
    for (int32_t d = 0; d < core->devices; d++) there |= is_source(core, b, d, sources);
    if (!there) return 0;
    int32_t own = frame_alloc(core, slot->device, s), rest = slot->length - i * core->block_tokens;
    TRY(own);
    map_entry(core, s, i, own, rest < core->block_tokens ? rest : core->block_tokens);
    TRY(load_from(core, b, sources, slot->device, own));
    core->pools[slot->device].frames[own].filler = s;
    core->pools[slot->device].frames[own].known = (int16_t)n;
    return 1;
}

enum { ALIKE = 8 }; /* blocks looked at for one that begins like the rest of a log */

/* A block that continues the row's last block, or begins the domain, and shares most first tokens with entry i; *most:
 * how many.  Looks at the eight that were indexed last. */
static int32_t alike(const Core *core, const Slot *slot, int32_t i, int32_t *most) {
    int32_t size = core->block_tokens, parent = -1, best = -1;
    int32_t rest = slot->length - i * size, end = rest < size ? rest : size;
    *most = 0;
    if (i) {
        const Frame *frame = &core->pools[slot->device].frames[slot->frames[i - 1]];
        if (!frame->indexed) return -1;
        parent = frame->block;
    }
    int32_t b = i ? core->blocks[parent].child : core->roots[(uint32_t)slot->domain % ROOTS];
    for (int32_t look = 0; look < ALIKE && b >= 0; look++) {
        const Block *block = &core->blocks[b];
        if (!indexed(block) || block->parent != parent || block->domain != slot->domain) break;
        const int32_t *tokens = core->block_tokens_at + (size_t)b * (size_t)size, *log = slot->log + (size_t)i * (size_t)size;
        int32_t n = 0;
        while (n < end && tokens[n] == log[n]) n++;
        if (n > *most && has_copy(block)) {
            best = b;
            *most = n;
        }
        b = block->sibling;
    }
    if (*most > rest - 1) *most = rest - 1; /* the log's last token is always computed */
    return best;
}

/* Map entry i with some first tokens that are known: of the saved tail, or of a block that begins like it.  Entries mapped. */
static int32_t resume(Core *core, int32_t s, int32_t i, int32_t sources, int32_t partial) {
    Slot *slot = &core->slots[s];
    Pool *pool = &core->pools[slot->device];
    int32_t size = core->block_tokens, rest = slot->length - i * size, n;
    if (rest <= 0) return 0;
    if (slot->tail_block >= 0 && i * size < slot->tail_end && slot->tail_end <= i * size + (rest < size ? rest : size)) {
        int32_t done = borrow(core, s, i, slot->tail_block, slot->tail_end - i * size, sources);
        TRY(done);
        if (done && rest >= size) TRY(index_entry(core, s, i));
        return done;
    }
    if (partial <= 0 || slot->length < 2) return 0;
    int32_t b = alike(core, slot, i, &n);
    if (n < partial || b < 0) return 0;
    int32_t f = core->blocks[b].copies[slot->device];
    if (f >= 0 && pool->frames[f].state == VALID && slot->pending_src < 0) {
        int32_t own = frame_alloc(core, slot->device, s);
        TRY(own);
        map_entry(core, s, i, own, rest < size ? rest : size);
        pool->frames[own].known = (int16_t)n;
        slot->pending_src = f;
        slot->pending_entry = i;
        if (pool->frames[f].wired++ == 0) pool->wired++;
        if (pool->frames[f].stamp) unstamp(core, slot->device, &pool->frames[f]); /* no victim before the copy is made */
        core->n_cow++;
    } else {
        int32_t done = borrow(core, s, i, b, n, sources);
        if (done <= 0) return done;
    }
    core->n_partial_hits++;
    core->n_partial_tokens += n;
    if (rest >= size) TRY(index_entry(core, s, i));
    return 1;
}

/* The first of the slot's group and those above it that `fresh` frames more would bring over its limit; 0: none.
 * *missing > 0: even without its reclaimable blocks, but for the first `hits` of core->hits, which the slot maps. */
static int32_t over_limit(Core *core, const Slot *slot, int32_t fresh, int32_t hits, int32_t *missing) {
    const Pool *pool = &core->pools[slot->device];
    int32_t first = 0;
    for (int32_t g = slot->group; g; g = core->above[g]) {
        const Account *account = &core->accounts[slot->device][g];
        int32_t more = account->used + fresh - account->hard, own = account->reclaimable;
        if (!account->hard || more <= 0) continue;
        for (int32_t k = 0; k < hits; k++) {
            const Frame *frame = &pool->frames[core->blocks[core->hits[k]].copies[slot->device]];
            own -= frame->stamp && within(core, frame->owner, g);
        }
        if (more > own) {
            *missing = more - own;
            return g;
        }
        if (!first) first = g;
    }
    return first;
}

/* Count the reclaimable ones of the first `hits` blocks that were looked up once more (1), or not at all (-1). */
static void count_hits(Core *core, int32_t device, int32_t hits, int32_t times) {
    for (int32_t k = 0; k < hits; k++) {
        const Frame *frame = &core->pools[device].frames[core->blocks[core->hits[k]].copies[device]];
        if (frame->stamp) count_reclaimable(core, device, frame->owner, times);
    }
}

int32_t core_admit(Core *core, int32_t s, int32_t reserve, int32_t sources, int32_t first_load, int32_t partial) {
    CHECK_SLOT(core, s);
    Slot *slot = &core->slots[s];
    CHECK_IDLE(core, slot);
    Pool *pool = &core->pools[slot->device];
    int32_t size = core->block_tokens, needed = blocks_for(core, slot->length);
    core->nloads = core->nfound = core->out.loads = 0;
    if (needed > core->entries)
        return fail(core, CORE_INVALID, "core: %d tokens do not fit a row of %d entries", slot->length, core->entries);
    TRY(reserve_frames(core, slot, needed));
    if (sources && !grow_array((void **)&core->loads, &core->loads_room, 4 * (size_t)needed, sizeof *core->loads))
        return fail(core, CORE_NOMEM, "core: no memory for %d loads", needed); /* now, while nothing has changed */
    int32_t tail = slot->nframes, hits, held; /* tail: the first entry that is missing or partly filled */
    if (tail && slot->counts[tail - 1] < size) tail--;
    int32_t nchain = lookup(core, slot, tail, &hits, &held);
    bool keeps_tail = !hits && tail < slot->nframes;
    if (keeps_tail) nchain = 0;
    int32_t fresh = needed - tail - hits - keeps_tail;
    if (keeps_tail && tail_written(core, slot) && !writable(core, s, tail)) fresh++;
    int32_t own_group = 0, own_short = 0;
    core->out.group = slot->group;
    if (fresh && core->nhard[slot->device]) {
        own_group = over_limit(core, slot, fresh, hits, &own_short);
        if (own_short > 0) {
            core->out.group = own_group;
            return admitted(&core->out, STATUS_OWN_NOROOM, own_short, 0, 0);
        }
    }
    if (held) count_hits(core, slot->device, hits, -1); /* what it shares is no cache that could go for it */
    int64_t available = (int64_t)pool->nfree + spare_frames(core, slot->device, slot->group);
    if (held) count_hits(core, slot->device, hits, 1);
    int32_t first_frame = hits ? core->blocks[core->hits[0]].copies[slot->device] : -1;
    if (hits && tail < slot->nframes && slot->frames[tail] != first_frame) {
        const Frame *old = frame_of(core, slot, tail); /* the partial tail that a whole block replaces */
        available += old->refs == 1 && old->wired == 0;
    }
    int64_t wanted = (int64_t)fresh + reserve;
    if (fresh && wanted > available) return admitted(&core->out, STATUS_NOROOM, (int32_t)(wanted - available), 0, 0);
    if (hits) {
        if (!grow_array((void **)&core->found, &core->found_room, (size_t)hits, sizeof *core->found))
            return fail(core, CORE_NOMEM, "core: no memory for %d hits", hits);
        for (int32_t k = 0; k < hits; k++) { /* before anything is unmapped: it may be the last reference */
            Block *block = &core->blocks[core->hits[k]];
            frame_take(core, slot->device, block->copies[slot->device]);
            block->hits++;
            core->found[k] = core->hits[k];
        }
        core->nfound = hits;
        if (pool->frames[first_frame].state != VALID && slot->computed > tail * size) slot->computed = tail * size;
        TRY(unmap(core, s, tail));
        for (int32_t k = 0; k < hits; k++)
            map_entry(core, s, tail + k, core->blocks[core->hits[k]].copies[slot->device], size);
        core->n_hits += hits;
    }
    for (int32_t g = own_group ? slot->group : 0; g; g = core->above[g]) { /* (what was unmapped may have made room) */
        const Account *account = &core->accounts[slot->device][g];
        if (!account->hard || account->used + fresh <= account->hard) continue;
        core->out.group = g;
        return admitted(&core->out, STATUS_OWN_EVICT, account->used + fresh - account->hard, hits, 0);
    }
    if (fresh > pool->nfree) return admitted(&core->out, STATUS_EVICT, fresh - pool->nfree, hits, 0);
    core->n_misses += blocks_in(core, slot->length) - tail - nchain;
    int32_t first = tail + hits;
    for (int32_t k = hits; k < nchain; k++, first++) {
        bool here = core->blocks[core->hits[k]].copies[slot->device] >= 0;
        int32_t loads = bring(core, s, first, core->hits[k], first >= first_load ? sources : 0);
        TRY(loads);
        if (here) core->n_hits++;
        else if (!loads) core->n_misses++; /* known, and computed all the same */
    }
    if (!keeps_tail) {
        int32_t more = resume(core, s, first, sources, partial);
        TRY(more);
        first += more;
    }
    TRY(fill(core, s, first, keeps_tail));
    for (int32_t k = core->nloads - 4; k >= 0; k -= 4) /* the sources have been used, a leaf before its parent */
        if (core->pools[core->loads[k + 1]].frames[core->loads[k + 2]].stamp)
            stamp_frame(core, core->loads[k + 1], core->loads[k + 2]);
    core->out.loads = core->nloads / 4;
    return admitted(&core->out, STATUS_OK, 0, hits, fresh);
}
