"""Llama 3.1 and later: a reply that is a JSON object is a call.

{"name": "weather", "parameters": {"city": "Oslo"}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .protocol import Scanner, Tool, as_template_takes, call_rules, with_parsed_arguments
from .scanners import Whole

PYTHON_TAG = "<|python_tag|>"


class Llama3:
    """Its templates take tools, and one call per message: of several, those after the first stand in messages of their own."""

    name = "llama3"
    markers: tuple[str, ...] = (PYTHON_TAG,)

    def shown(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Mapping[str, Any]], list[Any]]:
        return [with_parsed_arguments(message) for message in messages], [as_template_takes(tool) for tool in tools]

    def scanner(self, names: frozenset[str]) -> Scanner:
        return Whole(names, ("{", "["), PYTHON_TAG)

    def grammar(self, tools: Sequence[Tool], many: bool, marker_ids: Mapping[str, int]) -> str:
        return "\n".join(["start: body", call_rules(tools, "parameters")])
