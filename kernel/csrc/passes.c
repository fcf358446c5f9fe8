/* Forward passes: the decode set, planning, committing, rolling back. */
#include <stdlib.h>

#include "state.h"

typedef struct {
    int32_t slot;
    uint32_t generation;
    int32_t start, ntokens, write_from, entries, token_offset;
    uint32_t flags;
} SeqHead; /* the first 32 bytes of a SEQ record (kernel/batch.py) */

enum { BLOCKED_BY_LOAD = -2 };
enum { SEQ_FLAGS = 28, SEQ_SCORE_FROM = 72, SEQ_PROMPT_LEFT = 88, SEQ_RESERVED = 92 };
_Static_assert(sizeof(SeqHead) == 32 && sizeof(Chunk) == PREFILL_BYTES, "records as they travel");

int32_t core_set_generation(Core *core, int32_t s, const uint8_t *template_bytes, const uint8_t *stops, int32_t nstops,
                            int64_t max_tokens, int64_t limit, int64_t conn, int64_t request) {
    CHECK_SLOT(core, s);
    Slot *slot = &core->slots[s];
    if (nstops) {
        int32_t *room = realloc(slot->stops, (size_t)nstops * sizeof *room);
        if (!room) return fail(core, CORE_NOMEM, "core: no memory for %d stop tokens", nstops);
        slot->stops = room;
        memcpy(slot->stops, stops, (size_t)nstops * sizeof *room);
    }
    slot->nstops = nstops;
    memcpy(slot->template, template_bytes, SEQ_BYTES);
    slot->max_tokens = max_tokens;
    slot->generated = 0;
    slot->limit = limit;
    slot->conn = conn;
    slot->request = request;
    return 0;
}

static void start_running(Core *core, int32_t s) {
    Slot *slot = &core->slots[s];
    if (slot->running) return;
    slot->running = true;
    Pool *pool = &core->pools[slot->device];
    pool->run[pool->nrun++] = s;
}

int32_t core_start_running(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    start_running(core, s);
    return 0;
}

int32_t core_stop_running(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    stop_running(core, s);
    return 0;
}

int32_t core_discard(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    if (core->slots[s].in_flight) core->slots[s].discard = true;
    return 0;
}

static int32_t advanced(CoreOut *out, int32_t computed, int32_t ready, int32_t blocked_by) {
    out->computed = computed;
    out->ready = ready;
    out->blocked_by = blocked_by;
    return 0;
}

/* Move `computed` over what others have computed, or loaded, or (gated) are loading. */
static int32_t skip(Core *core, int32_t s, bool gated) {
    Slot *slot = &core->slots[s];
    int32_t size = core->block_tokens, n = slot->length;
    if (n > mapped_tokens(core, slot))
        return fail(core, CORE_PANIC, "advance: slot %d has %d tokens, %d of them mapped", s, n, mapped_tokens(core, slot));
    while (slot->computed < n) {
        int32_t i = blocks_in(core, slot->computed), to;
        Frame *frame = frame_of(core, slot, i);
        if (frame->state == VALID || (gated && frame->state == LOADING && !frame->known)) {
            to = n - i * size < size ? n : (i + 1) * size;
        } else if (frame->known && slot->computed == i * size && (frame->filler == s || frame->filler < 0) &&
                   (frame->state == FILLING || (gated && frame->state == LOADING))) {
            to = i * size + frame->known < n ? i * size + frame->known : n;
            frame->filler = s;
        } else {
            break;
        }
        slot->hit_total += to - slot->computed;
        slot->computed = to;
    }
    if (slot->highwater < slot->computed) slot->highwater = slot->computed;
    return 0;
}

int32_t core_skip_loading(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    return skip(core, s, true);
}

int32_t core_advance(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    Slot *slot = &core->slots[s];
    int32_t size = core->block_tokens, n = slot->length;
    TRY(skip(core, s, false));
    int32_t end = slot->computed;
    while (end < n) {
        int32_t i = blocks_in(core, end);
        Frame *frame = frame_of(core, slot, i);
        if (frame->state == VALID) break;
        if (frame->state == LOADING) {
            bool begun = frame->known > 0 && slot->computed - blocks_in(core, slot->computed) * size >= frame->known;
            if (end == slot->computed && !begun) return advanced(&core->out, end, 0, BLOCKED_BY_LOAD);
            if (end > slot->computed) break;
        } else if (frame->indexed && frame->filler != s) {
            if (frame->filler >= 0) {
                if (end == slot->computed) return advanced(&core->out, end, 0, frame->filler);
                break;
            }
            frame->filler = s;
        }
        end = n - i * size < size ? n : (i + 1) * size;
    }
    return advanced(&core->out, slot->computed, end - slot->computed, -1);
}

