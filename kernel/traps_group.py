"""System calls about groups: setlimit, groups."""

from __future__ import annotations

from . import calls as c
from .errors import E, Errno
from .events import Syscall
from .group import RESOURCES, TIERS, Group, parse_name
from .look import administers
from .machine import Machine
from .process import Connection
from .traps import Trap, administrator


def setlimit(m: Machine, connection: Connection, call: Syscall, args: c.SetlimitArgs) -> c.GroupRow:
    uid, sub = parse_name(args.group)
    if not sub:
        administrator(m, connection, f"set limits of the uid's group {args.group}: name a sub-group, {args.group}/NAME")
    elif connection.uid != uid:
        administrator(m, connection, "set limits of another user's groups")
    m.groups.check_room(args.group)
    group = m.groups.named(args.group)
    m.groups.set_limit(group, args.resource, args.soft, args.hard)
    m.log("info", f"group {group.name}: {args.resource} soft {args.soft} hard {args.hard}, set by uid {connection.uid}")
    return group_row(m, group)


def groups(m: Machine, connection: Connection, call: Syscall, args: c.GroupsArgs) -> c.GroupsResult:
    everyone = administers(m, connection.uid)
    if args.name:
        uid, _ = parse_name(args.name)
        if uid != connection.uid and not everyone:
            raise Errno(E.EACCES, f"group {args.name} is another user's", group=args.name)
        group = m.groups.find(args.name)
        if group is None:
            raise Errno(
                E.ENOENT, f"no group {args.name}: it is made when a process or a limit names it", group=args.name
            )
        return c.GroupsResult((group_row(m, group),))
    m.groups.tidy()
    seen = sorted((g for g in m.groups if everyone or g.uid == connection.uid), key=lambda g: (g.uid, g.name))
    return c.GroupsResult(tuple(group_row(m, g) for g in seen))


def group_row(m: Machine, group: Group) -> c.GroupRow:
    limits = []
    for resource in RESOURCES:
        soft, hard = group.limits.get(resource, (0, 0))
        limits.append(c.LimitRow(resource, _used(m, group, resource), soft, hard))
    share = sum(
        m.core.slot_row(x.slot).share_millionths for x in m.contexts.values() if x.process.group.within(group.number)
    )
    return c.GroupRow(
        group.name, group.uid, group.weight, group.processes, tuple(limits),
        share * m.config.kv.frame_bytes(m.config.block_tokens) // 1_000_000, m.core.served(group.number), group.throttled,
    )  # fmt: skip


def _used(m: Machine, group: Group, resource: str) -> int:
    """Of a tier with several devices, the fullest: limits hold on each."""
    if resource in TIERS:
        devices = [d.index for d in m.devices if d.tier == resource and not d.removed]
        return max((m.core.account(d, group.number).used for d in devices), default=0)
    if resource == "contexts":
        return group.contexts
    if group.bucket is not None:
        return group.bucket.used(m.now_ns)
    return group.meter.used(m.core.served(group.number), m.now_ns) if group.meter is not None else 0


TRAPS: dict[str, Trap] = {"setlimit": setlimit, "groups": groups}
