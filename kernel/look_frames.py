"""What `frames` tells: each frame of a device, who has its content and how long ago somebody wanted it.

The core knows frames and blocks, contexts know blocks: going through the contexts is what this costs, a few calls of the core
for each.  It changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from .calls import FramesResult
from .look import alone
from .records import FACT, FREE

if TYPE_CHECKING:
    from .context import Context
    from .device import Device
    from .machine import Machine

_TAKEN: Final = 4  # state of a frame that is another uid's, to one who may not see it


def frames(m: Machine, device: Device, uid: int, start: int, count: int) -> FramesResult:
    """Of one of several uids, the frames with content of its own contexts; of others' it learns only that they are taken."""
    everybody = alone(m, uid)
    states, refs, _, blocks, _, _ = m.core.frame_table(device.index)
    end = min(device.capacity, start + count)
    state = bytearray(states[start:end])
    block = array("i", blocks)[start:end]
    sharers = array("i", refs)[start:end]
    owners = _owners(m, device, (c for c in m.contexts.values() if everybody or c.process.uid == uid))
    cids, logical, ages = (array("i", bytes(4 * len(state))) for _ in range(3))
    known: list[int] = []
    for f, b in enumerate(block):
        ages[f] = logical[f] = -1
        if state[f] == FREE or b < 0:
            continue
        cid, index, sharing = owners.get(b, (0, -1, 0))
        if not (cid or everybody):
            state[f], sharers[f] = _TAKEN, 0
            continue
        cids[f], logical[f] = cid, index
        if not sharers[f] and device.tier != "hbm":
            sharers[f] = sharing
        known.append(f)
    for f, fact in zip(known, FACT.iter_unpack(m.core.facts([block[f] for f in known])), strict=True):
        if fact[0]:
            ages[f] = min(2**31 - 1, max(0, m.now_ns - fact[0]) // 1_000_000)
    if not everybody:
        block = array("i", (b if cid else -1 for b, cid in zip(block, cids, strict=True)))
    return FramesResult(
        device.name, device.capacity, start, bytes(state), cids.tobytes(), logical.tobytes(), sharers.tobytes(),
        ages.tobytes(), block.tobytes(),
    )  # fmt: skip


def _owners(m: Machine, device: Device, contexts: Iterable[Context]) -> dict[int, tuple[int, int, int]]:
    """(oldest context, which of its blocks it is, contexts that have it) by block."""
    found: dict[int, tuple[int, int, int]] = {}
    for context in contexts:
        if device.tier == "hbm":
            if context.device != device.index:
                continue
            mine = m.core.row_entries(context.slot)[0::2]
        else:
            mine = m.core.log_blocks(context.slot)
            tail, end = m.core.tail_of(context.slot)
            if tail >= 0 and len(mine) == end // m.config.block_tokens:
                mine = [*mine, tail]
        for index, b in enumerate(mine):
            cid, at, sharing = found.get(b, (context.cid, index, 0))
            found[b] = (cid, at, sharing + 1)
    return found