int32_t core_steal(Core *core, int32_t s) {
    CHECK_SLOT(core, s);
    Slot *slot = &core->slots[s];
    int32_t i = blocks_in(core, slot->computed);
    if (i >= slot->nframes) return 0;
    Frame *frame = frame_of(core, slot, i);
    if (frame->state != FILLING || !frame->indexed || frame->filler == s) return 0;
    if (frame->filler >= 0) {
        Slot *other = &core->slots[frame->filler];
        CHECK_IDLE(core, other);
        if (other->pending_entry == i) {
            frame->known = 0;
            settle_copy(core, other);
        }
        if (other->computed > i * core->block_tokens) other->computed = i * core->block_tokens;
    }
    frame->filler = s;
    return 0;
}

/* Frames a decoding slot needs before its last token can be computed: 0 or 1. */
static int32_t growth(Core *core, int32_t s) {
    Slot *slot = &core->slots[s];
    int32_t n = slot->length;
    if (n == 0 || slot->computed < n - 1)
        return fail(core, CORE_PANIC, "plan: slot %d decodes with %d of %d tokens computed", s, slot->computed, n);
    if (slot->computed == n) return 0;
    int32_t i = blocks_in(core, n - 1);
    if (i >= core->entries) return fail(core, CORE_PANIC, "plan: slot %d has %d tokens, more than its row can hold", s, n);
    return i >= slot->nframes ? 1 : !writable(core, s, i);
}

static int32_t grow(Core *core, int32_t s) {
    Slot *slot = &core->slots[s];
    int32_t n = slot->length;
    if (slot->computed == n) return 0;
    int32_t i = blocks_in(core, n - 1), count = n - i * core->block_tokens;
    if (i >= slot->nframes) {
        int32_t f = frame_alloc(core, slot->device, s);
        TRY(f);
        map_entry(core, s, i, f, count);
        return 0;
    }
    TRY(open_entry(core, s, i));
    set_count(core, s, i, count);
    return 0;
}

/* A PREFILL record must begin where the slot is computed to, and write only what the slot may write (I5). */
static int32_t check_chunk(Core *core, int32_t device, const Chunk *chunk) {
    CHECK_SLOT(core, chunk->slot);
    Slot *slot = &core->slots[chunk->slot];
    int64_t end = (int64_t)chunk->start + chunk->ntokens;
    if (slot->device != device || chunk->ntokens < 1 || chunk->start < 0 || chunk->start > slot->computed ||
        end > mapped_tokens(core, slot))
        return fail(core, CORE_PANIC, "plan: slot %d cannot compute %d tokens from %d, %d are computed", chunk->slot,
                    chunk->ntokens, chunk->start, slot->computed);
    if (end <= slot->computed) return 0;
    for (int32_t i = blocks_in(core, slot->computed); i < blocks_for(core, (int32_t)end); i++) {
        const Frame *frame = frame_of(core, slot, i);
        if (frame->state == VALID || (frame->indexed && frame->filler != chunk->slot))
            return fail(core, CORE_PANIC, "I5: slot %d would write frame %d, which is full or another's to fill",
                        chunk->slot, slot->frames[i]);
    }
    return 0;
}

/* 1 if the chunk goes on in a tail that was shared (fork) since the slot was admitted; later entries cannot be. */
static int32_t chunk_growth(Core *core, const Chunk *chunk) {
    const Slot *slot = &core->slots[chunk->slot];
    int32_t i = blocks_in(core, slot->computed);
    if (slot->computed == i * core->block_tokens || chunk->start + chunk->ntokens <= slot->computed) return 0;
    return !writable(core, chunk->slot, i);
}

/* Mark the slot as part of this pass, and make room for all that it and its commit will store. */
static int32_t join_pass(Core *core, int32_t s, int32_t flags) {
    Slot *slot = &core->slots[s];
    if (slot->pass == core->passes) return fail(core, CORE_PANIC, "plan: slot %d is twice in one pass", s);
    slot->pass = core->passes;
    if (flags & FLAG_SAMPLE) TRY(reserve_log(core, slot, slot->length + 1));
    return reserve_frames(core, slot, blocks_for(core, slot->length));
}

