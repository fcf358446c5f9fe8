"""The CUDA engine in a dry run, as the daemon starts it: it conforms like the CPU engine, in both numerics.

Its frames lie in a device's memory, so the suite looks at a mirror of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from attnix.drivers.conformance import CHECKS, Rig


@pytest.fixture(
    scope="module", params=[("invariant", "float32"), ("fast", "float32"), ("fast", "bfloat16")], ids="-".join
)
def rig(request: pytest.FixtureRequest, tiny_llama: Path, start_accel: StartAccel) -> Iterator[Rig]:
    rig = start_accel(tiny_llama, *request.param, device="cuda-dry")
    yield rig
    rig.close()


@pytest.mark.parametrize("name", CHECKS)
def test_the_cuda_engine_conforms(name: str, rig: Rig) -> None:
    CHECKS[name](rig)
