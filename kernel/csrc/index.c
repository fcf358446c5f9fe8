/* The key index: open addressing with linear probing (Knuth, TAOCP 3, 6.4, algorithms L and R: deletion moves later
 * entries back, so there are no tombstones and a lookup stays short for ever).  An entry carries 32 bits of its key, so
 * neither a probe nor a deletion looks at a block that is not the one. */
#include "state.h"

static inline uint64_t entry_of(Key key, int32_t block) { return key.lo << 32 | (uint32_t)(block + 1); }

static inline uint64_t home_of(const Core *core, uint64_t entry) { return (entry >> 32) & core->index_mask; }

void index_prefetch(const Core *core, Key key) { __builtin_prefetch(&core->index[key.lo & 0xffffffffu & core->index_mask]); }

/* The block this key may belong to, or -1; only for prefetching it. */
int32_t index_guess(const Core *core, Key key) {
    uint64_t at = home_of(core, key.lo << 32);
    for (uint64_t entry; (entry = core->index[at]) != 0; at = (at + 1) & core->index_mask)
        if (entry >> 32 == (uint32_t)key.lo) return (int32_t)((uint32_t)entry - 1);
    return -1;
}

int32_t index_find(const Core *core, Key key) {
    uint64_t at = home_of(core, key.lo << 32);
    for (uint64_t entry; (entry = core->index[at]) != 0; at = (at + 1) & core->index_mask) {
        if (entry >> 32 != (uint32_t)key.lo) continue;
        int32_t block = (int32_t)((uint32_t)entry - 1);
        if (key_equal(core->blocks[block].key, key)) return block;
    }
    return -1;
}

/* Requires: the key is not there.  There is always room: the table is twice the number of blocks. */
void index_insert(Core *core, Key key, int32_t block) {
    uint64_t at = home_of(core, key.lo << 32);
    while (core->index[at]) at = (at + 1) & core->index_mask;
    core->index[at] = entry_of(key, block);
}

/* Requires: it is there. */
void index_remove(Core *core, Key key, int32_t block) {
    uint64_t mask = core->index_mask, entry = entry_of(key, block);
    uint64_t hole = home_of(core, entry);
    while (core->index[hole] != entry) hole = (hole + 1) & mask;
    for (uint64_t at = (hole + 1) & mask; core->index[at]; at = (at + 1) & mask) {
        uint64_t from_home = (at - home_of(core, core->index[at])) & mask;
        if (from_home >= ((at - hole) & mask)) { /* it may stand in the hole: its home is not after it */
            core->index[hole] = core->index[at];
            hole = at;
        }
    }
    core->index[hole] = 0;
}
