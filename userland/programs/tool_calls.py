"""How a model asks for a tool, in text:

    <tool_call>{"name": "calculator", "arguments": {"expression": "6 * 7"}}</tool_call>

which is what Hermes and Qwen models were trained to write.  `</tool_call>` is a stop string, so the text ends before it.
The answer goes back as a message that holds `<tool_response>...</tool_response>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from .thoughts import spoken
from .tools import Tool

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
MAX_RESULT_CHARS: Final = 4000
_EXAMPLE: Final = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
_DECODER: Final = json.JSONDecoder(strict=False)
_NAME_KEYS: Final = ("name", "tool", "function")
_ARGUMENT_KEYS: Final = ("arguments", "args", "parameters", "input")


class ToolCall(NamedTuple):
    """What the model wants done."""

    name: str
    arguments: Mapping[str, Any]


class BadCall(ValueError):
    """A tool call was begun and cannot be read; the message is for the model."""


def parse(text: str) -> ToolCall | None:
    """The tool call that a text ends with; None when there is none.

    Lenient about what small models get wrong: words and code fences around the object, nothing behind it, other common
    names of the two keys, arguments as a string of JSON or beside the name.  Tags in a string of the call are a part of it.
    Error: BadCall.
    """
    text = spoken(text)
    found: Any = None
    refusal: BadCall | None = None
    at = 0
    while (begun := text.find(OPEN, at)) >= 0:
        at = begun + len(OPEN)
        start, close = text.find("{", at), text.find(CLOSE, at)
        if start < 0 or 0 <= close < start:
            refusal = BadCall(f"no JSON object follows {OPEN}: write {_EXAMPLE}")
            continue
        try:
            found, at = _DECODER.raw_decode(text, start)
            refusal = None
        except (ValueError, RecursionError) as error:
            refusal = BadCall(f"the tool call is not JSON ({error}): write {_EXAMPLE}")
    if refusal is not None:
        raise refusal
    if found is None:
        return None
    if isinstance(found.get("function"), dict):  # as OpenAI's clients nest it
        found = found["function"]
    name = next((found[key] for key in _NAME_KEYS if isinstance(found.get(key), str)), "")
    if not name:
        raise BadCall(f"the tool call names no tool: write {_EXAMPLE}")
    given = next((found[key] for key in _ARGUMENT_KEYS if key in found), None)
    if given is None:
        given = {key: value for key, value in found.items() if key not in _NAME_KEYS}
    if isinstance(given, str):
        try:
            given = json.loads(given, strict=False)
        except (ValueError, RecursionError):
            raise BadCall(f"the arguments of {name} are text and no JSON object: write {_EXAMPLE}") from None
    if not isinstance(given, dict):
        raise BadCall(f"the arguments of {name} are no JSON object: write {_EXAMPLE}")
    return ToolCall(name, given)


def goes_on(text: str) -> bool:
    """Whether `</tool_call>` would be no end of a call here: it stands in a thought, or in a string of a call."""
    text = spoken(text)
    if not text:
        return True
    at = 0
    while (begun := text.find(OPEN, at)) >= 0:
        at = begun + len(OPEN)
        start = text.find("{", at)
        if start < 0:
            return False
        try:
            _, at = _DECODER.raw_decode(text, start)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated string"):
                return True
        except (ValueError, RecursionError):
            pass
    return False


def described(tools: Sequence[Tool]) -> str:
    """What the model is told of its tools, for the system message."""
    lines = []
    for tool in tools:
        arguments = ", ".join(
            f"{name} ({meaning}{'' if name in tool.required else '; may be left out'})"
            for name, meaning in tool.parameters.items()
        )
        lines.append(f"- {tool.name}: {tool.description} Arguments: {arguments or 'none'}.")
    return "\n".join(
        [
            "You can use these tools:",
            *lines,
            "To use one, write",
            f'{OPEN}{{"name": "its name", "arguments": {{"argument": "value"}}}}{CLOSE}',
            "and nothing after it. Its answer then comes between <tool_response> and </tool_response>.",
            "When you know the answer to the question, write it, without a tool call.",
        ]
    )


def response(result: str) -> str:
    """A tool's answer as the model reads it; cut in the middle when it is longer than a model should be given."""
    if len(result) > MAX_RESULT_CHARS:
        half = MAX_RESULT_CHARS // 2
        left_out = len(result) - 2 * half
        result = f"{result[:half]}\n[{left_out} characters left out]\n{result[-half:]}"
    return f"<tool_response>\n{result}\n</tool_response>"
