"""Asks the system for what dashboards draw, once for all that look.

An answer is kept for a second, and for twenty times as long as it took: however many look, and however large the machine, the
kernel spends no more than a twentieth of its time on being looked at.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from attnix.syscalls import AsyncClient
from attnix.syscalls.exceptions import AccessDenied
from attnix.syscalls.types import (
    DecisionRow,
    FramesResult,
    HealthResult,
    PagemapResult,
    PressureResult,
    PsResult,
    TiersResult,
    UnameResult,
)

from ..upstream import Upstream

KEPT_S: Final = 1.0
SHARE: Final = 20  # of the time, one part at most
_PART: Final = 16384  # frames that one call tells
MOST_FRAMES: Final = 1 << 20  # of one device; what is beyond is not drawn


class State(NamedTuple):
    uname: UnameResult
    ps: PsResult
    tiers: TiersResult
    counters: dict[str, int]
    health: HealthResult
    pressure: PressureResult


class Frames(NamedTuple):
    """The whole device, whatever number of calls that took."""

    device: str
    capacity_frames: int
    states: bytes
    cids: array[int]
    logical: array[int]
    sharers: array[int]
    ages: array[int]
    blocks: array[int]


class _Kept:
    """One answer, asked for again when it is too old; whoever comes meanwhile waits for the same."""

    def __init__(self, ask: Callable[[], Awaitable[Any]]) -> None:
        self._ask = ask
        self._lock = asyncio.Lock()
        self._until_s = 0.0
        self._value: Any = None

    async def get(self) -> Any:
        async with self._lock:
            if time.monotonic() >= self._until_s:
                began_s = time.monotonic()
                self._value = await self._ask()
                took_s = time.monotonic() - began_s
                self._until_s = began_s + max(KEPT_S * 0.9, SHARE * took_s)
            return self._value


class Looks:
    """Of one gateway.  Error: Unavailable while there is no daemon."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._state = _Kept(self._ask_state)
        self._frames: dict[str, _Kept] = {}

    async def state(self) -> State:
        self._upstream.client  # noqa: B018  # an answer from before the daemon went is not its state
        found: State = await self._state.get()
        return found

    async def frames(self, device: str) -> Frames:
        """Error: SyscallError when there is no such device."""
        if device not in self._frames:
            known = {row.device for row in (await self.state()).tiers.tiers}
            if device not in known:
                await self._upstream.client.frames(device, 0, 0)  # the system says what is wrong
            self._frames[device] = _Kept(lambda: self._ask_frames(device))
        found: Frames = await self._frames[device].get()
        return found

    async def explain(self, cid: int, block: int, logical: int) -> dict[str, Any]:
        """Decisions about a block of a context, or about the context when blocks may not be asked about; and the block itself."""
        client, about = self._upstream.client, "block"
        rows: tuple[DecisionRow, ...] = ()
        if block >= 0:
            with suppress(AccessDenied):  # only the daemon's user may ask about a block by its number
                rows = (await client.explain(0, 0, block)).rows
        if cid and not rows:
            about, rows = "context", (await client.explain(0, cid)).rows
        entry = {}
        if cid and logical >= 0:
            entry = _entry(await client.pagemap(0, cid), logical)
        return {
            "cid": cid,
            "block": block,
            "logical": logical,
            "about": about,
            "entry": entry,
            "rows": [row._asdict() for row in rows],
        }

    async def _ask_state(self) -> State:
        c: AsyncClient = self._upstream.client
        uname, ps, tiers, vmstat, health, pressure = await asyncio.gather(
            c.uname(), c.ps(), c.tiers(), c.vmstat(), c.health(0), c.pressure()
        )
        return State(uname, ps, tiers, vmstat.counters, health, pressure)

    async def _ask_frames(self, device: str) -> Frames:
        client = self._upstream.client
        first = await client.frames(device, 0, _PART)
        parts: list[FramesResult] = [first]
        for start in range(_PART, min(first.capacity_frames, MOST_FRAMES), _PART):
            parts.append(await client.frames(device, start, _PART))
        arrays = [array("i", b"".join(getattr(part, name) for part in parts)) for name in Frames._fields[3:]]
        return Frames(device, first.capacity_frames, b"".join(part.states for part in parts), *arrays)


def _entry(table: PagemapResult, logical: int) -> dict[str, Any]:
    """One entry of a page table; empty when the context has become shorter."""
    frames = array("i", table.frames)
    where = {"tokens_from": logical * table.block_tokens, "device": table.device}
    if logical < len(frames):
        where |= {
            "frame": frames[logical], "tokens": array("h", table.counts)[logical], "shift": array("i", table.shifts)[logical],
            "sharers": array("i", table.sharers)[logical], "hits": array("i", table.hits)[logical],
            "flags": table.flags[logical],
        }  # fmt: skip
    if logical < len(table.copies):
        where["copies"] = table.copies[logical]
    return where
