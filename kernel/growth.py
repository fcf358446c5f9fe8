"""How long generations get here, learnt, and what those that run will still grow by.

An admission that fills memory to the brim is paid back in preemptions: the contexts that decode grow, and the newest loses
what it has.  So an admission leaves what the running ones, and it, will probably need at the worst moment to come.  Memory
is worst just before somebody ends, since an end gives its frames back: sorted by what is left of them, longest first, when
the i-th ends the i longest are there and have grown by what was left of it (the Past-Future scheduler, arXiv 2507.10150,
section 3; there with samples, here with a quantile, so that the same history gives the same answer).

Lengths are learnt as a survival curve (Kaplan & Meier, JASA 1958): a generation that was cut off (`max_tokens`, cancelled)
says that it would have been longer, not that it was short.  Counts are forgotten exponentially.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import ceil
from typing import Final, NamedTuple

_KEEP: Final = 0.998  # weight that an end keeps when the next one is seen: the last 500 or so count
_ENOUGH: Final = 16.0  # weighted ends before the curve is believed
_SMALL: Final = 16  # lengths below this have a bin each ...
_PER_OCTAVE: Final = 8  # ... above it so many share a doubling
_OCTAVES: Final = 20
_BINS: Final = _SMALL + _PER_OCTAVE * _OCTAVES
_RESCALE: Final = 1e12


def bin_of(tokens: int) -> int:
    """The bin of a length."""
    if tokens < _SMALL:
        return max(0, tokens)
    octave = tokens.bit_length() - 5  # 0 for 16..31
    within = (tokens >> (octave + 1)) - _PER_OCTAVE  # 16..31 -> 0..7
    return min(_BINS - 1, _SMALL + _PER_OCTAVE * octave + within)


def last_of(number: int) -> int:
    """The largest length in that bin."""
    if number < _SMALL:
        return number
    octave, within = divmod(number - _SMALL, _PER_OCTAVE)
    return ((_PER_OCTAVE + within + 1) << (octave + 1)) - 1


class Lengths:
    """The distribution of generated lengths."""

    def __init__(self) -> None:
        self._ended = [0.0] * _BINS  # ended by themselves
        self._cut = [0.0] * _BINS
        self._one = 1.0  # weight of the next one; older ones keep theirs, which is the same as forgetting them
        self._total = 0.0
        self._falling: list[float] | None = None  # minus the survival curve, per bin: ascending
        self._longest = 0

    def seen(self, tokens: int, cut: bool) -> None:
        """A generation is over after so many tokens; cut: it might have gone on."""
        (self._cut if cut else self._ended)[bin_of(tokens)] += self._one
        self._total += self._one
        self._longest = max(tokens, int(self._longest * _KEEP))
        self._one /= _KEEP
        self._falling = None
        if self._one > _RESCALE:
            self._ended = [w / self._one for w in self._ended]
            self._cut = [w / self._one for w in self._cut]
            self._total /= self._one
            self._one = 1.0

    def known(self) -> bool:
        return self._total >= _ENOUGH * self._one

    def more(self, done: int, most: int, quantile: float) -> int:
        """Tokens that a generation with `done` of at most `most` will still grow by; no more than that with probability
        `quantile`.  0 as long as too little is known.  One that is older than all that were seen is expected to get as old
        again, as lifetimes with a heavy tail do."""
        left = most - done
        if left <= 0 or not self.known():
            return 0
        if self._falling is None:
            self._falling = self._curve()
        alive = -self._falling[bin_of(done) - 1] if done > 0 else 1.0  # of those that got this far
        at = bisect_left(self._falling, -(1.0 - quantile) * alive - 1e-12) if alive > 1e-9 else _BINS
        end = last_of(at) if at < _BINS else self._longest
        if end <= done:
            end = 2 * max(done, 1)
        return min(left, end - done)

    def _curve(self) -> list[float]:
        """Minus the probability to get longer than each bin."""
        at_risk = self._total
        survival = 1.0
        falling = []
        for ended, cut in zip(self._ended, self._cut, strict=True):
            if ended > 0 and at_risk > 0:
                survival *= max(0.0, 1.0 - ended / at_risk)
            at_risk -= ended + cut
            falling.append(-survival)
        return falling


class Need(NamedTuple):
    """Of one admitted context."""

    frames: int  # that go when it ends
    room_tokens: int  # in its last frame
    more_tokens: int  # that it will still grow by; the last of them needs no frame


def reserve(active: Iterable[Need], joining: Need, block_tokens: int) -> int:
    """Frames that must stay available when a context joins the active ones, so that none of them has to be preempted; its own
    are not part of that.  Where blocks are begun by different contexts at different tokens, a last block is half full."""
    contexts = sorted([*active, joining], key=lambda c: -c.more_tokens)
    held = sum(c.frames for c in contexts)
    peak = staying = 0.0
    for number, (frames, room, more) in enumerate(contexts, 1):
        if more <= 0:
            break
        staying += frames + ((block_tokens - 1) / 2 - 1 - room) / block_tokens
        peak = max(peak, staying + number * more / block_tokens)
    return max(0, ceil(peak - held - 1e-9))
