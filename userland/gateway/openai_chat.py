"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from .ask import Ask, Done, Ended, Piece, Spent
from .errors import bad
from .gateway import Gateway
from .grammar import check_schema, json_grammar
from .http import Clock, answer, event, read_body, stream, unless_gone
from .keys import Key
from .openai_types import ChatRequest, JsonObjectFormat, JsonSchemaFormat, Message, NamedTool, chat_decoder
from .openai_usage import chat_logprobs, usage
from .sampling import check_model, joined, model_name, sampled
from .tools.protocol import Call, Tool
from .turns import Turn

_DONE: Final = b"data: [DONE]\n\n"


async def chat(gateway: Gateway, request: Request, key: Key) -> Response:
    """Answer one request."""
    body = await read_body(gateway, request, chat_decoder)
    gateway.words.model  # noqa: B018 (Unavailable, or a model without a tokenizer)
    check_model(gateway, body.model)
    ask = as_ask(gateway, body, key)
    ask.body_bytes = request.state.body_bytes
    reply = _Chat(gateway, ask, body)
    if not body.stream:
        return answer(await unless_gone(request, reply.whole()))
    return await stream(gateway, request, reply.chunks(), lambda error: event(error.openai()))


def as_ask(gateway: Gateway, body: ChatRequest, key: Key) -> Ask:
    """Error: ApiError for what cannot be done."""
    if body.functions or body.function_call:
        raise bad("functions and function_call are gone: use tools and tool_choice", "functions")
    if body.audio or (body.modalities and body.modalities != ["text"]):
        raise bad("this server answers in text only", "modalities")
    ask = Ask(key, [_plain(message, index) for index, message in enumerate(body.messages)])
    sampled(ask, body)
    ask.max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs needs logprobs", "top_logprobs")
    ask.logprobs = max(1, body.top_logprobs or 0) if body.logprobs else 0
    ask.trim = body.truncation == "auto"
    ask.tools = [
        Tool(tool.function.name, tool.function.description or "", tool.function.parameters or {})
        for tool in body.tools or ()
    ]
    names = [tool.name for tool in ask.tools]
    if len(set(names)) < len(names):
        raise bad("two tools have one name", "tools")
    _choose_tools(gateway, ask, body)
    if isinstance(body.response_format, JsonObjectFormat | JsonSchemaFormat):
        if ask.lark:
            raise bad("a tool call that is required leaves no room for response_format", "response_format")
        schema = None
        if isinstance(body.response_format, JsonSchemaFormat):
            schema = check_schema(body.response_format.json_schema.schema or {}, "response_format")
        ask.lark, ask.lark_param, ask.scan = json_grammar(schema), "response_format", False
    return ask


def _choose_tools(gateway: Gateway, ask: Ask, body: ChatRequest) -> None:
    choice = body.tool_choice if body.tool_choice is not None else ("auto" if ask.tools else "none")
    if choice == "none":
        return
    if not ask.tools:
        if choice == "auto":
            return
        raise bad("tool_choice needs tools", "tool_choice")
    ask.scan = True
    ask.one_call = body.parallel_tool_calls is False
    wanted = list(ask.tools)
    if isinstance(choice, NamedTool):
        wanted = [tool for tool in ask.tools if tool.name == choice.function.name]
        if not wanted:
            raise bad(f"tool_choice names {choice.function.name!r}, which is none of the tools", "tool_choice")
    elif choice == "auto":
        return
    many = choice == "required" and body.parallel_tool_calls is not False
    ask.lark = gateway.words.family.grammar(wanted, many, gateway.words.marker_ids)
    ask.lark_param = "tools"


def _plain(message: Message, index: int) -> dict[str, Any]:
    """As templates and the table of conversations take it."""
    plain: dict[str, Any] = {"role": message.role, "content": joined(message.content)}
    if message.role == "tool":
        if not message.tool_call_id:
            raise bad("a tool's message needs the tool_call_id that it answers", f"messages[{index}].tool_call_id")
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if message.role != "assistant":
            raise bad("only an assistant's message has tool_calls", f"messages[{index}].tool_calls")
        plain["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {"name": c.function.name, "arguments": c.function.arguments or "{}"},
            }
            for c in message.tool_calls
        ]
    return plain


