"""Concurrency tuned on an empty cache: as many contexts at once as fit while each is as long as its prompt.

With nothing in memory any number looks right.  An hour later contexts are as long as they get, and the same number wants more
frames than there are: they wait, and take them from one another.
"""

from __future__ import annotations

from .facts import Facts
from .finding import Finding, Number
from .room import room

NAME = "concurrency"
OVER = 1.25  # times as many as fit
SHORT = 0.1  # of the time somebody waited for frames


def concurrency(facts: Facts) -> Finding | None:
    fits = room(facts)
    if fits is None:
        return None
    set_to = facts.setting("sched.max_admitted")
    active = max((s.active for s in facts.window), default=0)
    unguarded = not facts.setting("sched.growth_permille") and facts.setting("load.thrash_high_permille") >= 1000
    if not set_to and not unguarded:
        return None  # the kernel finds the number itself
    at_once = min(set_to, active) if set_to else active
    if at_once < OVER * fits.contexts or not (facts.short_share >= SHORT or facts.grew("preemptions")):
        return None
    said = f"sched.max_admitted is {set_to}" if set_to else "nothing limits how many run"
    settings: dict[str, Number] = {
        "sched.growth_permille": max(500, facts.setting("sched.growth_permille")),
        "load.thrash_high_permille": min(400, facts.setting("load.thrash_high_permille")),
        "sched.max_admitted": 0,
    }
    return Finding(
        NAME, "More contexts run at once than memory holds when they have grown: the number fits an empty cache",
        (1 - fits.contexts / at_once) * max(facts.short_share, SHORT), "frames",
        (
            f"{said}, and up to {active} were admitted",
            f"a context begins with {fits.prompt_frames:.1f} frames and ends with {fits.frames:.1f}: {facts.capacity_frames:,} frames hold "
            f"{fits.at_first} that begin, and {fits.at_end} that end",
            f"for {facts.short_share:.0%} of the last {facts.window_ns / 1e9:.0f} s somebody with work waited for frames",
        ),
        (
            "Let the kernel find the number, from how long answers get here: `attnix sysctl sched.growth_permille=500`, "
            "`attnix sysctl load.thrash_high_permille=400`, `attnix sysctl sched.max_admitted=0`.",
            f"If it has to be a number, {fits.contexts} for as long as prompts and answers are what they are; measure it when the cache is full.",
        ),
        settings,
        {
            "max_admitted": set_to, "active_most": active, "fits": fits.contexts, "fits_at_first": fits.at_first,
            "frames_at_first": round(fits.prompt_frames, 2), "frames_at_end": round(fits.frames, 2),
        },
    )  # fmt: skip
