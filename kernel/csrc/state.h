/* The state of the core and the small operations every file needs.
 *
 * Blocks and frames are arrays of 64- and 32-byte records rather than one array per field: an admission touches all
 * fields of 256 blocks that lie anywhere, and a record is one cache miss where ten arrays are ten.  Tokens of blocks
 * and the index have arrays of their own.  Nothing is allocated per block.
 */
#ifndef ATTNIX_STATE_H
#define ATTNIX_STATE_H

#include <stdbool.h>

#include "core.h"
#include "siphash.h"

enum { FREE = 0, FILLING = 1, VALID = 2, LOADING = 3 };        /* frames */
enum { STATUS_OK = 0, STATUS_EVICT = 1, STATUS_NOROOM = 2, STATUS_OWN_EVICT = 3, STATUS_OWN_NOROOM = 4 }; /* admit, plan */
enum { REASON_STOP = 1, REASON_LENGTH = 2 };                    /* commit */
enum { FLAG_SAMPLE = 1, FLAG_HISTORY = 8 };                     /* kernel/batch.py */
enum { MAX_DEVICES = 8, SEQ_BYTES = 96, PREFILL_BYTES = 24, ROW_FIELDS = 9, COUNTERS = 11 };
enum { ROOTS = 1024, MAX_TURN = 65535, MAX_GROUPS = 1024 };

typedef struct {
    Key key;
    int32_t parent, domain;
    int32_t depth; /* tokens before it; below 0: not indexed; -2 - tokens before it: a saved tail */
    int32_t hits;  /* of a saved tail: tokens in it */
    int32_t copies[MAX_DEVICES]; /* frame per device, -1 */
    /* what admitting a hit does not touch: a second cache line */
    int32_t children[MAX_DEVICES]; /* blocks whose parent is this one, with a copy on that device */
    int64_t used_ns, due_ns;
    int32_t nchildren;
    int32_t child;   /* the latest, a hint; of a saved tail: slots that may come back to it */
    int32_t sibling; /* the next older one, a hint */
    uint16_t turn;
    uint8_t kind, priority;
} __attribute__((aligned(64))) Block;
_Static_assert(sizeof(Block) == 128, "two cache lines");

typedef struct {
    uint64_t stamp; /* 0: not reclaimable */
    int32_t refs, wired, filler, block;
    int16_t known;  /* FILLING or LOADING: first tokens that are valid, or will be */
    uint16_t owner; /* group that it is charged to, 0: nobody */
    uint8_t state;
    uint8_t indexed; /* its block is: repeated here so that decoding need not look at the block */
    uint8_t mark;    /* scratch of core_wired_frames, evictable, claim and disown */
} Frame;
_Static_assert(sizeof(Frame) == 32, "half a cache line");

/* What one group has on one device; its sub-groups' frames count here too. */
typedef struct {
    int32_t used, reclaimable;
    int32_t hard, soft; /* 0: no limit, no guarantee */
} Account;

typedef struct {
    /* what planning and committing a decode step touch: one cache line */
    int32_t *log, *frames;
    int16_t *counts;
    Key *keys;
    int32_t length, nframes, computed, highwater;
    int32_t device, pending_src, pending_entry;
    bool used, in_flight, discard, running;
    /* what they touch less of: a second one */
    uint32_t pass; /* number of the last plan that names it */
    int32_t log_room, frames_room, nstops, *stops;
    int64_t max_tokens, generated, limit, computed_total, generated_total;
    int64_t conn, request, hit_total, recomputed_total;
    Key root;
    int32_t domain, tail_block, tail_end, group;
    uint8_t template[SEQ_BYTES];
} __attribute__((aligned(64))) Slot;

typedef struct {
    int32_t slot, start, ntokens, flags, score_from, left;
} Chunk; /* a PREFILL record, as it travels */

typedef struct {
    Frame *frames;
    int32_t *free; /* a stack */
    int32_t capacity, nfree, reclaimable, wired;
    uint64_t *ring_stamp; /* reclaimable frames, least recently released first; stale where the stamps differ */
    int32_t *ring_frame;
    int32_t ring_room, ring_head, ring_length;
    int32_t *run, *run_spare; /* slots that decode */
    int32_t nrun;
    Chunk *flight;
    int32_t nflight;
    uint8_t *row_frame, *row_shift, *row_count, *row_generation; /* shared with the driver; NULL: a tier */
} Pool;

