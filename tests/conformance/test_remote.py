"""The network tier's process, as the daemon starts it, over a real server: on a Unix socket, on TCP, and without one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnix.drivers.channel import Channel
from attnix.drivers.conformance_tier import CHECKS, MIN_FRAMES, TierRig, Traits
from attnix.drivers.memfd import create_memfd, map_shared
from attnix.drivers.messages import decode_health, decode_moved, decode_probe, transfer_message
from attnix.drivers.spec import DriverSpec, driver_argv
from attnix.drivers.stored import StoredFormat
from attnix.kernel.errors import E
from attnix.kernel.events import Transfer
from attnix.kernel.tag import GATE_FAILED, GATES, Tag, gate_value, unpack_tag

BLOCK_TOKENS, LAYERS, FRAME_BYTES, FRAMES, DRAM = 16, 30, 368_640, 32, 1  # SmolLM2-135M's blocks in bfloat16
IDENTITY = bytes(range(16))
FORMAT = StoredFormat(FRAME_BYTES, LAYERS, BLOCK_TOKENS, IDENTITY)
PATIENCE_S = 20.0


def tag_of(number: int) -> bytes:
    tokens = bytes([number, 0, 0, 0]) * BLOCK_TOKENS
    return Tag(bytes([number]) * 16, b"\1" * 16, b"\2" * 16, 0, BLOCK_TOKENS, 0, b"alice", tokens).pack(BLOCK_TOKENS)


class Process:
    """A driver process and the daemon's end of it."""

    def __init__(self, **config: Any) -> None:
        arena_fd = create_memfd("test-dram", FRAMES * FORMAT.stored_bytes)
        rows_fd = create_memfd("test-rows", 4096)
        gates_fd = create_memfd("test-gates", 8 * GATES)
        self.arena, self.gates = map_shared(arena_fd), map_shared(gates_fd)
        for number in range(FRAMES):
            frame = memoryview(self.arena)[number * FORMAT.stored_bytes : (number + 1) * FORMAT.stored_bytes]
            assert not FORMAT.seal(os.urandom(4096) * (FRAME_BYTES // 4096), frame, bytes(8), tag_of(number))
        given = {
            "frame_bytes": FRAME_BYTES, "stored_bytes": FORMAT.stored_bytes, "layers": LAYERS,
            "block_tokens": BLOCK_TOKENS, "identity": IDENTITY.hex(), "capacity_frames": 1000, "dram_fd": arena_fd,
            "dram_device": DRAM, "dram_frames": FRAMES, "gates_fd": gates_fd, "hbm_fds": {},
        }  # fmt: skip
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "attnix.drivers.remote", "--channel", str(theirs.fileno()),
                "--arena", str(arena_fd), "--rows", str(rows_fd), "--config", json.dumps(given | {"deadline_ms": 5000} | config),
            ],
            pass_fds=(theirs.fileno(), arena_fd, rows_fd, gates_fd), stderr=subprocess.PIPE,
        )  # fmt: skip
        theirs.close()
        for fd in (arena_fd, rows_fd, gates_fd):
            os.close(fd)
        self.channel = Channel(ours)
        self.logs: list[str] = []

    def recv(self) -> list[Any]:
        """The next message that is not a log line."""
        while True:
            assert select.select([self.channel.fileno()], [], [], PATIENCE_S)[0], "no answer"
            message = self.channel.recv()
            assert message is not None, "the driver is gone"
            if message[0] != "log":
                return message
            self.logs.append(message[2])

    def ask(self, *message: Any) -> list[Any]:
        self.channel.send(message)
        return self.recv()

    def transfer(
        self, verb: str, seq: int, numbers: list[int], gate: int = -1, ticket: int = 0
    ) -> list[tuple[int, int]]:
        """Failures of moving blocks between the frames of their numbers."""
        pairs = b"".join(number.to_bytes(4, "little") * 2 for number in numbers)
        tags = b"".join(tag_of(number) for number in numbers)
        answer = self.ask(*transfer_message(Transfer(0, seq, verb, DRAM, pairs, tags, gate, ticket)))
        done = decode_moved(answer, 0, len(numbers))
        assert done.seq == seq
        assert done.moved_bytes == (len(numbers) - len(done.failed)) * FORMAT.stored_bytes
        return list(done.failed)

    def gate(self, gate: int) -> int:
        return int.from_bytes(self.gates[8 * gate : 8 * gate + 8], "little")

    def close(self) -> None:
        self.channel.close()
        try:
            assert self.process.wait(PATIENCE_S) == 0, "it must exit when its channel closes"
        finally:
            self.process.kill()
            self.process.communicate()


