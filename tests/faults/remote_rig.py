"""What the tests of the network tier stand on: a real server (Valkey or Redis), a proxy before it that can drop, delay,
swallow and corrupt, and the store engine with an arena, inside the test."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnix.drivers.remote.config import Settings, parse_settings
from attnix.drivers.remote.store import Question, RemoteStore
from attnix.drivers.stored import StoredFormat
from attnix.kernel.events import Transfer, TransferDone
from attnix.kernel.tag import Tag

BLOCK_TOKENS = 4
LAYERS = 2
FRAME_BYTES = 2 * 40_000  # a stored frame of 86,016 bytes: more than a socket passes on at once
IDENTITY = bytes(range(16))
FRAMES = 16
DRAM = 3  # device number
PATIENCE_S = 20.0
SLACK_S = 2.5  # what a busy machine may add to a time that is bounded by deadlines
FORMAT = StoredFormat(FRAME_BYTES, LAYERS, BLOCK_TOKENS, IDENTITY)
SIZE = FORMAT.stored_bytes


def tag_of(number: int, flags: int = 0) -> Tag:
    tokens = b"".join((number * 10 + i).to_bytes(4, "little") for i in range(BLOCK_TOKENS))
    return Tag(bytes([number]) * 16, b"\1" * 16, b"\2" * 16, 0, BLOCK_TOKENS, flags, b"alice", tokens)


def name_of(number: int) -> bytes:
    """Spelled out: other machines must find it under this name."""
    return (
        f"attnix:1:000102030405060708090a0b0c0d0e0f:{'02' * 16}:{number:02x}".encode() + f"{number:02x}".encode() * 15
    )


def bare(number: int) -> bytes:
    return bytes((number * 31 + i * 7) % 256 for i in range(1000)) * (FRAME_BYTES // 1000)


def pairs_of(*frames: int) -> bytes:
    return b"".join(frame.to_bytes(4, "little") * 2 for frame in frames)


def transfer(
    verb: str, seq: int, numbers: list[int], first_frame: int | None = None, tags: list[Tag] | None = None
) -> Transfer:
    """Blocks `numbers`, to or from the frames of the arena with their numbers, or consecutive ones."""
    chosen = [tag_of(number) for number in numbers] if tags is None else tags
    packed = b"".join(tag.pack(BLOCK_TOKENS) for tag in chosen)
    frames = numbers if first_frame is None else range(first_frame, first_frame + len(numbers))
    pairs = pairs_of(*frames)
    return Transfer(0, seq, verb, DRAM, pairs, packed, -1, 0)


class Server:
    """A server process with its own directory, on a Unix socket and a TCP port."""

    def __init__(self, binary: Path, folder: Path, *options: str) -> None:
        self.binary, self.folder, self.options = binary, folder, options
        self.socket = str(folder / "s")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                str(self.binary), "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", self.socket,
                "--save", "", "--appendonly", "no", "--dir", str(self.folder), *self.options,
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                break
            assert time.monotonic() < end and self.process.poll() is None, "the server does not start"
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def ask(self, *words: bytes) -> bytes:
        """One command by an independent client of few lines, the reply as it stands on the wire."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as sock:
            sock.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words))
            sock.shutdown(socket.SHUT_WR)
            reply = b""
            while chunk := sock.recv(1 << 20):
                reply += chunk
            return reply


