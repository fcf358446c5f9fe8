"""`/healthz`: this process answers.  `/readyz`: and the daemon does."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from .gateway import Gateway
from .upstream import RETRY_AFTER_S, Unavailable


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The two probes."""

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        try:
            answer = await gateway.upstream.client.uname()
        except Unavailable as why:
            return JSONResponse(
                {"status": "no daemon", "message": str(why)}, 503, headers={"retry-after": str(RETRY_AFTER_S)}
            )
        return JSONResponse({"status": "ready", "model": answer.model})

    return [Route("/healthz", healthz, methods=["GET"]), Route("/readyz", readyz, methods=["GET"])]
