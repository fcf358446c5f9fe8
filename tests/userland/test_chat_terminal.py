"""`attnix chat` on a real terminal (a pty): line editing, streaming, and Ctrl-C."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .conftest import COMMAND, DEADLINE_S, Serve
from .terminal import CTRL_C, CTRL_D, Terminal

PROMPT = rb">"  # prompt_toolkit moves the cursor instead of writing the blank behind it


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
