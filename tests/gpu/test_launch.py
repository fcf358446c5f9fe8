"""The launch table: a row for everything that is launched, the best one taken, and rules that can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnix.kernels_gpu import aot, launch_table, tune
from attnix.kernels_gpu.aot_cases import Case, cases
from attnix.kernels_gpu.cubin import Usage
from attnix.kernels_gpu.launch import ARCHITECTURES, SHARED_BYTES, _nearest, compiling_for, launch
from attnix.kernels_gpu.shapes import BLOCK_TOKENS, HEAD_DIMS, Launch

ROOT = Path(__file__).resolve().parents[2]
TABLED = {row[0] for row in launch_table.ROWS}
FINE = Usage("decode_pieces", 128, 0, 0, 0, 4096, 0, ("HMMA",), 128)


def compiler_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_ahead_of_time_and_keep_the_rules(architecture: int) -> None:
    """The subset of aot_cases.py; `python -m attnix.kernels_gpu.aot --all` is everything."""
    command = [sys.executable, "-m", "attnix.kernels_gpu.aot", "--architecture", str(architecture), "--workers", "1"]
    done = subprocess.run(command, env=compiler_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for kernel in ("decode_pieces", "prefill_tiles", "rope_write_kernel", "copy_frames_kernel", "rmsnorm_kernel"):
        assert kernel in done.stdout
    for head_dim in HEAD_DIMS:
        assert f"D{head_dim} P16 bfloat16" in done.stdout
    assert "was taken by no case" not in done.stdout


@pytest.mark.parametrize("kernel", sorted(TABLED))
def test_every_architecture_head_dim_and_block_size_has_a_row(kernel: str) -> None:
    for architecture in ARCHITECTURES:
        for head_dim in HEAD_DIMS:
            for block_tokens in BLOCK_TOKENS:
                assert launch(kernel, architecture, head_dim, block_tokens).warps in (1, 2, 4, 8)


def test_no_row_is_there_twice() -> None:
    keys = [row[:4] for row in launch_table.ROWS]
    assert len(set(keys)) == len(keys)


def test_the_subset_that_ci_compiles_takes_every_row() -> None:
    """aot.py says so of what it has compiled; this, of what it would."""
    taken: set[launch_table.Row] = set()
    for case in cases(every=False):
        if case.kernel in TABLED:
            with compiling_for(case.architecture) as rows:
                launch(case.kernel, case.architecture, case.head_dim, case.block_tokens)
                taken |= rows
    assert aot.never_taken(ARCHITECTURES, taken) == []
    lost = taken.pop()
    assert aot.never_taken(ARCHITECTURES, taken) == [lost]
    assert aot.never_taken([80, 90], [row for row in launch_table.ROWS if row[1] != 90]) == [
        row for row in launch_table.ROWS if row[1] == 90
    ]


def test_the_nearer_row_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (("k", 90, 0, 0, 1, 1, 1, 1, 1), ("k", 90, 64, 0, 2, 1, 1, 1, 1), ("k", 90, 64, 16, 3, 1, 1, 1, 1))
    monkeypatch.setattr("attnix.kernels_gpu.launch.ROWS", rows)
    _nearest.cache_clear()
    try:
        assert [launch("k", 90, *at).block_m for at in ((64, 16), (64, 32), (128, 16), (0, 0))] == [3, 2, 1, 1]
        with pytest.raises(KeyError, match="sm_80"):
            launch("k", 80)
    finally:
        _nearest.cache_clear()


@pytest.mark.parametrize(
    ("usage", "fault"),
    [
        (FINE, ""),
        (FINE._replace(local=8), "local 8"),
        (FINE._replace(stack=16, spills=4), "4 spills"),
        (FINE._replace(shared=SHARED_BYTES[90] + 1), "shared memory"),
        (FINE._replace(kernel="prefill_tiles", stack=16, spills=4, matrix=("HGMMA",)), ""),
        (FINE._replace(kernel="prefill_tiles", matrix=("HMMA",)), "no HGMMA, but HMMA"),
        (FINE._replace(kernel="prefill_tiles", matrix=()), "no HGMMA, but nothing"),
    ],
)
def test_the_rules_find_what_breaks_them(usage: Usage, fault: str) -> None:
    found = "; ".join(aot.faults(Case("paged_decode", 90, 128, 16, "bfloat16"), usage))
    assert (found == "") == (fault == "") and fault in found


def test_a_tuned_row_replaces_its_own_kind_and_no_other() -> None:
    rows = (("a", 90, 64, 0, 1, 1, 1, 1, 1), ("a", 90, 0, 0, 2, 2, 2, 2, 2), ("a", 80, 64, 0, 3, 3, 3, 3, 3))
    changed = tune.with_row(rows, ("a", 90, 64, 0), Launch(9, 8, 7, 6, 5))
    assert changed == (("a", 80, 64, 0, 3, 3, 3, 3, 3), ("a", 90, 0, 0, 2, 2, 2, 2, 2), ("a", 90, 64, 0, 9, 8, 7, 6, 5))


def test_the_written_table_reads_back_as_it_was(tmp_path: Path) -> None:
    text = tune.table_text(launch_table.ROWS, "measured on nothing")
    scope: dict[str, object] = {}
    exec(compile(text, "launch_table.py", "exec"), scope)
    assert scope["ROWS"] == tuple(sorted(launch_table.ROWS))


def test_without_a_gpu_the_tuner_and_the_bench_refuse_and_say_why() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for module, what in (
        ("attnix.kernels_gpu.tune", "needs a GPU"),
        ("attnix.bench_attention", "torch sees none here"),
    ):
        done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True)
        assert done.returncode != 0 and what in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run([sys.executable, "tests/gpu/run.py"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0 and "torch sees no GPU" in done.stderr
