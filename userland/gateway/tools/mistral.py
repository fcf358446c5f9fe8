"""Mistral: a control token, then a list of calls, or names and arguments one after the other.

[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]
[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .protocol import (
    Heard,
    Said,
    Scanner,
    Tool,
    as_template_takes,
    call_rules,
    calls_in,
    parsed_calls,
    with_parsed_arguments,
)
from .scanners import beginning_of

MARKER = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"


class Mistral:
    """Its templates take tools and tool calls themselves."""

    name = "mistral"
    markers: tuple[str, ...] = (MARKER, ARGUMENTS)

    def shown(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Mapping[str, Any]], list[Any]]:
        return [with_parsed_arguments(message) for message in messages], [as_template_takes(tool) for tool in tools]

    def scanner(self, names: frozenset[str]) -> Scanner:
        return _Scanner()

    def grammar(self, tools: Sequence[Tool], many: bool, marker_ids: Mapping[str, int]) -> str:
        opening = f"<[{marker_ids[MARKER]}]>" if MARKER in marker_ids else json.dumps(MARKER)
        more = ' (", " body){0,7}' if many else ""
        return "\n".join([f'start: {opening} "[" body{more} "]"', call_rules(tools, "arguments")])


class _Scanner:
    """Words up to the marker; all behind it is calls."""

    def __init__(self) -> None:
        self._held = ""
        self._marked = False

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
        calls = _one_by_one(held) if ARGUMENTS in held else parsed_calls(held, None)
        return [*calls] if calls else [Said(held)]


def _one_by_one(text: str) -> list[Heard]:
    """`name[ARGS]{...}`, more of them behind further markers."""
    calls: list[Heard] = []
    for part in text.split(MARKER):
        name, _, arguments = part.partition(ARGUMENTS)
        try:
            found = calls_in({"name": name.strip(), "arguments": json.loads(arguments)}, None)
        except (ValueError, RecursionError):
            return []
        if not found:
            return []
        calls += found
    return calls
