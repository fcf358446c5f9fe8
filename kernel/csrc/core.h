/* The C core: blocks, frames, the key index, page-table rows and the bookkeeping of forward passes.
 *
 * kernel/twin.py says what every call means; this must agree with it on every result and every table.
 *
 * Results: >= 0 is a result; CORE_* below is an error, its sentence is core_message().  After CORE_NOMEM and
 * CORE_INVALID nothing has changed.  After CORE_PANIC the state cannot be trusted.
 * Slots, devices and blocks are checked by every call that takes one.  One thread.
 *
 * From CDEF to END this file is also what cffi reads.
 */
#ifndef ATTNIX_CORE_H
#define ATTNIX_CORE_H

#include <stddef.h>
#include <stdint.h>

/* CDEF */
#define CORE_NOMEM -1000
#define CORE_INVALID -1001
#define CORE_PANIC -1002

typedef struct Core Core;

/* What the last call left for its caller; valid until the next call on the same core. */
typedef struct {
    uint8_t *seqs;      /* plan: SEQ records of 96 bytes */
    int32_t *tokens;    /* plan: tokens of all sequences; commit: tokens kept */
    int32_t *copies;    /* plan: pairs (source frame, destination frame) */
    int64_t *streams;   /* commit: pairs (conn, request) */
    float *logprobs;    /* commit: of the tokens kept */
    int32_t *kept;      /* commit: index of each among the sampled */
    int32_t *finished;  /* commit: pairs (slot, reason) */
    uint8_t *bytes;     /* residency, copied, key_heads, describe, facts: see there */
    int64_t now_ns;     /* set by the caller once a step: what `used_ns` of blocks is taken from */
    int32_t *list;      /* fork, oldest, rollback, run_slots, slots_used: slots or blocks */
    int32_t status, shortage, mapped, fresh, loads, group; /* admit, plan */
    int32_t sequences, histories, samples;             /* plan */
    int32_t ntokens, ncopies, nkept, nfinished, nlist; /* lengths of the above */
    int32_t computed, ready, blocked_by;               /* advance */
} CoreOut;

Core *core_new(const uint8_t *secret, int32_t block_tokens, int32_t slots, int32_t entries, int32_t devices,
               int32_t computes, const int32_t *capacities, int32_t hash_bits);
void core_free(Core *core);
void core_attach_rows(Core *core, int32_t device, uint8_t *frame, uint8_t *shift, uint8_t *count, uint8_t *generation);
CoreOut *core_out(Core *core);
const char *core_message(const Core *core);

void core_hash(const Core *core, const uint8_t *data, size_t size_bytes, uint8_t *digest);
int32_t core_open_slot(Core *core, int32_t device, int32_t domain, const uint8_t *root);
int32_t core_close_slot(Core *core, int32_t slot);
int32_t core_append(Core *core, int32_t slot, const uint8_t *tokens, int32_t ntokens);
void core_token_range(const uint8_t *tokens, int32_t ntokens, int32_t *least_greatest);
const int32_t *core_log(Core *core, int32_t slot, int32_t *ntokens);
int32_t core_truncate(Core *core, int32_t slot, int32_t length);
int32_t core_drop(Core *core, int32_t slot);
int32_t core_fork(Core *core, int32_t slot, int32_t n);
int32_t core_admit(Core *core, int32_t slot, int32_t reserve_frames, int32_t sources, int32_t first_load,
                   int32_t partial_tokens);
int32_t core_skip_loading(Core *core, int32_t slot);
int32_t core_oldest(Core *core, int32_t device, int32_t want);
int32_t core_evict(Core *core, int32_t device, const int32_t *blocks, int32_t nblocks);

int32_t core_set_generation(Core *core, int32_t slot, const uint8_t *template_bytes, const uint8_t *stops,
                            int32_t nstops, int64_t max_tokens, int64_t limit, int64_t conn, int64_t request);
int32_t core_start_running(Core *core, int32_t slot);
int32_t core_stop_running(Core *core, int32_t slot);
int32_t core_discard(Core *core, int32_t slot);
int32_t core_advance(Core *core, int32_t slot);
int32_t core_steal(Core *core, int32_t slot);
int32_t core_plan(Core *core, int32_t device, int32_t max_sequences, const uint8_t *prefill, int32_t nprefill);
int32_t core_commit(Core *core, int32_t device, const uint8_t *sampled, const uint8_t *logprobs, int32_t nsampled);
int32_t core_rollback(Core *core, int32_t device);
int32_t core_lose(Core *core, int32_t device);

int32_t core_free_frames(Core *core, int32_t device);
int32_t core_reclaimable_frames(Core *core, int32_t device);
int32_t core_capacity(Core *core, int32_t device);
int32_t core_wired_frames(Core *core, int32_t device);
int32_t core_run_length(Core *core, int32_t device);
int32_t core_run_slots(Core *core, int32_t device);
int32_t core_flight_length(Core *core, int32_t device);
int32_t core_is_running(Core *core, int32_t slot);
int32_t core_in_flight(Core *core, int32_t slot);
int32_t core_slot_row(Core *core, int32_t slot, int64_t *row);
int32_t core_entries(Core *core, int32_t slot);
void core_pagemap(Core *core, int32_t slot, int32_t *frames, int16_t *counts, int32_t *sharers, uint8_t *flags,
                  int32_t *hits);
