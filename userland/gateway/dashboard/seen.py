"""What of the system one who looks is told.

Without keys that is what the gateway's user sees.  With keys, a caller sees the processes of its key's group and their frames; of
others only that frames are taken, and nothing of how busy the machine is.
"""

from __future__ import annotations

from typing import Any

from attnix.syscalls.types import ProcessRow

from ...output import plain
from ..errors import ApiError
from .bins import binned
from .look import Frames, State

TAKEN = 4  # state of a frame that is somebody else's


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
            "tiers": plain(state.tiers.tiers),
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


def _without(frames: Frames, mine: set[int]) -> Frames:
    states, cids, blocks, sharers, ages = (
        bytearray(frames.states), frames.cids[:], frames.blocks[:], frames.sharers[:], frames.ages[:],
    )  # fmt: skip
    for f, cid in enumerate(frames.cids):
        if states[f] and cid not in mine:
            states[f], cids[f], blocks[f], sharers[f], ages[f] = TAKEN, 0, -1, 0, -1
    return frames._replace(states=bytes(states), cids=cids, blocks=blocks, sharers=sharers, ages=ages)
