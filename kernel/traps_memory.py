"""System calls about where contexts lie: pin, unpin, advise, prefetch, demote, evict, explain, attach_tier, detach_tier."""

from __future__ import annotations

from . import calls as c
from .config import DeviceConfig
from .context import Context, JobKind
from .device import Device
from .errands import Arrival, Attach, Demotion, Detach, Errand, Promotion, Sleep, Wake, resident_blocks
from .errors import E, Errno
from .events import AttachTier, Syscall, WakeDriver
from .evictor import Evictor
from .look import alone
from .machine import Machine
from .params import MAX_DEVICES, RETRY_MS
from .process import Connection
from .tag import stored_bytes
from .traps import Trap, administrator, seen_context

_KINDS = ("nvme", "remote", "sim")


def _tier(m: Machine, context: Context, name: str) -> Device:
    """A device by name (nvme0), or the first of a tier (nvme); for hbm, the context's own.  ENODEV."""
    for device in m.devices:
        if device.removed or (device.tier == "hbm" and device.index != context.device):
            continue
        if name in (device.name, device.tier):
            return device
    there = ", ".join(d.name for d in m.devices if not d.removed)
    raise Errno(E.ENODEV, f"no tier {name!r}: there is {there}", tier=name)


def pin(m: Machine, connection: Connection, call: Syscall, args: c.PinArgs) -> c.Empty:
    context = seen_context(m, connection, args)
    longest = m.sysctl.max_ms
    if not 0 <= args.duration_ms <= longest:
        raise Errno(E.EINVAL, f"duration_ms is 0..{longest} (sysctl pin.max_ms)", field="duration_ms", limit=longest)
    device = m.devices[context.device]
    limit = device.capacity * m.sysctl.share_permille // 1000
    others = [x for x in m.pinned(context.device) if x is not context]
    wanted = _all_frames(m, context)
    if sum(_all_frames(m, x) for x in others) + wanted > limit:
        seen = [x for x in others if alone(m, connection.uid) or x.process.uid == connection.uid]
        held = sum(_all_frames(m, x) for x in seen)
        raise Errno(
            E.EDQUOT,
            f"{wanted} frames would be pinned beside {held}; pins may hold {limit} frames of {device.name} (sysctl pin.share_permille)",
            wanted=wanted,
            held=held,
            limit=limit,
        )
    context.pinned_until_ns = m.now_ns + (args.duration_ms or longest) * 1_000_000
    m.pins[context.cid] = context
    m.tiers.decide("pin", device, context.cid, (), f"{wanted} frames for {args.duration_ms or longest} ms")
    return c.Empty()


