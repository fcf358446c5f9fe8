"""Numbers as people read them, against hand calculation."""

from __future__ import annotations

import pytest

from attnix.userland.units import age, count, size


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
