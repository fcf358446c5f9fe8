"""What can happen to a file or a server below the real model while it serves: right tokens, no client error, and the
counters tell what it was.  Every call of a conversation would raise what the daemon answers; every token is compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Daemon, Script, Start, Talks, TalksOf

pytestmark = [pytest.mark.e2e, pytest.mark.model]

KV_FRAME_BYTES, STORED_BYTES, SUPERBLOCK_BYTES = 368_640, 372_736, 4096
BLOCKS = 17  # of one conversation in the end; there are twelve
SMALL = ("--hbm", str(4 * BLOCKS * KV_FRAME_BYTES), "--dram", str(4 * BLOCKS * STORED_BYTES))
BELOW_BYTES = 13 * BLOCKS * STORED_BYTES
PATIENCE_S = 120.0


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.01)


def settled(daemon: Daemon, talks: Talks) -> None:
    """After the faults: everything adds up, it is the same daemon, and nothing in it is thought to be a bug."""
    talks.sound()
    assert talks.client.uname().pid == daemon.process.pid
    log = talks.dmesg()
    assert "error: bug" not in log and "Traceback" not in daemon.text(), daemon.text()
    assert talks.row("hbm0").restarts == 0


# -- the file -------------------------------------------------------------------------------------------------------


def conversing(daemon: Daemon, talks_of: TalksOf, scripts: list[Script]) -> Talks:
    """Twelve conversations of which hbm and dram hold eight, after their first turn."""
    talks = talks_of(daemon.connect(), scripts)
    talks.begin()
    talks.turn()
    until(lambda: talks.row("nvme0").write_bytes > 60 * STORED_BYTES, "writing to the file")
    return talks


def loads(talks: Talks, tier: str) -> int:
    return talks.count(f"loaded_blocks_{tier}")


def test_the_file_driver_is_killed(start: Start, scripts: list[Script], talks_of: TalksOf) -> None:
    """What the file holds is found again by the next one."""
    daemon = start(*SMALL, "--nvme", str(BELOW_BYTES))
    talks = conversing(daemon, talks_of, scripts)
    with talks.client:
        for n in (2, 7):
            restarts, before = talks.row("nvme0").restarts, loads(talks, "nvme")
            talks.turn({n: lambda: os.kill(talks.row("nvme0").driver_pid, signal.SIGKILL)})
            until(lambda before=restarts: talks.row("nvme0").restarts > before, "the restart")  # type: ignore[misc]
            until(lambda: talks.row("nvme0").state == "up", "the restart")
            talks.turn()
            assert loads(talks, "nvme") > before, "what the file holds is read again"
        settled(daemon, talks)
        assert talks.count("driver_deaths") == 2
        assert "blocks found from before" in talks.dmesg()
    daemon.end()


@pytest.mark.slow
def test_the_file_driver_hangs(start: Start, scripts: list[Script], talks_of: TalksOf) -> None:
    """Its transfers are given up when their deadline is over (10 s and more), and it is reaped before they count as lost."""
    daemon = start(*SMALL, "--nvme", str(BELOW_BYTES))
    talks = conversing(daemon, talks_of, scripts)
    with talks.client:
        stopped = talks.row("nvme0").driver_pid
        talks.turn({3: lambda: os.kill(stopped, signal.SIGSTOP)})
        until(lambda: talks.row("nvme0").driver_pid not in (0, stopped), "the restart")
        assert not Path(f"/proc/{stopped}").exists()
        before = loads(talks, "nvme")
        talks.turn()
        talks.turn()
        assert loads(talks, "nvme") > before
        settled(daemon, talks)
        assert talks.count("driver_deaths") == 1 and talks.count("transfer_errors") > 0
        assert "did not finish a transfer" in daemon.text()
    daemon.end()


def test_the_disk_is_full(start: Start, scripts: list[Script], talks_of: TalksOf) -> None:
    """The file may not be written beyond its first slots any more, which the kernel says as a full disk is said: evicted
    once, tried again, then the tier is read-only, and what it holds goes on being read."""
    daemon = start(*SMALL, "--nvme", str(BELOW_BYTES))
    talks = conversing(daemon, talks_of, scripts)
    with talks.client:
        pid = talks.row("nvme0").driver_pid
        talks.turn({1: lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (SUPERBLOCK_BYTES, SUPERBLOCK_BYTES))})
        before = loads(talks, "nvme")
        for _ in range(3):
            talks.turn()
        settled(daemon, talks)
        assert talks.row("nvme0").state == "read-only" and talks.row("nvme0").errors > 0
        assert talks.count("enospc_retries") > 0 and talks.count("driver_deaths") == 0
        assert "nvme0 is full (ENOSPC)" in talks.dmesg()
        assert loads(talks, "nvme") > before
    daemon.end()


def rot(path: Path, every: int) -> None:
    """Flip a bit in the payload of every n-th slot, behind the driver's back."""
    fd = os.open(path, os.O_RDWR)
    try:
        slots = (os.fstat(fd).st_size - SUPERBLOCK_BYTES) // STORED_BYTES
        for slot in range(0, slots, every):
            at = SUPERBLOCK_BYTES + slot * STORED_BYTES + 4096 + 97 * slot
            os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 16]), at)
        os.fsync(fd)
    finally:
        os.close(fd)


