"""Making room on one device: what goes, and whether it must be copied somewhere slower first.

A block whose content is also in a slower tier (a *clean* one) goes without I/O.  A dirty one is demoted, if computing it
again would cost more than moving it out and back; its frame is free once the copy has landed.  So `room` may answer
"not yet": the caller waits for TransferDone and asks again.  It never answers "never" while a frame could be had: when
nothing can be copied anywhere (no slower tier, or it is full, down or read-only) the content is dropped, which costs a
recomputation and nothing else (I7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from .errors import E
from .evict.registry import make, make_guarded
from .movers import Item
from .records import FACT

if TYPE_CHECKING:
    from .device import Device
    from .evict.protocol import EvictionPolicy
    from .machine import Machine

MOST_LEAVING: Final = 256  # demotions under way, and victims asked for at a time: a long wish is worked off in pieces
AHEAD: Final = 16  # demotions begun at least, once one is needed: the next caller will need frames too
_DIRTY, _GOING, _CLEAN = 0, 1, 2  # CoreApi.copied


class Evictor:
    """policy: of this device alone."""

    def __init__(self, machine: Machine, device: Device, policy: str) -> None:
        self._m = machine
        self._core = machine.core
        self._device = device
        self.index = device.index
        self.fault = ""  # of a third party's policy that lost its place, in words
        self.policy: EvictionPolicy = self._made(policy)
        self._ready: list[int] = []  # demoted to be evicted
        self.leaving = 0  # demotions under way
        self._refused: set[int] = set()  # the tier below would not take them: they go without a copy when they must

    def use(self, policy: str) -> None:
        """Go on with another policy, which knows nothing yet."""
        self.policy = self._made(policy)
        if self.policy.listens:
            self.policy.inserted(self._m.view, self._device.index, self._core.oldest(self._device.index, 1 << 30))

    def renew(self) -> None:
        """Go on with the same, which knows nothing any more.  One that lost its place has it no more than before."""
        fault = self.fault
        self.use(self.policy.name)
        self.fault = self.fault or fault

    def _made(self, policy: str) -> EvictionPolicy:
        self.fault = ""
        made = make_guarded(policy, self._failed)
        return self.policy if self.fault else made

    def _failed(self, policy: str, when: str, error: Exception) -> None:
        """A third party's policy is at fault.  The order that the core keeps by itself takes its place, since that has missed
        nothing."""
        self.policy = make("lru")
        self.fault = f"eviction policy {policy} failed {when} ({type(error).__name__}: {error})"
        self._m.log("error", f"{self._device.name}: {self.fault}: lru takes its place")

    def room(self, want_frames: int) -> int:
        """Free frames of this device now, after doing what can be done at once for `want_frames` of them."""
        free = self._core.free_frames(self._device.index)
        if free < want_frames:
            free += self.free(want_frames - free)
        return free

    def free(self, want_frames: int, requester: int = 0, only: int = 0) -> int:
        """Evict up to `want_frames` reclaimable blocks; how many went.  Demotions are begun for the rest: fewer than wanted
        and `leaving` above 0 means that waiting helps.

        requester  group (its number) that wants the frames: what others are guaranteed stays.  0: nobody's in particular
        only       group whose blocks alone may go, since it is at its limit; 0: anybody's
        """
        groups = self._m.groups
        before = groups.restrict((requester, only))
        freed = self._free(want_frames)
        groups.restrict(before)
        return freed

    def drop(self, want_frames: int, only: int) -> int:
        """The same at once and without copies, of one group alone."""
        groups = self._m.groups
        before = groups.restrict((only, only))
        freed = self._drop(want_frames)
        groups.restrict(before)
        return freed

    def _free(self, want_frames: int) -> int:
        index = self._device.index
        keepers = self._m.tiers.keepers(self._device)
        if not keepers:
            return self._drop(want_frames)
        freed = 0
        if self._ready:
            freed = self._evict_ready(keepers, want_frames)
        while freed < want_frames and self.leaving < MOST_LEAVING:
            chunk = min(want_frames - freed, MOST_LEAVING)
            victims = list(self.policy.victims(self._m.view, index, chunk))
            states = self._core.copied(victims, keepers)
            clean = [b for b, state in zip(victims, states, strict=True) if state == _CLEAN]
            more = self._evict(clean, chunk, "its content is in a slower tier too")
            dirty = [b for b, state in zip(victims, states, strict=True) if state == _DIRTY]
            if more < chunk and dirty:
                more += self._let_go(dirty, chunk - more)
            freed += more
            if not more:
                break
        if freed < want_frames and not self.leaving:  # the policy fell short
            freed += self._oldest(want_frames - freed, keepers)
        return freed

    def _oldest(self, want_frames: int, keepers: int) -> int:
        """What went longest without being wanted, and can go."""
        freed = 0
        while freed < want_frames and self.leaving < MOST_LEAVING:
            victims = self._can_go(min(want_frames - freed, MOST_LEAVING))
            states = self._core.copied(victims, keepers)
            more = self._evict(
                [b for b, s in zip(victims, states, strict=True) if s == _CLEAN], want_frames - freed, "the oldest"
            )
            dirty = [b for b, s in zip(victims, states, strict=True) if s == _DIRTY]
            if dirty and not more:
                more = self._let_go(dirty, want_frames - freed)
            if not more:
                break
            freed += more
        return freed

    def _can_go(self, want_frames: int) -> list[int]:
        """The oldest blocks that nothing on this device continues, but for what is named before them."""
        index = self._device.index
        found = self._core.evictable(index, self._core.oldest(index, 2 * want_frames + 64), want_frames)
        if not found:
            everything = self._core.oldest(index, self._device.capacity)
            found = self._core.evictable(index, everything, want_frames) or self._core.evictable(
                index, everything[::-1], want_frames
            )
        return found

    def _drop(self, want_frames: int) -> int:
        """The last tier, or the only one: what goes is gone."""
        index = self._device.index
        freed = 0
        while freed < want_frames:
            chunk = min(want_frames - freed, MOST_LEAVING)
            victims = list(self.policy.victims(self._m.view, index, chunk))
            more = self._evict(victims, chunk, "no slower tier can take it")
            if not more:
                more = self._evict(self._can_go(chunk), chunk, "the oldest of the last tier")
            if not more:
                break
            freed += more
        if freed and len(self._m.devices) > len(self._m.schedulers):
            self._m.count("dropped_blocks", freed)
        return freed

    def _evict_ready(self, keepers: int, want_frames: int) -> int:
        """Of what was demoted for this; what is not wanted yet stays ready."""
        states = self._core.copied(self._ready, keepers)
        clean = [b for b, state in zip(self._ready, states, strict=True) if state == _CLEAN]
        self._ready = clean[want_frames:]
        return self._evict(clean[:want_frames], want_frames, "demoted to make room")

    def _evict(self, blocks: Sequence[int], want_frames: int, why: str) -> int:
        if not blocks or want_frames <= 0:
            return 0
        index = self._device.index
        told = len(self._m.devices) > 1
        keys = self._core.key_heads(blocks) if told else ()
        freed = self._core.evict(index, list(blocks))
        if freed:
            self.forgotten(blocks)
            if told:
                gone = [k for k, state in enumerate(self._core.copied(blocks, 1 << index)) if not state]
                self._m.tiers.decide(
                    "evict", self._device, 0, [blocks[k] for k in gone], f"{freed} blocks by {self.policy.name}: {why}",
                    [keys[k] for k in gone], f"evicted by {self.policy.name}",
                )  # fmt: skip
        return freed

    def forgotten(self, blocks: Sequence[int]) -> None:
        """Copies of these may be here no more."""
        index = self._device.index
        if self.policy.listens or self._m.prefetches:
            gone = self._m.tiers.lacking(blocks, 1 << index)
            self._m.prefetches.gone(index, gone)
            if self.policy.listens:
                self.policy.removed(self._m.view, index, gone)

    def _let_go(self, dirty: list[int], want_frames: int) -> int:
        """Demote dirty blocks, or drop those that are cheaper to compute again; frames that are free at once."""
        device, m = self._device, self._m
        below = m.tiers.below(device.index)
        if below is None:
            return self._evict(dirty, want_frames, "no slower tier can take it")
        freed = 0
        over = self.over_limit(below, dirty) if m.groups.limited(below) else []
        if over:
            freed = self._evict(over, want_frames, f"its group is at its limit in {below.name}")
            m.count("dropped_blocks", freed)
            dirty = [b for b in dirty if b not in set(over)]
            if not dirty:
                return freed
        refused = self._not_for(below, dirty)
        if refused:  # asking again and again would keep both sides busy for nothing
            gone = self._evict(refused, want_frames - freed, f"{below.name} did not take it")
            m.count("dropped_blocks", gone)
            freed += gone
            self._refused.difference_update(m.tiers.lacking(refused, 1 << device.index))
            dirty = [b for b in dirty if b not in set(refused)]
        cheap, numbers = self._cheaper_to_compute(dirty, below) if freed < want_frames else ([], "")
        if cheap:
            gone = self._evict(cheap, want_frames - freed, f"computing it again is cheaper{numbers}")
            m.count("dropped_cheap", gone)
            freed += gone
            dirty = [b for b in dirty if b not in set(cheap)]
        todo = dirty[: max(0, max(want_frames - freed, AHEAD) - self.leaving)]
        if not todo:
            return freed
        room = m.tiers.evictors[below.index].room(len(todo))
        if room > 0:
            begun = m.movers.copy(
                device.index, below.index, todo[:room], "demote", then=self._demoted, demand=len(todo) > AHEAD
            )
            self.leaving += begun
            if begun:
                m.count("demoted_blocks", begun)
                m.tiers.decide(
                    "demote",
                    device,
                    0,
                    todo[:begun],
                    f"{begun} blocks to {below.name}: {want_frames} frames wanted{numbers}",
                    plain=f"to {below.name}: frames were wanted",
                )
                return freed
        if not self.leaving and not m.tiers.evictors[below.index].leaving and freed < want_frames:
            gone = self._evict(dirty, want_frames - freed, f"{below.name} has no room for it")
            m.count("dropped_blocks", gone)
            freed += gone
        return freed

    def over_limit(self, below: Device, blocks: list[int]) -> list[int]:
        """Those that their owner's limit keeps out of the tier below, after it has let go of what it had there before."""
        m, over = self._m, []
        owners = self._core.owners(self._device.index, blocks)
        mine: dict[int, list[int]] = {}
        for block, owner in zip(blocks, owners, strict=True):
            mine.setdefault(owner, []).append(block)
        for owner, theirs in mine.items():
            group = m.groups.numbered(owner)
            room = len(theirs)
            for g in group.chain() if group is not None else ():
                account = self._core.account(below.index, g.number)
                if account.hard and account.used + room > account.hard:
                    m.tiers.evictors[below.index].free(account.used + room - account.hard, owner, g.number)
                    room = min(room, account.hard - self._core.account(below.index, g.number).used)
            over += theirs[max(0, room) :]
        return over

    def _cheaper_to_compute(self, blocks: list[int], below: Device) -> tuple[list[int], str]:
        """Those of them, and the numbers that say so, if they are known."""
        m = self._m
        costs = m.costs
        if self._device.tier != "hbm":
            return [], ""  # it has been kept once already: what it saves is a reload and the recomputation after it
        away = costs.link(*m.tiers.link_of(self._device.index, below.index)).ns(costs.frame_bytes)
        back = costs.link(*m.tiers.link_of(below.index, self._device.index)).ns(costs.frame_bytes)
        first_ns = costs.rebuild_ns(self._device.index, 0)
        if not away or not back or not first_ns:
            return [], ""
        deepest = costs.depth_cheaper_than(self._device.index, away + back)
        numbers = (
            f"; to {below.name} and back takes {away / 1e6:.3f} + {back / 1e6:.3f} ms a block, computing {first_ns / 1e6:.3f} ms "
            f"at the start of a context, and less than moving before token {min(max(0, deepest), m.config.window_tokens):.0f}"
        )
        if deepest <= 0:
            return [], numbers
        facts = FACT.iter_unpack(self._core.facts(blocks))
        return [b for b, fact in zip(blocks, facts, strict=True) if fact[2] < deepest], numbers

    def _demoted(self, good: list[Item], bad: list[tuple[Item, int]]) -> None:
        self.leaving -= len(good) + len(bad)
        self._ready += [item.block for item in good]
        self._refused.update(item.block for item, code in bad if code not in (E.ENOSPC, E.EHOSTDOWN))

    def _not_for(self, below: Device, blocks: list[int]) -> list[int]:
        """Those that the tier below did not take, or will not: a store that others use too takes no block that nobody else could
        ever ask for (saved tails)."""
        refused = {b for b in blocks if b in self._refused}
        if below.tier == "remote" and blocks:
            facts = FACT.iter_unpack(self._core.facts(blocks))
            refused.update(b for b, fact in zip(blocks, facts, strict=True) if not fact[10])
        return [b for b in blocks if b in refused]

    def ahead(self, low_frames: int) -> None:
        """Begin demotions while fewer than `low_frames` are free or clean, so that the next admission need not wait."""
        index = self._device.index
        if self.leaving or self._core.free_frames(index) + len(self._ready) >= low_frames:
            return  # every step comes this far, few go on
        keepers = self._m.tiers.keepers(self._device)
        if not keepers:
            return
        want = low_frames - self._core.free_frames(index)
        victims = list(self.policy.victims(self._m.view, index, want))
        states = self._core.copied(victims, keepers)
        self._ready += [b for b, s in zip(victims, states, strict=True) if s == _CLEAN and b not in self._ready]
        dirty = [b for b, s in zip(victims, states, strict=True) if s == _DIRTY]
        below = self._m.tiers.below(index)
        if dirty and below is not None:
            refused = set(self._not_for(below, dirty))
            dirty = [b for b in dirty if b not in refused]
            room = self._m.tiers.evictors[below.index].room(len(dirty))
            self.leaving += self._m.movers.copy(index, below.index, dirty[:room], "demote", then=self._demoted)
