/* Groups: whom a frame is charged to, and whose blocks an eviction may take (kernel/twin_groups.py says what each call means). */
#include "state.h"

bool within(const Core *core, int32_t group, int32_t ancestor) {
    for (int32_t g = group; g; g = core->above[g])
        if (g == ancestor) return true;
    return false;
}

bool fits(const Core *core, int32_t device, int32_t group, int32_t frames) {
    if (!core->nhard[device]) return true;
    for (int32_t g = group; g; g = core->above[g]) {
        const Account *account = &core->accounts[device][g];
        if (account->hard && account->used + frames > account->hard) return false;
    }
    return true;
}

/* One frame more is within what it, or a group that contains it, is guaranteed. */
bool entitled(const Core *core, int32_t device, int32_t group) {
    for (int32_t g = group; g; g = core->above[g])
        if (core->accounts[device][g].soft && core->accounts[device][g].used < core->accounts[device][g].soft) return true;
    return false;
}

/* What the group is guaranteed may not go for `requester`: sub-groups are guaranteed something among their like only. */
static bool guarded(const Core *core, int32_t device, int32_t group, int32_t requester) {
    return core->accounts[device][group].soft && !within(core, requester, group) &&
           (!core->above[group] || within(core, requester, core->above[group]));
}

/* May a block of `owner` leave the device in the eviction that is under way? */
bool may_go(const Core *core, int32_t device, int32_t owner) {
    if (!core->restricted) return true;
    if (core->only && !within(core, owner, core->only)) return false;
    if (!core->nsoft[device]) return true;
    for (int32_t g = owner; g; g = core->above[g]) {
        const Account *account = &core->accounts[device][g];
        if (account->used <= account->soft && guarded(core, device, g, core->requester)) return false;
    }
    return true;
}

/* Reclaimable frames that may go for `group`: what others are guaranteed stays.  Sub-groups have numbers of their own, in
 * any order, so what each top group could give up is summed first. */
int32_t spare_frames(Core *core, int32_t device, int32_t group) {
    const Pool *pool = &core->pools[device];
    if (!core->nsoft[device] || !pool->reclaimable) return pool->reclaimable;
    int32_t total = pool->reclaimable;
    for (int32_t g = 1; g < core->ngroups; g++) core->need[g] = 0; /* kept back by sub-groups */
    for (int32_t round = 0; round < 2; round++)
        for (int32_t g = 1; g < core->ngroups; g++) {
            const Account *account = &core->accounts[device][g];
            if ((round == 0) != (core->above[g] != 0)) continue;
            int32_t kept = core->need[g], could = account->reclaimable - kept;
            if (guarded(core, device, g, group)) {
                int32_t over = account->used > account->soft ? account->used - account->soft : 0;
                if (could > over) kept += could - over;
            }
            if (core->above[g])
                core->need[core->above[g]] += kept;
            else
                total -= kept;
        }
    return total;
}

int32_t core_define_group(Core *core, int32_t group, int32_t above) {
    if (group < 1 || group >= MAX_GROUPS || above < 0 || above >= MAX_GROUPS || above == group || (above && core->above[above]))
        return fail(core, CORE_INVALID, "core: group %d cannot be made below %d", group, above);
    for (int32_t d = 0; d < MAX_DEVICES; d++) {
        Account *account = &core->accounts[d][group];
        if (account->used) return fail(core, CORE_PANIC, "define_group: group %d owns frames of device %d", group, d);
        core->nhard[d] -= account->hard != 0;
        core->nsoft[d] -= account->soft != 0;
        memset(account, 0, sizeof *account);
    }
    core->above[group] = (uint16_t)above;
    core->served[group] = 0;
    if (core->ngroups <= group) core->ngroups = group + 1;
    return 0;
}

int32_t core_set_group(Core *core, int32_t s, int32_t group) {
    CHECK_SLOT(core, s);
    CHECK_GROUP(core, group);
    core->slots[s].group = group;
    return 0;
}