def test_bits_flip_in_the_file(start: Start, scripts: list[Script], talks_of: TalksOf) -> None:
    daemon = start(*SMALL, "--nvme", str(BELOW_BYTES))
    talks = conversing(daemon, talks_of, scripts)
    with talks.client:
        talks.turn({2: lambda: rot(daemon.nvme_file, 2)})
        talks.turn({2: lambda: rot(daemon.nvme_file, 3)})
        talks.turn()
        settled(daemon, talks)
        found = talks.row("nvme0").corrupt
        assert found > 0 and talks.count("corrupt_copies") == found
        assert "ECORRUPT" in talks.dmesg() and talks.count("driver_deaths") == 0
    daemon.end()


def test_the_file_is_cut(start: Start, scripts: list[Script], talks_of: TalksOf) -> None:
    daemon = start(*SMALL, "--nvme", str(BELOW_BYTES))
    talks = conversing(daemon, talks_of, scripts)
    with talks.client:
        talks.turn({2: lambda: os.truncate(daemon.nvme_file, SUPERBLOCK_BYTES + 20 * STORED_BYTES + 1000)})
        talks.turn()
        talks.turn()
        settled(daemon, talks)
        assert talks.row("nvme0").errors > 0 and talks.count("transfer_errors") > 0
    daemon.end()


def test_the_file_is_deleted(start: Start, scripts: list[Script], talks_of: TalksOf) -> None:
    """A miss for each of its blocks; then there is a new file, and that is used."""
    daemon = start(*SMALL, "--nvme", str(BELOW_BYTES))
    talks = conversing(daemon, talks_of, scripts)
    with talks.client:
        talks.turn({2: daemon.nvme_file.unlink})
        talks.turn()
        before = loads(talks, "nvme")
        talks.turn()
        settled(daemon, talks)
        assert talks.row("nvme0").errors > 0 and "ENOENT" in talks.dmesg()
        assert daemon.nvme_file.exists() and loads(talks, "nvme") > before
    daemon.end()


# -- the server -----------------------------------------------------------------------------------------------------