class _Chat:
    """One answer, whole or in chunks; both are read from the same events."""

    def __init__(self, gateway: Gateway, ask: Ask, body: ChatRequest) -> None:
        self._gateway = gateway
        self._ask = ask
        self._top = body.top_logprobs or 0
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._turn = Turn(gateway, ask, self._call_id)
        self._model = model_name(gateway)

    def _call_id(self, index: int, number: int) -> str:
        return f"call_{self._id[9:]}_{index}_{number}"

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        replies = [_Collected() for _ in range(self._ask.n)]
        spent = Spent()
        with Clock(self._gateway) as clock:
            async with aclosing(self._turn.events()) as events:
                async for one in events:
                    if isinstance(one, Piece):
                        clock.tokens(one.choice, len(one.tokens))
                        replies[one.choice].take(one)
                    elif isinstance(one, Ended):
                        replies[one.choice].reason = one.reason
                    elif isinstance(one, Done):
                        spent = one.spent
        count(self._gateway, spent, [reply.reason for reply in replies])
        choices = [self._choice(index, reply) for index, reply in enumerate(replies)]
        return self._frame("chat.completion", choices) | {"usage": usage(spent)}

    def _choice(self, index: int, reply: _Collected) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(reply.text), "refusal": None}
        if reply.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [self._call(index, n, call) for n, call in enumerate(reply.calls)]
        logprobs = None
        if self._ask.logprobs:
            logprobs = chat_logprobs(self._gateway.words.model, reply.tokens, reply.rows, self._top)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reply.reason}

    def _call(self, index: int, number: int, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self._call_id(index, number), "type": "function", "function": function}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        calls = [0] * self._ask.n
        spent = Spent()
        reasons: list[str] = []
        with Clock(self._gateway) as clock:
            async with aclosing(self._turn.events()) as events:
                begun = False
                async for one in events:
                    if not begun and isinstance(one, Piece | Ended):  # what fails before it has a status of its own
                        begun = True
                        for index in range(self._ask.n):
                            yield self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
                    if isinstance(one, Piece):
                        clock.tokens(one.choice, len(one.tokens))
                        for delta in self._deltas(one, calls):
                            yield delta
                    elif isinstance(one, Ended):
                        reasons.append(one.reason)
                        yield self._chunk(one.choice, {}, reason=one.reason)
                    elif isinstance(one, Done):
                        spent = one.spent
        count(self._gateway, spent, reasons)
        if self._usage:
            yield event(self._frame("chat.completion.chunk", []) | {"usage": usage(spent)})
        yield _DONE

    def _deltas(self, piece: Piece, calls: list[int]) -> list[bytes]:
        index = piece.choice
        logprobs = None
        if self._ask.logprobs and piece.tokens:
            logprobs = chat_logprobs(self._gateway.words.model, piece.tokens, piece.logprobs, self._top)
        found: list[bytes] = []
        for heard in piece.heard:
            if isinstance(heard, Call):
                call = {"index": calls[index], **self._call(index, calls[index], heard)}
                calls[index] += 1
                found.append(self._chunk(index, {"tool_calls": [call]}, logprobs))
            else:
                found.append(self._chunk(index, {"content": heard.text}, logprobs))
            logprobs = None
        if logprobs is not None:
            found.append(self._chunk(index, {"content": ""}, logprobs))
        return found

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        frame = self._frame("chat.completion.chunk", [choice])
        return event(frame | {"usage": None} if self._usage else frame)

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


class _Collected:
    """A reply while it is put together."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.calls: list[Call] = []
        self.tokens: list[int] = []
        self.rows: list[Any] = []
        self.reason = ""

    def take(self, piece: Piece) -> None:
        self.tokens += piece.tokens
        self.rows += piece.logprobs
        for heard in piece.heard:
            if isinstance(heard, Call):
                self.calls.append(heard)
            else:
                self.text.append(heard.text)


def count(gateway: Gateway, spent: Spent, reasons: list[str]) -> None:
    """What a finished request adds to the metrics."""
    metrics = gateway.metrics
    for reason in reasons:
        metrics.succeeded.labels(reason).inc()
    metrics.prompt_tokens.inc(spent.prompt)
    metrics.generation_tokens.inc(spent.completion)
    for tier in ("hbm", "dram", "nvme", "remote"):
        metrics.found.labels(tier).inc(getattr(spent, tier))
