"""Streams one answer to a terminal, and lets Ctrl-C end the answer rather than the program."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isnan
from types import FrameType
from typing import Annotated, TypeAlias

import typer

from attnix.syscalls import Context, Stream
from attnix.syscalls.client import GenerateOptions
from attnix.syscalls.types import MAX_STOP_CHARS, MAX_STOP_STRINGS, GenerateResult

MaxTokensOption: TypeAlias = Annotated[
    int, typer.Option("--max-tokens", "-n", help="Longest answer, in tokens.", min=0)
]
TemperatureOption: TypeAlias = Annotated[
    float, typer.Option("--temperature", "-t", help="0 is greedy.", min=0.0, max=100.0)
]
TopPOption: TypeAlias = Annotated[
    float, typer.Option(help="Sample among the likeliest tokens of this much mass.", min=1e-6, max=1.0)
]
SeedOption: TypeAlias = Annotated[int, typer.Option(help="Same seed, same sample.", min=0, max=2**64 - 1)]
StopOption: TypeAlias = Annotated[list[str] | None, typer.Option(help="End at this text. Repeatable.")]


def sampling(temperature: float, top_p: float, seed: int, stop: list[str] | None) -> GenerateOptions:
    """The command line's options as those of `generate`.  Error: BadParameter for what it would refuse of every prompt."""
    if isnan(temperature) or isnan(top_p):
        raise typer.BadParameter("--temperature and --top-p are numbers")
    if len(stop or ()) > MAX_STOP_STRINGS or not all(0 < len(each) <= MAX_STOP_CHARS for each in stop or ()):
        raise typer.BadParameter(f"--stop: at most {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_CHARS} characters each")
    return {"temperature": temperature, "top_p": top_p, "seed": seed, "stop": tuple(stop or ())}


def stream_answer(
    context: Context, max_tokens: int, options: GenerateOptions, write: Callable[[str], None]
) -> GenerateResult:
    """Generate, and hand on the text as it comes.  Ctrl-C ends it with reason `cancelled`."""
    return read_answer(context.stream(max_tokens, **options), write)


def read_answer(stream: Stream, write: Callable[[str], None]) -> GenerateResult:
    """The same of a generation that has begun."""
    with interrupt_cancels(stream):
        for note in stream:
            if note.text:
                write(note.text)
        return stream.result()


@contextmanager
def interrupt_cancels(stream: Stream) -> Iterator[None]:
    """The first Ctrl-C cancels the generation; a second one, before the daemon has answered, is KeyboardInterrupt.

    A handler that returns leaves the client's read going where it was, so no byte of the reply is lost.  Raising out of
    that read could lose some, and the connection with them.
    """
    pressed = False

    def cancel(signum: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        stream.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
