"""Socket activation and readiness, as systemd does both: sd_listen_fds(3) and sd_notify(3), played by the test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnix.syscalls import connect

DEADLINE_S = 60.0
PASSER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=sys.argv[2])  # exec keeps the number
os.execv(sys.argv[3], sys.argv[3:])
"""


class Unit:
    """A listening socket at `path`, and daemons that are started with it as descriptor 3."""

    def __init__(self, folder: Path, mode: int = 0o600) -> None:
        self.folder = folder
        (folder / "run").mkdir(mode=0o700)
        self.path = folder / "run" / "x.sock"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path))
        self.path.chmod(mode)
        self.listener.listen(8)
        self.told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.told.bind(str(folder / "notify"))
        self.told.settimeout(DEADLINE_S)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, fds: int = 1) -> subprocess.Popen[str]:
        boot = [sys.executable, "-m", "attnix.boot", "--model", "sim", "--hbm", "4KiB", "--window", "64"]
        boot += ["--state-dir", str(self.folder / "state"), "--socket", "/nowhere/ignored.sock", *arguments]
        number = self.listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", PASSER, str(number), str(fds), *boot], pass_fds=[number], text=True,
            stderr=subprocess.STDOUT, stdout=subprocess.PIPE,
            env={**os.environ, "NOTIFY_SOCKET": str(self.folder / "notify")},
        )  # fmt: skip
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=DEADLINE_S)
        self.listener.close()
        self.told.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def test_a_daemon_serves_the_socket_that_it_was_started_with_and_leaves_it_there(folder: Path) -> None:
    unit = Unit(folder)
    try:
        early = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        early.connect(str(unit.path))  # before anybody serves: it waits in the backlog
        early.close()
        for _ in range(2):
            process = unit.start()
            assert unit.told.recv(100) == b"READY=1"
            with connect(str(unit.path)) as system:
                assert system.uname().model
            process.send_signal(signal.SIGTERM)
            assert unit.told.recv(100) == b"STOPPING=1"
            assert process.wait(DEADLINE_S) == 0
            assert unit.path.is_socket(), "it belongs to whoever passed it"
    finally:
        unit.close()


@pytest.mark.parametrize(
    ("mode", "arguments", "fds", "words"),
    [(0o666, (), 1, "SocketMode"), (0o660, (), 1, "--socket-group"), (0o600, (), 2, "exactly one socket")],
)
def test_a_socket_that_lets_in_whom_it_should_not_is_refused(
    folder: Path, mode: int, arguments: tuple[str, ...], fds: int, words: str
) -> None:
    unit = Unit(folder, mode)
    try:
        process = unit.start(*arguments, fds=fds)
        output = process.communicate(timeout=DEADLINE_S)[0]
        assert process.returncode == 1 and words in output and "Traceback" not in output
        assert unit.path.is_socket()
    finally:
        unit.close()


def test_a_socket_in_a_directory_that_its_user_may_not_write_to_is_served(folder: Path) -> None:
    """systemd makes /run/attnix as root, and the service runs as another: no lock file can be made there."""
    unit = Unit(folder)
    run = unit.path.parent
    try:
        if os.getuid() == 0:  # whom no mode keeps out: a lock file that cannot be made is played by the file system
            if subprocess.run(["chattr", "+i", str(run)], capture_output=True).returncode:
                pytest.skip("root, and no immutable directories here")
        else:
            run.chmod(0o500)
        process = unit.start()
        assert unit.told.recv(100) == b"READY=1"
        with connect(str(unit.path)) as system:
            assert system.uname().model
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        assert sorted(path.name for path in run.iterdir()) == ["x.sock"]
    finally:
        if os.getuid() == 0:
            subprocess.run(["chattr", "-i", str(run)], capture_output=True)
        run.chmod(0o700)
        unit.close()
