"""A store, a proxy before it, and engines on top of either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .remote_rig import Proxy, Server, Tier, TierOf


@pytest.fixture
def server(store_binary: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server(store_binary, tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


@pytest.fixture
def tier_of() -> Iterator[TierOf]:
    tiers: list[Tier] = []

    def make(url: str, **changes: Any) -> Tier:
        tiers.append(Tier(url, **changes))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.store.close()
