"""Numbers as people read them."""

from __future__ import annotations

from typing import Final

_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_STEPS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def size(bytes_: int) -> str:
    """`360 KiB`, `256 MiB`, `1.4 GiB`: three digits at most, binary units."""
    value, unit = float(bytes_), 0
    while value >= 1000 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_BINARY[unit]}" if value >= 10 or unit == 0 else f"{value:.1f} {_BINARY[unit]}"


def count(number: int) -> str:
    """`12,345`"""
    return f"{number:,}"


def age(ns: int) -> str:
    """`12 s`, `3 min`, `2 h`: the largest unit that fits."""
    seconds = max(0, ns) // 1_000_000_000
    for step, name in _STEPS:
        if seconds >= step:
            return f"{seconds // step} {name}"
    return "0 s"
