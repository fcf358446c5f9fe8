/* Slots: token logs, block keys, and the ends of page-table rows. */
#include <stdlib.h>

#include "state.h"

int32_t reserve_log(Core *core, Slot *slot, int32_t length) {
    if (length <= slot->log_room) return 0;
    int64_t room = (int64_t)length + length / 2 + 64;
    if (room > INT32_MAX / 4) room = length;
    int32_t *log = realloc(slot->log, (size_t)room * sizeof *log);
    if (!log) return fail(core, CORE_NOMEM, "core: no memory for a log of %d tokens", length);
    slot->log = log;
    Key *keys = realloc(slot->keys, ((size_t)room / (size_t)core->block_tokens + 1) * sizeof *keys);
    if (!keys) return fail(core, CORE_NOMEM, "core: no memory for the keys of %d tokens", length);
    slot->keys = keys;
    slot->log_room = (int32_t)room;
    return 0;
}

int32_t reserve_frames(Core *core, Slot *slot, int32_t entries) {
    if (entries <= slot->frames_room) return 0;
    int32_t room = entries + entries / 2 + 4;
    int32_t *frames = realloc(slot->frames, (size_t)room * sizeof *frames);
    if (frames) slot->frames = frames;
    int16_t *counts = frames ? realloc(slot->counts, (size_t)room * sizeof *counts) : NULL;
    if (!counts) return fail(core, CORE_NOMEM, "core: no memory for a row of %d entries", entries);
    slot->counts = counts;
    slot->frames_room = room;
    return 0;
}

/* Keys of the blocks that the log filled when it grew beyond `from` tokens. */
void extend_keys(Core *core, Slot *slot, int32_t from) {
    int32_t first = blocks_in(core, from), end = blocks_in(core, slot->length);
    if (first == end) return;
    Key key = first ? slot->keys[first - 1] : slot->root;
    for (int32_t i = first; i < end; i++)
        slot->keys[i] = key = hash_block(core, key, slot->log + (size_t)i * (size_t)core->block_tokens);
}

static int32_t take_slot(Core *core, int32_t device, int32_t domain, Key root) {
    int32_t s = core->free_slots[--core->nfree_slots];
    Slot *slot = &core->slots[s];
    slot->used = true;
    slot->in_flight = slot->discard = slot->running = false;
    slot->length = slot->nframes = slot->computed = slot->highwater = slot->nstops = 0;
    slot->device = device;
    slot->domain = domain;
    slot->root = root;
    slot->pending_src = slot->pending_entry = slot->tail_block = -1;
    slot->tail_end = slot->group = 0;
    slot->max_tokens = slot->generated = slot->limit = slot->conn = slot->request = 0;
    slot->computed_total = slot->hit_total = slot->recomputed_total = slot->generated_total = 0;
    memset(slot->template, 0, SEQ_BYTES);
    return s;
}

int32_t core_open_slot(Core *core, int32_t device, int32_t domain, const uint8_t *root) {
    CHECK_DEVICE(core, device);
    if (device >= core->computes) return fail(core, CORE_INVALID, "core: device %d is a tier, nothing runs there", device);
    if (!core->nfree_slots) return -1;
    Key key;
    memcpy(&key, root, sizeof key);
    return take_slot(core, device, domain, key);
}

/* Drop the entries past `keep_entries`, deepest first: a leaf is older in the ring than its parent. */
int32_t unmap(Core *core, int32_t s, int32_t keep_entries) {
    Slot *slot = &core->slots[s];
    Pool *pool = &core->pools[slot->device];
    size_t row = (size_t)s * (size_t)core->entries;
    while (slot->nframes > keep_entries) {
        int32_t i = slot->nframes - 1;
        if (i == slot->pending_entry) {
            pool->frames[slot->frames[i]].known = 0; /* the copy was never made */
            settle_copy(core, slot);
        }
        if (i - 8 >= keep_entries) __builtin_prefetch(&pool->frames[slot->frames[i - 8]], 1);
        int32_t f = slot->frames[i];
        slot->nframes = i;
        ((int32_t *)pool->row_frame)[row + (size_t)i] = -1;
        ((int16_t *)pool->row_count)[row + (size_t)i] = 0;
        TRY(frame_put(core, slot->device, f, s));
    }
    return 0;
}

void stop_running(Core *core, int32_t s) {
    Slot *slot = &core->slots[s];
    if (!slot->running) return;
    slot->running = false;
    Pool *pool = &core->pools[slot->device];
    int32_t at = 0;
    while (pool->run[at] != s) at++;
    memmove(&pool->run[at], &pool->run[at + 1], (size_t)(--pool->nrun - at) * sizeof *pool->run);
}

int32_t core_close_slot(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    Slot *slot = &core->slots[s];
    CHECK_IDLE(core, slot);
    stop_running(core, s);
    TRY(unmap(core, s, 0));
    leave_tail(core, slot);
    slot->used = false;
    free(slot->log);
    free(slot->keys);
    free(slot->frames);
    free(slot->counts);
    free(slot->stops);
    slot->log = slot->frames = slot->stops = NULL;
    slot->keys = NULL;
    slot->counts = NULL;
    slot->log_room = slot->frames_room = slot->length = slot->nstops = 0;
    ((uint32_t *)core->pools[slot->device].row_generation)[s]++;
    core->free_slots[core->nfree_slots++] = s;
    return 0;
}

