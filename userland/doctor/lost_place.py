"""A third party's policy that lost its place: it raised, or answered what is no answer, and the kernel goes on without it.

Nobody is refused anything and no token is wrong; but whoever chose the policy believes that it decides, and it does not.
"""

from __future__ import annotations

from .facts import Facts
from .finding import Finding

NAME = "lost_place"


def lost_place(facts: Facts) -> Finding | None:
    lost = facts.health.lost_places
    if not lost:
        return None
    settings = {row.setting: row.instead for row in lost}
    anew = ", ".join(f"`attnix sysctl {name}=NAME`" for name in settings)
    instead = ", ".join(f"`attnix sysctl {name}={policy}`" for name, policy in settings.items())
    return Finding(
        NAME, "A policy has failed and decides no more: another has its place", 0.0, "",
        tuple(f"{row.device}: {row.fault}; {row.instead} decides instead" for row in lost),
        (
            "Mend the policy and boot again, which is when its package is read; where the fault was in what it works with, give it its "
            f"place back: {anew}.",
            f"Or keep what decides now, knowing it: {instead}.",
        ),
        settings,
        {"places": len(lost), "device": lost[0].device, "fault": lost[0].fault, "instead": lost[0].instead},
    )  # fmt: skip
