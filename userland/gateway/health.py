"""`/healthz`: this process answers.  `/readyz`: and the daemon does."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from attnix.syscalls import AttnixError

from .gateway import Gateway
from .upstream import RETRY_AFTER_S, Unavailable


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The two probes."""

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        try:
            async with asyncio.timeout(gateway.look_s):
                answer = await gateway.upstream.client.uname()
        except (Unavailable, AttnixError, TimeoutError) as error:
            why = str(error) or f"the daemon did not answer within {gateway.look_s:g} s"
            return JSONResponse(
                {"status": "no daemon", "message": why}, 503, headers={"retry-after": str(RETRY_AFTER_S)}
            )
        if gateway.words.refusal:
            return JSONResponse({"status": "no tokenizer", "message": gateway.words.refusal}, 503)
        return JSONResponse({"status": "ready", "model": answer.model})

    return [Route("/healthz", healthz, methods=["GET"]), Route("/readyz", readyz, methods=["GET"])]
