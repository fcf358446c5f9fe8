"""The frame map against maps drawn by hand."""

from __future__ import annotations

from array import array

from attnix.syscalls.types import PagemapResult, TierRow
from attnix.userland.framemap import Mapped, draw, frame_map, legend


def tier(capacity: int, device: str = "hbm0") -> TierRow:
    return TierRow(device, "hbm", "up", 1, capacity, 0, 0, 0, 0, 1024, 1, 0)


def mapped(name: str, cid: int, frames: list[int], sharers: list[int], device: str = "hbm0") -> Mapped:
    n = len(frames)
    packed = array("i", frames).tobytes(), array("i", bytes(4 * n)).tobytes(), array("h", [4] * n).tobytes()
    rest = array("i", sharers).tobytes(), bytes(n), array("i", bytes(4 * n)).tobytes()
    return Mapped(name, cid, PagemapResult(cid, device, 4, 4 * n, *packed, *rest))


def test_shared_and_private_frames() -> None:
    a = mapped("one", 1, [0, 1, 2], [2, 2, 1])
    b = mapped("two", 2, [0, 1, 4], [2, 2, 1])
    seen = frame_map(tier(8), [a, b])
    assert [line.plain for line in draw(seen, columns=8)] == ["0  22a·b···"]
    assert (seen.mapped_frames, seen.shared_frames) == (4, 2)
    assert [(o.private_frames, o.shared_frames) for o in seen.owners] == [(1, 2), (1, 2)]
    assert [line.plain for line in legend(seen)][:2] == [
        "  a one  cid 1: 1 own, 2 shared",
        "  b two  cid 2: 1 own, 2 shared",
    ]


def test_ten_sharers_and_more_are_a_plus() -> None:
    seen = frame_map(tier(4), [mapped("x", 1, [0, 1, 2], [9, 10, 1000])])
    assert draw(seen, columns=4)[0].plain == "0  9++·"


def test_a_frame_seen_twice_is_shared_even_if_the_counts_are_old() -> None:
    """The second context was forked between the two looks."""
    seen = frame_map(tier(4), [mapped("x", 1, [2], [1]), mapped("y", 2, [2], [1])])
    assert draw(seen, columns=4)[0].plain == "0  ··2·"
    assert [(o.private_frames, o.shared_frames) for o in seen.owners] == [(0, 1), (0, 1)]


def test_other_devices_and_blocks_without_a_frame_are_left_out() -> None:
    seen = frame_map(tier(4), [mapped("x", 1, [-1, 3], [1, 1]), mapped("y", 2, [0], [1], device="hbm1")])
    assert draw(seen, columns=4)[0].plain == "0  ···a"
    assert len(seen.owners) == 1


def test_rows_with_nothing_mapped_become_one_line() -> None:
    seen = frame_map(tier(18), [mapped("x", 1, [1, 13], [1, 1])])
    assert [line.plain for line in draw(seen, columns=4)] == [" 0  ·a··", "    · x 8", "12  ·a··", "    · x 2"]


def test_an_empty_device_is_one_line() -> None:
    assert [line.plain for line in draw(frame_map(tier(10), []), columns=4)] == ["   · x 10"]


def test_a_large_device_is_cut_and_says_so() -> None:
    seen = frame_map(tier(40), [mapped("x", 1, list(range(0, 40, 4)), [1] * 10)])
    lines = [line.plain for line in draw(seen, columns=4, max_rows=3)]
    assert lines == [" 0  a···", " 4  a···", " 8  a···", "    ... 7 more mapped frames below"]


def test_more_contexts_than_letters() -> None:
    """They wrap around: the legend still has a line for each."""
    many = [mapped(f"p{n}", n + 1, [n], [1]) for n in range(60)]
    seen = frame_map(tier(64), many)
    assert len(seen.owners) == 60
    assert seen.owners[52].letter == "a"
    assert seen.mapped_frames == 60
