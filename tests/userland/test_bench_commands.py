"""Every `attnix bench X` is a program: one without an entry point would end at once and look like success."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["core", "syscall", "decode", "tiers", "resume", "overlap", "agents", "gateway"])
def test_every_bench_explains_itself(name: str) -> None:
    command = [sys.executable, "-m", "attnix.userland.cli", "bench", name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
