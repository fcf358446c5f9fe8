"""What of the system one who looks is told.

Without keys, or with an operator's, that is what the gateway's user sees.  With another key, a caller sees the processes of its
group and their frames; every other frame looks free, and nothing tells how busy the machine is.
"""

from __future__ import annotations

from typing import Any

from attnix.syscalls.types import ProcessRow, TierRow

from ...output import plain
from ..errors import ApiError
from .bins import binned
from .look import Frames, State


class Seen:
    """group: the only one that may be looked at; "": all."""

    def __init__(self, group: str) -> None:
        self._group = group

    def state(self, state: State) -> dict[str, Any]:
        everything = not self._group
        uname = state.uname
        return {
            "uname": {
                "version": uname.version, "model": uname.model, "block_tokens": uname.block_tokens,
                "window_tokens": uname.window_tokens, "pid": uname.pid if everything else 0,
            },
            "processes": plain(self._processes(state)),
            "tiers": plain(state.tiers.tiers if everything else [_bare(row) for row in state.tiers.tiers]),
            "counters": state.counters if everything else {},
            "at_ns": state.health.at_ns,
            "samples": plain(state.health.samples) if everything else [],
            "pressure": plain(state.pressure) if everything else None,
        }  # fmt: skip

    def frames(self, frames: Frames, state: State, cells: int) -> dict[str, Any]:
        """In at most so many cells."""
        if self._group:
            mine = {context.cid for row in self._processes(state) for context in row.contexts}
            frames = _without(frames, mine)
        pids = {context.cid: row.pid for row in state.ps.processes for context in row.contexts}
        return binned(frames, pids, cells)

    def check(self, cid: int, state: State) -> None:
        """Error: ApiError 404, also of a context that is there but not to be seen."""
        if self._group and not any(c.cid == cid for row in self._processes(state) for c in row.contexts):
            raise ApiError(404, f"there is no context {cid}", code="not_found")

    def block(self, number: int) -> int:
        """-1 where it may not be asked about: it could be anybody's."""
        return -1 if self._group else number

    def _processes(self, state: State) -> list[ProcessRow]:
        return [row for row in state.ps.processes if not self._group or row.group == self._group]


def _bare(row: TierRow) -> TierRow:
    """What it is, and not what it does."""
    return row._replace(
        free_frames=row.capacity_frames, reclaimable_frames=0, mapped_frames=0, wired_frames=0, driver_pid=0, restarts=0,
        read_bytes=0, write_bytes=0, errors=0, corrupt=0,
    )  # fmt: skip


def _without(frames: Frames, mine: set[int]) -> Frames:
    states, cids, blocks, sharers, ages = (
        bytearray(frames.states), frames.cids[:], frames.blocks[:], frames.sharers[:], frames.ages[:],
    )  # fmt: skip
    for f, cid in enumerate(frames.cids):
        if states[f] and cid not in mine:
            states[f], cids[f], blocks[f], sharers[f], ages[f] = 0, 0, -1, 0, -1
    return frames._replace(states=bytes(states), cids=cids, blocks=blocks, sharers=sharers, ages=ages)
