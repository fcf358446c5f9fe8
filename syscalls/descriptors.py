"""File descriptors, of which every connection takes one: as many as the system allows, and some that no connection gets.

A process without a free one can open no file, start no driver, and not come back to what it has lost.
"""

from __future__ import annotations

import resource
import time
from typing import Final

SPARE: Final = 32  # for everything that is no client's connection
_AGAIN_S: Final = 60.0  # between two lines of the log about it


def raise_limit() -> None:
    """Take what the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Shortage:
    """Says when there are too few left for another connection."""

    def __init__(self) -> None:
        self._told_s = float("-inf")

    def at(self, fd: int) -> str:
        """Why the connection with this descriptor cannot be had; "": it can.  The lowest free number is taken, so a high one
        says that those below are in use."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY or fd < limit - SPARE:
            return ""
        return f"too many connections: this process may have {limit} descriptors (ulimit -n, LimitNOFILE=)"

    def is_news(self) -> bool:
        """Whether the log has not been told for a while; it is now."""
        now = time.monotonic()
        if now < self._told_s + _AGAIN_S:
            return False
        self._told_s = now
        return True
