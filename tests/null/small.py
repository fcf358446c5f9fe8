"""A small system, a prompt, and what a refused call says: for tests of single calls."""

from __future__ import annotations

from typing import Any

import pytest

from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.simulated import SimulatedClient, SimulatedSystem

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def small(**more: Any) -> SimulatedSystem:
    return SimulatedSystem(**{"core": Core, "frames": 32, "block_tokens": 4, **more})


def refused(code: E, client: SimulatedClient, name: str, *args: object) -> dict[str, Any]:
    with pytest.raises(Errno) as error:
        client.call(name, *args)
    assert error.value.code is code, error.value
    return dict(error.value.detail)
