"""Thrashing: contexts that run take frames from one another, and the machine brings back what it has just thrown out.

The share of work that is done twice is what the kernel's guard looks at, too (kernel/load.py; Denning 1968).
"""

from __future__ import annotations

from .facts import Facts
from .finding import Finding, Number
from .room import room

NAME = "thrashing"
SHARE = 0.05  # of the work is done twice
FEWEST = 4  # running contexts that lost their frames
_GUARD, _GROWTH = "load.thrash_high_permille", "sched.growth_permille"


def thrashing(facts: Facts) -> Finding | None:
    again, computed = facts.grew("again_tokens"), facts.grew("computed_tokens")
    taken, loaded = facts.grew("preemptions"), facts.grew("fault_blocks") * facts.block_tokens
    share = min(1.0, again / computed) if computed else 0.0
    if taken < FEWEST or share < SHARE:
        return None
    active = [s.active for s in facts.window]
    fits = room(facts)
    evidence = [
        f"{taken:,} times in {facts.window_ns / 1e9:.0f} s a running context lost its frames; {again:,} tokens were brought back beside "
        f"{computed:,} computed ({share:.0%})" + (f", at most {loaded:,} of them from slower tiers" if loaded else ""),
        f"{facts.used_share:.0%} of the frames were in use at most; {max(active)} contexts were admitted at most, "
        f"{sum(active) / len(active):.0f} on average",
    ]
    remedies, settings = [], dict[str, Number]()
    if fits is not None:
        evidence.append(f"{facts.capacity_frames:,} frames hold {fits.contexts} contexts of {fits.tokens:,.0f} tokens")
    if facts.setting(_GUARD) >= 1000:
        evidence.append(f"the guard against it is off ({_GUARD} is {facts.setting(_GUARD)})")
        remedies.append(f"Turn the guard on: `attnix sysctl {_GUARD}=400`.")
        settings[_GUARD] = 400
    if not facts.setting(_GROWTH):
        evidence.append(f"nothing is kept for contexts to grow into ({_GROWTH} is 0)")
        remedies.append(f"Keep room for growth: `attnix sysctl {_GROWTH}=500`.")
        settings[_GROWTH] = 500
    if not remedies and fits is not None:
        remedies.append(f"Admit fewer at once: `attnix sysctl sched.max_admitted={fits.contexts}`.")
        settings["sched.max_admitted"] = fits.contexts
    if not remedies:
        remedies.append("Run fewer programs at once, or give the machine more frames (`attnix boot --hbm`).")
    return Finding(
        NAME, "Thrashing: running contexts take frames from one another, and work is done twice", share, "time",
        tuple(evidence), tuple(remedies), settings,
        {
            "preemptions": taken, "again_tokens": again, "computed_tokens": computed, "loaded_tokens": loaded,
            "active_most": max(active), "fits": fits.contexts if fits else 0,
        },
    )  # fmt: skip
