"""The dram tier's arena: never more than its budget by a twentieth, refused when the machine cannot hold it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from attnix.drivers import dram
from attnix.drivers.dram import HUGE_PAGE_BYTES, DramArena, DramSpec, frames_in
from attnix.drivers.memfd import map_shared, memfd_bytes

BUDGET = 100 << 20
STORED_OF = {33 << 10: 40 << 10, 1_153_434: 4096 + 1_155_072, 2 << 20: 4096 + (2 << 20), 5000: 4096 + 8192}


class Said:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, level: str, text: str) -> None:
        self.lines.append((level, text))


@pytest.mark.parametrize("frame_bytes", STORED_OF)
def test_what_a_budget_really_costs(frame_bytes: int) -> None:
    """Case 42: 100 MiB, blocks of 33 KiB and 1.1 MiB among them; bytes counted as the system counts them."""
    stored = STORED_OF[frame_bytes]
    frames = frames_in(BUDGET, frame_bytes)
    assert frames == BUDGET // stored, "by hand: a header of 4,096 bytes and whole pages"
    arena = DramArena(DramSpec(1, "dram0", frames, frame_bytes), Said())
    try:
        with map_shared(arena.fd) as mapping:
            for at in range(0, len(mapping), mmap.PAGESIZE):
                mapping[at] = 1
        allocated = os.fstat(arena.fd).st_blocks * 512
        assert frames * stored <= memfd_bytes(arena.fd) == allocated <= BUDGET * 105 // 100
        assert BUDGET - frames * stored < stored, "no frame more would fit"
    finally:
        arena.close()
    arena.close()


def test_whole_huge_pages_unless_they_cost_a_twentieth() -> None:
    big = DramSpec(1, "dram0", frames_in(BUDGET, 33 << 10), 33 << 10)
    assert big.arena_bytes % HUGE_PAGE_BYTES == 0 and big.arena_bytes - big.frames_bytes < HUGE_PAGE_BYTES
    small = DramSpec(1, "dram0", 2, 4096)
    assert small.arena_bytes == small.frames_bytes == 4 * 4096


def test_more_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dram, "machine_bytes", lambda: 1 << 20)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError, match="dram0 needs 2097152 bytes and this machine allows 1048576"):
        DramArena(DramSpec(1, "dram0", 256, 4096), Said())
    assert len(os.listdir("/proc/self/fd")) == before


def test_pages_that_cannot_be_locked_stay_pageable_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        def mlock(self, address: object, n_bytes: object) -> int:
            ctypes.set_errno(12)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc())
    said = Said()
    arena = DramArena(DramSpec(1, "dram0", 2, 4096, pages="locked"), said)
    arena.close()
    assert "locked" not in arena.pages
    assert [text for level, text in said.lines if level == "warning"] == [
        "dram0: pages stay pageable, locking 16384 bytes failed: Cannot allocate memory"
    ]


def test_locked_pages_are_locked_where_the_system_allows_it() -> None:
    def locked_kib() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmLck:"))

    said = Said()
    before = locked_kib()
    arena = DramArena(DramSpec(1, "dram0", 2, 4096, pages="locked"), said)
    try:
        if any(level == "warning" for level, _ in said.lines):
            pytest.skip("this system does not let us lock 16 KiB")
        assert locked_kib() - before == 16
    finally:
        arena.close()
    assert locked_kib() == before


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    root, groups = tmp_path / "cgroup", tmp_path / "self"
    (root / "a/b").mkdir(parents=True)
    groups.write_text("0::/a/b\n")
    (root / "a/b/memory.max").write_text("max\n")
    machine = dram.machine_bytes(tmp_path / "nothing", tmp_path / "nothing")
    assert dram.machine_bytes(root, groups) == machine == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (root / "a/memory.max").write_text("7000000\n")
    assert dram.machine_bytes(root, groups) == 7000000, "of the group around ours"
    (root / "a/b/memory.max").write_text("5000000\n")
    assert dram.machine_bytes(root, groups) == 5000000
    (root / "memory/x").mkdir(parents=True)
    (root / "memory/x/memory.limit_in_bytes").write_text("3000000\n")
    groups.write_text("3:cpu,memory:/x\n1:name=systemd:/a/b\n")
    assert dram.machine_bytes(root, groups) == 3000000
