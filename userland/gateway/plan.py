"""From a conversation to the tokens that its context still lacks.  Runs in the thread of Words."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from attnix.syscalls.text import Piece, TemplateError, TextModel, piece_tokens, pieces

from .ask import Ask
from .conversations import Conversation
from .errors import ApiError
from .families import Family


class Plan(NamedTuple):
    """
    keep     tokens of the context's log that stay
    tokens   to be appended behind them
    pieces   what the template wrote around the replies that the context holds
    resumed  the context goes on as it is: nothing of it was rendered anew
    trimmed  tokens cut out
    marks    length of each beginning that is to be pinned
    """

    keep: int
    tokens: list[int]
    pieces: list[Piece]
    resumed: bool
    trimmed: int
    marks: tuple[int, ...]


def plan(
    model: TextModel, family: Family, ask: Ask, found: Conversation | None, same: bool, room: int, block_tokens: int
) -> Plan:
    """What to do for `ask` in the context of `found`, or in a new one.

    same  the messages that `found` holds are those of `ask`, to the letter
    room  tokens that a prompt may have before it is trimmed
    Error: TemplateError; ApiError when it cannot be trimmed.
    """
    if ask.tokens:
        return Plan(0, list(ask.tokens), [], False, 0, ())
    shown, tools = family.shown(ask.messages, ask.tools)
    prefill = model.encode(ask.prefill, continues=True) if ask.prefill else []
    if found is not None and same and found.exact:
        shift = len(shown) - len(ask.messages)
        held = [index + shift for index in found.replies]
        try:
            parts = pieces(model, shown, tools, held) if _are_replies(shown, held) else []
        except TemplateError:
            parts = []  # it does not show a reply as it is: then it is rendered
        if parts and parts[:-1] == found.pieces:
            tokens = piece_tokens(model, parts[-1], True) + prefill
            if not (ask.trim and len(found.tokens) + len(tokens) > room):
                marks = _marks(model, shown, tools, ask, shift, list(found.tokens) + tokens)
                return Plan(len(found.tokens), tokens, parts, True, 0, marks)
    parts = pieces(model, shown, tools)
    tokens = piece_tokens(model, parts[0], False) + prefill
    if not tokens:
        raise ApiError(400, "the conversation is empty", param="messages")
    trimmed = 0
    if ask.trim and len(tokens) > room:
        tokens, trimmed = _trim(model, shown, tools, tokens, prefill, room, block_tokens)
    marks = _marks(model, shown, tools, ask, len(shown) - len(ask.messages), tokens) if not trimmed else ()
    keep = min(common(found.tokens, tokens), len(tokens) - 1) if found is not None else 0
    return Plan(keep, tokens[keep:], parts, False, trimmed, marks)


def common(a: array[int] | Sequence[int], b: Sequence[int]) -> int:
    """Length of the beginning that two have in common."""
    length = min(len(a), len(b))
    if list(a[:length]) == list(b[:length]):
        return length
    return next(index for index in range(length) if a[index] != b[index])


def _are_replies(shown: Sequence[object], held: Sequence[int]) -> bool:
    return all(index < len(shown) and shown[index]["role"] == "assistant" for index in held)  # type: ignore[index]


def _beginning(model: TextModel, shown: Sequence[object], tools: Sequence[object], count: int) -> list[int]:
    """Tokens of the first messages; they end with a generation prompt, which a longer conversation does not have there."""
    (piece,) = pieces(model, shown[:count], tools)  # type: ignore[arg-type]
    return piece_tokens(model, piece, False)


def _marks(
    model: TextModel, shown: Sequence[object], tools: Sequence[object], ask: Ask, shift: int, tokens: list[int]
) -> tuple[int, ...]:
    marks = []
    for count, _ in ask.pins:
        try:
            marks.append(common(_beginning(model, shown, tools, count + shift), tokens))
        except TemplateError:  # it does not render so short a conversation
            marks.append(0)
    return tuple(marks)


def _trim(
    model: TextModel,
    shown: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    tokens: list[int],
    prefill: list[int],
    room: int,
    block_tokens: int,
) -> tuple[list[int], int]:
    """Cut whole blocks' worth out behind the system message.  The tokens, and how many went.

    What the template writes up to the first other content, tools among it, stays, and so does what it writes behind the last.
    """
    heads = next((n for n, m in enumerate(shown) if m["role"] not in ("system", "developer")), -1)
    head = common(_with_other(model, shown, tools, heads) + prefill, tokens) if heads >= 0 else len(tokens)
    tail = common((_with_other(model, shown, tools, len(shown) - 1) + prefill)[::-1], tokens[::-1])
    gone = -(-(len(tokens) - room) // block_tokens) * block_tokens
    can_go = max(0, len(tokens) - head - tail - 1) // block_tokens * block_tokens
    if gone > can_go:
        wanted = len(tokens) - can_go
        raise ApiError(
            400, f"{wanted} tokens cannot be trimmed, the system message among them, and there is room for {room}",
            code="context_length_exceeded", param="messages", fields={"wanted": wanted, "limit": room},
        )  # fmt: skip
    return tokens[:head] + tokens[head + gone :], gone


def _with_other(model: TextModel, shown: Sequence[Mapping[str, Any]], tools: Sequence[Any], index: int) -> list[int]:
    """Tokens of the conversation with another content in one message: what they share with its own is not that content."""
    content = str(shown[index].get("content") or "").strip()
    other = next(char for char in "012" if not content.startswith(char) and not content.endswith(char))
    (piece,) = pieces(model, [*shown[:index], {**shown[index], "content": other}, *shown[index + 1 :]], tools)
    return piece_tokens(model, piece, False)