void core_counters(const Core *core, int64_t *counters);
void core_frame_table(Core *core, int32_t device, uint8_t *state, int32_t *refs, int32_t *wired, int32_t *block,
                      uint64_t *stamp, int32_t *filler);
int32_t core_blocks(const Core *core);
void core_block_table(Core *core, int32_t *parent, int32_t *domain, int32_t *depth, int32_t *hits, uint8_t *indexed,
                      uint8_t *keys, int32_t *copies, int32_t *children, int32_t *family);
int32_t core_block_tokens_of(Core *core, int32_t block, int32_t *tokens);
int32_t core_key_of(Core *core, int32_t slot, int32_t i, uint8_t *key);
int32_t core_find_key(Core *core, const uint8_t *key);
int32_t core_pending_copy(Core *core, int32_t slot);
int32_t core_slots_used(Core *core);
int32_t core_slot_device(Core *core, int32_t slot);

int32_t core_set_capacity(Core *core, int32_t device, int32_t frames);
int32_t core_loads(Core *core);
int32_t core_hit_blocks(Core *core);
int32_t core_begin_copy(Core *core, int32_t source, int32_t target, const int32_t *blocks, int32_t nblocks);
int32_t core_save_tail(Core *core, int32_t slot, int32_t target);
int32_t core_wire(Core *core, int32_t device, const int32_t *frames, int32_t nframes);
int32_t core_unwire(Core *core, int32_t device, const int32_t *frames, int32_t nframes);
int32_t core_landed(Core *core, int32_t device, const int32_t *frames, int32_t nframes, const uint8_t *good);
int32_t core_forget_copies(Core *core, int32_t device, const int32_t *blocks, int32_t nblocks);
int32_t core_forget_tail(Core *core, int32_t slot);
int32_t core_touch(Core *core, int32_t device, const int32_t *blocks, int32_t nblocks);
int32_t core_claim(Core *core, int32_t device, const int32_t *frames, int32_t nframes);
int32_t core_unclaim(Core *core, int32_t device, int32_t frame);
int32_t core_adopt(Core *core, int32_t device, int32_t frame, int32_t domain, const uint8_t *root, int32_t parent,
                   const uint8_t *tokens, int32_t ntokens, int32_t group);
int32_t core_define_group(Core *core, int32_t group, int32_t above);
int32_t core_set_group(Core *core, int32_t slot, int32_t group);
int32_t core_set_bounds(Core *core, int32_t device, int32_t group, int32_t soft, int32_t hard);
int32_t core_account(Core *core, int32_t device, int32_t group);
int64_t core_served(const Core *core, int32_t group);
int32_t core_frame_owners(Core *core, int32_t device);
int32_t core_spare_frames(Core *core, int32_t device, int32_t group);
int32_t core_restrict(Core *core, int32_t requester, int32_t only);
void core_unrestrict(Core *core);
int32_t core_owners(Core *core, int32_t device, const int32_t *blocks, int32_t nblocks);
int32_t core_group_tree(Core *core);
int32_t core_disown(Core *core, int32_t device, int32_t group);
int32_t core_residency(Core *core, int32_t slot);
int32_t core_loading(Core *core, int32_t slot);
int32_t core_row_blocks(Core *core, int32_t slot);
int32_t core_row_entries(Core *core, int32_t slot);
int32_t core_log_blocks(Core *core, int32_t slot);
int32_t core_prefix(Core *core, int32_t slot);
int32_t core_tail_of(Core *core, int32_t slot);
int32_t core_copied(Core *core, const int32_t *blocks, int32_t nblocks, int32_t devices);
int32_t core_copies_of(Core *core, int32_t block);
int32_t core_refs_of(Core *core, int32_t device, int32_t frame);
int32_t core_key_heads(Core *core, const int32_t *blocks, int32_t nblocks);
int32_t core_describe(Core *core, const int32_t *blocks, int32_t nblocks);
int32_t core_facts(Core *core, const int32_t *blocks, int32_t nblocks);
int32_t core_note(Core *core, int32_t slot, int32_t kind, int32_t turn, int64_t due_ns);
int32_t core_prioritise(Core *core, int32_t slot, int32_t start, int32_t end, int32_t priority);
int32_t core_sample(Core *core, int32_t device, int32_t want, uint64_t seed);
int32_t core_evictable(Core *core, int32_t device, const int32_t *blocks, int32_t nblocks, int32_t want);
int32_t core_chain(Core *core, int32_t device, int32_t leaf, int32_t want);
int32_t core_ghosts(const Core *core);
/* END */

#endif
