"""`attnix tiers`: the memory devices, what they are made of, and what moving to and from them costs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from attnix.syscalls.types import TierRow

from ..output import FromOption, JsonOption, SocketOption, look_at, print_json, show, table
from ..units import count, duration, rate, size


def tiers(as_json: JsonOption = False, socket: SocketOption = "", source: FromOption = "") -> None:
    """Show every memory device: state, policy and engine; then its measured speed and what it has moved since boot.

    READ is out of the device, WRITE into it; the rates and the latency are measured by its driver, `-` until it has.
    dram has no driver: what moves between it and another device is counted at that one.
    Last, what it costs to compute tokens, once that is known: timed at boot, then learned from every pass of prompts.
    """
    with look_at(socket, "tiers", source) as system:
        seen = system.tiers()
    if as_json:
        print_json(seen)
        return
    show(device_table(seen.tiers))
    show("")
    show(traffic_table(seen.tiers))
    for row in seen.tiers:
        if row.prefill_token_ns:
            show("")
            show(f"{row.device} prefill: {prefill(row)}")


def prefill(row: TierRow) -> str:
    """The fitted cost of computing tokens (DESIGN.md section 4), in units that compare from one machine to the next."""
    a_us, b_ns, k_ms = row.prefill_token_ns / 1e3, row.prefill_pair_ns, row.prefill_pass_ns / 1e6
    return f"{a_us:,.1f} us/token + {b_ns:,.2f} ns/token pair + {k_ms:,.2f} ms/pass"


def device_table(rows: Sequence[TierRow]) -> Table:
    """What each device is."""
    made = table("DEVICE", "TIER", "STATE", ">FRAMES", ">SIZE", ">USED", ">FREE", "POLICY", "~ENGINE")
    for row in rows:
        used = row.capacity_frames - row.free_frames
        made.add_row(
            row.device, row.tier, row.state, count(row.capacity_frames), size(row.capacity_frames * row.frame_bytes),
            count(used), count(row.free_frames), row.policy or "-", row.engine or "-",
            style="" if row.state == "up" else "yellow",
        )  # fmt: skip
    return made


def traffic_table(rows: Sequence[TierRow]) -> Table:
    """What each device does."""
    made = table("DEVICE", ">READ/s", ">WRITE/s", ">LATENCY", ">READ", ">WRITTEN", ">ERRORS", ">CORRUPT", ">RESTARTS")
    for row in rows:
        made.add_row(
            row.device, rate(row.read_bytes_s), rate(row.write_bytes_s), duration(row.latency_ns),
            size(row.read_bytes), size(row.write_bytes), count(row.errors), count(row.corrupt), count(row.restarts),
            style="red" if row.corrupt else "yellow" if row.errors else "",
        )  # fmt: skip
    return made
