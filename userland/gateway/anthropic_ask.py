"""A request of Anthropic's interface as an Ask: blocks become messages, `cache_control` marks become pins."""

from __future__ import annotations

import json
import secrets
from typing import Any, Final

from .anthropic_types import (
    AnyChoice,
    CacheControl,
    CountRequest,
    Message,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from .ask import Ask
from .errors import bad
from .gateway import Gateway
from .grammar import check_schema, json_grammar
from .keys import Key
from .tools.protocol import Tool

_TTL_S: Final = {"5m": 300.0, "1h": 3600.0}
_MAX_MARKS: Final = 4  # as Anthropic has it: the beginning that each marks is rendered and tokenized on its own


def as_ask(gateway: Gateway, body: CountRequest, key: Key) -> Ask:
    """Error: ApiError for what cannot be done."""
    if body.thinking and body.thinking.get("type") not in ("disabled", "adaptive"):
        raise bad("thinking is not supported", "thinking")
    messages: list[dict[str, Any]] = []
    pins: list[tuple[int, float]] = []
    if body.system:
        blocks = body.system if isinstance(body.system, list) else []
        text = "".join(block.text for block in blocks) if blocks else str(body.system if not blocks else "")
        messages.append({"role": "system", "content": text})
        _mark(pins, 1, [block.cache_control for block in blocks] + [tool.cache_control for tool in body.tools or ()])
    elif body.tools:
        _mark(pins, 0, [tool.cache_control for tool in body.tools])
    for index, message in enumerate(body.messages):
        messages += _messages(message, index)
        if isinstance(message.content, list):
            _mark(pins, len(messages), [block.cache_control for block in message.content])
    if (count := _marks(body)) > _MAX_MARKS:
        raise bad(f"at most {_MAX_MARKS} blocks can have cache_control, and {count} do")
    ask = Ask(key, messages, pins=pins)
    ask.tools = [Tool(tool.name, tool.description or "", tool.input_schema) for tool in body.tools or ()]
    if len({tool.name for tool in ask.tools}) < len(ask.tools):
        raise bad("two tools have one name", "tools")
    _choose_tools(gateway, ask, body)
    if messages[-1]["role"] == "assistant":
        if messages[-1].get("tool_calls"):
            raise bad("the last message calls tools: their results have to follow", "messages")
        ask.prefill = messages.pop()["content"]
        ask.pins = [(count, seconds) for count, seconds in pins if count <= len(messages)]
    if isinstance(body, MessagesRequest):
        _sampled(ask, body)
    return ask


def _sampled(ask: Ask, body: MessagesRequest) -> None:
    ask.max_tokens = body.max_tokens
    ask.temperature = 1.0 if body.temperature is None else body.temperature
    ask.top_p = 1.0 if body.top_p is None else max(1e-6, body.top_p)
    ask.top_k = body.top_k or 0
    ask.seed = secrets.randbelow(1 << 63)
    ask.stop = tuple(body.stop_sequences or ())
    for name in ("mcp_servers", "container"):
        if getattr(body, name):
            raise bad(f"{name} is not supported", name)
    wanted = body.output_format or (body.output_config.format if body.output_config else None)
    if wanted is not None:
        param = "output_format" if body.output_format else "output_config"
        if ask.lark or ask.prefill:
            other = "a tool call that is required" if ask.lark else "a beginning of the reply"
            raise bad(f"{other} leaves no room for {param}", param)
        ask.lark, ask.lark_param, ask.scan = json_grammar(check_schema(wanted.schema, param)), param, False


def _choose_tools(gateway: Gateway, ask: Ask, body: CountRequest) -> None:
    choice = body.tool_choice
    if isinstance(choice, NoChoice) or (choice is None and not ask.tools):
        return
    if not ask.tools:
        raise bad("tool_choice needs tools", "tool_choice")
    ask.scan = True
    ask.one_call = choice is not None and choice.disable_parallel_tool_use is True
    wanted, many = list(ask.tools), True
    if isinstance(choice, NamedChoice):
        wanted, many = [tool for tool in ask.tools if tool.name == choice.name], False
        if not wanted:
            raise bad(f"tool_choice names {choice.name!r}, which is none of the tools", "tool_choice")
    elif isinstance(choice, AnyChoice):
        many = not choice.disable_parallel_tool_use
    else:
        return
    ask.lark = gateway.words.family.grammar(wanted, many, gateway.words.marker_ids)
    ask.lark_param = "tools"


def _marks(body: CountRequest) -> int:
    """Blocks that are marked."""
    listed = [body.tools, body.system, *(message.content for message in body.messages)]
    return sum(block.cache_control is not None for part in listed if not isinstance(part, str) for block in part or ())


def _mark(pins: list[tuple[int, float]], count: int, marks: list[CacheControl | None]) -> None:
    """The beginning of so many messages is marked, if any of its last blocks is."""
    found = [_TTL_S[mark.ttl] for mark in marks if mark is not None]
    if found:
        pins.append((count, max(found)))


def _messages(message: Message, index: int) -> list[dict[str, Any]]:
    """One message becomes several: each tool's result is one of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    text: list[str] = []
    calls: list[dict[str, Any]] = []
    made: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        where = f"messages[{index}].content[{number}]"
        if isinstance(block, TextBlock):
            text.append(block.text)
        elif isinstance(block, ToolUseBlock):
            if message.role != "assistant":
                raise bad("only an assistant's message has tool_use blocks", where)
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            if message.role != "user":
                raise bad("only a user's message has tool_result blocks", where)
            made.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
        elif message.role != "assistant":
            raise bad("only an assistant's message has thinking blocks", where)
    if message.role == "assistant":
        return [{"role": "assistant", "content": "".join(text)} | ({"tool_calls": calls} if calls else {})]
    if text or not made:
        made.append({"role": message.role, "content": "".join(text)})
    return made


def _result(block: ToolResultBlock) -> str:
    content = block.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    return f"error: {text}" if block.is_error else text
