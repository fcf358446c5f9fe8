"""The ring of decisions that `explain` reads: what the pager did with blocks, and the numbers that made it.

A decision is noted per batch, not per block: which blocks it was about is looked up when somebody asks.  Blocks are told
apart by the head of their keys, since a number stands for other content once its block is gone; a number counts where
there is no key (a partial tail).
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from .calls import DecisionRow

ENTRIES: Final = 4096


class Decision(NamedTuple):
    """plain: `why` without what it says of the whole machine, for one of several uids; empty: it says nothing of it."""

    number: int
    at_ns: int
    what: str
    device: str
    cid: int
    blocks: tuple[int, ...]
    keys: tuple[int, ...]  # first 64 bits of the key of each of them; 0: it has none
    why: str
    plain: str


class Decisions:
    """Numbered from 1, oldest dropped first."""

    def __init__(self) -> None:
        self._ring: deque[Decision] = deque(maxlen=ENTRIES)
        self._number = 0

    def add(
        self, at_ns: int, what: str, device: str, cid: int, blocks: tuple[int, ...], why: str, keys: tuple[int, ...] = (),
        plain: str = "",
    ) -> None:  # fmt: skip
        self._number += 1
        self._ring.append(Decision(self._number, at_ns, what, device, cid, blocks, keys, why, plain))

    def rows(
        self, cid: int = 0, blocks: frozenset[int] = frozenset(), keys: frozenset[int] = frozenset(), latest: int = 64
    ) -> tuple[DecisionRow, ...]:
        """The latest decisions about a context, or any of these keys, or blocks by number; or simply the latest.  Oldest
        first."""
        return tuple(
            DecisionRow(
                d.number, d.at_ns, d.what, d.device, d.cid, d.blocks[0] if d.blocks else -1, len(d.blocks), d.why
            )
            for d in self._latest(cid, blocks, keys, latest)
        )  # fmt: skip

    def own_rows(self, cid: int, keys: frozenset[int], latest: int = 64) -> tuple[DecisionRow, ...]:
        """The same about a context of one of several uids, numbered from 1.  Of a batch it learns how many blocks were its own:
        how many others were wanted is how much of somebody's prompt was not in the cache, and so is the count of decisions."""
        return tuple(
            DecisionRow(
                number, d.at_ns, d.what, d.device, d.cid if d.cid == cid else 0, -1,
                len(d.blocks) if d.cid == cid else len(keys.intersection(d.keys)), d.plain or d.why,
            )
            for number, d in enumerate(self._latest(cid, frozenset(), keys, latest), 1)
        )  # fmt: skip

    def _latest(self, cid: int, blocks: frozenset[int], keys: frozenset[int], most: int) -> list[Decision]:
        """Oldest first."""
        everything = not (cid or blocks or keys)
        found: list[Decision] = []
        for d in reversed(self._ring):
            about = (cid and d.cid == cid) or not keys.isdisjoint(d.keys) or not blocks.isdisjoint(d.blocks)
            if about or everything:
                found.append(d)
                if len(found) == most:
                    break
        return found[::-1]
