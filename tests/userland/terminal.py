"""A command on a terminal of its own (a pty), for tests of what people type."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import subprocess
import termios
import time

from .conftest import DEADLINE_S

CTRL_C, CTRL_D = b"\x03", b"\x04"
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        self._fd, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C becomes SIGINT for the terminal's owner
        )  # fmt: skip
        os.close(theirs)
        self.seen = b""

    def type(self, data: bytes) -> None:
        os.write(self._fd, data)

    def read_until(self, pattern: bytes) -> bytes:
        """What is shown up to the pattern, without escape sequences."""
        end = time.monotonic() + DEADLINE_S
        while True:
            plain = _ESCAPES.sub(b"", self.seen)
            if found := re.search(pattern, plain):
                self.seen = plain[found.end() :]
                return plain[: found.end()]
            left = end - time.monotonic()
            assert left > 0, f"no {pattern!r} in {plain!r}"
            if select.select([self._fd], [], [], left)[0]:
                try:
                    data = os.read(self._fd, 4096)
                except OSError:  # the other side was closed
                    data = b""
                assert data, f"it ended without {pattern!r}: {plain!r}"
                self.seen += data

    def wait(self) -> int:
        """Its exit status; what it still says is read, or it could not end."""
        end = time.monotonic() + DEADLINE_S
        with contextlib.suppress(OSError):  # the other side was closed
            while select.select([self._fd], [], [], max(0.0, end - time.monotonic()))[0] and os.read(self._fd, 4096):
                pass
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)
