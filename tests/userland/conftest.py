"""Commands run inside this process (`attnix`), as processes (`spawn`), and daemons for them to talk to."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attnix.syscalls import ConnectionLost, connect
from attnix.syscalls.exceptions import Canceled
from attnix.userland import cli
from tests.wire.turnstile import Turnstile

DEADLINE_S = 30.0
ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "attnix.userland.cli"]


class Said(NamedTuple):
    """What a command printed, and its exit status."""

    out: str
    err: str
    status: int

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Attnix = Callable[..., Said]


@pytest.fixture
def attnix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Attnix:
    """attnix("ps", "--json") runs the command through its entry point, as the console script does."""

    def run(*words: str, stdin: str = "") -> Said:
        monkeypatch.setattr(sys, "argv", ["attnix", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        status: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code or 0
        captured = capsys.readouterr()
        return Said(captured.out, captured.err, status)

    return run


def until(holds: Callable[[], bool], what: str) -> None:
    """Poll until `holds`; an assertion with `what` when it takes too long."""
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen within {DEADLINE_S} s"
        time.sleep(0.005)


@pytest.fixture(name="until")
def until_fixture() -> Callable[[Callable[[], bool], str], None]:
    return until


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty $ATTNIX_HOME."""
    path = tmp_path / "home"
    monkeypatch.setenv("ATTNIX_HOME", str(path))
    monkeypatch.setenv("ATTNIX_STATE", str(tmp_path / "state"))
    return path


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A socket path where no daemon is, as the default one."""
    path = str(tmp_path / "run" / "none.sock")
    monkeypatch.setenv("ATTNIX_SOCKET", path)
    return path


@pytest.fixture
def turnstile(tmp_path: Path) -> Turnstile:
    return Turnstile(tmp_path / "turnstile")


Serve = Callable[..., str]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Serve]:
    """start(script=..., pass_ms=...) -> socket.  Options: tests/wire/served_daemon.py; path: where one was shut down before.

    A daemon with a simulated device whose tokens are bytes, so that text goes through it.  In the end its invariants are
    checked, and its frames are back.
    """
    daemons: list[tuple[subprocess.Popen[str], str]] = []

    def start(path: str = "", **options: Any) -> str:
        until(lambda: path not in [p for d, p in daemons if d.poll() is None], "the end of the daemon before it")
        path = path or str(folder / "run" / f"s{len(daemons)}.sock")
        script = ROOT / "tests" / "wire" / "served_daemon.py"
        command = [sys.executable, str(script), json.dumps({"socket": path, **options})]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        daemons.append((process, path))
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return path

    yield start
    for process, path in daemons:
        try:
            if process.poll() is None and os.path.exists(path):  # else the test has shut it down
                # Where it is on its way down it says so, or nothing; it has to arrive.
                with contextlib.suppress(ConnectionLost, Canceled), connect(path, timeout=DEADLINE_S) as system:
                    assert system.fsck().problems == ()
                    until(lambda: system.vmstat().counters["contexts"] == 0, "the release of every context")
                    tier = system.tiers().tiers[0]
                    assert tier.free_frames + tier.reclaimable_frames == tier.capacity_frames
                    system.shutdown()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """`serving` daemons of one test; the last is the default one."""
    with serving(tmp_path) as start:

        def begin(**options: Any) -> str:
            path = start(**options)
            monkeypatch.setenv("ATTNIX_SOCKET", path)
            return path

        yield begin
