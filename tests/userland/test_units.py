"""Numbers as people read them, against hand calculation."""

from __future__ import annotations

import pytest

from attnix.userland.units import age, count, duration, parse_size, rate, size


@pytest.mark.parametrize(
    ("bytes_", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KiB"), (368_640, "360 KiB"), (1 << 20, "1.0 MiB"), (256 << 20, "256 MiB"), (3 << 29, "1.5 GiB"), (5 << 50, "5120 TiB")],
)  # fmt: skip
def test_size(bytes_: int, text: str) -> None:
    assert size(bytes_) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (0, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (200_000, "2 d")]
)
def test_age(seconds: int, text: str) -> None:
    assert age(seconds * 1_000_000_000) == text


def test_count() -> None:
    assert count(1234567) == "1,234,567"


@pytest.mark.parametrize(
    ("ns", "text"), [(0, "-"), (850, "850 ns"), (1_000, "1.0 us"), (85_400, "85 us"), (3_400_000, "3.4 ms"), (16_000_000_000, "16 s"), (5_000_000_000_000, "5000 s")]
)  # fmt: skip
def test_duration(ns: int, text: str) -> None:
    assert duration(ns) == text


def test_rate() -> None:
    assert (rate(0), rate(3 << 29)) == ("-", "1.5 GiB/s")


@pytest.mark.parametrize(
    ("text", "bytes_"), [("1000000", 1_000_000), ("256MiB", 268_435_456), ("1.5 gib", 1_610_612_736), ("2GB", 2_000_000_000), ("4K", 4_000), ("7B", 7)]
)  # fmt: skip
def test_parse_size(text: str, bytes_: int) -> None:
    assert parse_size(text) == bytes_


@pytest.mark.parametrize("text", ["", "big", "-1", "1 QiB", "0x10", "1 2"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
