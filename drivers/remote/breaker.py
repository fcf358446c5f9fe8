"""The circuit breaker: after failures in a row nobody waits for a store that does not answer (Nygard, Release It!, ch. 5).

    closed      calls go through; `limit` failures in a row open it
    open        calls are refused at once; when the back-off is over the *driver* asks the store, no call pays for that
    half open   the store answered the driver: one call goes through as a trial, the others are refused;
                its success closes the breaker, its failure opens it again with twice the back-off

Time is an argument: nothing here reads a clock.
"""

from __future__ import annotations

from enum import Enum


class BreakerState(Enum):
    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class Breaker:
    """One breaker for one store.

    failures     calls that failed since the last one that did not
    opened       times it has opened
    retry_at_ns  while open: when the store may be asked again
    """

    def __init__(self, limit: int, backoff_first_ns: int, backoff_cap_ns: int) -> None:
        self.state = BreakerState.CLOSED
        self.failures = 0
        self.opened = 0
        self.retry_at_ns = 0
        self._limit = limit
        self._first_ns = backoff_first_ns
        self._cap_ns = backoff_cap_ns
        self._backoff_ns = backoff_first_ns
        self._on_trial = False

    def admit(self) -> bool:
        """Whether a call may go to the store now.  One that may must end in `succeed` or `fail`."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.OPEN or self._on_trial:
            return False
        self._on_trial = True
        return True

    def succeed(self) -> None:
        """A call was answered; whatever the answer was, the store is there."""
        self.failures = 0
        if self.state is BreakerState.HALF_OPEN and self._on_trial:
            self.state = BreakerState.CLOSED
            self._backoff_ns = self._first_ns
        self._on_trial = False

    def fail(self, now_ns: int) -> None:
        """A call was not answered: no connection, no answer in time, or nonsense."""
        self.failures += 1
        self._on_trial = False
        if self.state is BreakerState.HALF_OPEN:
            self._backoff_ns = min(2 * self._backoff_ns, self._cap_ns)
            self._open(now_ns)
        elif self.state is BreakerState.CLOSED and self.failures >= self._limit:
            self._open(now_ns)

    def can_probe(self, now_ns: int) -> bool:
        """Whether it is time for the driver to ask the store whether it is back."""
        return self.state is BreakerState.OPEN and now_ns >= self.retry_at_ns

    def probe_succeeded(self) -> None:
        if self.state is BreakerState.OPEN:
            self.state = BreakerState.HALF_OPEN
            self._on_trial = False

    def probe_failed(self, now_ns: int) -> None:
        if self.state is BreakerState.OPEN:
            self._backoff_ns = min(2 * self._backoff_ns, self._cap_ns)
            self.retry_at_ns = now_ns + self._backoff_ns

    def _open(self, now_ns: int) -> None:
        self.state = BreakerState.OPEN
        self.opened += 1
        self.retry_at_ns = now_ns + self._backoff_ns
