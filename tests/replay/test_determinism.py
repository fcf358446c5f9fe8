"""Same events, same times: same effects, to the byte; whatever Python's hashes are, whichever core decides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("random_agents.py")
STEPS = 1500
CALLS = ("append", "fork", "generate", "truncate", "kill", "release", "wait_tool", "resume")


def said(seed: int, core: str, hash_seed: int) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, str(SCRIPT), str(seed), str(STEPS), core]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    first = said(seed, "c", 1)
    assert said(seed, "c", 2) == first
    assert said(seed, "twin", 3) == first, "the cores are twins"
    assert all(first["done"].get(name, 0) > 3 for name in CALLS), first["done"]


def test_another_seed_is_another_run() -> None:
    assert said(3, "c", 1)["digest"] != said(4, "c", 1)["digest"]
