"""Real daemons for the end-to-end tests: `python -m attnix.boot` as its own process, the way `attnix boot` starts it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Boot = Callable[..., str]


@pytest.fixture
def boot(tmp_path: Path) -> Iterator[Boot]:
    """boot(model, *flags) -> socket path of a daemon that is ready.  All are shut down and must end with status 0."""
    daemons: list[subprocess.Popen[str]] = []

    def start(model: str, *flags: str) -> str:
        path = str(tmp_path / f"d{len(daemons)}" / "s.sock")
        command = [sys.executable, "-m", "attnix.boot", "--model", model, "--socket", path]
        command += ["--state-dir", str(tmp_path / "state"), "--max-contexts", "256", *flags]
        errors = tmp_path / f"stderr{len(daemons)}"
        with errors.open("w") as file:
            daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        daemons.append(daemon)
        assert daemon.stdout is not None
        line = daemon.stdout.readline()
        if "ready on" not in line:
            daemon.wait()
            raise AssertionError(f"the daemon did not start: {line}{errors.read_text()}")
        return path

    yield start
    statuses = []
    for daemon in daemons:
        daemon.terminate()
        try:
            statuses.append(daemon.wait(30))
        except subprocess.TimeoutExpired:
            daemon.kill()
            statuses.append(daemon.wait())
        assert daemon.stdout is not None
        daemon.stdout.close()
    assert statuses == [0] * len(daemons), "a daemon did not end in order"
