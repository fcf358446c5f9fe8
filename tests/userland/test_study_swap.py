"""The cost model's fit against passes made from known coefficients, and the tables of studies over known documents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from attnix.study_swap import Fit, Pass, chunks, fit
from attnix.userland.bench.tiers import rows_of
from attnix.userland.commands import study

from .conftest import Attnix


def passes(a: float, b: float, k: float) -> list[Pass]:
    sizes = ((16, 0), (128, 0), (512, 0), (512, 512), (512, 2048), (16, 3072), (128, 1024))
    return [Pass(n, c, a * n + b * n * (c + n / 2) + k) for n, c in sizes]


def test_a_fit_of_exact_passes_gives_their_coefficients() -> None:
    found = fit(passes(700e3, 150.0, 9e6))
    assert (found.a_ns, found.b_ns, found.k_ns) == pytest.approx((700e3, 150.0, 9e6))
    assert found.worst_residual == pytest.approx(0, abs=1e-9)
    assert found.predict(100, 1000) == pytest.approx(700e3 * 100 + 150.0 * 100 * 1050 + 9e6)


def test_what_the_model_cannot_say_is_in_the_residuals() -> None:
    made = passes(700e3, 150.0, 9e6)
    made[5] = made[5]._replace(ns=made[5].ns * 1.5)
    found = fit(made)
    assert (found.worst_tokens, found.worst_cached) == (16, 3072)
    assert 0.05 < found.worst_residual < 0.5


def test_chunks_of_a_prefill() -> None:
    assert chunks(16) == [(16, 0)]
    assert chunks(1100) == [(512, 0), (512, 512), (76, 1024)]


SWAP: dict[str, Any] = {
    "model": "made up",
    "engines": {"hbm": "cpu/x", "nvme": "io_uring"},
    "rounds": 5,
    "rows": [
        {
            "tokens": 16,
            "blocks": 1,
            "kv_bytes": 368_640,
            "dram_ns": 100_000.0,
            "nvme_ns": 20_000_000.0,
            "prefill_ns": 16_000_000.0,
            "model_ns": 12_000_000.0,
            "cheapest": "dram",
        }
    ],
    "fit": Fit(700e3, 150.0, 9e6, 7, 0.031, 0.25, 16, 3072)._asdict(),
    "recompute_wins": {"dram": [], "nvme": [16]},
}


def test_the_swap_table(monkeypatch: pytest.MonkeyPatch, attnix: Attnix) -> None:
    monkeypatch.setattr(study, "measured", lambda *words: json.dumps(SWAP))
    lines = attnix("study", "swap").out.splitlines()
    assert lines[2].split() == [
        "16",
        "1",
        "360",
        "KiB",
        "100",
        "us",
        "20",
        "ms",
        "16",
        "ms",
        "12",
        "ms",
        "-25%",
        "160",
        "1",
        "dram",
    ]
    assert lines[3] == "recompute beats loading from dram: nowhere, down to one block"
    assert lines[4] == "recompute beats loading from nvme: at 16 tokens"
    assert "a 700.0 us, b 150.00 ns, k 9.00 ms" in lines[5]
    assert attnix("study", "swap", "--json").json == SWAP


def test_rows_of_a_tier_bench() -> None:
    """Two frames of 1 MB: 2 MB in 1 ms is 2 GB/s; the ratio is the median of the pairs', not that of the medians."""
    case = {
        "case": "dram -> nvme", "peer": "fio io_uring", "frames": 2, "frame_bytes": 1_000_000, "peer_bytes": 2_008_192,
        "ours_ns": [1e6, 1e6, 4e6], "theirs_ns": [2e6, 0.5e6, 4e6], "missing": "",
    }  # fmt: skip
    speed, operations = rows_of(case)
    assert (speed.ours, speed.unit, speed.theirs, speed.ratio) == (2.0, "GB/s", 1.0, 1.0)
    assert (operations.ours, operations.unit, operations.theirs) == (2000.0, "IOPS", 1000.0)
    (missing,) = rows_of({**case, "theirs_ns": [], "missing": "fio is not installed"})
    assert (missing.theirs, missing.ratio) == (None, None)
    assert "fio is not installed" in missing.peer