struct Core {
    Sip keyed; /* SipHash state after the secret */
    Key mask;
    uint64_t reciprocal; /* of block_tokens, times 2^64; 0 stands for 1 */
    int32_t block_tokens, nslots, entries, devices, computes, nblocks, nghosts;
    Pool pools[MAX_DEVICES];
    Block *blocks;
    int32_t *block_tokens_at; /* [blocks, block_tokens] */
    int32_t *free_blocks, nfree_blocks;
    uint8_t *sweep_state; /* scratch, one per block */
    int32_t *sweep_path;
    Slot *slots;
    int32_t *free_slots, nfree_slots;
    uint64_t *index; /* open addressing: low half of the key << 32 | block + 1; 0 = empty */
    uint64_t index_mask;
    int32_t *hits; /* scratch of admit: one block per row entry */
    int32_t *loads, nloads, *found, nfound; /* of the last admission: what it waits for (four numbers each), what it hit */
    size_t loads_room, found_room;
    int32_t roots[ROOTS]; /* by domain: the block indexed last at depth 0, a hint */
    Account accounts[MAX_DEVICES][MAX_GROUPS];
    int64_t served[MAX_GROUPS];  /* tokens computed */
    int32_t need[MAX_GROUPS];    /* scratch of plan and spare */
    uint16_t above[MAX_GROUPS];  /* the group that contains it, 0: none */
    int32_t ngroups, nhard[MAX_DEVICES], nsoft[MAX_DEVICES]; /* groups with a limit, with a guarantee */
    int32_t requester, only; /* of the eviction under way: for whom, and whose blocks alone (0: anybody's) */
    bool restricted;         /* there is one */
    uint64_t clock;
    uint32_t passes;
    int64_t n_hits, n_misses, n_evictions, n_collisions, n_cow, n_merged, n_indexed, n_freed, n_partial_hits, n_partial_tokens;
    size_t bytes_room, seqs_room, tokens_room, copies_room, commit_room, list_room;
    CoreOut out;
    char message[200];
};

/* core.c */
int32_t fail(Core *core, int32_t code, const char *format, ...) __attribute__((format(printf, 3, 4), cold));
bool grow_array(void **array, size_t *room, size_t want, size_t item_bytes);
int32_t reserve_list(Core *core, size_t want);
int32_t reserve_bytes(Core *core, size_t want);
Key hash_block(const Core *core, Key previous, const int32_t *tokens);

/* index.c */
int32_t index_find(const Core *core, Key key);
void index_insert(Core *core, Key key, int32_t block);
void index_remove(Core *core, Key key, int32_t block);
void index_prefetch(const Core *core, Key key);
int32_t index_guess(const Core *core, Key key);

/* frames.c */
int32_t frame_alloc(Core *core, int32_t device, int32_t s);
int32_t copy_alloc(Core *core, int32_t device, int32_t block, int32_t owner);
int32_t block_alloc(Core *core);
void block_blank(Block *block);
void block_free(Core *core, int32_t block);
void add_copy(Core *core, int32_t block, int32_t device, int32_t f);
void stamp_frame(Core *core, int32_t device, int32_t f);
void frame_retire(Core *core, int32_t device, int32_t f);
void frame_free(Core *core, int32_t device, int32_t f);
void leave_tail(Core *core, Slot *slot);

/* groups.c */
bool fits(const Core *core, int32_t device, int32_t group, int32_t frames);
bool within(const Core *core, int32_t group, int32_t ancestor);
bool may_go(const Core *core, int32_t device, int32_t owner);
int32_t spare_frames(Core *core, int32_t device, int32_t group);
bool entitled(const Core *core, int32_t device, int32_t group);

/* tiers.c */
int32_t ghost_room(int32_t frames);

/* core.c */
bool new_pool(Pool *pool, int32_t capacity, int32_t nslots);
void free_pool(Pool *pool);
int32_t more_blocks(Core *core);

/* slots.c */
int32_t reserve_log(Core *core, Slot *slot, int32_t length);
int32_t reserve_frames(Core *core, Slot *slot, int32_t entries);
void extend_keys(Core *core, Slot *slot, int32_t from);
int32_t unmap(Core *core, int32_t s, int32_t keep_entries);
void stop_running(Core *core, int32_t s);

/* mapping.c */
bool writable(const Core *core, int32_t s, int32_t i);
int32_t open_entry(Core *core, int32_t s, int32_t i);
int32_t copy_on_write(Core *core, int32_t s, int32_t i);
int32_t index_entry(Core *core, int32_t s, int32_t i);
int32_t find_block(Core *core, const Slot *slot, int32_t i, int32_t parent);

static inline bool indexed(const Block *block) { return block->depth >= 0; }

static inline int32_t depth_of(const Block *block) {
    return block->depth >= 0 ? block->depth : block->depth == -1 ? 0 : -2 - block->depth;
}

static inline bool has_copy(const Block *block) {
    int32_t left = -1; /* all bits stay set only if every entry is -1 */
    for (int d = 0; d < MAX_DEVICES; d++) left &= block->copies[d];
    return left != -1;
}

static inline bool saved_tail(const Block *block) { return block->depth < -1 && block->child > 0; }

static inline bool key_equal(Key a, Key b) { return a.lo == b.lo && a.hi == b.hi; }

static inline Frame *frame_of(Core *core, const Slot *slot, int32_t i) {
    return &core->pools[slot->device].frames[slot->frames[i]];
}

static inline int32_t mapped_tokens(const Core *core, const Slot *slot) {
    return slot->nframes ? (slot->nframes - 1) * core->block_tokens + slot->counts[slot->nframes - 1] : 0;
}