int32_t core_set_bounds(Core *core, int32_t device, int32_t group, int32_t soft, int32_t hard) {
    if (device < 0 || device >= MAX_DEVICES) return fail(core, CORE_INVALID, "core: device %d does not exist", device);
    CHECK_GROUP(core, group);
    if (group == 0 || soft < 0 || hard < 0) return fail(core, CORE_INVALID, "core: bounds of group %d below 0", group);
    Account *account = &core->accounts[device][group];
    core->nhard[device] += (hard != 0) - (account->hard != 0);
    core->nsoft[device] += (soft != 0) - (account->soft != 0);
    account->hard = hard;
    account->soft = soft;
    return 0;
}

int32_t core_account(Core *core, int32_t device, int32_t group) {
    CHECK_DEVICE(core, device);
    CHECK_GROUP(core, group);
    TRY(reserve_list(core, 4));
    const Account *account = &core->accounts[device][group];
    core->out.list[0] = account->used;
    core->out.list[1] = account->reclaimable;
    core->out.list[2] = account->soft;
    core->out.list[3] = account->hard;
    return core->out.nlist = 4;
}

int64_t core_served(const Core *core, int32_t group) {
    return group >= 0 && group < core->ngroups ? core->served[group] : 0;
}

int32_t core_frame_owners(Core *core, int32_t device) {
    CHECK_DEVICE(core, device);
    const Pool *pool = &core->pools[device];
    TRY(reserve_bytes(core, 2 * (size_t)pool->capacity));
    for (int32_t f = 0; f < pool->capacity; f++) memcpy(core->out.bytes + 2 * (size_t)f, &pool->frames[f].owner, 2);
    return 2 * pool->capacity;
}

int32_t core_spare_frames(Core *core, int32_t device, int32_t group) {
    CHECK_DEVICE(core, device);
    CHECK_GROUP(core, group);
    return spare_frames(core, device, group);
}

int32_t core_restrict(Core *core, int32_t requester, int32_t only) {
    CHECK_GROUP(core, requester);
    CHECK_GROUP(core, only);
    core->requester = requester;
    core->only = only;
    core->restricted = true;
    return 0;
}

void core_unrestrict(Core *core) { core->restricted = false; }

static void mark_rows(Core *core, int32_t device, int32_t group, uint8_t mark) {
    for (int32_t s = 0; s < core->nslots; s++) {
        const Slot *slot = &core->slots[s];
        if (!slot->used || slot->device != device || !within(core, slot->group, group)) continue;
        for (int32_t i = 0; i < slot->nframes; i++) core->pools[device].frames[slot->frames[i]].mark = mark;
    }
}

int32_t core_owners(Core *core, int32_t device, const int32_t *blocks, int32_t nblocks) {
    CHECK_DEVICE(core, device);
    CHECK_BLOCKS(core, blocks, nblocks, "owners");
    TRY(reserve_list(core, (size_t)nblocks));
    for (int32_t k = 0; k < nblocks; k++) {
        int32_t f = core->blocks[blocks[k]].copies[device];
        core->out.list[k] = f >= 0 ? core->pools[device].frames[f].owner : 0;
    }
    return core->out.nlist = nblocks;
}

int32_t core_group_tree(Core *core) {
    TRY(reserve_list(core, (size_t)core->ngroups));
    for (int32_t g = 0; g < core->ngroups; g++) core->out.list[g] = core->above[g];
    return core->out.nlist = core->ngroups;
}

int32_t core_disown(Core *core, int32_t device, int32_t group) {
    CHECK_DEVICE(core, device);
    CHECK_GROUP(core, group);
    int32_t moved = 0;
    mark_rows(core, device, group, 1);
    for (int32_t s = 0; s < core->nslots; s++) {
        const Slot *slot = &core->slots[s];
        if (!slot->used || slot->device != device || within(core, slot->group, group)) continue;
        for (int32_t i = 0; i < slot->nframes; i++) {
            Frame *frame = &core->pools[device].frames[slot->frames[i]];
            if (frame->mark || !within(core, frame->owner, group)) continue;
            charge(core, device, frame->owner, -1);
            int32_t heir = slot->group;
            while (heir && !fits(core, device, heir, 1)) heir = core->above[heir];
            frame->owner = (uint16_t)heir;
            charge(core, device, heir, 1);
            moved++;
        }
    }
    mark_rows(core, device, group, 0);
    return moved;
}