static int32_t reserve_pass(Core *core, size_t sequences, size_t tokens) {
    CoreOut *out = &core->out;
    size_t room = core->commit_room; /* one room for four arrays: it counts only when all have grown */
    if (grow_array((void **)&out->seqs, &core->seqs_room, sequences, SEQ_BYTES) &&
        grow_array((void **)&out->copies, &core->copies_room, 2 * sequences, sizeof(int32_t)) &&
        grow_array((void **)&out->tokens, &core->tokens_room, tokens, sizeof(int32_t)) &&
        grow_array((void **)&out->streams, &room, sequences, 2 * sizeof(int64_t)) &&
        (room = core->commit_room, grow_array((void **)&out->logprobs, &room, sequences, sizeof(float))) &&
        (room = core->commit_room, grow_array((void **)&out->kept, &room, sequences, sizeof(int32_t))) &&
        (room = core->commit_room, grow_array((void **)&out->finished, &room, sequences, 2 * sizeof(int32_t)))) {
        core->commit_room = room;
        return 0;
    }
    return fail(core, CORE_NOMEM, "core: no memory for a pass of %zu sequences", sequences);
}

static void emit(Core *core, Pool *pool, const Chunk *chunk) {
    CoreOut *out = &core->out;
    Slot *slot = &core->slots[chunk->slot];
    uint8_t *record = out->seqs + (size_t)out->sequences * SEQ_BYTES;
    uint32_t history = 0;
    if (chunk->flags & FLAG_SAMPLE) {
        memcpy(&history, slot->template + SEQ_FLAGS, sizeof history);
        history &= FLAG_HISTORY;
    }
    SeqHead head = {
        chunk->slot, ((uint32_t *)pool->row_generation)[chunk->slot], chunk->start, chunk->ntokens, slot->computed,
        blocks_for(core, chunk->start + chunk->ntokens), out->ntokens, (uint32_t)chunk->flags | history,
    };
    memcpy(record, &head, sizeof head);
    memcpy(record + sizeof head, slot->template + sizeof head, SEQ_BYTES - sizeof head);
    memcpy(record + SEQ_SCORE_FROM, &chunk->score_from, 4);
    memcpy(record + SEQ_PROMPT_LEFT, &chunk->left, 4);
    memset(record + SEQ_RESERVED, 0, 4);
    memcpy(out->tokens + out->ntokens, slot->log + chunk->start, (size_t)chunk->ntokens * sizeof *out->tokens);
    out->ntokens += chunk->ntokens;
    out->sequences++;
    out->histories += history != 0;
    out->samples += (chunk->flags & FLAG_SAMPLE) != 0;
    if (slot->pending_src >= 0) {
        out->copies[out->ncopies++] = slot->pending_src;
        out->copies[out->ncopies++] = slot->frames[slot->pending_entry];
    }
    slot->in_flight = true;
    pool->flight[pool->nflight++] = *chunk;
}

static Chunk chunk_at(const uint8_t *prefill, int32_t k) {
    Chunk chunk;
    memcpy(&chunk, prefill + (size_t)k * PREFILL_BYTES, PREFILL_BYTES);
    return chunk;
}

/* Those that go move behind the others, so each gets its turn. */
static void rotate(Pool *pool, int32_t gone) {
    size_t rest = (size_t)(pool->nrun - gone);
    memcpy(pool->run_spare, pool->run + gone, rest * sizeof *pool->run);
    memcpy(pool->run_spare + rest, pool->run, (size_t)gone * sizeof *pool->run);
    int32_t *spare = pool->run;
    pool->run = pool->run_spare;
    pool->run_spare = spare;
}

/* A slot of this group needs a frame.  Room is made for the first group that has no guarantee to call on, else the first. */
static void grows(Core *core, int32_t device, int32_t group) {
    for (int32_t g = group; g; g = core->above[g]) core->need[g]++;
    if (core->out.group < 0 || (entitled(core, device, core->out.group) && !entitled(core, device, group)))
        core->out.group = group;
}

