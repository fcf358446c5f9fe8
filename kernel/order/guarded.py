"""A third party's scheduling policy, which may raise what it likes: as evict/guarded.py has it for eviction."""

from __future__ import annotations

from collections.abc import Callable

from .protocol import Forecast, Key, OrderPolicy, Waiting

Failed = Callable[[str, str, Exception], None]  # the policy's name, when, what


class Guarded(OrderPolicy):
    """`factory` makes the policy that was registered as `name`.  At its first fault `failed` is told, and from then on all
    jobs are equal to it, so that they go by place."""

    def __init__(self, name: str, factory: Callable[[], OrderPolicy], failed: Failed) -> None:
        self.name = name  # type: ignore[misc]
        self._failed = failed
        self._policy: OrderPolicy | None = None
        try:
            policy = factory()
            self.looks, self.attains = bool(policy.looks), bool(policy.attains)  # type: ignore[misc]
            self.plain, self.refuses = bool(policy.plain), bool(policy.refuses)  # type: ignore[misc]
            self._policy = policy
        except Exception as error:
            failed(name, "when it was made", error)

    def key(self, job: Waiting) -> Key:
        if self._policy is None:
            return ()
        try:
            key = tuple(self._policy.key(job))
            if not all(isinstance(part, (int, float)) for part in key):
                raise TypeError(f"{key!r} is no tuple of numbers")  # where it is compared it would raise, too
            return key
        except Exception as error:
            self._fail("in key", error)
            return ()

    def late_ns(self, job: Waiting, forecast: Forecast) -> int:
        if self._policy is None:
            return 0
        try:
            return int(self._policy.late_ns(job, forecast))
        except Exception as error:
            self._fail("in late_ns", error)
            return 0

    def _fail(self, when: str, error: Exception) -> None:
        self._policy = None
        self._failed(self.name, when, error)
