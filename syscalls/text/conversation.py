"""Whole conversations, with tools, as a client that keeps contexts renders them.

The daemon appends messages of a role and a content (`append`).  A program that serves conversations as others define them
(tool calls, tool results, several texts in a message) renders them itself and appends tokens.  It also keeps the replies
that its contexts hold as they were generated: rendering and tokenizing what a model said gives other tokens than the model
made.  So a conversation is rendered with a mark in the place of each reply that a context holds, and what lies between
the marks is what a template adds: equal beginnings say that the context fits, the last piece is what to append.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from .template import TemplateError
from .tokenizer import SHIELD, TextModel, free_mark

# Letters and digits only: templates strip white space and look for markup.  Nobody can write it who has not seen it.
_SECRET: Final = secrets.token_hex(8)
_MARK: Final = re.compile(rf"attnixReply(\d+)x{_SECRET}")


class Piece(NamedTuple):
    """Rendered text between two replies.  hidden: markup that stood in contents, by what stands for it in `text`."""

    text: str
    hidden: tuple[tuple[str, str], ...]


def pieces(
    model: TextModel, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], held: Collection[int] = ()
) -> list[Piece]:
    """What the template writes before, between and behind the replies that are held, a generation prompt at the end.

    messages  as templates take them: role, content, tool_calls, tool_call_id, name
    tools     as templates take them
    held      indices of replies that are not to be rendered
    Returns one piece more than `held` has indices.  Error: TemplateError, also where a reply does not appear once.
    """
    shown = [_marked(index) if index in held else message for index, message in enumerate(messages)]
    shielded, hidden = _shield(model, {"messages": shown, "tools": list(tools)})
    template = model.chat_template
    text = template.render_with_tools(shielded["messages"], shielded["tools"])
    found = [int(number) for number in _MARK.findall(text)]
    if found != sorted(held):
        raise TemplateError("this model's chat template does not show each reply once")
    parts = _MARK.split(text)[::2]
    return [Piece(part, tuple((k, hidden[k]) for k in SHIELD.findall(part) if k in hidden)) for part in parts]


def piece_tokens(model: TextModel, piece: Piece, continues: bool) -> list[int]:
    """Token ids of a piece: the template's markup as tokens, that of contents as text."""
    return model.encode_rendered(piece.text, dict(piece.hidden), continues)


def _marked(index: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"attnixReply{index}x{_SECRET}"}


def _shield(model: TextModel, value: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Replace markup in every string, so that no content can end its own turn and speak for somebody else."""
    everything = json.dumps(value, ensure_ascii=False, default=str)
    if not model.markup.search(everything):
        return value, {}
    mark = free_mark(everything)
    hidden: dict[str, str] = {}

    def hide(match: re.Match[str]) -> str:
        shield = f"{mark}{len(hidden)}\ue001"
        hidden[shield] = match.group()
        return shield

    def walk(item: Any) -> Any:
        if isinstance(item, str):
            return model.markup.sub(hide, item)
        if isinstance(item, Mapping):
            return {walk(key): walk(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [walk(inner) for inner in item]
        return item

    # Roles are the caller's own words, and templates compare them.
    messages = [
        {key: inner if key == "role" else walk(inner) for key, inner in message.items()}
        for message in value["messages"]
    ]
    return {"messages": messages, "tools": walk(value["tools"])}, hidden
