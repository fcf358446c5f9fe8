"""What all requests share: settings and the connection to the daemon."""

from __future__ import annotations

from attnix.syscalls import AsyncClient

from .settings import Settings
from .upstream import Upstream


class Gateway:
    """One running gateway.  `upstream.client` is an `attnix.syscalls.AsyncClient` that works, or raises Unavailable."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.upstream = Upstream(settings.socket, self._renewed)

    async def _renewed(self, client: AsyncClient) -> None:
        """A new connection: nothing of the one before is left."""

    async def run(self) -> None:
        """Work until cancelled."""
        await self.upstream.run()
