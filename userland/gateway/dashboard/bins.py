"""A device's frames as cells of a map: one each, or so many together where there are more than a screen has room for.

A cell of several frames is drawn as the process that has most of them; its age is the youngest, its sharers the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .look import Frames

_FREE = 0


def binned(frames: Frames, pids: Mapping[int, int], cells: int) -> dict[str, Any]:
    """Lists of one entry per cell; pids: by cid."""
    n = len(frames.states)
    each = max(1, -(-n // cells))
    if each == 1:
        whole = {
            "states": list(frames.states), "pids": [pids.get(cid, 0) for cid in frames.cids], "cids": frames.cids.tolist(),
            "logical": frames.logical.tolist(), "sharers": frames.sharers.tolist(), "ages": frames.ages.tolist(),
            "blocks": frames.blocks.tolist(), "used": [int(state != _FREE) for state in frames.states],
        }  # fmt: skip
        return {"device": frames.device, "capacity_frames": frames.capacity_frames, "each": 1, **whole}
    found: dict[str, list[int]] = {
        name: [] for name in ("states", "pids", "cids", "logical", "sharers", "ages", "blocks", "used")
    }
    for start in range(0, n, each):
        _cell(frames, pids, range(start, min(start + each, n)), found)
    return {"device": frames.device, "capacity_frames": frames.capacity_frames, "each": each, **found}


def _cell(frames: Frames, pids: Mapping[int, int], span: range, found: dict[str, list[int]]) -> None:
    used = [f for f in span if frames.states[f] != _FREE]
    owners = Counter(pids.get(frames.cids[f], 0) for f in used)
    pid = max(owners, key=lambda p: (owners[p], -p)) if owners else 0
    first = next((f for f in used if pids.get(frames.cids[f], 0) == pid), -1)
    ages = [frames.ages[f] for f in used if frames.ages[f] >= 0]
    found["states"].append(frames.states[first] if first >= 0 else _FREE)
    found["pids"].append(pid)
    found["cids"].append(frames.cids[first] if first >= 0 else 0)
    found["logical"].append(frames.logical[first] if first >= 0 else -1)
    found["sharers"].append(max((frames.sharers[f] for f in used), default=0))
    found["ages"].append(min(ages, default=-1))
    found["blocks"].append(frames.blocks[first] if first >= 0 else -1)
    found["used"].append(len(used))
