"""`/metrics`, for Prometheus."""

from __future__ import annotations

import asyncio

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from attnix.syscalls import AttnixError
from attnix.syscalls.types import TiersResult, VmstatResult

from .errors import ApiError
from .gateway import Gateway
from .http import caller, refusal
from .upstream import Unavailable


def routes(gateway: Gateway) -> list[BaseRoute]:
    """One page.  With keys it is for operators: counts of hits tell one tenant what another asks."""

    async def metrics(request: Request) -> Response:
        try:
            if not caller(gateway, request).operator:
                raise ApiError(403, "metrics are of the whole machine: this needs a key with `operator = true`")
        except ApiError as error:
            return refusal(error, "openai")
        vmstat: VmstatResult | None = None
        tiers: TiersResult | None = None
        try:
            async with asyncio.timeout(gateway.look_s):
                client = gateway.upstream.client
                vmstat, tiers = await client.vmstat(), await client.tiers()
        except (Unavailable, AttnixError, TimeoutError):
            pass
        own = gateway.metrics
        own.daemon.set(vmstat is not None)
        own.parked.labels("tool_wait").set(gateway.parked.waiting)
        own.parked.labels("idle").set(len(gateway.parked) - gateway.parked.waiting)
        return Response(own.show(vmstat, tiers), headers={"content-type": CONTENT_TYPE_LATEST})

    return [Route("/metrics", metrics, methods=["GET"])]