int32_t core_plan(Core *core, int32_t device, int32_t max_sequences, const uint8_t *prefill, int32_t nprefill) {
    CHECK_DEVICE(core, device);
    Pool *pool = &core->pools[device];
    CoreOut *out = &core->out;
    if (pool->nflight) return fail(core, CORE_PANIC, "plan: device %d has a pass in flight", device);
    core->passes++;
    bool groups = core->nhard[device] || core->nsoft[device];
    if (groups) memset(core->need, 0, (size_t)core->ngroups * sizeof *core->need);
    out->group = -1;
    int32_t ndecode = max_sequences > nprefill ? max_sequences - nprefill : 0, fresh = 0;
    if (ndecode > pool->nrun) ndecode = pool->nrun;
    size_t tokens = (size_t)ndecode;
    for (int32_t k = 0; k < ndecode; k++) {
        if (k + 8 < ndecode) __builtin_prefetch(&core->slots[pool->run[k + 8]]);
        int32_t more = growth(core, pool->run[k]);
        TRY(more);
        fresh += more;
        if (more && groups) grows(core, device, core->slots[pool->run[k]].group);
        TRY(join_pass(core, pool->run[k], FLAG_SAMPLE));
    }
    for (int32_t k = 0; k < nprefill; k++) {
        Chunk chunk = chunk_at(prefill, k);
        TRY(check_chunk(core, device, &chunk));
        TRY(join_pass(core, chunk.slot, chunk.flags));
        tokens += (size_t)chunk.ntokens;
        int32_t more = chunk_growth(core, &chunk);
        fresh += more;
        if (more && groups) grows(core, device, core->slots[chunk.slot].group);
    }
    TRY(reserve_pass(core, (size_t)ndecode + (size_t)nprefill, tokens));
    out->status = STATUS_OK;
    out->shortage = out->sequences = out->histories = out->samples = out->ntokens = out->ncopies = 0;
    for (int32_t g = 1; fresh && core->nhard[device] && g < core->ngroups; g++) {
        const Account *account = &core->accounts[device][g];
        int32_t more = account->used + core->need[g] - account->hard;
        if (!account->hard || !core->need[g] || more <= 0) continue;
        out->status = more <= account->reclaimable ? STATUS_OWN_EVICT : STATUS_OWN_NOROOM;
        out->shortage = more - (out->status == STATUS_OWN_NOROOM ? account->reclaimable : 0);
        out->group = g;
        return 0;
    }
    if (fresh > pool->nfree) {
        if (out->group < 0) out->group = 0;
        int32_t shortage = fresh - pool->nfree, spare = spare_frames(core, device, out->group);
        out->status = shortage <= spare ? STATUS_EVICT : STATUS_NOROOM;
        out->shortage = shortage - (out->status == STATUS_NOROOM ? spare : 0);
        return 0;
    }
    if (ndecode < pool->nrun) rotate(pool, ndecode);
    for (int32_t k = 0; k < ndecode; k++) {
        int32_t s = pool->run[pool->nrun - ndecode + k];
        TRY(grow(core, s));
        emit(core, pool, &(Chunk){s, core->slots[s].length - 1, 1, FLAG_SAMPLE, -1, 0});
    }
    for (int32_t k = 0; k < nprefill; k++) {
        Chunk chunk = chunk_at(prefill, k);
        if (chunk_growth(core, &chunk))
            TRY(copy_on_write(core, chunk.slot, blocks_in(core, core->slots[chunk.slot].computed)));
        emit(core, pool, &chunk);
    }
    return 0;
}

/* Positions up to `end` are computed: validate frames that this fills, index and seal full blocks. */
static int32_t computed(Core *core, int32_t s, int32_t end) {
    Slot *slot = &core->slots[s];
    int32_t begin = slot->computed;
    for (int32_t g = slot->group; g; g = core->above[g]) core->served[g] += end > begin ? end - begin : 1;
    if (end <= begin) {
        slot->computed_total++; /* only the last token again, for its logits */
        return 0;
    }
    slot->computed_total += end - begin;
    int32_t again = (end < slot->highwater ? end : slot->highwater) - begin;
    if (again > 0) slot->recomputed_total += again;
    slot->computed = end;
    if (slot->highwater < end) slot->highwater = end;
    for (int32_t i = blocks_in(core, begin), stop = blocks_in(core, end); i < stop; i++) {
        Frame *frame = frame_of(core, slot, i);
        if (frame->state == FILLING) {
            frame->state = VALID;
            frame->filler = -1;
            frame->known = 0;
        } else if (frame->state == LOADING && frame->known) {
            frame->known = core->block_tokens; /* it will be whole when its load is reported */
        }
        TRY(index_entry(core, s, i));
    }
    return 0;
}

