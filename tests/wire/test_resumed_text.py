"""Text and stop strings of a generation that is cut and goes on: every character once, nothing of a stop string.

Tokens are bytes and the model is a script, so that what must come out is written here and nowhere computed.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnix.syscalls import connect
from attnix.syscalls.client import Client

from .turnstile import Turnstile

DEADLINE_S = 20.0
SAYS = "Grüße, \U0001f600 D DE DEF and then DEFGHIJ tail that nobody sees"
BEFORE = SAYS[: SAYS.index("DEFGHIJ")]


class Cut:
    """A daemon whose model says SAYS, one byte a pass, and that can be killed and started again."""

    def __init__(self, launch: Callable[..., subprocess.Popen[str]], directory: Path, turnstile: Turnstile) -> None:
        self._launch = launch
        self.turnstile = turnstile
        self.path = str(directory / "run" / "t.sock")
        self._state = str(directory / "state")
        self.process: subprocess.Popen[str] | None = None

    def start(self, *, stepped: bool = False, **more: Any) -> None:
        """stepped: passes wait at the turnstile"""
        options = {"window_tokens": 512, "frames": 512, "script": list(SAYS.encode()), **more}
        if stepped:
            options["turnstile"] = self.turnstile.path
        self.process = self._launch(self.path, state=self._state, **options)
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def end(self, signum: int) -> None:
        assert self.process is not None and self.process.stdout is not None
        self.process.send_signal(signum)
        if signum == signal.SIGTERM:
            self.turnstile.let(1)  # the pass that has begun: an orderly end waits for it
        self.process.wait(DEADLINE_S)
        self.process.stdout.close()
        self.process = None

    def connect(self, **options: Any) -> Client:
        return connect(self.path, timeout=DEADLINE_S, **options)


@pytest.fixture
def cut(launch: Callable[..., subprocess.Popen[str]], tmp_path: Path, turnstile: Turnstile) -> Iterator[Cut]:
    made = Cut(launch, tmp_path, turnstile)
    yield made
    if made.process is not None:
        made.end(signal.SIGKILL)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("at", [3, 10, 18, 22], ids=lambda at: f"after {at} bytes")
def test_text_is_whole_through_the_death_of_the_daemon(
    cut: Cut, until: Callable[..., None], at: int, signum: int
) -> None:
    """Cut inside the u-umlaut, inside the smiley, and while "DE" is withheld because a stop string may have begun."""
    cut.start(stepped=True)
    with cut.connect(resume=DEADLINE_S) as client:
        context = client.alloc_context()
        context.append(tokens=[1])
        context.publish("n")
        cut.turnstile.let(1)
        until(lambda: context.stat().cached_tokens == 1, "the prompt")
        stream = context.stream(200, stop="DEFGHIJ")
        cut.turnstile.let(at)  # a byte each
        text, tokens = "", 0
        thread = None
        for note in stream:
            assert note.offset == tokens or not note.tokens
            text += note.text
            tokens += len(note.tokens) // 4
            if tokens >= at and thread is None:
                cut.end(signum)
                thread = threading.Thread(target=cut.start)
                thread.start()
        assert thread is not None
        thread.join()
        result = stream.result()
        assert (text, result.text, result.reason) == (BEFORE, BEFORE, "stop")
        assert client.reconnects == 1
        assert context.stat().tokens == 1 + len(BEFORE.encode()), "what came after the stop string is nobody's"


def test_a_stop_string_ends_a_generation_that_nobody_listens_to(cut: Cut, until: Callable[..., None]) -> None:
    cut.start(pass_ms=1)
    first = cut.connect()
    context = first.alloc_context()
    context.append(tokens=[1])
    context.publish("n")
    next(iter(context.stream(200, stop="DEFGHIJ")))
    first.close()
    with cut.connect() as client:
        until(lambda: client.names().rows[0].state == "idle", "its end")
        assert client.names().rows[0].tokens == 1 + len(BEFORE.encode())
        stream = client.open("n").reattach()
        assert "".join(note.text for note in stream) == BEFORE
        assert (stream.result().text, stream.result().reason) == (BEFORE, "stop")


def test_logprobs_of_a_generation_that_goes_on(cut: Cut) -> None:
    """While the daemon lives they are all there; what was sampled before its death has none, and none is made up."""
    cut.start(stepped=True)
    with cut.connect(resume=DEADLINE_S) as client:
        cut.turnstile.let_all()
        context = client.alloc_context()
        context.append(tokens=[1])
        context.publish("n")
        whole = context.fork()[0].generate(12, logprobs=2).logprobs
        cut.turnstile.let_none()
        stream = context.stream(12, logprobs=2)
        cut.turnstile.let(3)
        notes = iter(stream)
        got = len(next(notes).tokens) // 4
        client._socket.shutdown(2)  # only the connection breaks
        cut.turnstile.let_all()
        assert sum(len(note.logprobs) for note in notes) + got >= 12
        assert stream.result().logprobs == whole
        cut.turnstile.let_none()
        stream = context.stream(12, logprobs=2)
        cut.turnstile.let(3)
        next(iter(stream))
        cut.end(signal.SIGKILL)
        cut.start()
        result = stream.result()
        unknown = [entry for entry in result.logprobs if entry[1:] == (b"", b"")]
        assert 0 < len(unknown) < 12 == len(result.logprobs)
        assert all(entry[0] != entry[0] for entry in unknown), "not a number"
