"""The rig under the studies and benchmarks of tiers: real accel and nvme drivers move real KV, and nothing is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from attnix import bench_tiers, study_swap
from attnix.drivers.memfd import map_shared
from attnix.tier_rig import DRAM, HBM, NVME, NvmeSpec, RigError, TierRig
from attnix.userland.bench.tiers import rows_of

pytestmark = pytest.mark.model
FRAMES = 24


def frames_of(rig: TierRig, frames: list[int]) -> list[bytes]:
    with map_shared(rig.supervisor.arena_fd(HBM)) as arena:
        size = rig.frame_bytes
        return [arena[frame * size : (frame + 1) * size] for frame in frames]


def test_kv_goes_down_to_nvme_and_comes_back_elsewhere(smollm2: Path, tmp_path: Path) -> None:
    async def go() -> None:
        nvme = NvmeSpec(str(tmp_path / "slots"), FRAMES)
        async with TierRig(str(smollm2), hbm_frames=FRAMES, dram_frames=FRAMES, nvme=nvme, window_tokens=256) as rig:
            rig.map(0, np.arange(4, dtype=np.int32))
            tokens = np.arange(100, 164, dtype=np.int32)
            passes = await rig.prefill(0, tokens)
            assert [(count, start) for count, start, _ in passes] == [(64, 0)]
            before = frames_of(rig, [0, 1, 2, 3])
            assert len(set(before)) == 4 and bytes(rig.frame_bytes) not in before
            blocks, there = range(4), [20, 3, 11, 7]
            down = await rig.transfer(HBM, "read", DRAM, list(enumerate(there)), blocks)
            assert down.moved_bytes >= 4 * rig.frame_bytes
            await rig.transfer(NVME, "write", DRAM, list(zip([5, 6, 9, 0], there, strict=True)), blocks)
            other = [1, 2, 3, 4]
            await rig.transfer(NVME, "read", DRAM, list(zip([5, 6, 9, 0], other, strict=True)), blocks)
            await rig.transfer(HBM, "write", DRAM, list(zip([16, 17, 18, 19], other, strict=True)), blocks)
            assert frames_of(rig, [16, 17, 18, 19]) == before
            with pytest.raises(RigError, match="1 of 1 failed"):  # control: another block's name is refused
                await rig.transfer(HBM, "write", DRAM, [(20, other[0])], [1])

    asyncio.run(go())


def test_the_swap_study_runs(smollm2: Path, tmp_path: Path) -> None:
    """Four lengths and three repetitions: whether it works, not what it says."""
    found = asyncio.run(study_swap.study(str(smollm2), str(tmp_path), 1, (16, 64, 256, 1040)))
    rows = found["rows"]
    assert isinstance(rows, list)
    assert [(row["tokens"], row["blocks"], row["kv_bytes"]) for row in rows] == [
        (16, 1, 368_640), (64, 4, 4 * 368_640), (256, 16, 16 * 368_640), (1040, 65, 65 * 368_640),
    ]  # fmt: skip
    for row in rows:
        least = min(row[name] for name in ("dram_ns", "nvme_ns", "prefill_ns"))
        assert least > 0
        assert row[{"recompute": "prefill_ns"}.get(row["cheapest"], f"{row['cheapest']}_ns")] == least


def test_the_tier_bench_runs(smollm2: Path, tmp_path: Path) -> None:
    found = asyncio.run(bench_tiers.bench(str(smollm2), str(tmp_path), 2, 8, 16))
    cases = found["cases"]
    assert isinstance(cases, list)
    assert [case["case"] for case in cases] == [
        "hbm -> dram", "hbm -> dram", "dram -> hbm", "dram -> hbm",
        "dram -> nvme", "nvme -> dram", "nvme -> dram, scattered",
    ]  # fmt: skip
    for case in cases:
        assert len(case["ours_ns"]) == 2
        assert case["missing"] or len(case["theirs_ns"]) == 2
        assert all(row.ours > 0 for row in rows_of(case))
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
