"""`attnix bench resume` and `attnix bench overlap`: what their rows say of given times, and that they run on a real daemon."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from attnix.syscalls import Context
from attnix.userland.bench import overlap, resume
from attnix.userland.bench.decode_engines import BenchError, booted


def test_overlap_rows_are_medians_of_each_turns_ratio() -> None:
    """Turns of ratio 1.0, 1.5 and 1.2 (the bound of the last is its memory time), controls 2.0, 2.0 and 1.6."""
    turns = [
        overlap.Turn(0.100, 0.080, 0.100, 0.200),
        overlap.Turn(0.200, 0.100, 0.300, 0.400),
        overlap.Turn(0.050, 0.100, 0.120, 0.160),
    ]
    row, control = overlap.rows_of("nvme", 64, turns)
    assert row.ours == pytest.approx(1.2)
    assert control.ours == pytest.approx(2.0)
    assert row.limit == 1.10 and control.limit == 1.6
    assert row.theirs == pytest.approx(100)  # ms, the median bound
    assert "64 new tokens" in row.case
    assert row.n == 3


def test_dram_is_called_emulated_where_it_is_the_memory_of_hbm() -> None:
    engines = ("ref/x86/bfloat16", "cuda-dry/torch/bfloat16", "cuda/sm_90/bfloat16", "")
    labels = [overlap.label_of("dram", engine) for engine in engines]
    assert labels == ["dram (emulated: one memory)", "dram (dry run, no speed)", "dram", "dram (emulated: one memory)"]
    assert overlap.label_of("nvme", "cuda/sm_90/bfloat16") == "nvme"
    assert overlap.label_of("nvme", engines[1]) == "nvme (dry run, no speed)"


def test_resume_rows_put_each_case_beside_its_peer() -> None:
    ours = {case: [0.010, 0.030, 0.020] for case in ("hbm", "dram", "nvme", "restart", "recompute", "save")}
    rows = resume.rows(
        {**ours, "peer warm": [0.1], "peer cold": [0.2], "peer recompute": [6.0], "peer save": [0.05]}, "", 512
    )
    assert [row.ours for row in rows] == [pytest.approx(20)] * 6
    assert [row.theirs for row in rows] == [None, *map(pytest.approx, (100, 200, 200, 6000, 50))]
    assert rows[1].ratio == pytest.approx(5)
    missing = resume.rows(ours, "it is not installed", 512)
    assert missing[0].peer == "none" and "it is not installed" in missing[1].peer
    assert [row.ratio for row in missing] == [None] * 6


@pytest.mark.model
@pytest.mark.e2e
def test_a_context_resumes_from_every_tier_and_after_a_restart(smollm2: Path) -> None:
    """Both benches' steps on a small context, where every step checks where the KV was and which token came."""
    with tempfile.TemporaryDirectory(prefix="attnix-test-") as directory:
        flags = ["--dram", "64MiB", "--nvme", "64MiB", "--tier-write", "back"]
        times: dict[str, list[float]] = {}
        plan = resume.Plan(str(smollm2), 64, 1, 1, 1, "")
        with booted(str(smollm2), directory, 64 << 20, flags) as ours:
            ids = resume.prompt(ours.uname.vocab_tokens, 64)
            expected = resume.resumed(plan, ours, ids, None, directory, times, lambda text: None)
            assert set(times) == {"hbm", "dram", "nvme", "recompute", "save"}
            moving = overlap.Resumed(ours, 64)
            turn = moving.turn("nvme", 16)
            assert min(turn) > 0
            assert ours.client.vmstat().counters["loaded_blocks_nvme"] >= 8
            assert ours.client.fsck().problems == ()
        with booted(str(smollm2), directory, 64 << 20, flags) as again:
            opened = again.client.sys.open(resume.NAME)
            resumer = resume.Resumer(again.client, Context(again.client, opened.ctx, opened.cid))
            resumer.expected = expected
            assert resumer.first_token() > 0
            resumer.expected = [expected[0] + 1]  # control: another token is noticed
            with pytest.raises(BenchError, match="the first token was"):
                resumer.first_token()
