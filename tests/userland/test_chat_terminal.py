"""`attnix chat` on a real terminal (a pty): line editing, streaming, and Ctrl-C."""

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
from collections.abc import Iterator

import pytest

from .conftest import COMMAND, DEADLINE_S, Serve

CTRL_C, CTRL_D = b"\x03", b"\x04"
PROMPT = rb">"  # prompt_toolkit moves the cursor instead of writing the blank behind it
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


@pytest.fixture
def terminal(serve: Serve) -> Iterator[Terminal]:
    """A chat with a model that says the alphabet, slowly, for ever."""
    serve(script=[97 + n % 26 for n in range(2000)], pass_ms=10, window_tokens=2048, frames=600)
    made = Terminal([*COMMAND, "chat", "-n", "1500"])
    yield made
    made.close()


def test_ctrl_c_interrupts_the_answer_and_not_the_session(terminal: Terminal) -> None:
    terminal.read_until(PROMPT)
    terminal.type(b"hello\r")
    terminal.read_until(rb"abcde")
    terminal.type(CTRL_C)
    said = terminal.read_until(rb"\[interrupted\]")
    assert len(said) < 1500, "the answer was cut short"
    terminal.read_until(PROMPT)

    terminal.type(b"/stat\r")
    row = terminal.read_until(rb"cid 1: (\d+) tokens")
    tokens = int(row.split()[-2])
    assert len("user:hello;") + 5 <= tokens < 1500, "what was said until then stays in the context"

    terminal.type(b"and again\r")  # the same session, the same context
    terminal.read_until(rb"xyzabc")
    terminal.type(CTRL_C)
    terminal.read_until(rb"\[interrupted\]")
    terminal.read_until(PROMPT)
    terminal.type(b"/quit\r")
    assert terminal.wait() == 0


def test_ctrl_c_at_the_prompt_drops_the_line_only(terminal: Terminal) -> None:
    terminal.read_until(PROMPT)
    terminal.type(b"half a que" + CTRL_C)
    terminal.read_until(PROMPT)
    terminal.type(b"/stat\r")
    terminal.read_until(rb"cid 1: 0 tokens")
    terminal.read_until(PROMPT)  # between two prompts the terminal itself would take the Ctrl-D
    terminal.type(CTRL_D)
    assert terminal.wait() == 0


def test_killed_while_it_answers(terminal: Terminal) -> None:
    """The rig checks that its frames are back."""
    terminal.read_until(PROMPT)
    terminal.type(b"hello\r")
    terminal.read_until(rb"abc")
    terminal.process.kill()
    assert terminal.process.wait(DEADLINE_S) == -9
