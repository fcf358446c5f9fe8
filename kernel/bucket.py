"""A token bucket (the leaky bucket as a meter of ITU-T I.371): work is measured after it is done, so a level may go below zero.

Over any time t at most `rate` * (t + 1 s) tokens and one pass are let through: the bucket holds what one second brings.
"""

from __future__ import annotations

from typing import Final

SECOND_NS: Final = 1_000_000_000


class Bucket:
    """rate: tokens per second.  level: of the bucket, in tokens times 1e-9, so that no fraction is ever lost."""

    __slots__ = ("_at_ns", "_spent", "level", "rate", "until_ns")

    def __init__(self, rate: int, spent: int, now_ns: int) -> None:
        self.rate = rate
        self.level = rate * SECOND_NS
        self.until_ns = 0  # when what is held may go on; 0: nothing is held
        self._spent = spent
        self._at_ns = now_ns

    def spend(self, spent: int, now_ns: int) -> None:
        """`spent` tokens have been computed since the beginning of time."""
        self._refill(now_ns)
        self.level -= (spent - self._spent) * SECOND_NS
        self._spent = spent

    def _refill(self, now_ns: int) -> None:
        self.level = min(self.rate * SECOND_NS, self.level + self.rate * (now_ns - self._at_ns))
        self._at_ns = now_ns

    def hold(self, now_ns: int) -> None:
        """Requires: level below 0.  Until it is 0 again."""
        self.until_ns = now_ns + -(self.level // self.rate)

    def used(self, now_ns: int) -> int:
        """Tokens of the last second's allowance that are used up."""
        self._refill(now_ns)
        return max(0, self.rate - self.level // SECOND_NS)
