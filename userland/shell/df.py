"""`attnix df`: how full the tiers are, and how fast they were measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from attnix.syscalls.types import TierRow

from ..output import FromOption, JsonOption, SocketOption, look_at, print_json, show, table
from ..units import duration, rate, size

_FULL_PERCENT = 90


def df(as_json: JsonOption = False, socket: SocketOption = "", source: FromOption = "") -> None:
    """Show every tier's size, what is used of it, and its bandwidth and latency as its driver measured them.

    CACHE can be given back at once when frames are needed; USE% counts it as free.  READ is out of the device, WRITE into it.
    """
    with look_at(socket, "df", source) as system:
        seen = system.tiers()
    if as_json:
        print_json(seen)
    else:
        show(usage_table(seen.tiers))


def usage_table(rows: Sequence[TierRow]) -> Table:
    """A line per device."""
    made = table(
        "DEVICE", "TIER", "STATE", ">SIZE", ">USED", ">CACHE", ">FREE", ">USE%", ">READ/s", ">WRITE/s", ">LATENCY"
    )
    for row in rows:
        used = row.capacity_frames - row.free_frames - row.reclaimable_frames
        percent = 100 * used // row.capacity_frames if row.capacity_frames else 0
        frames = (row.capacity_frames, used, row.reclaimable_frames, row.free_frames)
        made.add_row(
            row.device, row.tier, row.state, *(size(n * row.frame_bytes) for n in frames), f"{percent}%",
            rate(row.read_bytes_s), rate(row.write_bytes_s), duration(row.latency_ns),
            style="red" if row.state == "down" else "yellow" if percent >= _FULL_PERCENT else "",
        )  # fmt: skip
    return made
