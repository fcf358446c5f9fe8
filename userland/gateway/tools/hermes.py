"""Hermes, Qwen2.5, Qwen3: calls between tags, each a JSON object.

<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .protocol import THINK, Scanner, Tool, as_template_takes, call_rules, with_parsed_arguments
from .scanners import Tagged

OPENING = "<tool_call>"
CLOSING = "</tool_call>"


class Hermes:
    """Its templates take tools and tool calls themselves."""

    name = "hermes"
    markers: tuple[str, ...] = ()
    thoughts: tuple[str, str] = THINK

    def shown(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Mapping[str, Any]], list[Any]]:
        return [with_parsed_arguments(message) for message in messages], [as_template_takes(tool) for tool in tools]

    def scanner(self, names: frozenset[str]) -> Scanner:
        return Tagged(OPENING, CLOSING, None)

    def grammar(self, tools: Sequence[Tool], many: bool, marker_ids: Mapping[str, int]) -> str:
        more = ' ("\\n" call){0,7}' if many else ""
        return "\n".join(
            [f"start: call{more}", f'call: "{OPENING}\\n" body "\\n{CLOSING}"', call_rules(tools, "arguments")]
        )
