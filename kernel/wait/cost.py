"""The default: the least of three wastes (InferCept, arXiv 2402.01869), in frames times ns.

    keep   its frames, for as long as they are kept: the time to live tau* of cachettl.py, over what is known of this call;
           when it is not back by then, the cheaper of the other two on top
    demote its frames while they are copied out and back: nobody can use them meanwhile
    drop   its frames, and those of everybody who runs, while it is computed again

What a tool's past says of its next call is little.  So whatever the wastes say, a context keeps its frames first for as long as
it would take to have them back, and for wait.ttl_ms at least: whoever holds them until they have cost what letting go of them
costs has never wasted more than twice what one who knew the answer's time would have (ski rental; Karlin, Manasse, Rudolph
and Sleator, "Competitive snoopy caching", Algorithmica 3, 1988).

The context of a caller who has said when it will be back, and is believed, is kept for the same time, and with some slack until
then, when it is due within that.  One that is due later stays in line by its due time: the line knows better than a fixed
time who goes first (docs/agents.md has the numbers).
"""

from __future__ import annotations

from math import exp
from typing import Final

from .cachettl import benefit_ns, time_to_live
from .protocol import Decision, Outlook, S

SLACK: Final = 1.2  # of a believed eta: how much later an answer may come and still find the frames kept


def kept_ns(outlook: Outlook, tau: float) -> tuple[float, float]:
    """(mean time that it is held when it is given up after tau, probability of that)."""
    n = len(outlook.distribution)
    if not n:
        late = exp(-tau / S)  # the prior of time_to_live
        return S * (1 - late), late
    late = sum(1 for d in outlook.distribution if d > tau)
    return sum(min(d, tau) for d in outlook.distribution) / n, late / n


class Cost:
    name = "cost"
    ranks = True
    fetches = True

    def decide(self, outlook: Outlook) -> Decision:
        frames = outlook.frames
        swap = frames * (outlook.out_ns + max(0.0, outlook.back_ns)) if outlook.out_ns >= 0 else float("inf")
        drop = (frames + outlook.others) * outlook.compute_ns if outlook.compute_ns >= 0 else float("inf")
        other, least = ("demote", swap) if swap <= drop else ("drop", drop)
        first = max(outlook.fixed_ns, int(outlook.rebuild_ns)) if outlook.fixed_ns else 0
        if outlook.by_eta:
            first = max(first, int(outlook.expected_ns * SLACK)) if outlook.expected_ns <= first else 0
        if least == float("inf"):
            return Decision("keep", first, "what its frames cost is not known yet")
        tau = time_to_live(outlook.distribution, benefit_ns(outlook))
        held, late = kept_ns(outlook, tau)
        keep = frames * held + late * least
        numbers = f"keep {keep / 1e6:.1f}, demote {swap / 1e6:.1f}, drop {drop / 1e6:.1f} frame-ms"
        if tau > 0 and keep < least:
            other, first = "keep", first if outlook.by_eta else max(first, tau)
        when = f"kept for {first / 1e6:.1f} ms first" if first else "in line by when it is due, which is known"
        return Decision(other, first, f"{numbers}; {when}")
