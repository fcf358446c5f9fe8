"""The rig under the studies and benchmarks of tiers: real accel and nvme drivers move real KV, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attnix import bench_tiers, study_swap
from attnix.bench_tiers_device import DeviceCopies, WrongCopy
from attnix.drivers.accel.cuda.ops import TorchOps
from attnix.drivers.accel.metadata import load_config
from attnix.drivers.memfd import create_memfd, map_shared
from attnix.kernel.tag import stored_bytes
from attnix.stand_in import SHAPES, write_stand_in
from attnix.tier_rig import DRAM, HBM, NVME, NvmeSpec, RigError, TierRig
from attnix.userland.bench.tiers import rows_of

FRAMES = 24


def frames_of(rig: TierRig, frames: list[int]) -> list[bytes]:
    with map_shared(rig.supervisor.arena_fd(HBM)) as arena:
        size = rig.frame_bytes
        return [arena[frame * size : (frame + 1) * size] for frame in frames]


@pytest.mark.model
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


@pytest.mark.model
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


@pytest.mark.model
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


@pytest.mark.e2e
def test_the_tier_bench_runs_on_a_device_in_a_dry_run(tmp_path: Path) -> None:
    """The driver's frames lie in its device, and what copies them is its own; two rounds, whose times are no speeds."""
    model = write_stand_in(tmp_path / "model" / "small.gguf", SHAPES["small"])
    folder = tmp_path / "nvme"
    folder.mkdir()
    found = asyncio.run(bench_tiers.bench(str(model), str(folder), 2, 8, 16, "cuda-dry"))
    engines, cases = found["engines"], found["cases"]
    assert isinstance(engines, dict) and engines["hbm"].startswith("cuda-dry/")
    assert isinstance(cases, list)
    peers = ("copy_ in one piece", "copy_ by frames")
    assert [(case["case"], case["peer"]) for case in cases[:6]] == [
        *(("hbm -> dram, copies alone", peer) for peer in peers),
        *(("dram -> hbm, copies alone", peer) for peer in peers),
        ("hbm -> dram, with checksums", peers[0]), ("dram -> hbm, with checksums", peers[0]),
    ]  # fmt: skip
    assert all(len(case["ours_ns"]) == len(case["theirs_ns"]) == 2 for case in cases[:6])
    assert [case["case"] for case in cases[6:]] == ["dram -> nvme", "nvme -> dram", "nvme -> dram, scattered"]


@pytest.mark.parametrize("fault", ["", "one frame short", "another layer's bytes"])
def test_copies_that_are_not_what_was_copied_are_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    config = load_config(write_stand_in(tmp_path / "small.gguf", SHAPES["small"]))
    size = config.frame_bytes(16, "bfloat16")
    fd = create_memfd("dram", 8 * stored_bytes(size))
    rig: Any = SimpleNamespace(
        config=config,
        block_tokens=16,
        hbm_frames=8,
        frame_bytes=size,
        supervisor=SimpleNamespace(arena_fd=lambda n: fd),
    )
    whole = TorchOps.copy_frames

    def copy_frames(self: TorchOps, source: Any, target: Any, pairs: Any, **how: Any) -> None:
        if fault == "one frame short":
            pairs = pairs[:-1]
        elif fault:
            how["layers"] = 1
        whole(self, source, target, pairs, **how)

    monkeypatch.setattr(TorchOps, "copy_frames", copy_frames)
    copies = DeviceCopies(rig, [(1, 7), (5, 0), (0, 3)], "cuda-dry")
    try:
        if not fault:
            copies.check()
            return
        with pytest.raises(WrongCopy, match="what came to dram"):
            copies.check()
    finally:
        os.close(fd)
