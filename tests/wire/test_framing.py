"""Framing: whatever way a stream is cut, the same messages come out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attnix.kernel.params import MAX_MESSAGE_BYTES
from attnix.syscalls.framing import LOST_BYTES, Oversized, Splitter, header

BODIES = st.lists(st.binary(max_size=300) | st.integers(1000, 5000).map(bytes), max_size=12)


@given(BODIES, st.lists(st.integers(1, 40), max_size=60))
def test_any_cut_gives_the_same_messages(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    splitter, got, at = Splitter(), [], 0
    for cut in cuts:
        got += splitter.split(stream[at : at + cut])
        at += cut
    got += splitter.split(stream[at:])
    assert got == bodies
    assert splitter.unfinished_bytes == 0


@given(st.integers(1, 64 << 10), st.integers(1, 7))
def test_an_oversized_message_is_skipped_and_the_next_one_is_found(extra: int, step: int) -> None:
    size = MAX_MESSAGE_BYTES + extra
    splitter = Splitter()
    assert splitter.split(size.to_bytes(4, "little")) == [Oversized(size, lost=False)]
    chunk, left = bytes((size // step) or 1), size
    while left > len(chunk):
        assert splitter.split(chunk) == []
        left -= len(chunk)
    assert splitter.split(bytes(left) + b"\x02\x00\x00\x00ok") == [b"ok"]


def test_after_lost_framing_nothing_is_a_message() -> None:
    splitter = Splitter()
    lost = Oversized(LOST_BYTES, lost=True)
    assert splitter.split(b"\x01\x00\x00\x00a" + LOST_BYTES.to_bytes(4, "little")) == [b"a", lost]
    assert splitter.split(b"\x01\x00\x00\x00a") == []


def test_header_is_little_endian() -> None:
    assert [header(n) for n in (0, 1, 1023, 1024, 0x01020304)] == [
        b"\0\0\0\0", b"\1\0\0\0", b"\xff\3\0\0", b"\0\4\0\0", b"\4\3\2\1",
    ]  # fmt: skip


def test_an_unfinished_message_is_known_to_the_byte() -> None:
    splitter = Splitter()
    assert splitter.split(b"\x05\x00\x00\x00ab") == []
    assert (splitter.unfinished_bytes, splitter.missing_bytes) == (6, 3)
