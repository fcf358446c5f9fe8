"""The simulated tier conforms: whatever is tried against it could be a file or a store."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from attnix.drivers.conformance_tier import CHECKS, MIN_FRAMES, StoredFormat, TierRig
from attnix.drivers.serve import ConfigError, DriverArguments
from attnix.drivers.sim_tier import make_backend
from attnix.drivers.spec import DriverSpec, driver_argv

FORMAT = StoredFormat(6 * 4096, 6, 4, bytes(range(16)))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierRig]:
    path = tmp_path_factory.mktemp("tier") / "slots"
    config = {"path": str(path), "capacity_frames": MIN_FRAMES}
    spec = DriverSpec(2, "sim0", driver_argv("attnix.drivers.sim_tier"), config, 1, 4096, tier="sim")

    def flip(slot: int, offset: int) -> None:
        fd = os.open(path, os.O_RDWR)
        at = slot * FORMAT.stored_bytes + offset
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 0x20]), at)
        os.close(fd)

    rig = TierRig(spec, FORMAT, flip=flip, deadline_s=20)
    yield rig
    rig.close()


@pytest.mark.parametrize("name", CHECKS)
def test_the_simulated_tier_conforms(name: str, rig: TierRig) -> None:
    CHECKS[name](rig)


@pytest.mark.parametrize("wrong", [7, ["x"], "5"])
def test_faults_that_are_no_list_are_refused_by_name(wrong: object) -> None:
    config = {"capacity_frames": 4, "frame_bytes": 128, "layers": 1, "block_tokens": 16, "fail_items": wrong}
    config |= {"dram_device": 1, "identity": "00" * 16, "stored_bytes": 8192, "dram_frames": 4, "dram_fd": 0}
    with pytest.raises(ConfigError, match="'fail_items' is a list of item numbers"):
        make_backend(DriverArguments(0, 0, 0, config))
