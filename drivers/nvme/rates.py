"""What the device's bandwidth turns out to be while it works."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from .engine import Operation, Verb
from .inventory import Measured

WINDOW_BYTES: Final = 16 << 20  # bytes after which a busy stretch is one measurement
RATE_BYTES: Final = 1 << 20  # less than this says nothing about bandwidth


class Rates:
    """Bandwidth over stretches in which the queue was never empty, an average that follows slowly.

    Not per transfer: transfers share the device, so each of them sees a part of its bandwidth.  A stretch with both reads
    and writes is no measurement of either.
    """

    def __init__(self, measured: Measured) -> None:
        self.measured = measured
        self.begin()

    def begin(self) -> None:
        """The queue was empty and is not any more."""
        self._began_ns = time.perf_counter_ns()
        self._read_bytes = self._written_bytes = 0

    def note(self, results: Sequence[tuple[Operation, int]], *, is_idle: bool) -> None:
        """All operations that have ended since the last call; is_idle: nothing else is under way.

        What is under way when a stretch begins and ends is counted as if it began and ended there, which evens out.
        """
        for operation, result in results:
            if operation.verb is Verb.READ:
                self._read_bytes += max(0, result)
            else:
                self._written_bytes += max(0, result)
        moved = self._read_bytes + self._written_bytes
        if moved < (RATE_BYTES if is_idle else WINDOW_BYTES):
            return
        if moved in (self._read_bytes, self._written_bytes):
            field = "read_bytes_s" if self._read_bytes else "write_bytes_s"
            rate = moved * 10**9 // max(1, time.perf_counter_ns() - self._began_ns)
            old = getattr(self.measured, field)
            self.measured = self.measured._replace(**{field: old + (rate - old) // 4 if old else rate})
        self.begin()
