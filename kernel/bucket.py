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


class Meter:
    """Whether a rate was had lately.  What it is behind or ahead is at most what an eighth of a second brings: who did nothing for a
    while has nothing saved up, and who had more owes nothing for long."""

    __slots__ = ("_at_ns", "_behind", "_had", "_spent", "rate")

    def __init__(self, rate: int, spent: int, now_ns: int) -> None:
        self.rate = rate
        self._behind = 0  # in tokens times 1e-9
        self._had = 0  # of what the last second brought, likewise
        self._spent = spent
        self._at_ns = now_ns

    def met(self, spent: int, now_ns: int) -> bool:
        """`spent` tokens have been computed since the beginning of time."""
        due, new = self.rate * (now_ns - self._at_ns), (spent - self._spent) * SECOND_NS
        most = self.rate * SECOND_NS
        self._behind = max(-most // 8, min(most // 8, self._behind + due - new))
        self._had = min(most, max(0, self._had - due) + new)
        self._spent, self._at_ns = spent, now_ns
        return self._behind <= 0

    def used(self, spent: int, now_ns: int) -> int:
        """Tokens of what the last second brought, at most all of them."""
        self.met(spent, now_ns)
        return -(-self._had // SECOND_NS)
