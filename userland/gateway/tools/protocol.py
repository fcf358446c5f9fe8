"""What a family of models has to say about tools.

A model writes tool calls as text.  A scanner reads that text as it comes, however it is cut, and tells what is said from
what is called; so a streamed reply and a whole one are read by the same code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

MOST_NAME_CHARS: Final = 128  # of a tool's name, in both APIs
THINK: Final = ("<think>", "</think>")
_VALUES: Final = frozenset(["const", "enum", "default", "examples"])  # keys of a schema under which no schema stands


class Said(NamedTuple):
    """Words for the reader."""

    text: str


class Call(NamedTuple):
    """A tool that is wanted; arguments are the text of a JSON object."""

    name: str
    arguments: str


Heard: TypeAlias = Said | Call


class Tool(NamedTuple):
    """A function that the model may call; parameters are a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]


class Scanner(Protocol):
    """Fed with text; `finish` at its end, and before text that it does not see.  inside: it may be in a call."""

    @property
    def inside(self) -> bool: ...

    def push(self, text: str) -> list[Heard]: ...
    def finish(self) -> list[Heard]: ...


class Family(Protocol):
    """One convention.

    name      for the log
    markers   control tokens that a scanner has to see, which are no text else
    thoughts  tags between which the model thinks: see scanners.Thinking
    """

    name: str
    markers: tuple[str, ...]
    thoughts: tuple[str, str]

    def shown(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Mapping[str, Any]], list[Any]]:
        """Messages and tools as the model's template takes them; the same number of messages, but for a system message
        put before them where there was none."""
        ...

    def scanner(self, names: frozenset[str]) -> Scanner: ...

    def grammar(self, tools: Sequence[Tool], many: bool, marker_ids: Mapping[str, int]) -> str:
        """A Lark grammar of one call of one of these tools, or of one or more."""
        ...


def as_template_takes(tool: Tool) -> dict[str, Any]:
    """OpenAI's description of a function, which templates of all families take."""
    described = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": described}


def with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Templates write arguments as JSON themselves: they take objects, clients send text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        with suppress(ValueError, RecursionError):  # whatever it is, it is what the model said
            arguments = json.loads(function["arguments"])
            if "\\ud" in function["arguments"].lower():
                arguments = json.loads(whole_characters(json.dumps(arguments, ensure_ascii=False)))
            function["arguments"] = arguments
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def calls_in(value: Any, names: frozenset[str] | None) -> list[Call]:
    """Tool calls in a parsed object, or a list of them; none when anything of it is no call.

    names  those that count; None: any
    """
    if isinstance(value, list):
        found = [calls_in(one, names) for one in value]
        return [call for calls in found for call in calls] if found and all(found) else []
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("function"), dict):  # as OpenAI's clients nest it
        value = value["function"]
    name = value.get("name")
    if not isinstance(name, str) or not _may_name(name) or (names is not None and name not in names):
        return []
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    if arguments is None or arguments == "":  # of a function that takes none
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return []
    if not isinstance(arguments, dict):
        return []
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN and the like, which are no JSON
        return []
    return [Call(name, whole_characters(written))]


def whole_characters(text: str) -> str:
    """An escape of half a character (\\ud800) in JSON is no text that could be sent on, or tokenized."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _finite(written: str) -> float:
    """A number, the largest there is when it is larger: 1e999 is JSON, which infinity is not."""
    most = sys.float_info.max
    return max(-most, min(most, float(written)))


_DECODER: Final = json.JSONDecoder(strict=False, parse_float=_finite)


def _may_name(name: str) -> bool:
    """Whether a tool could have this name: tools of other names than the request's may be called, but not of any."""
    return 0 < len(name) <= MOST_NAME_CHARS and name.isprintable()


def parsed_calls(text: str, names: frozenset[str] | None) -> list[Call]:
    """Tool calls of a text that is nothing but JSON values, with white space, semicolons or a code fence around them."""
    try:
        found = [calls_in(value, names) for value in _values(text)]
    except (ValueError, RecursionError):
        return []
    return [call for calls in found for call in calls] if all(found) else []


def ends_in_a_string(text: str) -> bool:
    """Whether these JSON values break off inside of a string: a tag that comes then is text of that string."""
    try:
        for _ in _values(text):
            pass
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def value_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins there, and where it ends.  Error: ValueError, RecursionError."""
    return _DECODER.raw_decode(text, at)


def _values(text: str) -> Iterator[Any]:
    text = text.strip()
    at = 0
    fenced = text.startswith("```")
    if fenced:
        text = text.partition("\n")[2].lstrip()
    while at < len(text) and not (fenced and text[at:] == "```"):
        value, at = value_at(text, at)
        yield value
        while at < len(text) and text[at] in " \t\r\n;,":
            at += 1


def call_rules(tools: Sequence[Tool], arguments_key: str) -> str:
    """Lark rules `body` (any of the tools) for `{"name": ..., "arguments": ...}`."""
    rules = [f"body: {' | '.join(f'body{n}' for n in range(len(tools)))}"]
    for n, tool in enumerate(tools):
        schema = {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                arguments_key: _moved(object_schema(tool.parameters), f"#/properties/{arguments_key}"),
            },
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        rules.append(f"body{n}: %json {json_rule(schema)}")
    return "\n".join(rules)


def _moved(schema: Any, to: str) -> Any:
    """A schema that stands at `to` in another one: its references into itself begin there."""
    if isinstance(schema, list):
        return [_moved(one, to) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: one if key in _VALUES else _moved(one, to) for key, one in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        moved["$ref"] = to + target[1:]
    return moved


def json_rule(schema: Mapping[str, Any]) -> str:
    """A schema as `%json` takes it: without free white space, in which a model could go on for ever."""
    tight = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    return json.dumps({**schema, "x-guidance": tight}, ensure_ascii=True)


def object_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters are an object, whatever their author left out."""
    schema = dict(parameters) or {"properties": {}, "additionalProperties": False}
    schema.setdefault("type", "object")
    return schema
