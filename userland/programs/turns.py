"""The turns of a conversation, and contexts made of them: how a chat goes on when its window is full."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from attnix.syscalls import Client, Context
from attnix.syscalls.exceptions import InvalidArgument, TooBig


class Turn(NamedTuple):
    """A question and, once it has come, its answer.  start: tokens before it."""

    start: int
    question: str
    answer: str = ""


def newest(turns: Sequence[Turn], length: int, most_tokens: int) -> int:
    """The first of the newest turns that together have at most so many tokens, in a context of `length`."""
    first = len(turns)
    while first and length - turns[first - 1].start <= most_tokens:
        first -= 1
    return first


def opened(context: Context, system_prompt: str) -> int:
    """Append a system prompt to an empty context; its tokens.  0: some templates show one with the first question only (`asked`)."""
    if not system_prompt:
        return 0
    try:
        return context.append(messages=[("system", system_prompt)]).tokens
    except InvalidArgument:
        return 0


def asked(question: str, system_prompt: str, start: int) -> list[tuple[str, str]]:
    """A question at `start`, and the system prompt before it, if nothing is there yet."""
    return [*([("system", system_prompt)] if system_prompt and not start else []), ("user", question)]


def context_of(system: Client, system_prompt: str, turns: Sequence[Turn], name: str) -> tuple[Context, list[Turn]]:
    """A new context with these turns, and the turns with where each starts in it.  It takes `name` over, if there is one.

    Error: TooBig, and the system's own; then there is no new context.
    """
    placed: list[Turn] = []
    with ExitStack() as undo:
        context = undo.enter_context(system.alloc_context())
        at = opened(context, system_prompt)
        for turn in turns:
            placed.append(turn._replace(start=at))
            said = [*asked(turn.question, system_prompt, at), *([("assistant", turn.answer)] if turn.answer else [])]
            at = context.append(messages=said).tokens
        if name:
            context.publish(name, replace=True)
        undo.pop_all()
    return context, placed


def shortened(
    system: Client, system_prompt: str, turns: Sequence[Turn], text: str, name: str
) -> tuple[Context, list[Turn]]:
    """As `context_of` with these turns and a new one, or with the new one alone if together they are too long.

    Error: TooBig when even alone it has no room.
    """
    last = Turn(0, text)
    try:
        return context_of(system, system_prompt, [*turns, last], name)
    except TooBig:
        if not turns:
            raise
    return context_of(system, system_prompt, [last], name)
