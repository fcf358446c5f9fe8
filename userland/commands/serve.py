"""`attnix serve`: the OpenAI and Anthropic interfaces over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from ..output import SocketOption


def serve(
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one and says which.")] = 8000,
    socket: SocketOption = "",
) -> None:
    """Serve OpenAI's and Anthropic's HTTP interfaces, and the dashboard, until interrupted."""
    from ..gateway.serve import serve as run  # uvicorn is slow to import, and other commands do not need it
    from ..gateway.settings import Settings

    raise typer.Exit(run(Settings(socket=socket, host=host, port=port)))