int32_t core_append(Core *core, int32_t s, const uint8_t *tokens, int32_t ntokens) {
    CHECK_SLOT(core, s);
    Slot *slot = &core->slots[s];
    if (ntokens > INT32_MAX / 8 - slot->length) return fail(core, CORE_INVALID, "core: a log of more than 2^28 tokens");
    TRY(reserve_log(core, slot, slot->length + ntokens + 1)); /* a pass in flight may still add the token it samples */
    int32_t from = slot->length;
    if (ntokens) memcpy(slot->log + from, tokens, (size_t)ntokens * 4);
    slot->length += ntokens;
    extend_keys(core, slot, from);
    return slot->length;
}

const int32_t *core_log(Core *core, int32_t s, int32_t *ntokens) {
    *ntokens = -1;
    if (s < 0 || s >= core->nslots || !core->slots[s].used) return NULL;
    *ntokens = core->slots[s].length;
    return core->slots[s].log;
}

int32_t core_truncate(Core *core, int32_t s, int32_t length) {
    CHECK_SLOT(core, s);
    if (length < 0) return fail(core, CORE_INVALID, "core: a log cannot be cut to %d tokens", length);
    Slot *slot = &core->slots[s];
    CHECK_IDLE(core, slot);
    if (length >= slot->length) return 0;
    int32_t size = core->block_tokens, last = blocks_in(core, length), rest = length - last * size;
    slot->length = length;
    if (slot->computed > length) slot->computed = length;
    if (slot->highwater > length) slot->highwater = length;
    if (slot->tail_end > length) leave_tail(core, slot);
    TRY(unmap(core, s, last + (rest ? 1 : 0)));
    if (!rest || slot->nframes <= last) return 0;
    const Frame *frame = frame_of(core, slot, last);
    if (frame->state == LOADING || (frame->state == FILLING && (frame->indexed || frame->known))) { /* others may wait for the whole of it */
        if (slot->computed > last * size) slot->computed = last * size;
        TRY(unmap(core, s, last));
    } else if (slot->counts[last] > rest) {
        set_count(core, s, last, rest);
    }
    return 0;
}

int32_t core_drop(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    Slot *slot = &core->slots[s];
    CHECK_IDLE(core, slot);
    stop_running(core, s);
    TRY(unmap(core, s, 0));
    slot->computed = 0;
    return 0;
}

static void fork_row(Core *core, const Slot *parent, int32_t c) {
    Slot *child = &core->slots[c];
    Pool *pool = &core->pools[parent->device];
    int32_t size = core->block_tokens;
    for (int32_t i = 0; i < parent->nframes; i++) {
        if (i + 8 < parent->nframes) __builtin_prefetch(&pool->frames[parent->frames[i + 8]], 1);
        int32_t f = parent->frames[i], count = parent->counts[i];
        if (!pool->frames[f].indexed) {
            int32_t visible = parent->computed - i * size;
            if (count > visible) count = visible;
            if (pool->frames[f].state == LOADING) { /* not here yet, though the parent's passes may count on it */
                if (child->computed > i * size) child->computed = i * size;
                return;
            }
            if (count <= 0) return;
            if (i == parent->pending_entry) f = parent->pending_src;
        } else if (pool->frames[f].state != VALID && child->computed > i * size) {
            child->computed = i * size; /* the child waits for its filler, or fills it from the start */
        }
        pool->frames[f].refs++;
        map_entry(core, c, i, f, count);
    }
}

int32_t core_fork(Core *core, int32_t s, int32_t n) {
    CHECK_SLOT(core, s);
    if (n < 0) return fail(core, CORE_INVALID, "core: fork makes %d slots", n);
    if (core->nfree_slots < n) return core->out.nlist = 0;
    TRY(reserve_list(core, (size_t)n));
    const Slot *parent = &core->slots[s];
    for (int32_t k = 0; k < n; k++) { /* memory first, so that a lack of it leaves nothing behind */
        Slot *child = &core->slots[core->free_slots[core->nfree_slots - 1 - k]];
        TRY(reserve_log(core, child, parent->length));
        TRY(reserve_frames(core, child, parent->nframes));
    }
    for (int32_t k = 0; k < n; k++) {
        int32_t c = take_slot(core, parent->device, parent->domain, parent->root);
        Slot *child = &core->slots[c];
        child->group = parent->group;
        if (parent->length) memcpy(child->log, parent->log, (size_t)parent->length * sizeof *child->log);
        if (parent->length >= core->block_tokens)
            memcpy(child->keys, parent->keys, (size_t)blocks_in(core, parent->length) * sizeof *child->keys);
        child->length = parent->length;
        child->computed = child->highwater = parent->computed;
        if (parent->tail_block >= 0) {
            child->tail_block = parent->tail_block;
            child->tail_end = parent->tail_end;
            core->blocks[child->tail_block].child++;
        }
        fork_row(core, parent, c);
        core->out.list[k] = c;
    }
    return core->out.nlist = n;
}
