"""Any other model (SmolLM2): tools are described in the system message, and calls read from tags or plain JSON.

    <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>

Its template knows roles and contents only, so calls and results are written into contents here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .protocol import THINK, Call, Heard, Scanner, Tool, call_rules
from .scanners import Tagged, Whole

OPENING = "<tool_call>"
CLOSING = "</tool_call>"


class Generic:
    """Nothing is expected of the template but the roles system, user and assistant."""

    name = "generic"
    markers: tuple[str, ...] = ()
    thoughts: tuple[str, str] = THINK

    def shown(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Mapping[str, Any]], list[Any]]:
        plain = [_plain(message) for message in messages]
        if tools:
            told = _described(tools)
            if plain and plain[0]["role"] == "system":
                plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{told}"}
            else:
                plain.insert(0, {"role": "system", "content": told})
        return [*plain], []

    def scanner(self, names: frozenset[str]) -> Scanner:
        return _Either(names)

    def grammar(self, tools: Sequence[Tool], many: bool, marker_ids: Mapping[str, int]) -> str:
        more = ' ("\\n" call){0,7}' if many else ""
        return "\n".join([f"start: call{more}", f'call: "{OPENING}" body "{CLOSING}"', call_rules(tools, "arguments")])


class _Either:
    """JSON alone, or calls between tags: which it is shows at the first character that is no white space."""

    def __init__(self, names: frozenset[str]) -> None:
        self._whole = Whole(names)
        self._tagged = Tagged(OPENING, CLOSING, None)

    @property
    def inside(self) -> bool:
        return self._whole.inside or self._tagged.inside

    def push(self, text: str) -> list[Heard]:
        if not self._whole.undecided:
            return self._tagged.push(text)
        heard: list[Heard] = []
        for piece in self._whole.push(text):
            heard += [piece] if isinstance(piece, Call) else self._tagged.push(piece.text)
        return heard

    def finish(self) -> list[Heard]:
        heard: list[Heard] = []
        for piece in self._whole.finish():
            heard += [piece] if isinstance(piece, Call) else self._tagged.push(piece.text)
        return heard + self._tagged.finish()


def _plain(message: Mapping[str, Any]) -> dict[str, str]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if message["role"] == "developer":
        return {"role": "system", "content": content}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        written = f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}'
        content += f"{chr(10) if content else ''}{OPENING}{written}{CLOSING}"
    return {"role": message["role"], "content": content}


def _described(tools: Sequence[Tool]) -> str:
    lines = [
        json.dumps({"name": t.name, "description": t.description, "parameters": dict(t.parameters)}, ensure_ascii=False)
        for t in tools
    ]
    return "\n".join(
        [
            "You can call these functions:",
            *lines,
            "To call one, write only",
            f'{OPENING}{{"name": "its name", "arguments": {{"argument": "value"}}}}{CLOSING}',
            "Its result then comes between <tool_response> and </tool_response>.",
        ]
    )
