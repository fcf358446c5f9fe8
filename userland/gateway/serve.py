"""Runs the application on uvicorn and uvloop, until it is told to stop."""

from __future__ import annotations

import errno
import logging
import os
import sys

import uvicorn

from attnix.syscalls.descriptors import raise_limit

from .app import build
from .protocol import limited
from .settings import Settings


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT.  The exit status."""
    raise_limit()
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
    logging.getLogger("uvicorn.error").addFilter(_CannotBind(settings.host, settings.port).filter)
    server = _Announcing(config)
    try:
        server.run()
    except SystemExit:  # it has said why: the port is taken, or not ours
        return 1
    return 0 if server.started else 1


class _CannotBind(logging.Filter):
    """Says why it cannot serve there as everything else here says such things."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._where = f"{host}:{port}"

    def filter(self, record: logging.LogRecord) -> bool:
        error: object = record.msg
        if not isinstance(error, OSError):
            return True
        number = error.errno or 0
        taken = number == errno.EADDRINUSE
        why = os.strerror(number) if number > 0 else error.strerror or str(error)
        remedy = "; --port 8001 takes another, --port 0 any free one" if taken else ""
        print(f"attnix: cannot serve on {self._where}: {why}{remedy}", file=sys.stderr)
        return False


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