class Server:
    """A server process that speaks the Redis protocol on a port of its own choice."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self._binary, self._folder = binary, folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [self._binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", self._folder],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until(self._answers, "the server's start")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Wire:
    """A TCP proxy before the server.  mode: "pass", "cut" (connections stay, nothing gets through), or "flip" (one bit of
    each large piece from the server is another)."""

    def __init__(self, port: int) -> None:
        self.mode = "pass"
        self.flipped = 0
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def _run(self, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                with contextlib.suppress(OSError):
                    upstream = socket.create_connection(("127.0.0.1", self._to))
                    self._sockets.append(upstream)
                    self._run(self._pump, client, upstream, False)
                    self._run(self._pump, upstream, client, True)

    def _pump(self, source: socket.socket, to: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if self.mode == "cut":
                    continue
                if self.mode == "flip" and is_reply and len(data) > 10_000:
                    data[len(data) // 2] ^= 4
                    self.flipped += 1
                to.sendall(data)
        for sock in (source, to):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(PATIENCE_S)
        for sock in (self._listener, *self._sockets):
            sock.close()


@pytest.fixture
def server(store_binary: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server(store_binary, tmp_path)
    yield server
    server.signal(signal.SIGCONT)
    server.kill()


@pytest.fixture
def wire(server: Server) -> Iterator[Wire]:
    wire = Wire(server.port)
    yield wire
    wire.close()


def over(port: int, daemon: Daemon, talks_of: TalksOf, scripts: list[Script]) -> Talks:
    """Twelve conversations of which hbm and dram hold eight, after two turns over a server on this port."""
    talks = talks_of(daemon.connect(), scripts)
    settings = {"url": f"redis://127.0.0.1:{port}", "deadline_ms": 2000, "backoff_cap_ms": 2000}
    assert talks.client.attach_tier("remote", BELOW_BYTES, json.dumps(settings)).device == "remote0"
    talks.begin()
    talks.turn()
    talks.turn()
    assert loads(talks, "remote") > 0 and talks.row("remote0").write_bytes > 60 * STORED_BYTES
    return talks


def serves_again(talks: Talks) -> None:
    """Once the driver has found its server again, which takes a transfer, blocks go there and come from there."""

    def is_back() -> bool:
        for context in talks.contexts:
            talks.client.demote(context.handle, "remote")
        return ": is back" in talks.dmesg()

    row, before = talks.row("remote0"), loads(talks, "remote")
    until(is_back, "the server's return")
    for _ in range(3):
        talks.turn()
    assert talks.row("remote0").write_bytes > row.write_bytes and loads(talks, "remote") > before


def test_the_server_is_killed(server: Server, start: Start, scripts: list[Script], talks_of: TalksOf) -> None:
    """All that it held is gone.  Another one is taken when it is there."""
    daemon = start(*SMALL)
    talks = over(server.port, daemon, talks_of, scripts)
    with talks.client:
        talks.turn({3: server.kill})
        talks.turn()
        assert talks.row("remote0").errors > 0 and talks.count("transfer_errors") > 0
        server.start()
        serves_again(talks)
        settled(daemon, talks)
        assert talks.count("driver_deaths") == 0
    daemon.end()


def test_the_server_freezes(server: Server, start: Start, scripts: list[Script], talks_of: TalksOf) -> None:
    daemon = start(*SMALL)
    talks = over(server.port, daemon, talks_of, scripts)
    with talks.client:
        talks.turn({3: lambda: server.signal(signal.SIGSTOP)})
        talks.turn()
        assert talks.row("remote0").errors > 0 and "ETIMEDOUT" in talks.dmesg()
        server.signal(signal.SIGCONT)
        serves_again(talks)
        settled(daemon, talks)
        assert talks.count("driver_deaths") == 0
    daemon.end()


def test_the_wire_is_cut(wire: Wire, start: Start, scripts: list[Script], talks_of: TalksOf) -> None:
    daemon = start(*SMALL)
    talks = over(wire.port, daemon, talks_of, scripts)
    with talks.client:
        talks.turn({3: lambda: setattr(wire, "mode", "cut")})
        talks.turn()
        assert talks.row("remote0").errors > 0 and "ETIMEDOUT" in talks.dmesg()
        wire.mode = "pass"
        serves_again(talks)
        settled(daemon, talks)
        assert talks.count("driver_deaths") == 0
    daemon.end()


def test_the_wire_corrupts(wire: Wire, start: Start, scripts: list[Script], talks_of: TalksOf) -> None:
    daemon = start(*SMALL)
    talks = over(wire.port, daemon, talks_of, scripts)
    with talks.client:
        talks.turn({3: lambda: setattr(wire, "mode", "flip")})
        talks.turn()
        wire.mode = "pass"
        talks.turn()
        settled(daemon, talks)
        assert wire.flipped > 0
        assert talks.row("remote0").corrupt > 0 and talks.count("corrupt_copies") == talks.row("remote0").corrupt
        assert talks.count("driver_deaths") == 0
    daemon.end()
