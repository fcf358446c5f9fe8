"""A driver that is down, keeps dying, or answers that nothing works.

The kernel serves on: what a tier held comes from another or is computed again, and its driver is started again with back-off.  So
nobody sees more than that things are slower, however long it lasts.
"""

from __future__ import annotations

from attnix.syscalls.types import DriverRow, TierRow

from ..units import duration
from .facts import Facts
from .finding import Finding

NAME = "driver"
DOWN_NS = 15_000_000_000  # one that is started again is there sooner, if it can be
DEATHS = 3  # in the window
MUTE = 8  # transfers in a row


def driver(facts: Facts) -> Finding | None:
    wrong = [(row, tier) for row in facts.health.drivers for tier in facts.tiers if row.device == tier.device]
    found = [(row, tier, said) for row, tier in wrong if (said := _said(facts, row))]
    if not found:
        return None
    frames = sum(tier.capacity_frames for tier in facts.tiers)
    computes = any(tier.tier == "hbm" for _, tier, _ in found)
    damage = max(
        _away(facts, row) * (1.0 if tier.tier == "hbm" else tier.capacity_frames / frames if frames else 0.0)
        for row, tier, _ in found
        if (tier.tier == "hbm") is computes
    )
    worst, *_ = max(found, key=lambda each: (each[1].tier == "hbm", _away(facts, each[0])))
    return Finding(
        NAME, f"{', '.join(row.device for row, *_ in found)} cannot be relied on: its driver is down, or fails again and again",
        damage, "time" if computes else "frames",
        tuple(f"{row.device}: {said}" for row, _, said in found),
        tuple(_remedy(row, tier) for row, tier, _ in found),
        numbers={
            "device": worst.device, "deaths": _deaths(facts, worst), "up": int(worst.up), "gone": worst.gone,
            "away_permille": round(1000 * _away(facts, worst)), "mute": worst.mute,
        },
    )  # fmt: skip


def _said(facts: Facts, row: DriverRow) -> str:
    """What is wrong with it, in words; "": nothing that lasts."""
    at_ns, window = facts.last.at_ns, f"{facts.window_ns / 1e9:.0f} s"
    if row.gone:
        return f"its driver is gone for good ({row.gone})"
    down_ns = 0 if row.up or not row.deaths else at_ns - row.deaths[-1][0]
    if down_ns >= DOWN_NS:
        return (
            f"its driver is down for {duration(down_ns)} ({row.reason}), and no attempt to start it has gone well since"
        )
    deaths = _deaths(facts, row)
    if deaths >= DEATHS:
        return f"its driver died {deaths} times in {window} (last: {row.reason}) and was away for {_away(facts, row):.0%} of them"
    if row.mute >= MUTE:
        return f"its driver lives, and all of its last {row.mute:,} transfers failed"
    return ""


def _deaths(facts: Facts, row: DriverRow) -> int:
    return sum(1 for at_ns, _ in row.deaths if at_ns >= facts.first.at_ns)


def _away(facts: Facts, row: DriverRow) -> float:
    """Share of the window in which nothing could be had from it, 0..1."""
    if row.gone or row.mute >= MUTE:
        return 1.0
    first, last = facts.first.at_ns, facts.last.at_ns
    away_ns = sum(max(0, (back or last) - max(at, first)) for at, back in row.deaths)
    return min(1.0, away_ns / facts.window_ns) if facts.window_ns else 0.0


def _remedy(row: DriverRow, tier: TierRow) -> str:
    see = f"`attnix dmesg` has the last words of {row.device}'s driver"
    if tier.tier == "hbm":
        return f"{see}; nothing is computed there until it is up: see to the device and its memory, then boot again."
    what = {"nvme": "the file, its disk and its file system", "remote": "the store, and the way to it"}.get(
        tier.tier, "the device"
    )
    return (
        f"{see}; see to {what}. Without it: `attnix detach-tier {row.device}`, and `attnix attach-tier {tier.tier} ...` when it is mended."
    )  # fmt: skip
