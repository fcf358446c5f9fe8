"""The gates: one shared int64 array through which a load tells a waiting pass how far it has come (kernel/tag.py).

Stores and loads of one aligned int64 are atomic on every machine we run on; whoever fills frames stores after the bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Final

from attnix.kernel.tag import GATE_FAILED, GATES, gate_value

from .memfd import create_memfd, map_shared

GATES_BYTES: Final = 8 * GATES


class Gates:
    """The daemon's end: owns the memfd, and closes the gates of loads whose driver will not.

    fd  to hand to drivers
    """

    def __init__(self) -> None:
        self.fd = create_memfd("attnix-gates", GATES_BYTES)
        self._map: mmap.mmap = map_shared(self.fd)
        self._values = memoryview(self._map).cast("q")

    def value(self, gate: int) -> int:
        return self._values[gate]

    def fail(self, gate: int, ticket: int) -> None:
        """A load will not arrive: passes that wait for it fail.  Nothing happens when the gate serves a later load."""
        if self._values[gate] >> 10 <= ticket:
            self._values[gate] = gate_value(ticket, GATE_FAILED)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._values.release()
            with contextlib.suppress(BufferError):
                self._map.close()
