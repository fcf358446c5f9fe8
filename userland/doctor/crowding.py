"""A cache that crowds out live contexts: frames that nobody runs in, while others wait for some.

What no context maps is given up as soon as somebody wants it, so by itself a cache is in nobody's way here.  What may be: pins,
frames that are kept for the answer of a tool, and a cache that has to be copied down before its frames can be had.
"""

from __future__ import annotations

from .facts import Facts
from .finding import Finding, Number

NAME = "crowding"
SHORT = 0.1  # of the time somebody waited for frames
HELD = 0.15  # of the frames
COPIES = 8  # times that somebody waited for a copy


def crowding(facts: Facts) -> Finding | None:
    capacity = facts.capacity_frames
    if facts.short_share < SHORT or not capacity:
        return None
    pinned = sum(h.pinned_frames for h in facts.holdings)
    kept = sum(h.tool_frames for h in facts.holdings)
    cache = sum(h.cache_frames for h in facts.holdings)
    running = sum(h.running_frames for h in facts.holdings)
    copies = facts.grew("copy_waits")
    held, evidence, remedies, settings = 0, list[str](), list[str](), dict[str, Number]()
    if pinned >= HELD * capacity:
        held += pinned
        evidence.append(f"{pinned:,} frames are pinned by contexts without work")
        most = facts.setting("pin.share_permille")
        settings["pin.share_permille"] = max(50, most // 4)
        remedies.append(
            f"Unpin what is not wanted soon (`attnix unpin CID`), or allow less: pin.share_permille is {most}, try "
            f"`attnix sysctl pin.share_permille={settings['pin.share_permille']}`."
        )
    if kept >= HELD * capacity:
        held += kept
        evidence.append(
            f"{kept:,} frames wait with their contexts for tools (wait.policy {facts.sysctl.get('wait.policy', '?')})"
        )
        remedies.append(
            "Let them go sooner: `attnix sysctl wait.policy=cost`, or with wait.policy=ttl a smaller wait.ttl_ms; and say a truthful "
            "eta in wait_tool, so that they come back in time."
        )
        settings["wait.policy"] = "cost"
    if copies >= COPIES and cache >= HELD * capacity:
        held += cache
        evidence.append(
            f"{cache:,} frames are cache, and {copies:,} times somebody waited until it was copied to a slower tier "
            f"(tier.write is {facts.sysctl.get('tier.write', '?')})"
        )
        remedies.append("Copy at the end of turns, not when frames are wanted: `attnix sysctl tier.write=through`.")
        settings["tier.write"] = "through"
    if not evidence:
        return None
    waiting = max((s.queued for s in facts.window), default=0)
    evidence.insert(
        0,
        f"for {facts.short_share:.0%} of the last {facts.window_ns / 1e9:.0f} s somebody with work waited for frames (up to {waiting} "
        f"contexts), while contexts that run hold {running:,} of {capacity:,}",
    )
    return Finding(
        NAME, "Frames that nobody runs in crowd out contexts with work", facts.short_share * min(1.0, held / capacity), "frames",
        tuple(evidence), tuple(remedies), settings,
        {
            "pinned_frames": pinned, "tool_frames": kept, "cache_frames": cache, "running_frames": running,
            "capacity_frames": capacity, "short_permille": round(1000 * facts.short_share), "copy_waits": copies,
        },
    )  # fmt: skip