class Proxy:
    """A TCP proxy that can be told to misbehave.

    mode    "pass", "swallow" (nothing gets through, connections stay), "refuse" (connections are closed)
    delay_s added before every chunk, in each direction
    damage  called with (offset in the stream of this connection, chunk) from the server; may change the chunk
    cut_at  bytes from the server after which a connection is closed; -1: never
    """

    def __init__(self, port: int) -> None:
        self.mode = "pass"
        self.delay_s = 0.0
        self.damage: Callable[[int, bytearray], None] | None = None
        self.cut_at = -1
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._run(self._accept)

    def _run(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                if self.mode == "refuse":
                    client.close()
                    continue
                try:
                    upstream = socket.create_connection(("127.0.0.1", self._to))
                except OSError:
                    client.close()
                    continue
                self._sockets.append(upstream)
                self._run(self._pump, client, upstream, False)
                self._run(self._pump, upstream, client, True)

    def _pump(self, source: socket.socket, to: socket.socket, is_reply: bool) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                chunk = bytearray(data)
                if self.mode != "pass":
                    continue
                if self.delay_s:
                    time.sleep(self.delay_s)
                if is_reply and self.damage is not None:
                    self.damage(offset, chunk)
                offset += len(chunk)
                if is_reply and 0 <= self.cut_at < offset:
                    break
                to.sendall(chunk)
        for sock in (source, to):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(PATIENCE_S)
        for sock in [self._listener, *self._sockets]:
            sock.close()


def settings(url: str, **changes: Any) -> Settings:
    config = {
        "url": url, "identity": IDENTITY.hex(), "frame_bytes": FRAME_BYTES, "layers": LAYERS,
        "block_tokens": BLOCK_TOKENS, "capacity_frames": FRAMES, "dram_device": DRAM,
    }  # fmt: skip
    return parse_settings(config | changes)


class Tier:
    """A RemoteStore and an arena with blocks 0..FRAMES-1 in the frames of their numbers.

    Its deadline is long where a test does not say otherwise: the machine may be busy.
    """

    def __init__(self, url: str, **changes: Any) -> None:
        self.arena = bytearray(FRAMES * SIZE)
        for number in range(FRAMES):
            self.fill(number)
        self.store = RemoteStore(settings(url, **{"deadline_ms": 5000, **changes}), self.arena)
        self._seq = 0

    def fill(self, number: int, tag: Tag | None = None) -> None:
        packed = (tag or tag_of(number)).pack(BLOCK_TOKENS)
        frame = memoryview(self.arena)[number * SIZE : (number + 1) * SIZE]
        assert not FORMAT.seal(bare(number), frame, bytes(8), packed)

    def frame(self, number: int) -> bytes:
        return bytes(self.arena[number * SIZE : (number + 1) * SIZE])

    def spoil(self) -> None:
        self.arena[:] = b"\xee" * len(self.arena)

    def begin(
        self, verb: str, numbers: list[int], first_frame: int | None = None, tags: list[Tag] | None = None
    ) -> int:
        self._seq += 1
        self.store.submit(transfer(verb, self._seq, numbers, first_frame, tags))
        return self._seq

    def run(
        self, verb: str, numbers: list[int], first_frame: int | None = None, tags: list[Tag] | None = None
    ) -> TransferDone:
        seq = self.begin(verb, numbers, first_frame, tags)
        done = self.wait()
        assert isinstance(done, TransferDone) and done.seq == seq
        return done

    def exists(self, numbers: list[int]) -> list[bool]:
        self._seq += 1
        self.store.ask_exists(self._seq, b"".join(tag_of(number).pack(BLOCK_TOKENS) for number in numbers))
        done = self.wait()
        assert isinstance(done, Question) and done.number == self._seq
        return [bool(done.bitmap[i // 8] >> i % 8 & 1) for i in range(len(numbers))]

    def wait(self) -> TransferDone | Question:
        self.until(lambda: bool(self.store.done))
        return self.store.done.popleft()

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end, "it did not happen"
            wake_ns = self.store.wake_ns()
            wait_s = 0.05 if wake_ns is None else min(0.05, max(0.0, (wake_ns - self.store.now_ns()) / 1e9))
            select.select([self.store.fileno()], [], [], wait_s)
            self.store.turn()

    def counts(self, *names: str) -> tuple[int, ...]:
        health = self.store.health()
        return tuple(health[name] for name in names)


TierOf = Callable[..., Tier]


def stock(server: Server, tier_of: TierOf, numbers: list[int]) -> None:
    """Have the server hold these blocks."""
    assert tier_of(tcp(server.port)).run("write", numbers).failed == ()


def codes(done: TransferDone) -> list[int]:
    return [code for _, code in done.failed]


def tcp(port: int) -> str:
    return f"redis://127.0.0.1:{port}/0"
