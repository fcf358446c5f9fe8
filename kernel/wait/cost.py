"""The default: the least of three wastes (InferCept, arXiv 2402.01869), in frames times ns.

    keep   its frames, for as long as they are kept: the time to live tau* of cachettl.py, over what is known of this call;
           when it is not back by then, the cheaper of the other two on top
    demote its frames while they are copied out and back: nobody can use them meanwhile
    drop   its frames, and those of everybody who runs, while it is computed again

What is unknown is not guessed: without measured costs a context stays in line by its due time.  So does one whose caller
has said when it will be back, and is believed: the line knows better than a fixed time who goes first, and a keep would
hold frames beside others that are due sooner (docs/agents.md has the numbers).
"""

from __future__ import annotations

from math import exp

from .cachettl import benefit_ns, time_to_live
from .protocol import Decision, Outlook, S


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
        if least == float("inf"):
            return Decision("keep", 0, "what its frames cost is not known yet")
        tau = time_to_live(outlook.distribution, benefit_ns(outlook))
        held, late = kept_ns(outlook, tau)
        keep = frames * held + late * least
        numbers = f"keep {keep / 1e6:.1f}, demote {swap / 1e6:.1f}, drop {drop / 1e6:.1f} frame-ms"
        if tau > 0 and keep < least and outlook.by_eta:
            return Decision("keep", 0, f"{numbers}; in line by when it is due, which is known")
        if tau > 0 and keep < least:
            return Decision("keep", tau, f"{numbers}; for {tau / 1e6:.1f} ms")
        return Decision(other, 0, numbers)
