"""Runs the application on uvicorn and uvloop, until it is told to stop."""

from __future__ import annotations

import sys

import uvicorn

from .app import build
from .protocol import limited
from .settings import Settings


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT.  The exit status."""
    config = uvicorn.Config(
        build(settings),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=limited(settings.time_limit_s),
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=5,
    )
    server = _Announcing(config)
    try:
        server.run()
    except SystemExit:  # it has said why: the port is taken, or not ours
        return 1
    return 0 if server.started else 1


class _Announcing(uvicorn.Server):
    """Says where it serves, in one line on standard output, when it does."""

    async def startup(self, sockets: object = None) -> None:
        await super().startup(None)
        if self.started:
            for server in self.servers:
                for socket in server.sockets:
                    host, port = socket.getsockname()[:2]
                    shown = f"[{host}]" if ":" in host else host
                    print(f"attnix: serving on http://{shown}:{port}", flush=True)
                    sys.stdout.flush()
