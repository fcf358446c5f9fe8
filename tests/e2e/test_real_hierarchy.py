"""The memory hierarchy under the real model: more contexts than hbm holds, no token wrong and none computed twice.

What is right comes from daemons whose hbm holds everything and that have nothing below it (conftest.py).
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attnix.kernel.calls import TierRow
from attnix.syscalls.client import Client
from attnix.syscalls.records import unpack_ids

if TYPE_CHECKING:
    from tests.e2e.conftest import Script, Start, TalksOf

pytestmark = [pytest.mark.e2e, pytest.mark.model]

KV_FRAME_BYTES, STORED_BYTES = 368_640, 372_736  # SmolLM2's in bfloat16, in hbm and below
SUPERBLOCK_BYTES = 4096  # before the slots of the file
PATIENCE_S = 300.0


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.01)


def tier_row(client: Client, device: str) -> TierRow:
    return next(row for row in client.tiers().tiers if row.device == device)


def sizes(hbm: int, dram: int, nvme: int) -> tuple[str, ...]:
    """Flags for that many frames."""
    return (
        "--hbm", str(hbm * KV_FRAME_BYTES), "--dram", str(dram * STORED_BYTES), "--nvme", str(nvme * STORED_BYTES),
    )  # fmt: skip


# -- restarts -------------------------------------------------------------------------------------------------------


def test_kill_9_in_the_middle_of_streams(start: Start, streamed: list[Script], talks_of: TalksOf) -> None:
    """The client comes back by itself; each token is right, and what the file had is not computed again."""
    flags = sizes(150, 60, 260)  # of the six, hbm holds five and dram two
    daemon = start(*flags)
    with daemon.connect(resume=PATIENCE_S) as client:
        talks = talks_of(client, streamed)
        talks.begin()
        talks.turn()
        full = sum(c.stat().tokens // 16 for c in talks.contexts)
        until(lambda: talks.row("nvme0").write_bytes >= full * STORED_BYTES, "writing down what is named")
        told = talks.log_tokens()
        client.setlimit(f"uid:{os.geteuid()}", "tokens_s", hard=40)  # seconds lie between 8 tokens of each and 44
        streams = [(i, talks.go_on(i)) for i in range(5)]
        with daemon.connect() as watch:

            def generated() -> list[int]:
                """Of each stream, the least first."""
                usages = [watch.stat(cid=talks.contexts[i].cid).usage for i in range(5)]
                return sorted(
                    u.generated_tokens - s.turns[0].max_tokens for u, s in zip(usages, streamed, strict=False)
                )

            until(lambda: generated()[1] >= 8, "four streams")
            assert generated()[-1] <= 44, "each was to have 20 tokens to go"
        daemon.kill()
        daemon = start(*flags)
        for i, stream in streams:
            result = talks.check(i, stream)
            assert result.usage.nvme_tokens >= 16 * 20, f"conversation {i} was not loaded"
        assert client.reconnects == 1
        talks.turn()
        talks.sound()
        # Since the restart: tails of at most 16 tokens, the turn that was cut off, and what came after it.
        computed = talks.count("computed_tokens")
        assert computed <= talks.log_tokens() - told + 6 * 16 + 2 * talks.generations
        assert talks.count("loaded_blocks_nvme") >= 5 * 20
    daemon.end()


@pytest.mark.parametrize("ending", ["SIGTERM", "SIGKILL"])
def test_a_prefix_is_found_after_a_restart(start: Start, ending: str) -> None:
    """Cases 22 and 26: ten blocks in a file of ten slots; after the restart exactly the four new tokens are computed."""
    draw = random.Random(22)
    tokens = [draw.randrange(100, 40_000) for _ in range(160)]
    more = [draw.randrange(100, 40_000) for _ in range(4)]
    flags = sizes(64, 32, 10)
    daemon = start(*flags)
    with daemon.connect() as client:
        context = client.alloc_context()
        context.append(tokens=tokens)
        client.sysctl("tier.write", "through")
        context.forward(1)
        until(lambda: tier_row(client, "nvme0").free_frames == 0, "writing through")
        assert client.snapshot("s", [context]).tokens == 160
        client.sysctl("tier.write", "back")
        twin = context.fork(1)[0]
        twin.append(tokens=more)
        expected = twin.generate(6, ignore_eos=True).tokens
    daemon.end() if ending == "SIGTERM" else daemon.kill()

    daemon = start(*flags)
    with daemon.connect() as client:
        assert tier_row(client, "nvme0").free_frames == 0
        restored = client.restore("s")[0]
        assert restored.append(tokens=more).tokens == 164
        until(lambda: restored.stat().cached_tokens == 164, "the prefill")
        assert client.vmstat().counters["computed_tokens"] == 4
        assert (restored.stat().usage.hit_tokens, restored.stat().usage.nvme_tokens) == (160, 160)
        assert min(unpack_ids(restored.pagemap().frames)) >= 0 and len(unpack_ids(restored.pagemap().frames)) == 11
        again = client.alloc_context()
        again.append(tokens=tokens + more)
        until(lambda: again.stat().cached_tokens == 164, "the prefill")
        assert client.vmstat().counters["computed_tokens"] == 8
        assert (again.stat().usage.hit_tokens, again.stat().usage.nvme_tokens) == (160, 0)
        assert restored.generate(6, ignore_eos=True).tokens == again.generate(6, ignore_eos=True).tokens == expected
        # An eleventh block takes the place of another.
        client.sysctl("tier.write", "through")
        before = tier_row(client, "nvme0").write_bytes
        again.append(tokens=more * 3)
        again.forward(1)
        until(lambda: tier_row(client, "nvme0").write_bytes >= before + STORED_BYTES, "writing through")
        row = tier_row(client, "nvme0")
        assert row.capacity_frames == 10 and row.capacity_frames - row.free_frames <= 10
        assert daemon.nvme_file.stat().st_size <= SUPERBLOCK_BYTES + 10 * STORED_BYTES
        assert client.fsck().problems == ()
    daemon.end()


# -- other frames, other tiers --------------------------------------------------------------------------------------


def test_int8_frames_go_through_all_tiers(
    start: Start, scripts: list[Script], answered_by: Callable[..., list[Script]], talks_of: TalksOf
) -> None:
    """Their scales go with them: the same tokens as in an hbm that holds everything in int8."""
    asked = [script._replace(turns=script.turns[:4]) for script in scripts[:9]]
    right = answered_by(start, asked, "--kv-dtype", "int8")
    assert [s.answers for s in right] != [s.answers[:4] for s in scripts[:9]], "int8 makes no difference at all"
    frame_bytes = 30 * 2 * 3 * 16 * (64 + 4)  # a number is a byte, and each token and head has a float32 scale
    stored_bytes = 4096 + -(-frame_bytes // 4096) * 4096
    flags = (
        "--hbm", str(45 * frame_bytes), "--dram", str(45 * stored_bytes), "--nvme", str(200 * stored_bytes),
    )  # fmt: skip
    daemon = start(*flags, "--kv-dtype", "int8")
    with daemon.connect() as client:
        talks = talks_of(client, right)
        talks.begin()
        for _ in range(4):
            talks.turn()
        talks.sound()
        rows = {row.device: row for row in client.tiers().tiers}
        assert rows["hbm0"].frame_bytes == frame_bytes and client.uname().kv_dtype == "int8"
        assert [rows[d].capacity_frames for d in ("hbm0", "dram0", "nvme0")] == [45, 45, 200]
        for device in ("hbm0", "nvme0"):
            assert rows[device].read_bytes and rows[device].write_bytes and not rows[device].errors
        assert talks.count("loaded_blocks_nvme") > 20 and talks.count("loaded_blocks_dram") > 0
        assert client.getrusage().recomputed_tokens == 0
    daemon.end()


def test_tiers_come_and_go_while_streams_run(
    start: Start, scripts: list[Script], talks_of: TalksOf, tmp_path: Path
) -> None:
    settings = json.dumps({"path": str(tmp_path / "d" / "later.frames")})
    daemon = start("--hbm", str(68 * KV_FRAME_BYTES), "--dram", str(68 * STORED_BYTES))
    with daemon.connect() as client:
        talks = talks_of(client, scripts)
        talks.begin()
        talks.turn()
        attached: list[str] = []

        def attach() -> None:
            attached.append(client.attach_tier("nvme", 260 * STORED_BYTES, settings).device)

        talks.turn({5: attach})
        talks.turn()
        talks.turn()
        assert attached == ["nvme0"] and talks.count("loaded_blocks_nvme") > 20
        pid = talks.row("nvme0").driver_pid
        talks.turn({5: lambda: client.detach_tier("nvme0")})
        until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the driver")
        assert [row.device for row in client.tiers().tiers if row.state != "down"] == ["hbm0", "dram0"]
        talks.turn({2: attach})  # with what it held
        before = talks.count("loaded_blocks_nvme")
        talks.turn()
        assert talks.count("loaded_blocks_nvme") > before
        talks.sound()
        assert talks.count("driver_deaths") == talks.count("transfer_errors") == 0
    daemon.end()


def test_another_line_of_the_register_is_another_answer(start: Start, scripts: list[Script]) -> None:
    """The control: were a block's KV that of other tokens, these tests would see it.  One number in the middle of each
    prompt is changed, the turns and the seeds are the same."""
    daemon = start("--hbm", str(300 * KV_FRAME_BYTES))
    changed = 0
    with daemon.connect() as client:
        for script in scripts:
            lines = script.prompt.splitlines(keepends=True)
            lines[5] = lines[5].replace(" keeps ", " keeps 1")
            context = client.alloc_context()
            context.append(text="".join(lines))
            said = []
            for turn in script.turns[:4]:
                context.append(text=turn.text)
                result = context.generate(
                    turn.max_tokens, temperature=turn.temperature, seed=turn.seed, ignore_eos=True
                )
                said.append(result.tokens)
            changed += tuple(said) != script.answers[:4]
    daemon.end()
    assert changed >= len(scripts) - 1
