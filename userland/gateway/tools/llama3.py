"""Llama 3.1 and later: a reply that is a JSON object is a call.

{"name": "weather", "parameters": {"city": "Oslo"}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .protocol import THINK, Scanner, Tool, as_template_takes, call_rules, with_parsed_arguments
from .scanners import Whole

PYTHON_TAG = "<|python_tag|>"


class Llama3:
    """Its templates take tools, and refuse a message with more than one call: several are written as the model writes them."""

    name = "llama3"
    markers: tuple[str, ...] = (PYTHON_TAG,)
    thoughts: tuple[str, str] = THINK

    def shown(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Mapping[str, Any]], list[Any]]:
        plain = [_written(with_parsed_arguments(message)) for message in messages]
        return [*plain], [as_template_takes(tool) for tool in tools]

    def scanner(self, names: frozenset[str]) -> Scanner:
        return Whole(names, ("{", "["), PYTHON_TAG)

    def grammar(self, tools: Sequence[Tool], many: bool, marker_ids: Mapping[str, int]) -> str:
        return "\n".join(["start: body", call_rules(tools, "parameters")])


def _written(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with several calls as one without: they are its words."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    if len(functions) < 2:
        return message
    calls = [json.dumps({"name": f["name"], "parameters": f["arguments"]}, ensure_ascii=False) for f in functions]
    words = [message["content"]] if message.get("content") else []
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*words, "; ".join(calls)])}
