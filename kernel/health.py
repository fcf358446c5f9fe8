"""What `health` tells: rows made from kernel state, changing nothing.  kernel/look.py is the same for the other calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .calls import DriverRow, HealthResult, HoldingRow, LinkRow, ToolRow
from .look import alone

if TYPE_CHECKING:
    from .device import Device
    from .machine import Machine


def health(m: Machine, uid: int, heads_each: int) -> HealthResult:
    """To one of several uids only what is its own: the machine's numbers would tell it about the others."""
    everybody = alone(m, uid)
    heads = m.heads.rows(uid, everybody, heads_each)
    if not everybody:
        return HealthResult(m.now_ns, (), heads, (), (), ())
    lost = tuple(m.lost_places())
    return HealthResult(m.now_ns, m.history.rows(), heads, links(m), tools(m), holdings(m), lost, drivers(m))


def links(m: Machine) -> tuple[LinkRow, ...]:
    return tuple(
        LinkRow(device.name, verb, int(link.first_bytes_s), int(link.bytes_s), link.moves, round(link.late_ns))
        for device in m.devices
        if not device.removed
        for verb, link in m.costs.links_of(device.index)
    )


def drivers(m: Machine) -> tuple[DriverRow, ...]:
    return tuple(
        DriverRow(device.name, device.up, device.gone, device.why_down, tuple(device.deaths), device.mute)
        for device in m.devices
        if not device.removed and (device.deaths or device.gone or device.mute)
    )


def tools(m: Machine) -> tuple[ToolRow, ...]:
    rows = []
    for tool in m.lifetimes.tools.heard():
        low, middle, high = (round(1000 * tool.ratios.quantile(q)) if len(tool.ratios) else 0 for q in (250, 500, 750))
        median_ns = int(tool.durations.median()) if len(tool.durations) else -1
        rows.append(
            ToolRow(tool.name, tool.calls, median_ns, len(tool.ratios), low, middle, high, tool.absurd, tool.absent)
        )
    return tuple(rows)


def holdings(m: Machine) -> tuple[HoldingRow, ...]:
    return tuple(_holding(m, device) for device in m.devices[: m.tiers.computes])


def _holding(m: Machine, device: Device) -> HoldingRow:
    millionths = {"running": 0, "waiting": 0, "idle": 0, "tool": 0, "pinned": 0}
    for context in m.contexts_of(device.index):
        share = m.core.slot_row(context.slot).share_millionths
        if context.job is not None:
            kind = "running" if context.admitted else "waiting"
        else:
            kind = "tool" if context.wait is not None else "idle"
            millionths["pinned"] += share if m.tiers.pinned(context) else 0
        millionths[kind] += share
    frames = {kind: share // 1_000_000 for kind, share in millionths.items()}
    return HoldingRow(
        device.name, device.capacity, m.core.free_frames(device.index), m.core.reclaimable_frames(device.index),
        frames["running"], frames["waiting"], frames["idle"], frames["tool"], frames["pinned"],
    )  # fmt: skip
