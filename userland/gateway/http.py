"""Requests in, answers out: bodies within a limit, keys, clients that leave, and errors in the shape of their API."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import Api, ApiError, as_api_error, bad
from .gateway import Gateway
from .keys import Key
from .protocol import EVENTS
from .upstream import RETRY_AFTER_S

R = TypeVar("R")
Handler = Callable[[Request, Key], Awaitable[Response]]

_log: Final = logging.getLogger("attnix.gateway")
_encode: Final = msgspec.json.Encoder().encode
_LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]", "testserver")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def answer(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(_encode(value), status, headers, "application/json")


def refusal(error: ApiError, api: Api) -> Response:
    """An error as an answer."""
    return answer(error.openai() if api == "openai" else error.anthropic(), error.status, error.headers)


def guarded(gateway: Gateway, api: Api, handler: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """A handler with everything around it: the key, its limits, errors, counting."""

    async def endpoint(request: Request) -> Response:
        try:
            check_host(gateway, request)
            key = caller(gateway, request)
            key.quota.enter(time.monotonic())
            try:
                response = await handler(request, key)
            except BaseException:
                key.quota.leave()
                raise
            if isinstance(response, Streaming):
                response.then(key.quota.leave)
            else:
                key.quota.leave()
        except ClientGone:
            gateway.metrics.gone.inc()
            response = Response(status_code=499)  # nobody reads it
        except asyncio.CancelledError:  # only by the server, when it is told to stop and has waited long enough
            response = refusal(_stopping(), api)
        except Exception as error:
            as_answer = as_api_error(error)
            if as_answer.status >= 500 and as_answer.code == "internal":
                _log.exception("a request failed")
            response = refusal(as_answer, api)
        gateway.metrics.answers.labels(str(response.status_code)).inc()
        return response

    return endpoint


def _stopping() -> ApiError:
    return ApiError(503, "this gateway is being stopped", code="unavailable", retry_after_s=RETRY_AFTER_S)


def caller(gateway: Gateway, request: Request) -> Key:
    """Whose key it brings.  Error: ApiError 401."""
    return gateway.keys.of(request.headers.get("authorization", ""), request.headers.get("x-api-key", ""))


def check_host(gateway: Gateway, request: Request) -> None:
    """Without keys only this machine may call, and no web page that another name leads here (DNS rebinding)."""
    if gateway.settings.keys:
        return
    host = request.headers.get("host", "localhost")
    name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
    if name.lower() not in _LOCAL_HOSTS:
        raise ApiError(403, f"this gateway has no keys file and serves this machine only, not {name!r}")


async def read_body(gateway: Gateway, request: Request, decoder: msgspec.json.Decoder[R]) -> R:
    """The request's body as its type.  Error: ApiError; ClientGone."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body must be application/json, not {kind or 'unnamed'}")
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise ApiError(415, f"the body must be sent as it is, not with content-encoding {coding[:40]!r}")
    limit = gateway.settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise ApiError(413, f"a body of {declared} bytes; the limit is {limit}", fields={"limit": limit})
    body = bytearray()
    async with asyncio.timeout(gateway.settings.time_limit_s):
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > limit:
                raise ApiError(413, f"the body is longer than {limit} bytes", fields={"limit": limit})
            if not message.get("more_body"):
                break
    request.state.body_bytes = len(body)
    try:
        return decoder.decode(bytes(body))
    except msgspec.ValidationError as error:
        _, _, where = str(error).partition(" - at `$")
        raise bad(str(error), where.rstrip("`").lstrip(".")) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"the body is not JSON: {error}", code="invalid_json") from None


async def unless_gone(request: Request, work: Coroutine[Any, Any, R]) -> R:
    """The result of `work`, which is cancelled when the client leaves.  Error: ClientGone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await cancelled(watch, task)


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """End those that still run, one after the other, whatever they say to that."""
    for task in tasks:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Streaming(Response):
    """Server-sent events.  The first is there already: what fails before it is an answer with a status of its own."""

    def __init__(
        self, gateway: Gateway, first: bytes, rest: AsyncGenerator[bytes, None], failed: Callable[[ApiError], bytes]
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-cache"}, "text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self._gateway = gateway
        self._first = first
        self._rest = rest
        self._failed = failed
        self._ends: list[Callable[[], None]] = []

    def then(self, end: Callable[[], None]) -> None:
        """Called when it is over, in whatever way."""
        self._ends.append(end)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[EVENTS] = True
        writing = asyncio.ensure_future(self._write(send))
        watch = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait((writing, watch), return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                self._gateway.metrics.gone.inc()
            else:
                writing.result()
        except asyncio.CancelledError:
            await cancelled(writing)
            await send({"type": "http.response.body", "body": self._failed(_stopping()), "more_body": False})
        finally:
            await cancelled(watch, writing)
            await self._rest.aclose()
            self._over()

    def _over(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            end()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async with aclosing(self._rest) as rest:
                async for chunk in rest:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            failure = as_api_error(error)
            if failure.code == "internal":
                _log.exception("a stream failed")
            await send({"type": "http.response.body", "body": self._failed(failure), "more_body": True})
        self._over()  # before the client knows: its next request must find this one's place free
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream(
    gateway: Gateway, request: Request, chunks: AsyncGenerator[bytes, None], failed: Callable[[ApiError], bytes]
) -> Response:
    """A stream that has begun.  Error: what went wrong before its first chunk; ClientGone."""
    try:
        first = await unless_gone(request, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return Streaming(gateway, first, chunks, failed)


def event(value: object, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _encode(value) + b"\n\n"


class Clock:
    """Times one request for the metrics."""

    def __init__(self, gateway: Gateway) -> None:
        self._metrics = gateway.metrics
        self._begun_s = time.perf_counter()
        self._last_s: dict[int, float] = {}

    def __enter__(self) -> Clock:
        self._metrics.running.inc()
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.running.dec()
        self._metrics.whole_s.observe(time.perf_counter() - self._begun_s)

    def tokens(self, reply: int, count: int) -> None:
        """So many came together."""
        if not count:
            return
        now = time.perf_counter()
        if not self._last_s:
            self._metrics.first_token_s.observe(now - self._begun_s)
        last = self._last_s.get(reply)
        if last is not None:
            for _ in range(count):
                self._metrics.between_tokens_s.observe((now - last) / count)
        self._last_s[reply] = now


def dumps(value: object) -> str:
    """JSON as text, for what travels inside of JSON."""
    return json.dumps(value, ensure_ascii=False)
