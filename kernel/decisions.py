"""The ring of decisions that `explain` reads: what the pager did with blocks, and the numbers that made it.

A decision is noted per batch, not per block: which blocks it was about is looked up when somebody asks.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from .calls import DecisionRow

ENTRIES: Final = 4096


class Decision(NamedTuple):
    number: int
    at_ns: int
    what: str
    device: str
    cid: int
    blocks: tuple[int, ...]
    keys: tuple[bytes, ...]  # of those blocks then: a number may stand for other content by now
    why: str


class Decisions:
    """Numbered from 1, oldest dropped first."""

    def __init__(self) -> None:
        self._ring: deque[Decision] = deque(maxlen=ENTRIES)
        self._number = 0

    def add(
        self, at_ns: int, what: str, device: str, cid: int, blocks: tuple[int, ...], why: str, keys: tuple[bytes, ...] = ()
    ) -> None:  # fmt: skip
        self._number += 1
        self._ring.append(Decision(self._number, at_ns, what, device, cid, blocks, keys, why))

    def rows(self, cid: int = 0, blocks: frozenset[int] = frozenset(), latest: int = 64) -> tuple[DecisionRow, ...]:
        """The latest decisions about a context or any of these blocks, or simply the latest; oldest first."""
        found: list[DecisionRow] = []
        for d in reversed(self._ring):
            if (cid and d.cid == cid) or (blocks and not blocks.isdisjoint(d.blocks)) or not (cid or blocks):
                first = d.blocks[0] if d.blocks else -1
                found.append(DecisionRow(d.number, d.at_ns, d.what, d.device, d.cid, first, len(d.blocks), d.why))
                if len(found) == latest:
                    break
        return tuple(reversed(found))