@pytest.fixture(scope="module")
def server(store_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Urls of a running server, by kind."""
    folder = tmp_path_factory.mktemp("store")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            str(store_binary), "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", str(folder / "s"),
            "--save", "", "--appendonly", "no", "--dir", str(folder),
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            break
        assert time.monotonic() < end and process.poll() is None, "the server does not start"
        time.sleep(0.005)
    yield {"unix": f"redis+unix://{folder}/s", "tcp": f"redis://localhost:{port}"}
    process.kill()
    process.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(**config: Any) -> Process:
        started.append(Process(**config))
        return started[-1]

    yield make
    for process in started:
        process.close()


Start = Callable[..., Process]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_whole_driver(server: dict[str, str], start: Start, kind: str) -> None:
    driver = start(url=server[kind] + ("?db=1" if kind == "unix" else "/2"))
    number, probe = decode_probe(driver.ask("probe", 7))
    assert (number, probe.pid, probe.kind, probe.capacity_frames) == (7, driver.process.pid, "remote", 1000)
    assert (probe.frame_bytes, probe.stored_bytes) == (FRAME_BYTES, FORMAT.stored_bytes)
    assert {"read", "write", "exists"} <= set(probe.capabilities)
    assert min(probe.read_bytes_s, probe.write_bytes_s, probe.latency_ns) > 0

    before = bytes(driver.arena)
    assert driver.transfer("write", 1, list(range(0, FRAMES, 2))) == []
    driver.arena[:] = bytes(len(driver.arena))
    missing = [(number, int(E.ENOENT)) for number in range(1, FRAMES, 2)]
    assert driver.transfer("read", 2, list(range(FRAMES)), gate=5, ticket=9) == missing
    assert driver.gate(5) == gate_value(9, GATE_FAILED)
    for number in range(0, FRAMES, 2):
        frame = slice(number * FORMAT.stored_bytes, (number + 1) * FORMAT.stored_bytes)
        assert driver.arena[frame] == before[frame]
    assert driver.transfer("read", 3, [0, 2], gate=5, ticket=10) == []
    assert driver.gate(5) == gate_value(10, LAYERS)

    tags = b"".join(tag_of(number) for number in range(10))
    assert driver.ask("exists", 4, tags) == ["exists", 4, bytes([0b01010101, 0b01])]
    assert driver.ask("drop", 5, [0, 2]) == ["dropped", 5]
    assert driver.ask("exec", 6, b"", b"", b"", []) == ["unknown", "exec"]
    _, counters = decode_health(driver.ask("health", 8))
    assert (counters["reads"], counters["writes"], counters["misses"]) == (FRAMES // 2 + 2, FRAMES // 2, FRAMES // 2)
    assert driver.logs == []


def test_messages_that_make_no_sense_cost_a_log_line(server: dict[str, str], start: Start) -> None:
    driver = start(url=server["unix"])
    driver.channel.send(["exists", 1])
    driver.channel.send(["exists", 1, b"123"])
    failed = driver.ask("read", 2, DRAM, b"\1", tag_of(1), -1, 0)
    assert failed[:2] == ["moved", 2] and failed[2] == [[0, int(E.EINVAL)]]
    assert driver.ask("exists", 3, b"") == ["exists", 3, b""]
    assert len(driver.logs) == 3


def test_without_a_store_it_starts_answers_and_stops(start: Start, tmp_path: Path) -> None:
    driver = start(url=f"redis+unix://{tmp_path}/none", breaker_failures=2)
    _, probe = decode_probe(driver.ask("probe", 1))
    assert (probe.read_bytes_s, probe.write_bytes_s, probe.latency_ns) == (0, 0, 0)
    assert driver.transfer("write", 1, [1, 2]) == [(0, int(E.EIO)), (1, int(E.EIO))]
    assert driver.transfer("read", 2, [1]) == [(0, int(E.EIO))]
    assert driver.ask("exists", 3, tag_of(1) * 3) == ["exists", 3, b"\0"]
    assert decode_health(driver.ask("health", 4))[1]["breaker"] == 1
    assert any("No such file" in line for line in driver.logs)


def test_a_frozen_store_leaves_it_answering(start: Start) -> None:
    """A listener that nobody serves: health is answered while a transfer waits for its deadline."""
    listener = socket.create_server(("127.0.0.1", 0))
    driver = start(url=f"redis://127.0.0.1:{listener.getsockname()[1]}", deadline_ms=1200, breaker_failures=9)
    decode_probe(driver.ask("probe", 1))
    pairs = bytes(8)
    driver.channel.send(transfer_message(Transfer(0, 5, "read", DRAM, pairs, tag_of(0), -1, 0)))
    _, counters = decode_health(driver.ask("health", 1))
    assert counters["in_flight"] == 1
    assert decode_moved(driver.recv(), 0, 1).failed == ((0, int(E.ETIMEDOUT)),)
    listener.close()


def test_a_configuration_that_cannot_work_ends_it_for_good() -> None:
    driver = Process(url="redis://127.0.0.1", max_object_bytes=1000)
    assert driver.process.wait(PATIENCE_S) == os.EX_CONFIG
    _, said = driver.process.communicate()
    assert b"max_object_bytes" in said
    driver.channel.close()


def test_it_dies_with_its_channel_even_in_the_middle(server: dict[str, str]) -> None:
    driver = Process(url=server["tcp"])
    decode_probe(driver.ask("probe", 1))
    driver.channel.send(transfer_message(Transfer(0, 1, "write", DRAM, bytes(8), tag_of(0), -1, 0)))
    driver.close()
    assert driver.process.returncode != -signal.SIGKILL


# -- the suite of all tiers -------------------------------------------------------------------------------------------


class RemoteRig(TierRig):
    """The suite's rig, which can rot an object: it remembers which block its frames were last given."""

    def __init__(self, url: str, port: int) -> None:
        self._port = port
        self._blocks: dict[int, int] = {}
        super().__init__(
            DriverSpec(
                device=2,
                name="remote0",
                argv=driver_argv("attnix.drivers.remote"),
                config={"url": url, "capacity_frames": MIN_FRAMES, "deadline_ms": 2000},
                arena_bytes=0,
                rows_bytes=0,
                tier="remote",
            ),
            StoredFormat(3 * 20_000, 3, BLOCK_TOKENS, IDENTITY),
            traits=Traits(keeps_private=False, survives_restart=False, is_addressed=False),
            flip=self._rot,
        )

    def write(self, *blocks: tuple[int, int]) -> None:
        self._blocks |= {frame: number for number, frame in blocks}
        super().write(*blocks)

    def _rot(self, frame: int, offset: int) -> None:
        tag = unpack_tag(self.tag(self._blocks[frame]), BLOCK_TOKENS)
        name = f"attnix:1:{IDENTITY.hex()}:{tag.root.hex()}:{tag.key.hex()}".encode()
        byte = self._ask(b"GETRANGE", name, b"%d" % offset, b"%d" % offset)
        assert byte.startswith(b"$1\r\n")
        size = b":%d\r\n" % self.format.stored_bytes
        assert self._ask(b"SETRANGE", name, b"%d" % offset, bytes([byte[4] ^ 0x40])) == size

    def _ask(self, *words: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self._port), PATIENCE_S) as sock:
            sock.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
            return sock.recv(4096)


@pytest.fixture(scope="module", params=["unix", "tcp"])
def rig(request: pytest.FixtureRequest, server: dict[str, str]) -> Iterator[RemoteRig]:
    rig = RemoteRig(server[request.param], int(server["tcp"].rpartition(":")[2]))
    yield rig
    rig.close()


@pytest.mark.parametrize("name", CHECKS)
def test_the_network_tier_conforms(name: str, rig: RemoteRig) -> None:
    CHECKS[name](rig)
