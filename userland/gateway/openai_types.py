"""The bodies of OpenAI's interface, as types: requests are decoded into them, and openapi.py describes them from here.

What is not named is ignored, as OpenAI's servers do with what they do not know; what would change the answer and cannot
be done is refused where it is used.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Temperature = Annotated[float, Meta(ge=0, le=2)]
Probability = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=16)] | None
Choices = Annotated[int, Meta(ge=1, le=128)]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
FunctionName = Annotated[str, Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_.-]+$")]


class TextPart(Struct, tag_field="type", tag="text"):
    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    refusal: str


class FunctionCall(Struct):
    name: str
    arguments: str = "{}"


class ToolCall(Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Struct):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct):
    function: Function
    type: Literal["function"] = "function"


class NamedFunction(Struct):
    name: str


class NamedTool(Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class JsonSchema(Struct):
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextFormat(Struct, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    pass


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class StreamOptions(Struct):
    include_usage: bool | None = None


class Unserved(Struct, kw_only=True):
    """What other servers take and this one does not: it would change the answer, so it is refused (sampling.py)."""

    logit_bias: dict[str, float] | None = None
    min_tokens: Any = None  # vLLM's
    stop_token_ids: Any = None
    include_stop_str_in_output: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None  # SGLang's and llama.cpp's
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    continue_final_message: Any = None  # of chats
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    lora_path: Any = None  # SGLang's
    min_new_tokens: Any = None
    stop_regex: Any = None
    no_stop_trim: Any = None
    custom_logit_processor: Any = None
    length_penalty: Any = None  # and of others; some are sent with what changes nothing (sampling.py)
    typical_p: Any = None
    dry_multiplier: Any = None
    xtc_probability: Any = None
    mirostat: Any = None
    add_generation_prompt: Any = None
    skip_special_tokens: Any = None
    web_search_options: Any = None


class ChatRequest(Unserved, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str = ""
    frequency_penalty: Penalty | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Choices | None = None
    parallel_tool_calls: bool | None = None
    presence_penalty: Penalty | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    seed: Seed | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=128)] | None = None
    top_p: Probability | None = None
    # as vLLM's extensions
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Salt | None = None
    truncation: Literal["auto", "disabled"] | None = None  # as in OpenAI's Responses
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None


class CompletionRequest(Unserved, kw_only=True):
    prompt: str | list[str | int | list[int]]
    model: str = ""
    best_of: int | None = None
    echo: bool | None = None
    frequency_penalty: Penalty | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    n: Choices | None = None
    presence_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Salt | None = None


chat_decoder: msgspec.json.Decoder[ChatRequest] = msgspec.json.Decoder(ChatRequest)
completion_decoder: msgspec.json.Decoder[CompletionRequest] = msgspec.json.Decoder(CompletionRequest)
