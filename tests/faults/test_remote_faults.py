"""The network tier with a store that dies, stands still, lies, fills up or is somebody else: every error is a miss.

A real server (Valkey or Redis) behind a proxy of this file that can drop, delay, swallow and corrupt.  The store engine
runs inside the test where only it is meant; the driver process where a whole driver is.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnix.drivers.remote.breaker import Breaker, BreakerState
from attnix.drivers.remote.config import Settings, parse_settings
from attnix.drivers.remote.resp import Kind, ProtocolError, Reply, ReplyReader, request
from attnix.drivers.remote.store import Question, RemoteStore
from attnix.drivers.serve import ConfigError
from attnix.drivers.stored import StoredFormat
from attnix.kernel.errors import E
from attnix.kernel.events import Transfer, TransferDone
from attnix.kernel.tag import HEADER_BYTES, PRIVATE, Tag

BLOCK_TOKENS = 4
LAYERS = 2
FRAME_BYTES = 2 * 40_000  # a stored frame of 86,016 bytes: more than a socket passes on at once
IDENTITY = bytes(range(16))
FRAMES = 16
DRAM = 3  # device number
PATIENCE_S = 20.0
SLACK_S = 0.6  # what a busy machine may add to a time that is bounded by deadlines
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


@pytest.fixture
def server(store_binary: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server(store_binary, tmp_path)
    server.start()
    yield server
    server.kill()


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


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


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


@pytest.fixture
def tier_of() -> Iterator[Callable[..., Tier]]:
    tiers: list[Tier] = []

    def make(url: str, **changes: Any) -> Tier:
        tiers.append(Tier(url, **changes))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.store.close()


TierOf = Callable[..., Tier]


def stock(server: Server, tier_of: TierOf, numbers: list[int]) -> None:
    """Have the server hold these blocks."""
    assert tier_of(tcp(server.port)).run("write", numbers).failed == ()


def codes(done: TransferDone) -> list[int]:
    return [code for _, code in done.failed]


def tcp(port: int) -> str:
    return f"redis://127.0.0.1:{port}/0"


# -- what is stored, and read back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_blocks_go_out_and_come_back(server: Server, tier_of: TierOf, kind: str) -> None:
    tier = tier_of(f"redis+unix://{server.socket}" if kind == "unix" else tcp(server.port), ttl_s=100)
    frames = [tier.frame(n) for n in range(FRAMES)]
    done = tier.run("write", list(range(FRAMES)))
    assert done.failed == () and done.moved_bytes == FRAMES * SIZE and done.elapsed_ns > 0
    for number in (0, 7, FRAMES - 1):
        assert server.ask(b"GET", name_of(number)) == b"$%d\r\n" % SIZE + frames[number] + b"\r\n"
    ttl_ms = int(server.ask(b"PTTL", name_of(3))[1:])
    assert 90_000 < ttl_ms <= 100_000
    tier.spoil()
    done = tier.run("read", list(range(FRAMES)))
    assert done.failed == () and done.moved_bytes == FRAMES * SIZE
    assert [tier.frame(n) for n in range(FRAMES)] == frames
    assert tier.counts("reads", "writes", "read_bytes", "misses") == (FRAMES, FRAMES, FRAMES * SIZE, 0)


def test_a_block_that_is_not_there_is_a_miss_and_the_others_are_read(server: Server, tier_of: TierOf) -> None:
    tier = tier_of(tcp(server.port))
    tier.run("write", [1, 3])
    wanted = [tier.frame(1), tier.frame(3)]
    tier.spoil()
    done = tier.run("read", [0, 1, 2, 3])
    assert done.failed == ((0, E.ENOENT), (2, E.ENOENT)) and done.moved_bytes == 2 * SIZE
    assert [tier.frame(1), tier.frame(3)] == wanted
    assert tier.exists([0, 1, 2, 3]) == [False, True, False, True]


def test_a_private_block_is_never_stored(server: Server, tier_of: TierOf) -> None:
    tier = tier_of(tcp(server.port))
    private = tag_of(5, PRIVATE)
    tier.fill(5, private)
    for verb in ("write", "read"):
        assert codes(tier.run(verb, [5], 5, [private])) == [E.EINVAL]
    assert server.ask(b"DBSIZE") == b":0\r\n"


def test_what_is_not_in_the_arena_under_its_tag_is_not_stored(server: Server, tier_of: TierOf) -> None:
    tier = tier_of(tcp(server.port))
    tier.arena[7 * SIZE + HEADER_BYTES + 50_000] ^= 1
    assert codes(tier.run("write", [5, 7], 6)) == [E.ECORRUPT] * 2  # frame 6 holds block 6, and 7 has rotted
    assert server.ask(b"DBSIZE") == b":0\r\n"


def test_frames_that_do_not_exist_are_refused(server: Server, tier_of: TierOf) -> None:
    tier = tier_of(tcp(server.port))
    before = bytes(tier.arena)
    assert tier.run("read", [1, 2], FRAMES - 1).failed == ((0, E.ENOENT), (1, E.EINVAL))
    wrong = transfer("read", 99, [1])._replace(arena=DRAM + 1)
    tier.store.submit(wrong)
    assert tier.wait() == TransferDone(0, 99, ((0, E.EINVAL),), 0, 0)
    beyond = FRAMES.to_bytes(4, "little") + (1).to_bytes(4, "little")
    tier.store.submit(transfer("write", 98, [1])._replace(pairs=beyond))
    assert tier.wait() == TransferDone(0, 98, ((0, E.EINVAL),), 0, 0)
    assert bytes(tier.arena) == before


def test_a_read_behind_a_write_of_the_same_block_sees_it(server: Server, tier_of: TierOf) -> None:
    """Both at once: the read must not overtake, whatever connection it takes."""
    tier = tier_of(tcp(server.port))
    for _ in range(20):
        server.ask(b"FLUSHALL")
        tier.begin("write", list(range(8)))
        tier.begin("read", [7], first_frame=9)
        ends = [tier.wait(), tier.wait()]
        assert all(isinstance(end, TransferDone) and end.failed == () for end in ends)
        assert tier.frame(9) == tier.frame(7)


def test_transfers_through_one_frame_of_the_arena_keep_their_order(server: Server, tier_of: TierOf) -> None:
    """Out of frame 0 (block 0), then into it (block 1), then out of it again: nobody can tell that they were sent at once."""
    tier = tier_of(tcp(server.port))
    tier.run("write", [1])
    zero, one = tier.frame(0), tier.frame(1)
    tier.begin("write", [0], 0)
    tier.begin("read", [1], 0)
    tier.begin("write", [1], 0)
    tier.begin("read", [2], 5)
    ends = [tier.wait() for _ in range(4)]
    assert [end.failed for end in ends if isinstance(end, TransferDone)] == [(), (), (), ((0, E.ENOENT),)]
    assert server.ask(b"GET", name_of(0)) == b"$%d\r\n" % SIZE + zero + b"\r\n"
    assert tier.frame(0) == one and tier.counts("in_flight") == (0,)


def test_domains_and_identities_do_not_meet(server: Server, tier_of: TierOf) -> None:
    tier = tier_of(tcp(server.port))
    tier.run("write", [1])
    other_domain = tag_of(1)._replace(root=b"\3" * 16)
    assert codes(tier.run("read", [1], tags=[other_domain])) == [E.ENOENT]
    other_model = tier_of(tcp(server.port), identity=bytes(16).hex())
    assert codes(other_model.run("read", [1])) == [E.ENOENT]
    assert codes(tier.run("read", [1])) == []


def test_the_password_and_the_database_are_used(store_binary: Path, tmp_path: Path, tier_of: TierOf) -> None:
    server = Server(store_binary, tmp_path, "--requirepass", "s3cret")
    server.start()
    try:
        (tmp_path / "password").write_text("s3cret\n")
        url = f"redis://127.0.0.1:{server.port}/5"
        good = tier_of(url, password_file=str(tmp_path / "password"))
        assert good.run("write", [1]).failed == ()
        assert codes(tier_of(f"redis://:s3cret@127.0.0.1:{server.port}/5").run("read", [1])) == []
        assert codes(tier_of(f"redis://:s3cret@127.0.0.1:{server.port}/4").run("read", [1])) == [E.ENOENT]
        for wrong in (url, f"redis://:other@127.0.0.1:{server.port}/5"):
            tier = tier_of(wrong, breaker_failures=1)
            assert codes(tier.run("read", [1, 2])) == [E.EIO, E.EIO]
            [(level, text)] = tier.store.logs
            assert level == "warning" and ("NOAUTH" in text or "WRONGPASS" in text)
            assert "other" not in text
    finally:
        server.kill()


def test_expired_is_a_miss(server: Server, tier_of: TierOf) -> None:
    tier = tier_of(tcp(server.port), ttl_s=0.05)
    assert tier.run("write", [1]).failed == ()
    tier.until(lambda: server.ask(b"EXISTS", name_of(1)) == b":0\r\n")
    assert codes(tier.run("read", [1])) == [E.ENOENT]


def test_a_full_store_says_so_and_the_connection_goes_on(store_binary: Path, tmp_path: Path, tier_of: TierOf) -> None:
    server = Server(store_binary, tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    server.start()
    try:
        tier = tier_of(tcp(server.port))
        seen = [code for numbers in (range(8), range(8, 16)) for code in codes(tier.run("write", list(numbers)))]
        seen += [c for root in range(9, 14) for c in codes(tier.run("write", list(range(16)), tags=_moved(tier, root)))]
        assert seen and set(seen) == {E.ENOSPC}
        assert tier.counts("full", "connects", "breaker_opened") == (len(seen), 1, 0)
        assert [level for level, text in tier.store.logs if "OOM" in text] == ["warning"]  # once
        assert codes(tier.run("read", [0])) == []
    finally:
        server.kill()


def _moved(tier: Tier, root: int) -> list[Tag]:
    """The arena's blocks made over into another domain: as many new objects."""
    tags = [tag_of(number)._replace(root=bytes([root]) * 16) for number in range(FRAMES)]
    for number, tag in enumerate(tags):
        tier.fill(number, tag)
    return tags


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_object_bytes": SIZE - 1}, "max_object_bytes"),
        ({"url": "http://x/"}, "url"),
        ({"url": "redis://u:hidden@h:port/0"}, "url"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"identity": "00"}, "identity"),
        ({"tls": True}, "tls"),
        ({"backoff_ms": float("inf")}, "backoff_ms"),
        ({"window_bytes": "8M"}, "window_bytes"),
        ({"layers": 3}, "layers"),
        ({"password_file": "/nowhere/at/all"}, "password_file"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        settings(**{"url": "redis://127.0.0.1/0", **changes})
    assert "hidden" not in str(caught.value)


def test_an_object_of_another_size_is_refused_and_the_connection_goes_on(server: Server, tier_of: TierOf) -> None:
    tier = tier_of(tcp(server.port), max_object_bytes=2 * SIZE)
    tier.run("write", [0, 1, 2, 3])
    server.ask(b"SET", name_of(0), b"")
    server.ask(b"SET", name_of(1), tier.frame(1)[:-1])
    server.ask(b"SET", name_of(2), tier.frame(2) + b"\r\n$-1\r\n" * 9000)
    assert tier.run("read", [0, 1, 2, 3]).failed == ((0, E.ECORRUPT), (1, E.ECORRUPT), (2, E.ECORRUPT))
    assert tier.exists([0, 1, 2, 3]) == [False, False, False, True]
    assert tier.counts("connection_failures", "connects") == (0, 2)
    server.ask(b"SET", name_of(2), bytes(2 * SIZE + 1))  # beyond the limit: not even received
    assert codes(tier.run("read", [2])) == [E.EIO]
    assert tier.counts("connection_failures") == (1,)
    assert codes(tier.run("read", [3])) == []


# -- content ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 9, 24, 40, 70, 190, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + FRAME_BYTES - 1])
def test_rot_in_the_store_is_found(server: Server, tier_of: TierOf, at: int) -> None:
    tier = tier_of(tcp(server.port))
    tier.run("write", [1, 2])
    rotten = bytearray(tier.frame(1))
    rotten[at] ^= 0x10
    server.ask(b"SET", name_of(1), bytes(rotten))
    assert tier.run("read", [1, 2]).failed == ((0, E.ECORRUPT),)
    assert tier.counts("corrupt", "breaker_opened") == (1, 0)


def test_another_blocks_object_under_the_name_is_found(server: Server, tier_of: TierOf) -> None:
    tier = tier_of(tcp(server.port))
    server.ask(b"SET", name_of(1), tier.frame(2))
    assert codes(tier.run("read", [1])) == [E.ECORRUPT]


def test_a_proxy_that_corrupts_content_is_found(server: Server, proxy: Proxy, tier_of: TierOf) -> None:
    tier = tier_of(tcp(proxy.port))
    assert tier.run("write", [1, 2, 3]).failed == ()
    target = len(b"+PONG\r\n" + b"$%d\r\n" % SIZE) + SIZE + len(b"\r\n$%d\r\n" % SIZE) + HEADER_BYTES + 50_000

    def flip(offset: int, chunk: bytearray) -> None:
        if offset <= target < offset + len(chunk):
            chunk[target - offset] ^= 1

    proxy.damage = flip
    assert tier.run("read", [1, 2, 3]).failed == ((1, E.ECORRUPT),)
    proxy.damage = None
    assert tier.run("read", [1, 2, 3]).failed == ()  # what is stored is right


def test_protocol_bytes_that_a_proxy_corrupts_cost_items_and_a_deadline_at_most(
    server: Server, proxy: Proxy, tier_of: TierOf
) -> None:
    """Every byte around the content, in three ways: never a hang, a crash, or content that is not what it should be."""
    writer = tier_of(tcp(server.port))
    writer.run("write", [1, 2])
    wanted = [writer.frame(1), writer.frame(2)]
    head = len(b"+PONG\r\n")
    line = len(b"$%d\r\n" % SIZE)
    offsets = [*range(head + line), *range(head + line + SIZE, head + line + SIZE + 2 + line)]
    ends: list[int] = []
    for at in offsets:
        for mask in (0x01, 0x04, 0x80):

            def flip(offset: int, chunk: bytearray, at: int = at, mask: int = mask) -> None:
                if offset <= at < offset + len(chunk):
                    chunk[at - offset] ^= mask

            proxy.damage = flip
            tier = tier_of(tcp(proxy.port), deadline_ms=60)
            tier.spoil()
            began = time.monotonic()
            done = tier.run("read", [1, 2], 1)
            assert time.monotonic() - began < 0.06 + 2 * SIZE / 50e6 + SLACK_S
            bad = {item for item, _ in done.failed}
            for item in {0, 1} - bad:
                assert tier.frame(1 + item) == wanted[item], f"byte {at} ^ {mask:#x}"
            ends += codes(done)
            tier.store.close()
    assert {E.EIO, E.ECORRUPT, E.ETIMEDOUT} >= set(ends) and len(ends) > len(offsets)


# -- a store that fails -------------------------------------------------------------------------------------------------


def test_a_server_killed_in_the_middle_fails_the_rest_and_is_used_again_when_it_is_back(
    server: Server, proxy: Proxy, tier_of: TierOf
) -> None:
    tier = tier_of(tcp(proxy.port), window_bytes=3 * SIZE)
    tier.run("write", list(range(8)))
    proxy.cut_at = 3 * SIZE
    done = tier.run("read", list(range(8)))
    assert 0 < len(done.failed) < 8 and set(codes(done)) == {E.EIO}
    assert done.moved_bytes == (8 - len(done.failed)) * SIZE
    proxy.cut_at = -1
    assert tier.run("read", list(range(8))).failed == ()

    tier.begin("read", list(range(8)))
    server.kill()
    end = tier.wait()
    assert isinstance(end, TransferDone) and set(codes(end)) <= {E.EIO}
    assert codes(tier.run("read", [1])) == [E.EIO]
    server.start()
    tier.until(lambda: tier.exists([1]) == [False] and tier.counts("breaker") == (0,))
    assert codes(tier.run("read", [1])) == [E.ENOENT]  # it kept nothing
    assert tier.run("write", [1]).failed == () and tier.run("read", [1]).failed == ()


def test_a_frozen_server_costs_one_deadline(server: Server, tier_of: TierOf) -> None:
    """However many items, transfers and questions are waiting: no retries."""
    stock(server, tier_of, [1])
    tier = tier_of(tcp(server.port), deadline_ms=100, breaker_failures=100)
    tier.until(lambda: tier.exists([1]) == [True])
    server.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        for _ in range(5):
            tier.begin("read", list(range(FRAMES)))
            tier.begin("write", list(range(FRAMES)))
        tier.store.ask_exists(99, tag_of(1).pack(BLOCK_TOKENS))
        ends = [tier.wait() for _ in range(11)]
        took = time.monotonic() - began
    finally:
        server.signal(signal.SIGCONT)
    assert 0.1 <= took < 0.1 + SLACK_S
    for end in ends:
        if isinstance(end, TransferDone):
            assert codes(end) == [E.ETIMEDOUT] * FRAMES and end.moved_bytes == 0
        else:
            assert end.bitmap == b"\0"
    before = bytes(tier.arena)
    tier.until(lambda: tier.run("read", [1], 12).failed == ())
    assert tier.frame(12) == before[SIZE : 2 * SIZE]
    assert bytes(tier.arena)[: 12 * SIZE] == before[: 12 * SIZE]  # nothing that was given up landed later


def test_a_server_that_is_too_slow_is_given_up(server: Server, proxy: Proxy, tier_of: TierOf) -> None:
    """Bytes keep coming, so it never stands still, but not as many as would be of use."""
    stock(server, tier_of, list(range(FRAMES)))
    tier = tier_of(tcp(proxy.port), deadline_ms=150, min_bytes_s=50e6, breaker_failures=100)
    tier.until(lambda: tier.exists([1]) == [True])
    proxy.delay_s = 0.04
    began = time.monotonic()
    done = tier.run("read", list(range(FRAMES)))
    assert time.monotonic() - began < 0.15 + FRAMES * SIZE / 50e6 + SLACK_S
    assert done.failed and set(codes(done)) == {E.ETIMEDOUT}
    proxy.delay_s = 0.0
    tier.until(lambda: tier.run("read", list(range(FRAMES))).failed == ())


def test_the_breaker_opens_stays_quick_and_closes(server: Server, tier_of: TierOf) -> None:
    stock(server, tier_of, [1])
    tier = tier_of(tcp(server.port), deadline_ms=120, breaker_failures=3, backoff_ms=100)
    tier.until(lambda: tier.exists([1]) == [True])
    server.signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            assert codes(tier.run("read", [1])) == [E.ETIMEDOUT]
        assert tier.counts("breaker", "breaker_opened") == (1, 1)
        slowest = 0.0
        for count in (1, FRAMES):
            for _ in range(20):
                began = time.monotonic()
                assert codes(tier.run("read", list(range(count)))) == [E.EIO] * count
                slowest = max(slowest, (time.monotonic() - began) / count)
        assert slowest < 0.005
        assert tier.exists([1]) == [False]
        failures = tier.counts("connection_failures")[0]
        tier.until(lambda: tier.counts("connection_failures")[0] >= failures + 2)  # it asks by itself, and nobody waits
        assert tier.counts("breaker") == (1,)
    finally:
        server.signal(signal.SIGCONT)
    tier.until(lambda: tier.counts("breaker") == (2,))
    assert codes(tier.run("read", [1])) == []  # the trial
    assert tier.counts("breaker", "breaker_opened") == (0, 1)
    said = [text.partition(": ")[2] for _, text in tier.store.logs]
    assert len(said) == 2 and "nothing came for 120 ms" in said[0] and said[1] == "is back"


def test_a_partition_and_its_end(server: Server, proxy: Proxy, tier_of: TierOf) -> None:
    stock(server, tier_of, [1])
    tier = tier_of(tcp(proxy.port), deadline_ms=120, backoff_ms=50)
    tier.until(lambda: tier.exists([1]) == [True])
    for mode in ("swallow", "refuse"):
        proxy.mode = mode
        for _ in range(4):
            assert set(codes(tier.run("read", [1]))) <= {E.ETIMEDOUT, E.EIO}
        assert tier.counts("breaker") == (1,)
        proxy.mode = "pass"
        tier.until(lambda: tier.counts("breaker") == (2,))
        tier.until(lambda: tier.run("read", [1]).failed == ())


def test_a_server_that_was_never_there(tmp_path: Path, tier_of: TierOf) -> None:
    for url in (f"redis+unix://{tmp_path}/none", "redis://127.0.0.1:1/0", "redis://name.invalid/0"):
        tier = tier_of(url, breaker_failures=2)
        tier.store.self_test()
        began = time.monotonic()
        assert codes(tier.run("read", [1, 2])) == [E.EIO] * 2
        assert codes(tier.run("write", [1])) == [E.EIO]
        assert tier.exists([1]) == [False]
        assert time.monotonic() - began < SLACK_S
        assert tier.counts("latency_ns", "read_bytes_s") == (0, 0)


def test_the_test_at_the_start_measures_and_leaves_nothing(server: Server, tier_of: TierOf) -> None:
    tier = tier_of(tcp(server.port))
    tier.store.self_test()
    latency_ns, read_bytes_s, write_bytes_s = tier.counts("latency_ns", "read_bytes_s", "write_bytes_s")
    assert 1_000 < latency_ns < 200_000_000
    assert min(read_bytes_s, write_bytes_s) > 1_000_000
    assert server.ask(b"DBSIZE") == b":0\r\n"


def test_transfers_measure_too(server: Server, tier_of: TierOf) -> None:
    """A store that was not there at the start is learnt from use."""
    tier = tier_of(tcp(server.port))
    tier.run("write", list(range(FRAMES)))
    tier.run("read", list(range(FRAMES)))
    assert min(tier.counts("read_bytes_s", "write_bytes_s")) > 10_000_000
    assert tier.counts("latency_ns") == (0,)
    tier.until(lambda: tier.run("read", [1]).failed == () and tier.counts("latency_ns")[0] > 0)


# -- the parts ----------------------------------------------------------------------------------------------------------


def test_the_breaker_step_by_step() -> None:
    breaker = Breaker(2, backoff_first_ns=100, backoff_cap_ns=300)
    breaker.fail(0)
    breaker.succeed()
    breaker.fail(1)
    assert breaker.admit()
    breaker.fail(2)  # the second in a row
    assert (breaker.state, breaker.opened, breaker.retry_at_ns) == (BreakerState.OPEN, 1, 102)
    assert not breaker.admit() and not breaker.can_probe(101) and breaker.can_probe(102)
    breaker.probe_failed(110)
    assert breaker.retry_at_ns == 310
    breaker.probe_failed(310)
    assert breaker.retry_at_ns == 610  # the cap
    breaker.probe_succeeded()
    assert breaker.admit() and not breaker.admit()  # one trial
    breaker.fail(700)
    assert (breaker.state, breaker.retry_at_ns) == (BreakerState.OPEN, 1000)
    breaker.probe_succeeded()
    assert breaker.admit()
    breaker.succeed()
    assert breaker.state is BreakerState.CLOSED and breaker.admit() and breaker.admit()
    breaker.fail(2000)
    breaker.fail(2001)
    assert breaker.retry_at_ns == 2101  # from the beginning


def read_replies(data: bytes, portions: list[int], sizes: list[int]) -> tuple[list[Reply], list[bytes]]:
    """What a reader makes of `data` that arrives in portions; `sizes` are the targets of its bulk strings."""
    replies: list[Reply] = []
    targets = [bytearray(size) for size in sizes]
    waiting = iter(targets)
    reader = ReplyReader(lambda: memoryview(next(waiting)), replies.append, 100_000)
    at = 0
    while at < len(data):
        portion = min(portions[0], len(data) - at)
        portions = [*portions[1:], portions[0]]
        landed = 0
        for buffer in reader.buffers():
            part = data[at + landed : at + landed + min(len(buffer), portion - landed)]
            buffer[: len(part)] = part
            landed += len(part)
        at += landed
        reader.landed(landed)
    return replies, [bytes(target) for target in targets]


@pytest.mark.parametrize("portions", [[1], [2, 3], [7], [100_000], [4096], [5, 4095, 1], [4094, 2, 1, 30_000]])
def test_replies_are_read_however_they_arrive(portions: list[int]) -> None:
    big = bytes(i % 251 for i in range(70_000))
    data = (
        b"+OK\r\n$70000\r\n"
        + big
        + b"\r\n:-12\r\n$-1\r\n$5\r\nab\r\nc\r\n-ERR no\r\n$90000\r\n"
        + bytes(90_000)
        + b"\r\n+PONG\r\n"
    )
    replies, targets = read_replies(data, portions, [70_000, 5, 3])
    assert replies == [
        Reply(Kind.STATUS, b"OK"), Reply(Kind.BULK, number=70_000), Reply(Kind.INTEGER, number=-12), Reply(Kind.NIL),
        Reply(Kind.BULK, number=5), Reply(Kind.ERROR, b"ERR no"), Reply(Kind.MISFIT, number=90_000), Reply(Kind.STATUS, b"PONG"),
    ]  # fmt: skip
    assert targets == [big, b"ab\r\nc", bytes(3)]


@pytest.mark.parametrize(
    "data",
    [b"*1\r\n", b"\r\n", b":1_0\r\n", b":\r\n", b"$-2\r\n", b"$ 1\r\n", b"$100001\r\n", b"$2\r\nabc\r\n", b"x" * 5000, b"$99999999999999999999\r\n"],
)  # fmt: skip
def test_what_is_no_reply_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read_replies(data, [1000], [2])


def test_requests_are_spelled_as_the_protocol_has_them() -> None:
    assert request(b"GET", b"k\r\n") == b"*2\r\n$3\r\nGET\r\n$3\r\nk\r\n\r\n"
