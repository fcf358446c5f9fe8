"""System calls about load: pressure, and the numbers that `attnix doctor` wants."""

from __future__ import annotations

from . import calls as c
from .errors import E, Errno
from .events import Syscall
from .health import health as look_at_health
from .look import admitted_limit, alone, hbm_frames
from .look_frames import frames as look_at_frames
from .machine import Machine
from .params import FRAMES_TOLD, HEADS
from .process import Connection
from .psi import WINDOW_MS
from .traps import Trap

_NO_MORE = 1001  # threshold that ends a subscription


def pressure(m: Machine, connection: Connection, call: Syscall, args: c.PressureArgs) -> c.PressureResult:
    shortest, longest = WINDOW_MS
    if not -1 <= args.threshold_permille <= _NO_MORE or not shortest <= args.window_ms <= longest:
        raise Errno(
            E.EINVAL, f"threshold_permille is 0..1000, or {_NO_MORE} (no more) or -1 (only look); window_ms is {shortest}..{longest}",
            low=shortest, high=longest,
        )  # fmt: skip
    if args.threshold_permille == _NO_MORE:
        m.psi.unsubscribe(connection.conn)
    elif args.threshold_permille >= 0:
        m.psi.subscribe(connection.conn, connection.uid, args.threshold_permille, args.window_ms)
    uid = connection.uid
    seen = m.psi.seen(uid)
    limit = admitted_limit(m) if alone(m, uid) else 0
    return c.PressureResult(
        seen.some.permille(), seen.full.permille(), seen.some.total_ns, seen.full.total_ns, limit, *hbm_frames(m, uid)
    )


def health(m: Machine, connection: Connection, call: Syscall, args: c.HealthArgs) -> c.HealthResult:
    if not 0 <= args.heads <= HEADS:
        raise Errno(E.EINVAL, f"0 to {HEADS} heads can be told, not {args.heads}", heads=args.heads, limit=HEADS)
    return look_at_health(m, connection.uid, args.heads)


def frames(m: Machine, connection: Connection, call: Syscall, args: c.FramesArgs) -> c.FramesResult:
    device = next((d for d in m.devices if d.name == args.device and not d.removed), None)
    if device is None:
        raise Errno(E.ENODEV, f"there is no device {args.device!r}: see `attnix tiers`", device=args.device)
    if not 0 <= args.start <= device.capacity or not 0 <= args.most <= FRAMES_TOLD:
        raise Errno(
            E.EINVAL, f"{device.name} has {device.capacity} frames, of which {FRAMES_TOLD} at a time can be told",
            start=args.start, most=args.most, limit=FRAMES_TOLD,
        )  # fmt: skip
    return look_at_frames(m, device, connection.uid, args.start, args.most)


TRAPS: dict[str, Trap] = {"pressure": pressure, "health": health, "frames": frames}
