"""`POST /v1/completions`: prompts as they are, several at a time."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from .ask import Ask, Done, Ended, Event, Piece, Spent
from .errors import bad
from .gateway import Gateway
from .http import Clock, answer, event, read_body, stream, unless_gone
from .keys import Key
from .openai_chat import count
from .openai_types import CompletionRequest, completion_decoder
from .openai_usage import Offsets, completion_logprobs, usage
from .sampling import check_model, model_name, sampled
from .tools.protocol import Said
from .turns import Turn

_DONE: Final = b"data: [DONE]\n\n"
_MAX_PROMPTS: Final = 128
_AT_ONCE: Final = 32  # replies of one request that hold contexts at a time: there may be fewer slots than prompts


async def completions(gateway: Gateway, request: Request, key: Key) -> Response:
    """Answer one request."""
    body = await read_body(gateway, request, completion_decoder)
    gateway.words.model  # noqa: B018 (Unavailable, or a model without a tokenizer)
    check_model(gateway, body.model)
    if body.echo or body.suffix or (body.best_of or 1) > (body.n or 1):
        raise bad(
            "echo, suffix and best_of are not supported",
            "echo" if body.echo else "suffix" if body.suffix else "best_of",
        )
    ask = Ask(key, keep=False)
    sampled(ask, body)
    ask.max_tokens = 16 if body.max_tokens is None else body.max_tokens
    ask.logprobs = max(1, body.logprobs) if body.logprobs is not None else 0
    prompts = await _prompts(gateway, body)
    if len(prompts) * ask.n > _MAX_PROMPTS:
        raise bad(f"{len(prompts)} prompts of {ask.n} replies: at most {_MAX_PROMPTS} together", "prompt")
    reply = _Completion(gateway, [replace(ask, tokens=tokens) for tokens in prompts], body)
    if not body.stream:
        return answer(await unless_gone(request, reply.whole()))
    return await stream(gateway, request, reply.chunks(), lambda error: event(error.openai()))


async def _prompts(gateway: Gateway, body: CompletionRequest) -> list[list[int]]:
    """Token ids of every prompt.  Error: ApiError."""
    given: list[Any] = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt)
    if given and all(isinstance(one, int) for one in given):
        given = [given]
    if not given or not (all(isinstance(one, str) for one in given) or all(isinstance(one, list) for one in given)):
        raise bad("prompt is a text, a list of texts, token ids, or a list of lists of token ids", "prompt")
    words, found = gateway.words, []
    for one in given:
        tokens = await words.run(words.model.encode_text, one, 0, chars=len(one)) if isinstance(one, str) else one
        if not tokens:
            raise bad("a prompt is empty", "prompt")
        if not all(0 <= token < words.uname.vocab_tokens for token in tokens):
            raise bad(f"token ids are 0 to {words.uname.vocab_tokens - 1}", "prompt")
        found.append(tokens)
    return found


class _Completion:
    """One answer of all prompts, whole or in chunks."""

    def __init__(self, gateway: Gateway, asks: list[Ask], body: CompletionRequest) -> None:
        self._gateway = gateway
        self._asks = asks
        self._n = asks[0].n
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._id = f"cmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model_name(gateway)
        self._top = body.logprobs or 0

    async def _events(self) -> AsyncGenerator[Event, None]:
        """Those of all prompts as they come; replies are numbered through, and one Done has the sum."""
        if len(self._asks) == 1:
            async with aclosing(Turn(self._gateway, self._asks[0], _no_calls).events()) as events:
                async for one in events:
                    yield one
            return
        queue: asyncio.Queue[Event | BaseException] = asyncio.Queue()

        turns = asyncio.Semaphore(max(1, _AT_ONCE // self._n))

        async def pump(number: int, ask: Ask) -> None:
            try:
                async with turns, aclosing(Turn(self._gateway, ask, _no_calls).events()) as events:
                    async for one in events:
                        queue.put_nowait(_renumbered(one, number * self._n))
            except BaseException as error:
                queue.put_nowait(error)
                raise

        tasks = [asyncio.ensure_future(pump(number, ask)) for number, ask in enumerate(self._asks)]
        total, left = Spent(), len(tasks)
        end = asyncio.get_running_loop().time() + self._gateway.settings.time_limit_s  # of all: each turn has as much
        try:
            while left:
                async with asyncio.timeout_at(end):
                    news = await queue.get()
                if isinstance(news, BaseException):
                    raise news
                if isinstance(news, Done):
                    left -= 1
                    for field in fields(total):
                        setattr(total, field.name, getattr(total, field.name) + getattr(news.spent, field.name))
                else:
                    yield news
            yield Done(total)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        many = len(self._asks) * self._n
        texts: list[list[str]] = [[] for _ in range(many)]
        tokens: list[list[int]] = [[] for _ in range(many)]
        rows: list[list[Any]] = [[] for _ in range(many)]
        reasons = [""] * many
        spent = Spent()
        with Clock(self._gateway) as clock:
            async with aclosing(self._events()) as events:
                async for one in events:
                    if isinstance(one, Piece):
                        clock.tokens(one.choice, len(one.tokens))
                        texts[one.choice] += [heard.text for heard in one.heard if isinstance(heard, Said)]
                        tokens[one.choice] += one.tokens
                        rows[one.choice] += one.logprobs
                    elif isinstance(one, Ended):
                        reasons[one.choice] = one.reason
                    elif isinstance(one, Done):
                        spent = one.spent
        count(self._gateway, spent, reasons)
        choices = [
            self._choice(i, "".join(texts[i]), reasons[i], self._logprobs(tokens[i], rows[i], self._offsets()))
            for i in range(many)
        ]
        return self._frame(choices) | {"usage": usage(spent)}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        spent = Spent()
        reasons: list[str] = []
        offsets = [self._offsets() for _ in range(len(self._asks) * self._n)]
        with Clock(self._gateway) as clock:
            async with aclosing(self._events()) as events:
                async for one in events:
                    if isinstance(one, Piece):
                        clock.tokens(one.choice, len(one.tokens))
                        text = "".join(heard.text for heard in one.heard if isinstance(heard, Said))
                        logprobs = self._logprobs(one.tokens, one.logprobs, offsets[one.choice])
                        if text or (logprobs and one.tokens):
                            yield self._chunk(self._choice(one.choice, text, None, logprobs))
                    elif isinstance(one, Ended):
                        reasons.append(one.reason)
                        yield self._chunk(self._choice(one.choice, "", one.reason, None))
                    elif isinstance(one, Done):
                        spent = one.spent
        count(self._gateway, spent, reasons)
        if self._usage:
            yield event(self._frame([]) | {"usage": usage(spent)})
        yield _DONE

    def _offsets(self) -> Offsets:
        return Offsets(self._gateway.words.model)

    def _logprobs(self, tokens: list[int], rows: Any, offsets: Offsets) -> dict[str, Any] | None:
        if not self._asks[0].logprobs:
            return None
        return completion_logprobs(self._gateway.words.model, tokens, rows, self._top, offsets)

    @staticmethod
    def _choice(index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        frame = self._frame([choice])
        return event(frame | {"usage": None} if self._usage else frame)

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id, "object": "text_completion", "created": self._created, "model": self._model,
            "choices": choices,
        }  # fmt: skip


def _no_calls(index: int, number: int) -> str:
    return ""


def _renumbered(one: Event, base: int) -> Event:
    return one._replace(choice=one.choice + base) if isinstance(one, Piece | Ended) else one
