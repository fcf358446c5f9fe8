"""Mistral: a control token, then a list of calls, or names and arguments one after the other.

[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]
[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}
[TOOL_CALLS]weather[CALL_ID]Xk3bT9aQz[ARGS]{"city": "Oslo"}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .protocol import (
    Call,
    Heard,
    Said,
    Scanner,
    Tool,
    as_template_takes,
    call_rules,
    calls_in,
    value_at,
    with_parsed_arguments,
)
from .scanners import beginning_of

MARKER = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
_ID = re.compile("[a-zA-Z0-9]{9}")  # its templates refuse a call that is named in another way


class Mistral:
    """Its templates take tools and tool calls themselves."""

    name = "mistral"
    markers: tuple[str, ...] = (MARKER, CALL_ID, ARGUMENTS)
    thoughts: tuple[str, str] = ("[THINK]", "[/THINK]")

    def shown(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Mapping[str, Any]], list[Any]]:
        plain = [_with_short_ids(with_parsed_arguments(message)) for message in messages]
        return [*plain], [as_template_takes(tool) for tool in tools]

    def scanner(self, names: frozenset[str]) -> Scanner:
        return _Scanner()

    def grammar(self, tools: Sequence[Tool], many: bool, marker_ids: Mapping[str, int]) -> str:
        opening = f"<[{marker_ids[MARKER]}]>" if MARKER in marker_ids else json.dumps(MARKER)
        more = ' (", " body){0,7}' if many else ""
        return "\n".join([f'start: {opening} "[" body{more} "]"', call_rules(tools, "arguments")])


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    changed = dict(message)
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short_id(call.get("id") or "")} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    return changed


def _short_id(given: str) -> str:
    """The same for a call and its result, whoever has named it."""
    return given if _ID.fullmatch(given) else hashlib.blake2b(given.encode("utf-8", "replace")).hexdigest()[:9]


class _Scanner:
    """Words up to the marker; all behind it is calls."""

    def __init__(self) -> None:
        self._held = ""
        self._marked = False

    @property
    def inside(self) -> bool:
        return self._marked

    def push(self, text: str) -> list[Heard]:
        self._held += text
        if self._marked:
            return []
        before, marked, rest = self._held.partition(MARKER)
        if marked:
            self._marked, self._held = True, rest
            return [Said(before.rstrip())] if before.strip() else []
        keep = beginning_of(self._held, MARKER)
        said = self._held[: len(self._held) - keep].rstrip()
        self._held = self._held[len(said) :]
        return [Said(said)] if said else []

    def finish(self) -> list[Heard]:
        held, self._held = self._held, ""
        if not self._marked:
            return [Said(held)] if held else []
        return [*calls] if (calls := _calls(held)) else [Said(held)]


def _calls(text: str) -> list[Call]:
    """Lists of calls and `name[ARGS]{...}`, with or without further markers between them.  A marker in a string is text."""
    calls: list[Call] = []
    at = 0
    try:
        while (at := _next(text, at)) < len(text):
            if text[at] in "[{":
                value, at = value_at(text, at)
            else:
                name, _, behind = text[at:].partition(ARGUMENTS)
                at = len(text) - len(behind.lstrip())
                arguments, at = value_at(text, at)
                value = {"name": name.partition(CALL_ID)[0].strip(), "arguments": arguments}
            found = calls_in(value, None)
            if not found:
                return []
            calls += found
    except (ValueError, RecursionError):
        return []
    return calls


def _next(text: str, at: int) -> int:
    """Behind markers, and white space and the like."""
    while at < len(text):
        if text.startswith(MARKER, at):
            at += len(MARKER)
        elif text[at] in " \t\r\n;,":
            at += 1
        else:
            break
    return at
