"""Numbers as people read them."""

from __future__ import annotations

import re
from typing import Final

_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL: Final = ("ns", "us", "ms", "s")
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


def rate(bytes_s: int) -> str:
    """`1.2 GiB/s`; `-` when nobody has measured it yet."""
    return f"{size(bytes_s)}/s" if bytes_s else "-"


def duration(ns: int) -> str:
    """`850 ns`, `12 us`, `3.4 ms`, `2.0 s`: three digits at most; `-` when nobody has measured it yet."""
    if not ns:
        return "-"
    value, unit = float(ns), 0
    while value >= 1000 and unit < len(_DECIMAL) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_DECIMAL[unit]}" if value >= 10 or unit == 0 else f"{value:.1f} {_DECIMAL[unit]}"


def parse_size(text: str) -> int:
    """Bytes of `256MiB`, `2GiB`, `1000000`.  Error: ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size: write 256MiB, 2GiB or a number of bytes")
    prefix = (match[2] or "").upper()
    base = 1024 if prefix.endswith("I") else 1000
    return int(float(match[1]) * base ** ("KMGT".index(prefix[0]) + 1 if prefix else 0))
