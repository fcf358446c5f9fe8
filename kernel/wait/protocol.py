"""What a wait policy is to the kernel: a function from measured numbers to keep, demote or drop.

A policy decides once, when a wait begins.  `keep_ns` is how long the context's frames are taken after everybody else's; when
that is over they are the next to go.  Without it:

    keep    it takes its turn among those that rest, as the last that was used
    demote  its frames are the next to go, and its blocks are copied down ahead, so that they can go at once (with a keep
            time: when that is over)
    drop    its frames are the next to go, and nothing is copied ahead

While a policy ranks those that rest, nobody is next because of a decision: what is due last and costs least is.
Frames are never given away for nothing: as long as nobody wants them, a context that was dropped finds everything where
it left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

S = 1_000_000_000


class Outlook(NamedTuple):
    """What is known when a wait begins.  Times in ns, -1: unknown.

    frames         that would be free if it went (others' share of them stays)
    others         frames of the contexts that run now: all of them wait while somebody's prompt is computed again
    expected_ns    until the answer
    distribution   how long such calls took, by size; empty: nothing is known
    out_ns         to copy its frames down; -1: to nowhere
    back_ns        to load them again
    compute_ns     to compute them again
    queue_ns       mean time that contexts which had lost their frames waited for new ones when their answer came
    memoryfulness  0..1: how far that wait delays its program (wait/memory.py)
    fixed_ns       sysctl wait.ttl_ms
    by_eta         its caller has said when the answer comes, and is believed
    """

    frames: int
    others: int
    expected_ns: int
    distribution: Sequence[float]
    out_ns: float
    back_ns: float
    compute_ns: float
    queue_ns: float
    memoryfulness: float
    fixed_ns: int
    by_eta: bool = False

    @property
    def rebuild_ns(self) -> float:
        """The cheaper way to have its frames back; 0: neither is known."""
        known = [ns for ns in (self.back_ns if self.out_ns >= 0 else -1.0, self.compute_ns) if ns >= 0]
        return min(known, default=0.0)


class Decision(NamedTuple):
    what: str  # keep | demote | drop
    keep_ns: int
    why: str


class WaitPolicy(Protocol):
    """ranks: while any caller has said when it is back, contexts that rest are taken by what they cost and when they are due,
    not by least recent use.
    fetches: what a context has lost is loaded again before its answer is due (returning.py)."""

    name: str
    ranks: bool
    fetches: bool

    def decide(self, outlook: Outlook) -> Decision: ...
