"""CacheTTL (arXiv 2511.02230, there also Continuum): keep for the time that gains most, whatever the caller says.

    tau* = argmax over tau in {0} and the observed durations of  P(d <= tau) * B - tau
    B    = mean queueing delay of follow-ups that were evicted * memoryfulness + the time to reload or compute

Holding the context for tau costs tau; with probability P(d <= tau) it saves what its return would cost otherwise.  Where
holding gains nothing (tau* = 0), it lets go before those that merely rest.  With nothing observed durations are taken for
exponential with a mean of one second, and then tau* = ln B, with B in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from .protocol import Decision, Outlook, S


def benefit_ns(outlook: Outlook) -> float:
    """B."""
    return max(0.0, outlook.queue_ns) * outlook.memoryfulness + outlook.rebuild_ns


def best_ttl(durations: Sequence[float], benefit: float) -> float:
    """tau* for durations by size; of several that gain the same, the shortest."""
    best, best_gain, n = 0.0, 0.0, len(durations)
    for k, tau in enumerate(durations):
        if k + 1 < n and durations[k + 1] == tau:
            continue  # P(d <= tau) counts all that took that long
        gain = (k + 1) / n * benefit - tau
        if gain > best_gain:
            best, best_gain = float(tau), gain
    return best


def time_to_live(durations: Sequence[float], benefit: float) -> int:
    """The same where nothing was observed yet."""
    if durations:
        return int(best_ttl(durations, benefit))
    return int(log(benefit / S) * S) if benefit > S else 0


class CacheTtl:
    name = "cachettl"
    ranks = False
    fetches = False

    def decide(self, outlook: Outlook) -> Decision:
        benefit = benefit_ns(outlook)
        keep_ns = time_to_live(outlook.distribution, benefit)
        what = "demote" if outlook.out_ns >= 0 else "drop" if outlook.compute_ns >= 0 else "keep"
        return Decision(what, keep_ns, f"its return is worth {benefit / 1e6:.1f} ms")