/* tokens / block_tokens by a multiplication: exact for tokens * block_tokens < 2^64, and decoding does eight a step. */
static inline int32_t blocks_in(const Core *core, int32_t tokens) {
    if (core->reciprocal == 0) return tokens;
    return (int32_t)((unsigned __int128)core->reciprocal * (uint32_t)tokens >> 64);
}

static inline int32_t blocks_for(const Core *core, int32_t tokens) {
    return blocks_in(core, tokens + core->block_tokens - 1);
}

/* Row entry i names frame f.  The kernel keeps its own copy of frames and counts: a driver cannot lie to it. */
static inline void map_entry(Core *core, int32_t s, int32_t i, int32_t f, int32_t count) {
    Slot *slot = &core->slots[s];
    Pool *pool = &core->pools[slot->device];
    size_t at = (size_t)s * (size_t)core->entries + (size_t)i;
    ((int32_t *)pool->row_frame)[at] = f;
    ((int32_t *)pool->row_shift)[at] = 0;
    ((int16_t *)pool->row_count)[at] = (int16_t)count;
    slot->frames[i] = f;
    slot->counts[i] = (int16_t)count;
    if (i == slot->nframes) slot->nframes++;
}

static inline void set_count(Core *core, int32_t s, int32_t i, int32_t count) {
    Slot *slot = &core->slots[s];
    slot->counts[i] = (int16_t)count;
    ((int16_t *)core->pools[slot->device].row_count)[(size_t)s * (size_t)core->entries + (size_t)i] = (int16_t)count;
}

/* Group `owner`, and those that contain it, have so many frames more on this device. */
static inline void charge(Core *core, int32_t device, int32_t owner, int32_t frames) {
    for (int32_t g = owner; g; g = core->above[g]) core->accounts[device][g].used += frames;
}

static inline void count_reclaimable(Core *core, int32_t device, int32_t owner, int32_t frames) {
    core->pools[device].reclaimable += frames;
    for (int32_t g = owner; g; g = core->above[g]) core->accounts[device][g].reclaimable += frames;
}

/* It is no cache any more. */
static inline void unstamp(Core *core, int32_t device, Frame *frame) {
    frame->stamp = 0;
    count_reclaimable(core, device, frame->owner, -1);
}

static inline void frame_take(Core *core, int32_t device, int32_t f) {
    Frame *frame = &core->pools[device].frames[f];
    frame->refs++;
    if (frame->stamp) unstamp(core, device, frame);
}

/* One row entry of slot s less names frame f. */
static inline int32_t frame_put(Core *core, int32_t device, int32_t f, int32_t s) {
    Frame *frame = &core->pools[device].frames[f];
    if (frame->refs < 1) return fail(core, CORE_PANIC, "I3: frame %d has no reference to give back", f);
    frame->refs--;
    if (frame->filler == s) frame->filler = -1;
    if (frame->refs == 0 && frame->wired == 0) frame_retire(core, device, f);
    return 0;
}

/* The pending copy is made, or is needed no longer: let its source go. */
static inline void settle_copy(Core *core, Slot *slot) {
    int32_t f = slot->pending_src;
    if (f < 0) return;
    Pool *pool = &core->pools[slot->device];
    slot->pending_src = slot->pending_entry = -1;
    if (--pool->frames[f].wired == 0) {
        pool->wired--;
        if (pool->frames[f].refs == 0 && !pool->frames[f].stamp) frame_retire(core, slot->device, f);
    }
}

#define CHECK_SLOT(core, s)                                                                                  \
    do {                                                                                                     \
        if ((s) < 0 || (s) >= (core)->nslots || !(core)->slots[s].used)                                      \
            return fail(core, CORE_INVALID, "core: slot %d is not open", s);                                 \
    } while (0)
#define CHECK_BLOCKS(core, list, n, what)                                                                    \
    do {                                                                                                     \
        for (int32_t k_ = 0; k_ < (n); k_++)                                                                 \
            if ((list)[k_] < 0 || (list)[k_] >= (core)->nblocks)                                             \
                return fail(core, CORE_INVALID, "core: " what " names a block that does not exist");         \
    } while (0)
#define CHECK_DEVICE(core, d)                                                                                \
    do {                                                                                                     \
        if ((d) < 0 || (d) >= (core)->devices)                                                               \
            return fail(core, CORE_INVALID, "core: device %d does not exist", d);                            \
    } while (0)
#define CHECK_GROUP(core, g)                                                                                 \
    do {                                                                                                     \
        if ((g) < 0 || (g) >= (core)->ngroups)                                                               \
            return fail(core, CORE_INVALID, "core: group %d does not exist", g);                             \
    } while (0)
#define CHECK_IDLE(core, slot)                                                                               \
    do {                                                                                                     \
        if ((slot)->in_flight)                                                                               \
            return fail(core, CORE_PANIC, "I4: a slot in flight may not change what it maps");               \
    } while (0)
#define TRY(expression)                                                                                      \
    do {                                                                                                     \
        int32_t code_ = (expression);                                                                        \
        if (code_ < 0) return code_;                                                                         \
    } while (0)

#endif
