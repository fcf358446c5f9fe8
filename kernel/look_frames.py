"""What `frames` tells: each frame of a device, who has its content and how long ago somebody wanted it.

The core knows frames and blocks, contexts know blocks: going through the contexts is what this costs, a few calls of the core
for each.  It changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .calls import FramesResult
from .look import alone
from .records import FACT, FREE

if TYPE_CHECKING:
    from .context import Context
    from .device import Device
    from .machine import Machine


def frames(m: Machine, device: Device, uid: int, start: int, count: int) -> FramesResult:
    """To one of several uids, the frames with content of its own contexts, in their order; all others look free.  How many
    are taken, and where, would tell it what of others' prompts was not in the cache."""
    everybody = alone(m, uid)
    states, refs, _, numbers, _, _ = m.core.frame_table(device.index)
    every, counts = array("i", numbers), array("i", refs)
    owners = _owners(m, device, (c for c in m.contexts.values() if everybody or c.process.uid == uid))
    end = min(device.capacity, start + count)
    shown = (range(device.capacity) if everybody else _own(m, device, uid, owners, every))[start:end]
    free = end - start - len(shown)
    state = bytearray(states[f] for f in shown) + bytes([FREE] * free)
    block = array("i", [*(every[f] for f in shown), *[-1] * free])
    sharers = array("i", [*(counts[f] for f in shown), *[0] * free])
    cids, logical, ages = (array("i", bytes(4 * len(state))) for _ in range(3))
    known: list[int] = []
    for f, b in enumerate(block):
        ages[f] = logical[f] = -1
        if state[f] == FREE or b < 0:
            continue
        cid, index, sharing = owners.get(b, (0, -1, 0))
        cids[f], logical[f] = cid, index
        if not sharers[f] and device.tier != "hbm":
            sharers[f] = sharing
        known.append(f)
    for f, fact in zip(known, FACT.iter_unpack(m.core.facts([block[f] for f in known])), strict=True):
        if fact[0]:
            ages[f] = min(2**31 - 1, max(0, m.now_ns - fact[0]) // 1_000_000)
    if not everybody:
        block = array("i", [-1] * len(block))  # they are given out as frames are
    return FramesResult(
        device.name, device.capacity, start, bytes(state), cids.tobytes(), logical.tobytes(), sharers.tobytes(),
        ages.tobytes(), block.tobytes(),
    )  # fmt: skip


def own_numbers(m: Machine, device: int, uid: int) -> dict[int, int]:
    """What the frames of a compute device are called to one of several uids: its own are numbered in the order of its contexts
    and of their blocks.  Where they lie tells how many others have taken and given back."""
    entries = (m.core.row_entries(c.slot)[1::2] for c in m.contexts_of(device) if c.process.uid == uid)
    return {f: number for number, f in enumerate(dict.fromkeys(f for row in entries for f in row))}


def _own(m: Machine, device: Device, uid: int, owners: Iterable[int], blocks: array[int]) -> list[int]:
    """The frames of a uid's contexts, in that order."""
    if device.tier == "hbm":
        return list(own_numbers(m, device.index, uid))
    places = {b: f for f, b in enumerate(blocks)}
    return [places[b] for b in owners if b in places]


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
