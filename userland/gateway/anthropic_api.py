"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's interface."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .anthropic_ask import as_ask
from .anthropic_types import count_decoder, messages_decoder
from .ask import Ask, Begun, Done, Ended, Piece, Spent
from .gateway import Gateway
from .http import Clock, answer, event, guarded, read_body, stream, unless_gone
from .keys import Key
from .openai_chat import count
from .plan import plan
from .sampling import check_model, model_name
from .tools.protocol import Call
from .turns import Turn

_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Messages, and counting their tokens."""
    served = (("/v1/messages", messages), ("/v1/messages/count_tokens", count_tokens))
    return [
        Route(path, guarded(gateway, "anthropic", partial(handler, gateway)), methods=["POST"])
        for path, handler in served
    ]


async def messages(gateway: Gateway, request: Request, key: Key) -> Response:
    """Answer one request."""
    body = await read_body(gateway, request, messages_decoder)
    gateway.words.model  # noqa: B018 (Unavailable, or a model without a tokenizer)
    check_model(gateway, body.model)
    ask = as_ask(gateway, body, key)
    ask.body_bytes = request.state.body_bytes
    reply = _Reply(gateway, ask)
    if not body.stream:
        return answer(await unless_gone(request, reply.whole()))
    return await stream(gateway, request, reply.events(), lambda error: event(error.anthropic(), "error"))


async def count_tokens(gateway: Gateway, request: Request, key: Key) -> Response:
    """Tokens of a prompt; nothing is computed."""
    body = await read_body(gateway, request, count_decoder)
    words = gateway.words
    check_model(gateway, body.model)
    ask = as_ask(gateway, body, key)
    ask.pins = ()
    room, block = words.uname.window_tokens, words.uname.block_tokens
    async with asyncio.timeout(gateway.settings.time_limit_s):
        given = (words.model, words.family, ask, None, False, room, block)
        made = await unless_gone(request, words.run(plan, *given, chars=request.state.body_bytes))
    return answer({"input_tokens": len(made.tokens)})


class _Reply:
    """One answer, whole or as events."""

    def __init__(self, gateway: Gateway, ask: Ask) -> None:
        self._gateway = gateway
        self._id = f"msg_{secrets.token_hex(12)}"
        self._turn = Turn(gateway, ask, self._call_id)
        self._model = model_name(gateway)

    def _call_id(self, index: int, number: int) -> str:
        return f"toolu_{self._id[4:]}_{number}"

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        content: list[dict[str, Any]] = []
        calls = 0
        ended, spent = Ended(0, "", ""), Spent()
        with Clock(self._gateway) as clock:
            async with aclosing(self._turn.events()) as events:
                async for one in events:
                    if isinstance(one, Piece):
                        clock.tokens(0, len(one.tokens))
                        for heard in one.heard:
                            if isinstance(heard, Call):
                                content.append(self._tool_use(calls, heard))
                                calls += 1
                            elif content and content[-1]["type"] == "text":
                                content[-1]["text"] += heard.text
                            else:
                                content.append({"type": "text", "text": heard.text})
                    elif isinstance(one, Ended):
                        ended = one
                    elif isinstance(one, Done):
                        spent = one.spent
        count(self._gateway, spent, [ended.reason])
        return self._message(content, usage(spent)) | _stopped(ended)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        open_text = False
        block = calls = 0
        ended, spent = Ended(0, "", ""), Spent()
        prompt = 0
        with Clock(self._gateway) as clock:
            async with aclosing(self._turn.events()) as events:
                begun = False
                async for one in events:
                    if isinstance(one, Begun):
                        prompt = one.prompt_tokens
                        continue
                    if not begun:  # what fails before it has a status of its own
                        begun = True
                        start = self._message([], {"input_tokens": prompt, "output_tokens": 0})
                        yield _event("message_start", message=start)
                    if isinstance(one, Piece):
                        clock.tokens(0, len(one.tokens))
                        for heard in one.heard:
                            if isinstance(heard, Call):
                                if open_text:
                                    yield _event("content_block_stop", index=block)
                                    block, open_text = block + 1, False
                                use = self._tool_use(calls, heard)
                                arguments = json.dumps(use["input"], ensure_ascii=False)
                                yield _event("content_block_start", index=block, content_block=use | {"input": {}})
                                delta = {"type": "input_json_delta", "partial_json": arguments}
                                yield _event("content_block_delta", index=block, delta=delta)
                                yield _event("content_block_stop", index=block)
                                block, calls = block + 1, calls + 1
                                continue
                            if not open_text:
                                open_text = True
                                yield _event(
                                    "content_block_start", index=block, content_block={"type": "text", "text": ""}
                                )
                            delta = {"type": "text_delta", "text": heard.text}
                            yield _event("content_block_delta", index=block, delta=delta)
                    elif isinstance(one, Ended):
                        ended = one
                    elif isinstance(one, Done):
                        spent = one.spent
        count(self._gateway, spent, [ended.reason])
        if open_text:
            yield _event("content_block_stop", index=block)
        yield _event("message_delta", delta=_stopped(ended), usage=usage(spent))
        yield _event("message_stop")

    def _tool_use(self, number: int, call: Call) -> dict[str, Any]:
        return {
            "type": "tool_use",
            "id": self._call_id(0, number),
            "name": call.name,
            "input": json.loads(call.arguments),
        }

    def _message(self, content: list[dict[str, Any]], spent: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content,
            "stop_reason": None, "stop_sequence": None, "usage": spent,
        }  # fmt: skip


def usage(spent: Spent) -> dict[str, Any]:
    """Anthropic counts cached tokens apart; `attnix` says in which tier they were."""
    made = min(spent.pinned, spent.prompt - spent.cached)
    return {
        "input_tokens": spent.prompt - spent.cached - made,
        "cache_creation_input_tokens": made,
        "cache_read_input_tokens": spent.cached,
        "output_tokens": spent.completion,
        "attnix": spent.tiers(),
    }


def _stopped(ended: Ended) -> dict[str, Any]:
    if ended.stop and ended.reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": ended.stop}
    return {"stop_reason": _REASONS[ended.reason], "stop_sequence": None}


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)
