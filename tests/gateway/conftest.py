"""`gateway(...)` starts a daemon with a scripted mind and a gateway in front of it; both are at rest in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .rig import Daemon, Served

Gateway = Callable[..., Served]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    """options: of the gateway's command line; everything else is the daemon's."""
    started: list[Served] = []

    def start(*options: str, **daemon: Any) -> Served:
        started.append(Served(Daemon(tmp_path / str(len(started)), **daemon), *options))
        return started[-1]

    yield start
    for served in started:
        served.stop()
        if served.daemon.process.popen.poll() is None:
            served.daemon.at_rest()
            assert served.daemon.process.stop() == 0
