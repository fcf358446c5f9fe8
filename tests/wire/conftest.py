"""`serve(...)` starts tests/wire/served_daemon.py and, at the end, holds it to what every daemon must hold."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from attnix.syscalls import Client, connect

from .turnstile import Turnstile

pack: Any = msgpack.packb  # its stubs say that it may return None

DEADLINE_S = 20.0


def until(holds: Callable[[], bool], what: str = "it") -> None:
    """Poll until `holds`; an assertion with `what` when it takes too long."""
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen within {DEADLINE_S} s"
        time.sleep(0.002)


class Raw:
    """A client that sends any bytes, and reads messages."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(path)
        self._buffer = b""

    def send(self, *bodies: bytes) -> None:
        self.socket.sendall(b"".join(len(body).to_bytes(4, "little") + body for body in bodies))

    def call(self, *message: Any) -> None:
        self.send(pack(list(message)))

    def read(self) -> list[Any] | None:
        """The next message; None when the daemon has closed."""
        while len(self._buffer) < 4 or len(self._buffer) < 4 + int.from_bytes(self._buffer[:4], "little"):
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionResetError:
                data = b""
            if not data:
                assert not self._buffer, "the daemon closed inside a message"
                return None
            self._buffer += data
        size = int.from_bytes(self._buffer[:4], "little")
        body, self._buffer = self._buffer[4 : 4 + size], self._buffer[4 + size :]
        message: list[Any] = msgpack.unpackb(body, strict_map_key=False)
        return message

    def close(self) -> None:
        self.socket.close()


class Served:
    """A daemon process.  `fit` asserts what must hold of it whatever the test did."""

    def __init__(self, path: str, process: subprocess.Popen[str]) -> None:
        self.path = path
        self.process = process
        self.clients: list[Client | Raw] = []

    def connect(self, timeout: float | None = DEADLINE_S) -> Client:
        client = connect(self.path, name="test", timeout=timeout)
        self.clients.append(client)
        return client

    def raw(self) -> Raw:
        client = Raw(self.path)
        self.clients.append(client)
        return client

    def complaints(self) -> list[str]:
        """Error lines of dmesg: second replies, undeclared errnos."""
        with connect(self.path, name="inspector", timeout=DEADLINE_S) as client:
            return [row.text for row in client.dmesg().rows if row.level == "error"]

    def fit(self) -> None:
        """Alive, every invariant holds, nothing was complained of, and nobody left anything behind."""
        for client in self.clients:
            client.close()
        with connect(self.path, name="inspector", timeout=DEADLINE_S) as client:
            until(lambda: client.vmstat().counters["connections"] == 1, "the end of every other connection")
            assert client.fsck().problems == ()
            until(lambda: client.vmstat().counters["contexts"] == 0, "the release of every context")
            tier = client.tiers().tiers[0]
            assert tier.free_frames + tier.reclaimable_frames == tier.capacity_frames, "frames are back"
        assert self.complaints() == []

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a daemon; `fit=False` for one that a test breaks on purpose."""
    started: list[tuple[Served, bool]] = []

    def start(*, path: str = "", fit: bool = True, **options: Any) -> Served:
        path = path or str(tmp_path / "run" / f"{len(started)}.sock")
        process = launch(path, **options)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        served = Served(path, process)
        started.append((served, fit))
        return served

    yield start
    for served, fit in started:
        try:
            if fit and served.process.poll() is None:
                served.fit()
            if fit:
                assert served.stop() == 0
        finally:
            for client in served.clients:
                client.close()
            if served.process.poll() is None:
                served.process.kill()
            served.process.wait(DEADLINE_S)
            assert served.process.stdout is not None
            served.process.stdout.close()


@pytest.fixture
def turnstile(tmp_path: Path) -> Turnstile:
    return Turnstile(tmp_path / "turnstile")


def launch(path: str, **options: Any) -> subprocess.Popen[str]:
    """Start served_daemon.py without waiting for anything."""
    script = Path(__file__).with_name("served_daemon.py")
    source = str(Path(__file__).resolve().parents[2] / "src")
    python_path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, str(script), json.dumps({"socket": path, **options})],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path},
    )


@pytest.fixture(name="launch")
def launch_fixture() -> Callable[..., subprocess.Popen[str]]:
    return launch


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., None]:
    return until