def _all_frames(m: Machine, context: Context) -> int:
    """That its log fills.  Not those that it has now: how fast a prompt gets its frames shows how much of it was in the cache."""
    return -(-m.core.slot_row(context.slot).tokens // m.config.block_tokens)


def unpin(m: Machine, connection: Connection, call: Syscall, args: c.LookArgs) -> c.Empty:
    seen_context(m, connection, args).pinned_until_ns = 0
    return c.Empty()


def _errand(m: Machine, errand: Errand) -> None:
    m.errands.add(errand)


def prefetch(m: Machine, connection: Connection, call: Syscall, args: c.PrefetchArgs) -> c.MovedResult | None:
    context = seen_context(m, connection, args)
    if args.deadline_ms < 0:
        raise Errno(E.EINVAL, "deadline_ms is not negative", field="deadline_ms")
    target = _tier(m, context, args.tier)
    deadline_ns = m.now_ns + args.deadline_ms * 1_000_000 if args.deadline_ms else 0
    _fetch(m, context, target, call.conn, call.request, deadline_ns)
    return None


def _fetch(m: Machine, context: Context, target: Device, conn: int, request: int, deadline_ns: int) -> None:
    if target.tier != "hbm":
        _errand(m, Promotion(conn, request, context, target, deadline_ns))
        return
    m.errands.arrive(conn, request, context, deadline_ns)


def demote(m: Machine, connection: Connection, call: Syscall, args: c.DemoteArgs) -> c.MovedResult | None:
    context = seen_context(m, connection, args)
    target = _tier(m, context, args.tier)
    if target.tier == "hbm":
        raise Errno(E.EINVAL, "a context is demoted to a tier below hbm", tier=args.tier)
    if not (target.up or target.gone or target.removed or target.draining):
        raise Errno(E.EAGAIN, f"{target.name} is being started again", device=target.name, retry_after_ms=RETRY_MS)
    if not target.up or target.read_only or target.draining:
        raise Errno(
            E.EHOSTDOWN, f"{target.name} takes nothing at present: see `attnix tiers` and dmesg", device=target.name
        )
    if context.job is not None and context.job.kind is not JobKind.PREFILL:
        what = f"a {context.job.kind.value} is running on this context: cancel it before you demote"
        raise Errno(E.EBUSY, what, cid=context.cid, request=context.job.request)
    if m.tiers.pinned(context):
        raise _pinned(m, context, "demote")
    _errand(m, Demotion(call.conn, call.request, context, target))
    return None


def _pinned(m: Machine, context: Context, what: str) -> Errno:
    left_ms = -(-(context.pinned_until_ns - m.now_ns) // 1_000_000)
    text = f"the context is pinned for another {left_ms} ms: unpin it before you {what}"
    return Errno(E.EBUSY, text, cid=context.cid, left_ms=left_ms)


def evict(m: Machine, connection: Connection, call: Syscall, args: c.LookArgs) -> c.MovedResult:
    """Forget every copy of what this context alone has; it is computed again when it is used."""
    context = seen_context(m, connection, args)
    if context.job is not None or m.core.in_flight(context.slot):
        raise Errno(E.EBUSY, "the context is being computed: cancel that before you evict", cid=context.cid)
    if m.tiers.pinned(context):
        raise _pinned(m, context, "evict")
    blocks = m.core.log_blocks(context.slot)[::-1]
    m.core.forget_tail(context.slot)
    m.schedulers[context.device].pager.forget(context)
    keys = m.core.key_heads(blocks)
    freed = 0
    for device in m.devices:
        freed += m.core.evict(device.index, blocks)
        m.tiers.evictors[device.index].forgotten(blocks)
    m.tiers.decide("drop", m.devices[context.device], context.cid, blocks, f"asked for: {freed} copies freed", keys)
    return c.MovedResult(freed, resident_blocks(m, context, context.device), 0)


def advise(m: Machine, connection: Connection, call: Syscall, args: c.AdviseArgs) -> c.Empty:
    context = seen_context(m, connection, args)
    length = m.core.slot_row(context.slot).tokens
    end = length if args.end < 0 else args.end
    if not 0 <= args.start <= end <= length:
        raise Errno(E.EINVAL, f"tokens [{args.start}, {args.end}) are not within 0..{length}", tokens=length)
    if args.advice == "willneed":
        if not m.errands.advised(context, Arrival):
            _fetch(m, context, m.devices[context.device], 0, 0, 0)
    elif args.advice == "cold":
        stage = m.tiers.stage
        wanted = stage is not None and context.job is None and not m.tiers.pinned(context)
        if stage is not None and wanted and not m.errands.advised(context, Demotion):
            _errand(m, Demotion(0, 0, context, stage))
    elif args.advice in ("dontneed", "normal", "priority"):
        if not 0 <= args.priority <= 100:
            raise Errno(E.EINVAL, f"priority is 0..100, not {args.priority}", field="priority")
        priority = {"dontneed": 0, "normal": 50}.get(args.advice, args.priority)
        m.core.prioritise(context.slot, args.start, end, priority)
        _expire(m, context, args.start, end, args.duration_ms)
    else:
        names = "willneed, dontneed, cold, normal or priority"
        raise Errno(E.EINVAL, f"advice is {names}, not {args.advice!r}", field="advice")
    return c.Empty()


def _expire(m: Machine, context: Context, start: int, end: int, duration_ms: int) -> None:
    """Tokens [start, end) have another priority from now on, for so long (0: for ever): what was to end there does not any more."""
    size = m.config.block_tokens
    first, last = -(-start // size), end // size  # whole blocks have one
    for old in [e for e in m.errands.about(context) if isinstance(e, _Expiry)]:
        if first < old.last and old.first < last:
            m.errands.withdraw(old)
            for left in ((old.first, first), (last, old.last)):
                if left[0] < left[1]:
                    m.errands.add(_Expiry(context, *left, old.deadline_ns))
    if duration_ms > 0 and first < last:
        m.errands.add(_Expiry(context, first, last, m.now_ns + duration_ms * 1_000_000))


class _Expiry(Errand):
    """The priority of blocks [first, last) ends.  No two of one context overlap, so there are as many as it has blocks at most."""

    def __init__(self, context: Context, first: int, last: int, deadline_ns: int) -> None:
        super().__init__(0, 0, context, deadline_ns)
        self.first, self.last = first, last

    def step(self, m: Machine) -> None:
        return None

    def sleeps(self) -> bool:
        return True

    def late(self, m: Machine) -> c.Empty:
        if self.context is not None:
            size, tokens = m.config.block_tokens, m.core.slot_row(self.context.slot).tokens
            m.core.prioritise(self.context.slot, self.first * size, min(self.last * size, tokens), 50)
        return c.Empty()


def explain(m: Machine, connection: Connection, call: Syscall, args: c.ExplainArgs) -> c.ExplainResult:
    if args.block >= 0:
        administrator(m, connection, "ask about a block by number")
        try:
            keys = frozenset(m.core.key_heads((args.block,))) - {0}
        except (ValueError, IndexError, OverflowError):
            keys = frozenset()  # there is no such block
        return c.ExplainResult(m.tiers.decisions.rows(blocks=frozenset(() if keys else (args.block,)), keys=keys))
    if args.ctx or args.cid:
        context = seen_context(m, connection, args)
        full = m.core.slot_row(context.slot).tokens // m.config.block_tokens
        keys = frozenset(int.from_bytes(m.core.key_of(context.slot, i)[:8], "little") for i in range(full))
        if not alone(m, connection.uid):
            return c.ExplainResult(m.tiers.decisions.own_rows(context.cid, keys))
        return c.ExplainResult(m.tiers.decisions.rows(cid=context.cid, keys=keys))
    administrator(m, connection, "see the decisions about everybody")
    return c.ExplainResult(m.tiers.decisions.rows())


def attach_tier(m: Machine, connection: Connection, call: Syscall, args: c.AttachTierArgs) -> None:
    administrator(m, connection, "attach a tier")
    if args.kind not in _KINDS:
        raise Errno(E.EINVAL, f"kind is {', '.join(_KINDS)}, not {args.kind!r}", field="kind")
    stage = m.tiers.stage
    if stage is None:
        raise Errno(E.ENODEV, "there is no dram to move things through: boot with --dram", tier="dram")
    frames = args.size_bytes // stored_bytes(m.config.kv.frame_bytes(m.config.block_tokens))
    if not 1 <= frames < 1 << 28:
        raise Errno(E.EINVAL, f"{args.size_bytes} bytes hold {frames} frames", field="size_bytes")
    index = next((d.index for d in m.devices if d.removed), len(m.devices))
    if index >= MAX_DEVICES:
        raise Errno(E.ENOMEM, f"there are {MAX_DEVICES} devices already", wanted=1, free=0, limit=MAX_DEVICES)
    number = sum(1 for d in m.devices if d.tier == args.kind and not d.removed)
    names = {d.name for d in m.devices if not d.removed}
    while f"{args.kind}{number}" in names:
        number += 1
    device = Device(index, DeviceConfig(f"{args.kind}{number}", args.kind, frames))
    m.core.set_capacity(index, frames)
    m.costs.forget(index)
    evictor = Evictor(m, device, m.sysctl.policy_of(device.tier))
    if index == len(m.devices):
        m.devices.append(device)
        m.tiers.evictors.append(evictor)
        m.movers.add_device()
    else:
        m.devices[index] = device
        m.tiers.evictors[index] = evictor
    m.groups.apply(device)
    m.emit(AttachTier(index, device.name, args.kind, frames, args.settings))
    _errand(m, Attach(call.conn, call.request, device))


def detach_tier(m: Machine, connection: Connection, call: Syscall, args: c.DetachTierArgs) -> None:
    administrator(m, connection, "detach a tier")
    device = next((d for d in m.devices if d.name == args.device and not d.removed), None)
    if device is None:
        raise Errno(E.ENODEV, f"no device {args.device!r}", device=args.device)
    if device.tier in ("hbm", "dram"):
        raise Errno(
            E.EINVAL, f"{device.name} stays: only tiers with a driver of their own are detached", device=device.name
        )
    if device.draining:
        raise Errno(E.EBUSY, f"{device.name} is being detached already", device=device.name)
    device.draining = True
    _errand(m, Detach(call.conn, call.request, device))


def sleep(m: Machine, connection: Connection, call: Syscall, args: c.Empty) -> None:
    administrator(m, connection, "put the system to sleep")
    if m.asleep:
        raise Errno(E.EBUSY, "the system sleeps already: `attnix wake` ends that", state="asleep")
    if m.tiers.stage is None:
        raise Errno(E.ENODEV, "there is no tier below hbm to keep contexts in: boot with --dram", tier="dram")
    m.asleep = True
    for context in list(m.contexts.values()):
        if context.job is not None:
            m.schedulers[context.device].hold(context)
    _errand(m, Sleep(call.conn, call.request))


def wake(m: Machine, connection: Connection, call: Syscall, args: c.Empty) -> None:
    administrator(m, connection, "wake the system")
    if not m.asleep or any(isinstance(errand, (Sleep, Wake)) for errand in m.errands.open):
        raise Errno(E.EBUSY, "the system does not sleep, or is just going to or waking up", state="awake")
    for device in m.devices[: m.tiers.computes]:
        device.gone = ""
        m.emit(WakeDriver(device.index))
    _errand(m, Wake(call.conn, call.request, None))


TRAPS: dict[str, Trap] = {
    "sleep": sleep,
    "wake": wake,
    "pin": pin,
    "unpin": unpin,
    "advise": advise,
    "prefetch": prefetch,
    "demote": demote,
    "evict": evict,
    "explain": explain,
    "attach_tier": attach_tier,
    "detach_tier": detach_tier,
}
