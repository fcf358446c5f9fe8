"""The twin core's groups: whom a frame is charged to, what may be charged, and whose blocks an eviction may take.

A frame is charged to one group, the *owner*: that of the slot it was allocated for; a copy made in another tier has the
owner of the copy it was made from.  It counts in the owner's account and in those of the groups that contain the owner.
A slot that maps a frame which another allocated is not charged for it.  When a group is short of frames and others map
what it let go of, `disown` makes them pay, as far as they have room.

Group 0 is nobody: it has no account and no limits.  Groups are numbers here; their names are kernel/group.py's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from .errors import Panic
from .params import MAX_DEVICES, MAX_GROUPS
from .records import Account
from .twin_tables import FrameState, PoolState, SlotState, TwinTables

_USED, _RECLAIMABLE, _SOFT, _HARD = range(4)


class TwinGroups(TwinTables):
    """Accounts and what they allow."""

    # -- calls --------------------------------------------------------------------------------------------------

    def define_group(self, group: int, above: int) -> None:
        """`group` is new, within `above` (0: within none), and has no limits.  Requires: it owns nothing."""
        if not 1 <= group < MAX_GROUPS or not 0 <= above < MAX_GROUPS or above == group or self._above.get(above, 0):
            raise ValueError(f"core: group {group} cannot be made below {above}")
        for d in range(MAX_DEVICES):
            if self._account(d, group)[_USED]:
                raise Panic(f"define_group: group {group} owns frames of device {d}")
            self._accounts.pop((d, group), None)
        for g in range(group):
            self._above.setdefault(g, 0)
        self._above[group] = above
        self._served[group] = 0

    def set_group(self, s: int, group: int) -> None:
        """Frames that this slot allocates from now on are the group's."""
        self._need_group(group)
        self._slot(s).group = group

    def set_bounds(self, device: int, group: int, soft: int, hard: int) -> None:
        """soft: frames that evictions for others leave it; hard: most that are ever charged to it; 0: none."""
        if not 0 <= device < MAX_DEVICES:
            raise ValueError(f"core: device {device} does not exist")
        self._need_group(group)
        if group == 0 or soft < 0 or hard < 0:
            raise ValueError(f"core: bounds of group {group} below 0")
        self._account(device, group)[_SOFT:] = [soft, hard]

    def account(self, device: int, group: int) -> Account:
        self._pool(device)
        self._need_group(group)
        return Account(*self._account(device, group)) if group else Account(0, 0, 0, 0)

    def served(self, group: int) -> int:
        """Tokens computed for the group since it was defined."""
        return self._served.get(group, 0)

    def frame_owners(self, device: int) -> bytes:
        """Owner of each frame, uint16; 0 where it is free."""
        return array("H", [f.owner for f in self._pool(device).frames]).tobytes()

    def spare_frames(self, device: int, group: int) -> int:
        """Reclaimable frames less those that other groups are guaranteed.  Some of them may have to stay for the sake of a
        guaranteed block that continues them."""
        return self._spare(self._pool(device), self._need_group(group))

    def restrict(self, requester: int, only: int) -> None:
        """Until `unrestrict`, `oldest`, `sample`, `evictable`, `chain` and `evict` leave alone what groups that do not contain
        `requester` are guaranteed, and everything that is not charged to `only` (0: anybody)."""
        self._restricted = (self._need_group(requester), self._need_group(only))

    def unrestrict(self) -> None:
        self._restricted = None

    def owners(self, device: int, blocks: Sequence[int]) -> list[int]:
        """Owner of each block's frame on the device; 0 where it has none."""
        pool = self._pool(device)
        if any(not 0 <= b < len(self._blocks) for b in blocks):
            raise ValueError("core: owners names a block that does not exist")
        frames = [self._blocks[b].copies[device] for b in blocks]
        return [pool.frames[f].owner if f >= 0 else 0 for f in frames]

    def group_tree(self) -> list[int]:
        """Per group, by number, the one that contains it."""
        return [self._above[g] for g in range(len(self._above))]

    def disown(self, device: int, group: int) -> int:
        """Frames that are charged to the group, which none of its slots maps and another group's slot does, are charged to that
        one, or, when it has no room, to a group that contains it, or to nobody.  How many."""
        pool = self._pool(device)
        self._need_group(group)
        here = [slot for slot in self._slots if slot.used and slot.device == device]
        own = {f for slot in here if self._within(slot.group, group) for f in slot.frames}
        moved = 0
        for slot in here:
            if self._within(slot.group, group):
                continue
            for f in slot.frames:
                frame = pool.frames[f]
                if f in own or not self._within(frame.owner, group):
                    continue
                self._charge(device, frame.owner, -1)
                heir = slot.group
                while heir and not self._fits(device, heir, 1):
                    heir = self._above[heir]
                frame.owner = heir
                self._charge(device, heir, 1)
                moved += 1
        return moved

    # -- accounts -----------------------------------------------------------------------------------------------

    def _need_group(self, group: int) -> int:
        if group not in self._above:
            raise ValueError(f"core: group {group} does not exist")
        return group

    def _account(self, device: int, group: int) -> list[int]:
        return self._accounts.setdefault((device, group), [0, 0, 0, 0])

    def _chain(self, group: int) -> Iterator[int]:
        """The group and those that contain it."""
        while group:
            yield group
            group = self._above[group]

    def _within(self, group: int, ancestor: int) -> bool:
        return ancestor in self._chain(group)

    def _charge(self, device: int, owner: int, frames: int) -> None:
        for g in self._chain(owner):
            self._account(device, g)[_USED] += frames

    def _own(self, pool: PoolState, frame: FrameState, owner: int) -> None:
        frame.owner = owner
        self._charge(pool.device, owner, 1)

    def _count_reclaimable(self, pool: PoolState, owner: int, frames: int) -> None:
        pool.reclaimable += frames
        for g in self._chain(owner):
            self._account(pool.device, g)[_RECLAIMABLE] += frames

    def _unstamp(self, pool: PoolState, frame: FrameState) -> None:
        """It is no cache any more."""
        frame.stamp = 0
        self._count_reclaimable(pool, frame.owner, -1)

    # -- limits -------------------------------------------------------------------------------------------------

    def _fits(self, device: int, group: int, frames: int) -> bool:
        for g in self._chain(group):
            used, _, _, hard = self._account(device, g)
            if hard and used + frames > hard:
                return False
        return True

    def _over_limit(self, slot: SlotState, fresh: int, hits: list[int]) -> tuple[int, int]:
        """The first of the slot's group and those above it that `fresh` frames more would bring over its limit, 0: none; and
        what is missing even without its reclaimable blocks, but for `hits`, which the slot maps."""
        pool = self._pools[slot.device]
        first = 0
        for g in self._chain(slot.group):
            used, own, _, hard = self._account(slot.device, g)
            more = used + fresh - hard
            if not hard or more <= 0:
                continue
            for b in hits:
                frame = pool.frames[self._blocks[b].copies[slot.device]]
                own -= 1 if frame.stamp and self._within(frame.owner, g) else 0
            if more > own:
                return g, more - own
            first = first or g
        return first, 0

    # -- guarantees ---------------------------------------------------------------------------------------------

    def _entitled(self, device: int, group: int) -> bool:
        """One frame more is within what it, or a group that contains it, is guaranteed."""
        return any(self._account(device, g)[_USED] < self._account(device, g)[_SOFT] for g in self._chain(group))

    def _guarded(self, soft: int, group: int, requester: int) -> bool:
        """What the group is guaranteed may not go for `requester`: sub-groups are guaranteed something among their like only."""
        above = self._above[group]
        return bool(soft) and not self._within(requester, group) and (not above or self._within(requester, above))

    def _may_go(self, pool: PoolState, frame: FrameState) -> bool:
        """May it leave the device in the eviction that is under way?"""
        if self._restricted is None:
            return True
        requester, only = self._restricted
        if only and not self._within(frame.owner, only):
            return False
        for g in self._chain(frame.owner):
            used, _, soft, _ = self._account(pool.device, g)
            if used <= soft and self._guarded(soft, g, requester):
                return False
        return True

    def _spare(self, pool: PoolState, group: int) -> int:
        kept_below: dict[int, int] = {}
        total = pool.reclaimable
        for g in sorted(self._above, key=lambda g: (not self._above[g], g)):  # sub-groups first
            if g == 0:
                continue
            used, reclaimable, soft, _ = self._account(pool.device, g)
            kept = kept_below.get(g, 0)
            if self._guarded(soft, g, group):
                kept += max(0, reclaimable - kept - max(0, used - soft))
            above = self._above[g]
            if above:
                kept_below[above] = kept_below.get(above, 0) + kept
            else:
                total -= kept
        return total
