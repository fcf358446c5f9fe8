"""64 contexts of 1,024 tokens and more on an hbm for 8 of them, under the real model: no token wrong and none computed twice.

A file of its own: with what is right (conftest.py), which a daemon with hbm for all of them says, it is the longest of all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Script, Start, TalksOf

pytestmark = [pytest.mark.e2e, pytest.mark.model]

KV_FRAME_BYTES, STORED_BYTES = 368_640, 372_736  # SmolLM2's in bfloat16, in hbm and below
SUPERBLOCK_BYTES = 4096  # before the slots of the file


def memfd_bytes(pid: int) -> dict[str, int]:
    """Sizes of the memory files that a process has open, by name."""
    found = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        name = os.readlink(fd)
        if name.startswith("/memfd:"):
            found[name.removeprefix("/memfd:").removesuffix(" (deleted)")] = os.stat(fd).st_size
    return found


@pytest.mark.slow
def test_64_named_contexts_on_an_hbm_that_holds_8(start: Start, long_scripts: list[Script], talks_of: TalksOf) -> None:
    assert sum(bool(script.answers) for script in long_scripts) == 32
    blocks = 72  # of one context in the end: 1,024 tokens and more, and five turns
    hbm_bytes, nvme_bytes = 8 * blocks * KV_FRAME_BYTES, 64 * blocks * STORED_BYTES
    dram_bytes = (24 * blocks * STORED_BYTES) >> 21 << 21  # its arena is whole huge pages
    daemon = start("--hbm", str(hbm_bytes), "--dram", str(dram_bytes), "--nvme", str(nvme_bytes))
    with daemon.connect() as client:
        talks = talks_of(client, long_scripts, at_once=3)
        talks.begin()
        assert min(c.stat().tokens for c in talks.contexts) >= 1024
        for _ in range(5):
            talks.turn()
        assert sum(talks.done) == 64 * 5
        assert max(c.stat().tokens for c in talks.contexts) <= blocks * 16
        talks.sound()

        usage = client.getrusage()
        counters = client.vmstat().counters
        rows = {row.device: row for row in client.tiers().tiers}
        for row in rows.values():
            print(row.device, row.capacity_frames, row.read_bytes >> 20, row.write_bytes >> 20, "MiB read, written")
        # Computed: every token of every log once, and once more the last of a prompt that was computed before its
        # generation came (docs/caveats.md).
        assert usage.recomputed_tokens == 0
        total = talks.log_tokens()
        assert total - 64 - talks.generations <= counters["computed_tokens"] <= total + talks.generations
        assert counters.get("dropped_blocks", 0) == counters.get("transfer_errors", 0) == 0
        assert counters["loaded_blocks_nvme"] > 64 and counters["loaded_blocks_dram"] > 64

        allocated = memfd_bytes(daemon.process.pid)
        assert allocated["attnix-hbm0-arena"] <= hbm_bytes
        assert allocated["attnix-dram0"] <= dram_bytes
        assert daemon.nvme_file.stat().st_size <= nvme_bytes + SUPERBLOCK_BYTES  # allocated in advance
        for device, held in (("hbm0", 8), ("dram0", 24), ("nvme0", 64)):
            assert rows[device].capacity_frames <= held * blocks
        for device in ("hbm0", "nvme0"):  # dram has no driver: its bytes are moved by those of the two others
            assert rows[device].read_bytes > 64 << 20 and rows[device].write_bytes > 64 << 20, f"{device} took no part"
            assert not rows[device].errors and not rows[device].corrupt
    daemon.end()