static void finish(Core *core, int32_t s, int32_t reason) {
    CoreOut *out = &core->out;
    out->finished[2 * out->nfinished] = s;
    out->finished[2 * out->nfinished++ + 1] = reason;
    stop_running(core, s);
}

/* One sampled token joins the log of slot s, unless it is not wanted or ends the generation. */
static void take_sample(Core *core, int32_t s, int32_t token, float logprob, int32_t which) {
    CoreOut *out = &core->out;
    Slot *slot = &core->slots[s];
    if (slot->discard) return;
    for (int32_t k = 0; k < slot->nstops; k++)
        if (slot->stops[k] == token) {
            finish(core, s, REASON_STOP);
            return;
        }
    slot->log[slot->length++] = token;
    extend_keys(core, slot, slot->length - 1);
    slot->generated++;
    slot->generated_total++;
    out->streams[2 * out->nkept] = slot->conn;
    out->streams[2 * out->nkept + 1] = slot->request;
    out->tokens[out->nkept] = token;
    out->logprobs[out->nkept] = logprob;
    out->kept[out->nkept++] = which;
    if (slot->generated >= slot->max_tokens || slot->length >= slot->limit)
        finish(core, s, REASON_LENGTH);
    else
        start_running(core, s);
}

int32_t core_commit(Core *core, int32_t device, const uint8_t *sampled, const uint8_t *logprobs, int32_t nsampled) {
    CHECK_DEVICE(core, device);
    Pool *pool = &core->pools[device];
    CoreOut *out = &core->out;
    int32_t expected = 0, at = 0, nflight = pool->nflight;
    for (int32_t k = 0; k < nflight; k++) expected += (pool->flight[k].flags & FLAG_SAMPLE) != 0;
    if (nsampled != expected)
        return fail(core, CORE_PANIC, "commit: device %d sampled %d tokens for another number of sequences", device, nsampled);
    out->nkept = out->nfinished = 0;
    pool->nflight = 0;
    for (int32_t k = 0; k < nflight; k++) {
        if (k + 8 < nflight) __builtin_prefetch(&core->slots[pool->flight[k + 8].slot], 1);
        if (k + 4 < nflight) { /* a block that this pass fills will be looked for in the index */
            const Slot *ahead = &core->slots[pool->flight[k + 4].slot];
            int32_t end = pool->flight[k + 4].start + pool->flight[k + 4].ntokens, full = blocks_in(core, end);
            if (full * core->block_tokens == end) index_prefetch(core, ahead->keys[full - 1]);
        }
        Chunk chunk = pool->flight[k];
        Slot *slot = &core->slots[chunk.slot];
        slot->in_flight = false;
        settle_copy(core, slot);
        TRY(computed(core, chunk.slot, chunk.start + chunk.ntokens));
        if (chunk.flags & FLAG_SAMPLE) {
            int32_t token;
            float logprob;
            memcpy(&token, sampled + 4 * (size_t)at, 4);
            memcpy(&logprob, logprobs + 4 * (size_t)at, 4);
            take_sample(core, chunk.slot, token, logprob, at++);
        }
        slot->discard = false;
    }
    return 0;
}

int32_t core_rollback(Core *core, int32_t device) {
    CHECK_DEVICE(core, device);
    Pool *pool = &core->pools[device];
    TRY(reserve_list(core, (size_t)pool->nflight));
    for (int32_t k = 0; k < pool->nflight; k++) {
        Slot *slot = &core->slots[pool->flight[k].slot];
        slot->in_flight = slot->discard = false;
        core->out.list[k] = pool->flight[k].slot;
    }
    core->out.nlist = pool->nflight;
    pool->nflight = 0;
    return core->out.nlist;
}

int32_t core_lose(Core *core, int32_t device) {
    CHECK_DEVICE(core, device);
    Pool *pool = &core->pools[device];
    TRY(core_rollback(core, device));
    for (int32_t s = 0; s < core->nslots; s++)
        if (core->slots[s].used && core->slots[s].device == device) TRY(core_drop(core, s));
    for (int32_t f = 0; f < pool->capacity; f++) {
        if (!pool->frames[f].stamp) continue;
        if (pool->frames[f].wired) return fail(core, CORE_PANIC, "lose: a transfer still uses frame %d of device %d", f, device);
        frame_free(core, device, f);
    }
    return 0;
}
