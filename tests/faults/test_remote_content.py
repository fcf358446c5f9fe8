"""What the network tier stores and reads back, and whatever else a store may hold or send: content is right or a miss."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from attnix.drivers.serve import ConfigError
from attnix.kernel.errors import E
from attnix.kernel.events import TransferDone
from attnix.kernel.tag import HEADER_BYTES, PRIVATE, Tag

from .remote_rig import (
    DRAM,
    FRAME_BYTES,
    FRAMES,
    SIZE,
    SLACK_S,
    Proxy,
    Server,
    Tier,
    TierOf,
    codes,
    name_of,
    settings,
    tag_of,
    tcp,
    transfer,
)

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
    """Out of frame 0 (block 0), then into it (block 1), then out of it again: nobody can tell that they were sent at once.
    The last has a frame of its own, and may end before any of them."""
    tier = tier_of(tcp(server.port))
    tier.run("write", [1])
    zero, one = tier.frame(0), tier.frame(1)
    tier.begin("write", [0], 0)
    tier.begin("read", [1], 0)
    tier.begin("write", [1], 0)
    tier.begin("read", [2], 5)
    answers = [tier.wait() for _ in range(4)]
    ends = sorted((end for end in answers if isinstance(end, TransferDone)), key=lambda end: end.seq)
    assert [end.failed for end in ends] == [(), (), (), ((0, E.ENOENT),)]
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
