"""Groups: processes accounted together, as cgroups are.  Every uid has one, `uid:N`, which contains its sub-groups, `uid:N/NAME`.

A group has limits, each on one resource:

    hbm, dram, nvme   frames on each device of that tier.  hard: never more are charged to it.  soft: evictions and
                      preemptions for other groups leave it that many of what it has
    contexts          hard: no more are made.  soft: so many can be made whatever others do: what it has not made of them is
                      left free
    tokens_s          hard: tokens computed per second, over any time long enough to forget one second's worth and one pass.
                      soft: with less than that it goes before those who have been promised no more (rates.py)
    weight            hard: its share of the compute devices under contention, relative to others'

Sub-groups are limited within their uid's group: what they use counts there too, and what they are guaranteed, they are
guaranteed among each other; only a uid's own guarantee holds against other uids.

Whom a frame is charged to is the core's affair (kernel/twin_groups.py), where a group is a number.  A group is there from
when it is first named until nothing is left of it: no process, no frame, no limit.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from .bucket import Bucket, Meter
from .errors import E, Errno
from .params import MAX_GROUP_NAME_BYTES, MAX_GROUPS, RETRY_MS
from .rates import Rates

if TYPE_CHECKING:
    from .context import Context
    from .device import Device
    from .machine import Machine

DEFAULT_WEIGHT: Final = 100  # share of a group that nobody gave another
MAX_WEIGHT: Final = 10_000
TIERS: Final = ("hbm", "dram", "nvme")
RESOURCES: Final = (*TIERS, "contexts", "tokens_s")
_WHOLE: Final = 2 | 4  # flags of CoreApi.pagemap: indexed and valid
MAX_LIMIT: Final = (1 << 31) - 1


class Group:
    """weight: its share under contention, relative to the other groups'.  contexts: its sub-groups' count too."""

    __slots__ = (
        "bucket", "contexts", "limits", "meter", "name", "number", "parent", "processes", "throttled", "uid", "weight",
    )  # fmt: skip

    def __init__(self, name: str, uid: int, number: int, parent: Group | None) -> None:
        self.name = name
        self.uid = uid
        self.number = number
        self.parent = parent
        self.weight = DEFAULT_WEIGHT
        self.limits: dict[str, tuple[int, int]] = {}  # by resource: soft, hard; 0: none
        self.processes = 0
        self.contexts = 0
        self.throttled = 0  # times that a limit held it back
        self.bucket: Bucket | None = None  # where tokens_s is limited ...
        self.meter: Meter | None = None  # ... and where it is guaranteed

    def chain(self) -> Iterator[Group]:
        """Itself and what contains it."""
        yield self
        if self.parent is not None:
            yield self.parent

    @property
    def root(self) -> Group:
        """Its uid's own."""
        return self if self.parent is None else self.parent

    def within(self, number: int) -> bool:
        return self.number == number or (self.parent is not None and self.parent.number == number)

    @property
    def held(self) -> bool:
        """It has computed more than its rate allows, or its uid has."""
        bucket, parent = self.bucket, self.parent
        return (bucket is not None and bucket.until_ns > 0) or (parent is not None and parent.held)

    def soft(self, resource: str) -> int:
        return self.limits.get(resource, (0, 0))[0]

    def hard(self, resource: str) -> int:
        return self.limits.get(resource, (0, 0))[1]


def parse_name(name: str) -> tuple[int, str]:
    """(N, NAME) of `uid:N` or `uid:N/NAME`: the names of groups, and of domains.  EINVAL."""
    head, slash, sub = name.partition("/")
    digits = head.removeprefix("uid:")
    canonical = head.startswith("uid:") and digits.isascii() and digits.isdigit() and str(int(digits)) == digits
    fits = len(name.encode(errors="replace")) <= MAX_GROUP_NAME_BYTES and name.isprintable() and "/" not in sub
    if not canonical or not fits or int(digits) >= 1 << 32 or bool(sub) != bool(slash):
        raise Errno(
            E.EINVAL,
            f"{name!r} is not uid:N or uid:N/NAME, NAME printable, without '/', {MAX_GROUP_NAME_BYTES} bytes at most in all",
            name=name,
        )
    return int(digits), sub


