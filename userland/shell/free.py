"""`attnix free`: the tiers and what their frames are used for."""

from __future__ import annotations

from rich.table import Table

from attnix.syscalls.types import TierRow

from ..output import FromOption, JsonOption, SocketOption, look_at, print_json, show, table
from ..units import size


def free(as_json: JsonOption = False, socket: SocketOption = "", source: FromOption = "") -> None:
    """Show every tier's frames: free, cache (reclaimable when needed), mapped by contexts, wired by the running batch."""
    with look_at(socket, "free", source) as system:
        seen = system.tiers()
    if as_json:
        print_json(seen)
    else:
        show(tier_table(seen.tiers))


def tier_table(rows: tuple[TierRow, ...]) -> Table:
    """Two lines per device: frames, and the same in bytes."""
    made = table("DEVICE", "STATE", ">TOTAL", ">FREE", ">CACHE", ">MAPPED", ">WIRED", ">PID", ">EPOCH", ">RESTARTS")
    for row in rows:
        uses = (row.capacity_frames, row.free_frames, row.reclaimable_frames, row.mapped_frames, row.wired_frames)
        driver = (str(row.driver_pid or "-"), str(row.epoch), str(row.restarts))
        made.add_row(row.device, row.state, *[f"{frames:,}" for frames in uses], *driver)
        made.add_row("", "", *[size(frames * row.frame_bytes) for frames in uses], "", "", "", style="dim")
    return made
