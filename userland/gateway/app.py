"""The gateway as an ASGI application: who answers which path.

Each file beside this one that answers requests has a function `routes(gateway) -> list[BaseRoute]`; `SECTIONS` is the
one place where they are put together, and where a new one (the dashboard) is mounted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from . import health, openai_api
from .gateway import Gateway
from .settings import Settings

SECTIONS: Final[tuple[Callable[[Gateway], list[BaseRoute]], ...]] = (openai_api.routes, health.routes)


def build(settings: Settings) -> Starlette:
    """The application; it connects when it starts."""
    gateway = Gateway(settings)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.ensure_future(gateway.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    app = Starlette(routes=[route for section in SECTIONS for route in section(gateway)], lifespan=lifespan)
    app.state.gateway = gateway
    return app
