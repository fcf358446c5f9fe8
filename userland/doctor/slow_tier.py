"""A tier slower than its last measurement.

Eviction, splits and waits are decided with measured speeds.  A disk that throttles, a file system that has filled up or a busy
network makes them late first, and wrong until the averages have followed.
"""

from __future__ import annotations

from attnix.syscalls.types import LinkRow

from ..units import rate
from .facts import Facts
from .finding import Finding

NAME = "slow_tier"
TIMES = 2.0  # slower than at first
FEWEST = 16  # transfers
_WORDS = {"read": "reads from", "write": "writes to"}


def slow_tier(facts: Facts) -> Finding | None:
    slow = [link for link in facts.health.links if _is_slow(link)]
    if not slow:
        return None
    late_ns = facts.grew("late_ns")
    worst = min(slow, key=lambda link: link.bytes_s / link.first_bytes_s)
    tier = {row.device: row.tier for row in facts.tiers}
    evidence = [
        f"{_WORDS.get(link.verb, link.verb)} {link.device}: {rate(link.bytes_s)} now, {rate(link.first_bytes_s)} at first "
        f"({link.first_bytes_s / link.bytes_s:.1f} times slower, over {link.moves:,} transfers)"
        for link in slow
    ]
    evidence.append(
        f"transfers took {late_ns / 1e9:.2f} s longer in the last {facts.window_ns / 1e9:.0f} s than they would have at first"
    )
    remedies = [
        "See what else uses the device (`iostat -x 1`), its free space, and `attnix dmesg` for errors and retries."
    ]
    if tier.get(worst.device) in ("nvme", "remote"):
        remedies.append(f"If it stays slow, do without it: `attnix detach-tier {worst.device}`.")
    return Finding(
        NAME, f"{', '.join(sorted({link.device for link in slow}))} is slower than when it was measured",
        min(1.0, late_ns / facts.window_ns) if facts.window_ns else 0.0, "time", tuple(evidence), tuple(remedies),
        numbers={
            "device": worst.device, "verb": worst.verb, "bytes_s": worst.bytes_s, "first_bytes_s": worst.first_bytes_s,
            "late_ns": late_ns,
        },
    )  # fmt: skip


def _is_slow(link: LinkRow) -> bool:
    return link.moves >= FEWEST and 0 < link.bytes_s * TIMES <= link.first_bytes_s
