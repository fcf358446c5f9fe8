"""`make gpu` itself, without a GPU.  A file of its own: with the compilations of test_launch.py it would be the longest of all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .test_launch import compiler_environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.e2e
def test_make_gpu_in_a_dry_run(tmp_path: Path) -> None:
    """Every step that a machine with a GPU would run, with tiny sizes; nothing is recorded."""
    before = (ROOT / "docs" / "performance.md").read_bytes()
    command = ["make", "--no-print-directory", "gpu", "DRY=1", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=compiler_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    verdicts = json.loads(done.stdout.strip().splitlines()[-1])
    assert {"kernels", "memcheck", "engine", "e2e", "attention", "decode", "tiers", "overlap"} <= set(verdicts)
    assert set(verdicts.values()) == {"passed"}
    assert (ROOT / "docs" / "performance.md").read_bytes() == before
