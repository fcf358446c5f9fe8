"""`attnix serve`: the OpenAI and Anthropic interfaces over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from attnix.syscalls.client import LONGEST_S
from attnix.syscalls.paths import default_socket_path, too_long

from ..output import CommandError, SocketOption


def serve(
    host: Annotated[
        str, typer.Option(help="Address to serve on; others than this machine's need --keys.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one and says which.")] = 8000,
    keys: Annotated[
        str, typer.Option(metavar="FILE", help="API keys, mode 0600, read again at SIGHUP (docs/gateway.md).")
    ] = "",
    max_body: Annotated[int, typer.Option(min=1, metavar="BYTES", help="Longest request body.")] = 8 * 2**20,
    time_limit: Annotated[
        float, typer.Option(min=0.001, max=LONGEST_S, metavar="SECONDS", help="Longest request.")
    ] = 600.0,
    max_parked: Annotated[
        int, typer.Option(min=0, help="Conversations whose contexts are kept between requests.")
    ] = 256,
    parked: Annotated[
        float, typer.Option(min=0.0, max=LONGEST_S, metavar="SECONDS", help="For how long, without a request.")
    ] = 600.0,
    origin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A web origin that may call (CORS). Repeatable.")
    ] = None,
    socket: SocketOption = "",
) -> None:
    """Serve OpenAI's and Anthropic's HTTP interfaces, and the dashboard, until interrupted."""
    from ..gateway.keys import BadKeys
    from ..gateway.serve import serve as run  # uvicorn is slow to import, and other commands do not need it
    from ..gateway.settings import Settings

    if not keys and host not in ("127.0.0.1", "::1", "localhost"):
        raise CommandError(f"serving on {host} needs --keys FILE: without keys only this machine may connect")
    if why := too_long(socket or default_socket_path()):  # no daemon can ever be there
        raise CommandError(why)
    settings = Settings(
        socket, host, port, keys, max_body, time_limit, max_parked, parked, tuple(origin or ())
    )  # fmt: skip
    try:
        status = run(settings)
    except BadKeys as error:
        raise CommandError(str(error)) from None
    raise typer.Exit(status)
