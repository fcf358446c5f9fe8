"""What holds the passes of tests/wire/served_daemon.py, so that nothing is a race between a test and the model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from attnix.syscalls import Client


class Turnstile:
    """`serve(turnstile=turnstile.path)`: passes of the model wait behind it until they are let on, whatever time that takes."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path: Final = str(path)
        self._seen = -1  # passes, when the last one was let on

    def let(self, passes: int) -> None:
        """Of those that wait or will wait, so many end."""
        self._turn(b"." * passes)

    def let_all(self) -> None:
        """None waits any more."""
        self._turn(b"o")

    def let_none(self) -> None:
        """They wait again."""
        self._turn(b"c")

    def step(self, client: Client, holds: Callable[[], bool]) -> bool:
        """Whether it holds; until then each pass that has begun ends, and at most one more."""
        if holds():
            return True
        begun = client.vmstat().counters.get("passes", 0)
        if begun != self._seen:
            self._seen = begun
            self.let(1)
        return False

    def _turn(self, written: bytes) -> None:
        fd = os.open(self.path, os.O_RDWR)  # both ends: a FIFO with one waits for the other
        try:
            os.write(fd, written)
        finally:
            os.close(fd)
