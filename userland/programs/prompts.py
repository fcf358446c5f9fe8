"""The input of a batch: a JSON object on each line.

{"id": "a7", "prompt": "..."} or {"id": "a7", "messages": [{"role": ..., "content": ...}, ...]}, and if wanted "max_tokens",
"temperature", "top_p", "top_k", "min_p", "seed", "stop" of its own.  Without an id it is the line's number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from attnix.syscalls.client import GenerateOptions

_OPTIONS: Final[dict[str, tuple[type, ...]]] = {
    "max_tokens": (int,), "temperature": (int, float), "top_p": (int, float), "top_k": (int,), "min_p": (int, float),
    "seed": (int,), "stop": (str, list),
}  # fmt: skip


class BadLine(ValueError):
    """A line that asks for nothing that can be done; the message says what is wrong with it."""


class Prompt(NamedTuple):
    """A line of the input.  wrong: why it cannot be done; the rest is empty then."""

    id: str | int
    messages: tuple[tuple[str, str], ...] = ()
    options: GenerateOptions | None = None
    max_tokens: int | None = None
    wrong: str = ""


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The lines of a file, one by one; blank ones are left out.  Error: OSError."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _prompt(number, line)


def check_ids(path: Path) -> int:
    """How many prompts there are.  Error: BadLine when two have one id: the output could not tell them apart."""
    seen: set[str | int] = set()
    for prompt in read_prompts(path):
        if prompt.id in seen:
            raise BadLine(f"{path} has the id {prompt.id!r} twice: give each line one of its own, or none")
        seen.add(prompt.id)
    return len(seen)


def _prompt(number: int, line: str) -> Prompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Prompt(number, wrong=f"line {number} is not JSON: {error}")
    if not isinstance(fields, dict):
        return Prompt(number, wrong=f"line {number} is no JSON object")
    name = fields.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        return Prompt(number, wrong=f"line {number}: the id is neither text nor a whole number")
    try:
        messages, options = _messages(fields), _options(fields)
    except BadLine as error:
        return Prompt(name, wrong=f"line {number}: {error}")
    max_tokens = options.pop("max_tokens", None)
    return Prompt(name, messages, GenerateOptions(**options), max_tokens)  # type: ignore[typeddict-item]


def _messages(fields: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    if ("prompt" in fields) == ("messages" in fields):
        raise BadLine("give either a prompt or messages")
    if "prompt" in fields:
        if not isinstance(fields["prompt"], str):
            raise BadLine("the prompt is no text")
        return (("user", fields["prompt"]),)
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise BadLine("messages is no list of messages")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise BadLine('a message is {"role": "user", "content": "..."}')
    return tuple((message["role"], message["content"]) for message in messages)


def _options(fields: dict[str, Any]) -> dict[str, Any]:
    known = {"id", "prompt", "messages", *_OPTIONS}
    if unknown := sorted(set(fields) - known):
        raise BadLine(f"unknown: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    options = {name: fields[name] for name in _OPTIONS if name in fields}
    for name, value in options.items():
        fits = isinstance(value, _OPTIONS[name]) and not isinstance(value, bool)
        if not fits or (isinstance(value, list) and not all(isinstance(each, str) for each in value)):
            raise BadLine(f"{name} cannot be {value!r}")
    return options
