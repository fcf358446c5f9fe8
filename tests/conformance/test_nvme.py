"""The file tier conforms with both of its engines, and lives through what can happen to its file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnix.drivers.conformance_tier import CHECKS, MIN_FRAMES, StoredFormat, TierRig
from attnix.drivers.nvme.engine import new_region
from attnix.drivers.nvme.ring_engine import RingEngine, RingUnavailable
from attnix.drivers.spec import DriverSpec, driver_argv

FORMAT = StoredFormat(6 * 16384, 6, 4, bytes(range(16)))
SUPERBLOCK = 4096


def has_uring() -> bool:
    try:
        RingEngine(new_region(4096), 1).close()
    except RingUnavailable:
        return False
    return True


ENGINES = [pytest.param("uring", marks=pytest.mark.skipif(not has_uring(), reason="no io_uring here")), "threads"]


def nvme_spec(path: Path, **settings: Any) -> DriverSpec:
    config = {"path": str(path), "capacity_frames": MIN_FRAMES, **settings}
    return DriverSpec(2, "nvme0", driver_argv("attnix.drivers.nvme"), config, 1, 4096, tier="nvme")


def flipper(path: Path, format: StoredFormat) -> Callable[[int, int], None]:
    def flip(slot: int, offset: int) -> None:
        at = SUPERBLOCK + slot * format.stored_bytes + offset
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x20]))
            file.flush()
            os.fsync(file.fileno())  # the driver does not look into the page cache

    return flip


def start(path: Path, format: StoredFormat = FORMAT, **settings: Any) -> TierRig:
    return TierRig(nvme_spec(path, **settings), format, flip=flipper(path, format), deadline_s=20)


@pytest.fixture(scope="module", params=ENGINES)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierRig]:
    rig = start(tmp_path_factory.mktemp("tier") / "slots", engine=request.param)
    yield rig
    rig.close()


@pytest.mark.parametrize("name", CHECKS)
def test_the_file_tier_conforms(name: str, rig: TierRig) -> None:
    CHECKS[name](rig)
