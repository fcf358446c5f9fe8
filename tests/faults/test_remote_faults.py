"""The network tier with a store that dies, stands still, is too slow or was never there: every error is a miss.

Then its parts alone: the breaker, and the protocol's replies.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from statistics import median

import pytest

from attnix.drivers.remote.breaker import Breaker, BreakerState
from attnix.drivers.remote.resp import Kind, ProtocolError, Reply, ReplyReader, request
from attnix.kernel.errors import E
from attnix.kernel.events import TransferDone

from .remote_rig import BLOCK_TOKENS, FRAMES, SIZE, SLACK_S, Proxy, Server, TierOf, codes, stock, tag_of, tcp

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
    tier = tier_of(tcp(server.port), deadline_ms=300, breaker_failures=100)
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
    assert 0.3 <= took < 0.3 + SLACK_S, "one after the other they would take 3.3 s"
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
    tier = tier_of(tcp(server.port), deadline_ms=1000, breaker_failures=3, backoff_ms=100)
    tier.until(lambda: tier.exists([1]) == [True])
    server.signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            assert codes(tier.run("read", [1])) == [E.ETIMEDOUT]
        assert tier.counts("breaker", "breaker_opened") == (1, 1)
        took: list[float] = []
        for count in (1, FRAMES):
            for _ in range(20):
                began = time.monotonic()
                assert codes(tier.run("read", list(range(count)))) == [E.EIO] * count
                took.append(time.monotonic() - began)
        assert median(took) < 1.0 / 2, "a refusal waits for nothing"
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
    assert len(said) == 2 and "nothing came for 1000 ms" in said[0] and said[1] == "is back"


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
        ((level, said),) = tier.store.logs  # at once: whoever has just booted may have misspelt it
        assert level == "warning" and said.endswith("all of it is a miss until it answers again"), said
        began = time.monotonic()
        assert codes(tier.run("read", [1, 2])) == [E.EIO] * 2
        assert codes(tier.run("write", [1])) == [E.EIO]
        assert tier.exists([1]) == [False]
        assert time.monotonic() - began < SLACK_S
        assert tier.counts("latency_ns", "read_bytes_s") == (0, 0)
        assert len(tier.store.logs) == 1, "and once"


def test_the_test_at_the_start_measures_and_leaves_nothing(server: Server, tier_of: TierOf) -> None:
    tier = tier_of(tcp(server.port))
    began = time.monotonic()
    tier.store.self_test()
    took_s = time.monotonic() - began
    latency_ns, read_bytes_s, write_bytes_s = tier.counts("latency_ns", "read_bytes_s", "write_bytes_s")
    assert 1_000 < latency_ns < took_s * 1e9
    assert min(read_bytes_s, write_bytes_s) > SIZE / took_s, "a block and more each, in a part of the time"
    assert server.ask(b"DBSIZE") == b":0\r\n"


def test_transfers_measure_too(server: Server, tier_of: TierOf) -> None:
    """A store that was not there at the start is learnt from use."""
    tier = tier_of(tcp(server.port))
    began = time.monotonic()
    tier.run("write", list(range(FRAMES)))
    tier.run("read", list(range(FRAMES)))
    assert min(tier.counts("read_bytes_s", "write_bytes_s")) > FRAMES * SIZE / (time.monotonic() - began)
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
