"""How much it matters in which order programs go on: the memoryfulness of CacheTTL (arXiv 2511.02230).

    eta = -Corr(k, N - k)   over all programs that ended and every turn k of their N

When all programs have equally many turns, one that is far on is nearly done, and to delay it delays the end of a program:
eta is 1.  When their number is geometric, how far one is on says nothing about what is left: eta is 0.
"""

from __future__ import annotations

from typing import Final

_KEEP: Final = 0.99  # weight that a program keeps when the next one ends
_ENOUGH: Final = 3.0  # weighted programs before it is believed


class Memory:
    """of: the memoryfulness, 0..1; 1 until something is known."""

    def __init__(self) -> None:
        self._programs = 0.0
        self._sums = [0.0] * 6  # n, k, r, k*k, r*r, k*r with r = N - k

    def ended(self, turns: int) -> None:
        """A program of so many turns is over."""
        if turns < 1:
            return
        n = float(turns)
        k, kk = n * (n + 1) / 2, n * (n + 1) * (2 * n + 1) / 6
        r, rr = n * (n - 1) / 2, (n - 1) * n * (2 * n - 1) / 6
        new = (n, k, r, kk, rr, n * k - kk)
        self._programs = self._programs * _KEEP + 1
        self._sums = [old * _KEEP + more for old, more in zip(self._sums, new, strict=True)]

    @property
    def of(self) -> float:
        n, k, r, kk, rr, kr = self._sums
        if self._programs < _ENOUGH:
            return 1.0
        spread = (n * kk - k * k) * (n * rr - r * r)
        if spread <= 1e-9 * n**4:
            return 1.0
        return float(min(1.0, max(0.0, -(n * kr - k * r) / spread**0.5)))
