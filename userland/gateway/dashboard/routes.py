"""`/` and what the page asks for: `/dashboard/state`, `/dashboard/frames` and `/dashboard/explain`.

The page is the same for everybody and needs no key; the three that tell something want one where the gateway has keys, and
tell what that key's group may know (seen.py).  Everything is polled, and one answer serves all who ask at about the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from attnix.syscalls.exceptions import AttnixError, SyscallError

from ..errors import ApiError, as_api_error
from ..gateway import Gateway
from ..http import answer, caller, check_host, refusal
from ..upstream import RETRY_AFTER_S
from .look import Looks
from .seen import Seen

STATIC: Final = Path(__file__).parent / "static"
_KINDS: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Nothing from elsewhere, nothing inline, in nobody's frame.
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FRESH: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The page, its files, and its JSON."""
    looks = Looks(gateway.upstream)

    async def page(request: Request) -> Response:
        return _file("index.html")

    async def file(request: Request) -> Response:
        return _file(request.path_params["name"])

    async def state(request: Request, seen: Seen) -> Any:
        return seen.state(await looks.state())

    async def frames(request: Request, seen: Seen) -> Any:
        device = request.query_params.get("device", "")
        cells = _number(request, "cells", 4096, 1, 16384)
        return seen.frames(await looks.frames(device), await looks.state(), cells)

    async def explain(request: Request, seen: Seen) -> Any:
        cid = _number(request, "cid", 0, 0, 1 << 53)
        block = _number(request, "block", -1, -1, (1 << 31) - 1)
        logical = _number(request, "logical", -1, -1, (1 << 31) - 1)
        seen.check(cid, await looks.state())
        return await looks.explain(cid, seen.block(block), logical)

    return [
        Route("/", page, methods=["GET"]),
        Route("/dashboard/static/{name}", file, methods=["GET"]),
        Route("/dashboard/state", _told(gateway, state), methods=["GET"]),
        Route("/dashboard/frames", _told(gateway, frames), methods=["GET"]),
        Route("/dashboard/explain", _told(gateway, explain), methods=["GET"]),
    ]


def _file(name: str) -> Response:
    path = STATIC / name
    if path.parent != STATIC or path.suffix not in _KINDS or not path.is_file():
        return Response("not found\n", 404, HEADERS, "text/plain")
    return FileResponse(path, headers=HEADERS, media_type=_KINDS[path.suffix])


def _told(
    gateway: Gateway, tell: Callable[[Request, Seen], Awaitable[Any]]
) -> Callable[[Request], Awaitable[Response]]:
    """With the key looked at, and every error in JSON.  Polling does not count against a key's requests."""

    async def endpoint(request: Request) -> Response:
        try:
            check_host(gateway, request)
            key = caller(gateway, request)
            group = "" if key.operator else gateway.keys.full(key.group)
            async with asyncio.timeout(gateway.look_s):
                return answer(await tell(request, Seen(group)), headers=_FRESH)
        except TimeoutError:
            why = f"the daemon did not answer within {gateway.look_s:g} s"
            return refusal(ApiError(503, why, code="unavailable", retry_after_s=RETRY_AFTER_S), "openai")
        except SyscallError as error:
            return refusal(ApiError(404, str(error), code="not_found"), "openai")
        except (ApiError, AttnixError, Exception) as error:
            return refusal(as_api_error(error), "openai")

    return endpoint


def _number(request: Request, name: str, default: int, low: int, high: int) -> int:
    """Error: ApiError 400."""
    text = request.query_params.get(name, "")
    if not text:
        return default
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise ApiError(400, f"{name} is a number from {low} to {high}", param=name)
    return number