class Groups:
    """All of one machine, by name."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._core = machine.core
        self._groups: dict[str, Group] = {}
        self._numbers = list(range(MAX_GROUPS - 1, 0, -1))  # free ones
        self._restriction: tuple[int, int] | None = None
        self.guaranteed = False  # some group has a soft limit on frames ...
        self._contexts_guaranteed = False  # ... or on contexts
        self.rates = Rates(machine)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    # -- finding and making ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._groups)

    def of_uid(self, uid: int) -> Group:
        return self.named(f"uid:{uid}")

    def find(self, name: str) -> Group | None:
        return self._groups.get(name)

    def named(self, name: str) -> Group:
        """Made when it is first named.  EINVAL: no group can have that name.  EAGAIN: there are too many."""
        group = self._groups.get(name)
        if group is not None:
            return group
        uid, sub = parse_name(name)
        parent = self.of_uid(uid) if sub else None
        if not self._numbers:
            self.tidy(keep=parent)
        if not self._numbers:
            message = f"{MAX_GROUPS - 1} groups exist: end the processes of one"
            raise Errno(E.EAGAIN, message, limit=MAX_GROUPS - 1, retry_after_ms=RETRY_MS)
        group = self._groups[name] = Group(name, uid, self._numbers.pop(), parent)
        self._core.define_group(group.number, parent.number if parent is not None else 0)
        return group

    def check_room(self, name: str) -> None:
        """EAGAIN: the uid has as many sub-groups as are left for everybody else, so this new one is not made.  Whoever comes
        always finds some: the thresholds are dynamic (Choudhury and Hahne, INFOCOM'96), and no share is set aside for those
        who never come.  EINVAL: no group can have that name."""
        uid, sub = parse_name(name)
        if not sub or name in self._groups or self._sub_groups(uid) < len(self._numbers):
            return
        self.tidy()
        if (mine := self._sub_groups(uid)) >= len(self._numbers):
            text = f"uid:{uid} has {mine} sub-groups and no more are left for others: end the processes of one and take its limits away"
            raise Errno(E.EAGAIN, text, limit=mine, group=f"uid:{uid}", retry_after_ms=RETRY_MS)

    def _sub_groups(self, uid: int) -> int:
        return sum(1 for g in self._groups.values() if g.uid == uid and g.parent is not None)

    def tidy(self, keep: Group | None = None) -> None:
        """Forget those of which nothing is left, sub-groups first."""
        kept = {keep}  # and those of which a sub-group is left
        for group in sorted(self._groups.values(), key=lambda g: (g.parent is None, -g.number)):
            idle = not group.processes and not group.contexts and not group.limits and group.weight == DEFAULT_WEIGHT
            used = group in kept or not idle
            if used or any(self._core.account(d.index, group.number).used for d in self._m.devices):
                kept.add(group.parent)
                continue
            del self._groups[group.name]
            self._numbers.append(group.number)

    def owner_of(self, domain: str) -> int:
        """Number of the group that pays for blocks of a domain which were found in a tier; 0: nobody."""
        try:
            return self.of_uid(parse_name(domain)[0]).number
        except Errno:
            return 0

    def processes_of(self, uid: int) -> int:
        """Of all its groups."""
        return sum(g.processes for g in self._groups.values() if g.uid == uid)

    # -- contexts -------------------------------------------------------------------------------------------------

    def joined(self, context: Context, group: Group) -> None:
        self._core.set_group(context.slot, group.number)
        for g in group.chain():
            g.contexts += 1

    @staticmethod
    def left(group: Group) -> None:
        for g in group.chain():
            g.contexts -= 1

    def check_contexts(self, group: Group, more: int = 1) -> None:
        """EDQUOT: so many contexts more are not allowed.  ENOMEM: there are slots, but they are others' by guarantee."""
        for g in group.chain():
            limit, left = g.hard("contexts"), self._left_free(g, group)
            if limit and g.contexts + more > limit - left:
                g.throttled += 1
                rest = f", of which {left} are guaranteed to its other sub-groups" if left else ""
                raise Errno(
                    E.EDQUOT,
                    f"{more} contexts beside {g.contexts} of group {g.name} are more than its limit of {limit}{rest}: release "
                    "some, or have the limit raised (`attnix group set`)",
                    wanted=more, used=g.contexts, limit=limit, group=g.name, resource="contexts",
                )  # fmt: skip
        left, most = self._left_free(None, group), self._m.config.max_contexts
        free = most - len(self._m.contexts) - left
        if left and more > free:
            group.root.throttled += 1
            raise Errno(
                E.ENOMEM,
                f"{max(0, free)} of {most} context slots are free that are not guaranteed to other groups, {more} wanted: release "
                "some, or have a guarantee lowered (`attnix group set --soft`)",
                wanted=more, free=max(0, free), reclaimable=0, limit=most, group=group.name, retry_after_ms=RETRY_MS,
            )  # fmt: skip

    def _left_free(self, above: Group | None, group: Group) -> int:
        """Contexts that the others directly below `above` (None: the uids' groups) may still make by their guarantees."""
        if not self._contexts_guaranteed:
            return 0
        others = (g for g in self._groups.values() if g.parent is above and not group.within(g.number))
        return sum(max(0, g.soft("contexts") - g.contexts) for g in others)

    # -- frames ---------------------------------------------------------------------------------------------------

    def most_frames(self, group: Group, device: Device) -> tuple[int, Group | None]:
        """Frames that a context of this group can have there at most, and whose limit that is; None: the device's size."""
        most, whose = device.capacity, None
        for g in group.chain():
            limit = g.hard(device.tier)
            if limit and limit < most:
                most, whose = limit, g
        return most, whose

    def room(self, number: int, device: int) -> int:
        """Frames that the group can still be charged on a device, when its reclaimable ones there have gone."""
        account = self._core.account(device, number)
        return account.hard - account.used + account.reclaimable

    def guaranteed_to_others(self, group: Group, device: Device) -> int:
        """Frames there that evictions for this group leave alone, at most."""
        levels = [g.parent for g in group.chain()]
        others = (g for g in self._groups.values() if g.parent in levels and not group.within(g.number))
        return sum(g.soft(device.tier) for g in others)

    def limited(self, device: Device) -> bool:
        return any(g.hard(device.tier) for g in self._groups.values())

    def fair_game(self, context: Context, requester: int) -> bool:
        """May the context's frames be taken for another group?  What is not whole yet is lost with them, the rest is cache."""
        if not self.guaranteed:
            return True
        _, _, _, sharers, flags, _ = self._core.pagemap(context.slot)
        pairs = zip(array("i", sharers), flags, strict=True)
        lost = max(1, sum(1 for n, flag in pairs if n == 1 and flag & _WHOLE != _WHOLE))
        for g in context.process.group.chain():
            account = self._core.account(context.device, g.number)
            if account.soft and account.used - lost < account.soft and self._guarded(g, requester):
                return False
        return True

    def _guarded(self, group: Group, requester: int) -> bool:
        """As the core has it: kernel/twin_groups.py."""
        other = self.numbered(requester)
        if other is not None and other.within(group.number):
            return False
        return group.parent is None or (other is not None and other.within(group.parent.number))

    def entitled(self, requester: int, device: int) -> bool:
        """It has less than it is guaranteed."""
        group = self.numbered(requester)
        for g in group.chain() if group is not None and self.guaranteed else ():
            account = self._core.account(device, g.number)
            if account.used < account.soft:
                return True
        return False

    def numbered(self, number: int) -> Group | None:
        return next((g for g in self._groups.values() if g.number == number), None) if number else None

    def restrict(self, restriction: tuple[int, int] | None) -> tuple[int, int] | None:
        """Evictions from here on are for group `restriction[0]`, and among blocks of group `restriction[1]` alone (0: of
        anybody); None: whatever is asked for goes.  What was in force before."""
        before = self._restriction
        if restriction is not None and not self.guaranteed and not restriction[1]:
            restriction = None
        if restriction != before:
            self._restriction = restriction
            if restriction is None:
                self._core.unrestrict()
            else:
                self._core.restrict(*restriction)
        return before

    # -- limits ---------------------------------------------------------------------------------------------------

    def set_limit(self, group: Group, resource: str, soft: int, hard: int) -> None:
        """-1: as it is; 0: none.  EINVAL, EBUSY: nothing has changed."""
        if resource == "weight":
            self._set_weight(group, soft, hard)
            return
        if resource not in RESOURCES:
            names = ", ".join((*RESOURCES, "weight"))
            raise Errno(E.EINVAL, f"a resource is one of {names}, not {resource!r}", field="resource")
        before = group.limits.get(resource, (0, 0))
        soft, hard = before[0] if soft == -1 else soft, before[1] if hard == -1 else hard
        if not 0 <= soft <= MAX_LIMIT or not 0 <= hard <= MAX_LIMIT:
            raise Errno(E.EINVAL, f"limits are 0 (none) to {MAX_LIMIT}, or -1 for what it is", soft=soft, hard=hard)
        if hard and soft > hard:
            raise Errno(E.EINVAL, f"{soft} cannot be guaranteed where at most {hard} are allowed", soft=soft, hard=hard)
        if soft > before[0]:
            self._check_guarantee(group, resource, soft)
        if hard:
            self._check_use(group, resource, hard)
        group.limits[resource] = (soft, hard)
        if (soft, hard) == (0, 0):
            del group.limits[resource]
        if resource == "tokens_s":
            self.rates.set(group, soft, hard)
        self.guaranteed = any(g.soft(tier) for g in self._groups.values() for tier in TIERS)
        self._contexts_guaranteed = any(g.soft("contexts") for g in self._groups.values())
        for device in self._m.devices:
            if device.tier == resource:
                self._core.set_bounds(device.index, group.number, soft, hard)

    def apply(self, device: Device) -> None:
        """A device joins: limits on its tier hold there too."""
        for group in self._groups.values():
            self._core.set_bounds(device.index, group.number, *group.limits.get(device.tier, (0, 0)))

    @staticmethod
    def _set_weight(group: Group, soft: int, hard: int) -> None:
        if soft not in (-1, 0) or not (1 <= hard <= MAX_WEIGHT or hard in (-1, 0)):
            raise Errno(E.EINVAL, f"a weight is 1..{MAX_WEIGHT}, given as `hard`; 0: {DEFAULT_WEIGHT}", field="hard")
        if hard >= 0:
            group.weight = hard or DEFAULT_WEIGHT

    def _check_guarantee(self, group: Group, resource: str, soft: int) -> None:
        """EINVAL: what is guaranteed at this level is more than there is."""
        devices = [d.capacity for d in self._m.devices if d.tier == resource and not d.removed]
        if resource == "contexts":
            devices = [self._m.config.max_contexts]
        limit = group.parent.hard(resource) if group.parent is not None else 0
        bounds: list[int] = [*devices, limit] if limit else devices
        there = min(bounds) if bounds else MAX_LIMIT
        others = sum(g.soft(resource) for g in self._groups.values() if g.parent is group.parent and g is not group)
        if soft + others > there:
            what = f"frames of {resource}" if resource in TIERS else resource
            raise Errno(
                E.EINVAL,
                f"{soft} {what} cannot be guaranteed to {group.name}: {others} are to others, of {there}",
                wanted=soft, guaranteed=others, limit=there, group=group.name,
            )  # fmt: skip

    def _check_use(self, group: Group, resource: str, hard: int) -> None:
        """EBUSY: the group uses more, and cannot be brought below by taking what it does not use now."""
        used = group.contexts if resource == "contexts" else 0
        for device in self._m.devices:
            if device.tier == resource:
                used = max(used, self._m.tiers.shrink(group, device, hard))
        if used > hard:
            raise Errno(
                E.EBUSY,
                f"group {group.name} uses {used} {resource}, more than {hard}: release contexts of it (or stop what runs) and "
                "set the limit again",
                used=used, limit=hard, group=group.name, resource=resource,
            )  # fmt: skip
