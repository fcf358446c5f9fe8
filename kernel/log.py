"""The ring of kernel messages that `dmesg` reads."""

from __future__ import annotations

from collections import deque

from .calls import DmesgRow
from .params import DMESG_ENTRIES


class Dmesg:
    """Numbered from 1, oldest dropped first."""

    def __init__(self) -> None:
        self._rows: deque[DmesgRow] = deque(maxlen=DMESG_ENTRIES)
        self._number = 0

    def add(self, at_ns: int, level: str, text: str) -> None:
        self._number += 1
        self._rows.append(DmesgRow(self._number, at_ns, level, text))

    def since(self, number: int) -> tuple[DmesgRow, ...]:
        return tuple(row for row in self._rows if row.number > number)
