"""The gateway as an ASGI application: who answers which path.

Each file beside this one that answers requests has a function `routes(gateway) -> list[BaseRoute]`; `SECTIONS` is the
one place where they are put together, and where a new one (the dashboard) is mounted.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from . import anthropic_api, health, monitoring, openai_api, openapi
from .dashboard import routes as dashboard
from .errors import ApiError, api_of
from .gateway import Gateway
from .http import refusal
from .settings import Settings

SECTIONS: Final[tuple[Callable[[Gateway], list[BaseRoute]], ...]] = (
    openai_api.routes,
    anthropic_api.routes,
    monitoring.routes,
    health.routes,
    openapi.routes,
    dashboard.routes,
)


async def _refused(request: Request, error: Exception) -> Response:
    """A path or a method that is not served."""
    assert isinstance(error, HTTPException)
    known = f"{request.method} {request.url.path} is not served here"
    answer = refusal(ApiError(error.status_code, known, code="not_found"), api_of(request.url.path))
    answer.headers.update(error.headers or {})
    return answer


def build(settings: Settings) -> Starlette:
    """The application; it connects when it starts."""
    gateway = Gateway(settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.ensure_future(gateway.run())
        if settings.keys:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.read_keys_again)
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    routes = [route for section in SECTIONS for route in section(gateway)]
    middleware = []
    if settings.origins:
        methods, headers = ["GET", "POST"], ["authorization", "content-type", "x-api-key"]
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=list(settings.origins), allow_methods=methods, allow_headers=headers
            )
        )
    handlers: dict[Any, Any] = {404: _refused, 405: _refused}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)
    # No redirect where a slash is too many: its address would be what the Host header says, without TLS behind a proxy that has it.
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app
