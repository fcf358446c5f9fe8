"""The bodies of Anthropic's interface, as types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from .openai_types import Count


class CacheControl(Struct):
    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}
    cache_control: CacheControl | None = None


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """What another model has thought: no model is shown it again, as at Anthropic."""

    thinking: str = ""
    signature: str = ""
    cache_control: None = None


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    data: str = ""
    cache_control: None = None


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class Message(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Struct):
    name: Annotated[str, Meta(min_length=1, max_length=128, pattern="^[a-zA-Z0-9_.-]+$")]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None


class AutoChoice(Struct, tag_field="type", tag="auto"):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag_field="type", tag="any"):
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Struct, tag_field="type", tag="tool"):
    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, tag_field="type", tag="none"):
    pass


class JsonFormat(Struct, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(Struct):
    format: JsonFormat | None = None


class CountRequest(Struct, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str = ""
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: Count
    stop_sequences: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)] | None = (
        None
    )
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # as its beta had it
    mcp_servers: list[Any] | None = None
    container: Any = None


messages_decoder: msgspec.json.Decoder[MessagesRequest] = msgspec.json.Decoder(MessagesRequest)
count_decoder: msgspec.json.Decoder[CountRequest] = msgspec.json.Decoder(CountRequest)
