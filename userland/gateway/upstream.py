"""The gateway's one connection to the daemon, made again whenever it breaks."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from attnix.syscalls import AsyncClient, AttnixError, ConnectionLost, aconnect

_log: Final = logging.getLogger("attnix.gateway")
RETRY_S: Final = 0.25  # between attempts to connect
RETRY_AFTER_S: Final = 1  # what clients are told
LOOK_S: Final = 5.0  # for an answer to those that only look: a daemon that hangs says nothing


class Unavailable(Exception):
    """There is no daemon at this moment."""


class Upstream:
    """Call `run` as a task; `client` is a connection that works, or Unavailable.

    renewed     awaited with each new connection before anybody sees it
    connection  counts connections: a handle is worth nothing on another one than its own
    """

    def __init__(self, path: str, renewed: Callable[[AsyncClient], Awaitable[None]]) -> None:
        self.connection = 0
        self.why = "the gateway has not connected yet"
        self._path = path
        self._renewed = renewed
        self._client: AsyncClient | None = None
        self._told = ""

    @property
    def client(self) -> AsyncClient:
        """Error: Unavailable."""
        if self._client is None or not self._client.connected:
            raise Unavailable(self.why)
        return self._client

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.connected

    async def run(self) -> None:
        """Keep a connection until cancelled."""
        while True:
            client = aconnect(self._path or None, name="gateway")
            try:
                await client.start()
                await self._renewed(client)
                self.connection += 1
                self._client = client
                self._told = ""
                await client.ended()
                self.why = "the daemon has gone"
            except (ConnectionLost, AttnixError) as error:
                self._lost(error.message)
            except Exception as error:  # whatever it was, the next attempt may succeed
                if self._lost(f"the connection to the daemon cannot be used: {type(error).__name__}: {error}"):
                    _log.exception("a connection could not be used")
            finally:
                self._client = None
                client.close()
            await asyncio.sleep(RETRY_S)

    def _lost(self, why: str) -> bool:
        """Say so once, not at every attempt.  Whether it was said now."""
        self.why = why
        if why == self._told:
            return False
        self._told = why
        print(f"attnix: {why}; requests get 503 until there is one", file=sys.stderr, flush=True)
        return True
