"""What every folder shares: the default model's file, and hypothesis profiles.

Profiles: dev 50 examples, ci 200 (derandomized), deep 5,000.  Chosen by HYPOTHESIS_PROFILE or CI.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from attnix.syscalls.paths import home_dir

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True)
settings.register_profile("deep", max_examples=5000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The pulled default model.  Where it is missing the test is skipped; in CI that is a failure."""
    files = sorted((home_dir() / "models" / "smollm2").glob("*.gguf"))
    if not files:
        if os.environ.get("CI"):
            pytest.fail("SmolLM2 is not there: `make test` pulls it first")
        pytest.skip("SmolLM2 is not there: run `attnix pull smollm2`")
    return files[0]
