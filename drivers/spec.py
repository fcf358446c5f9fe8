"""How one driver is started and watched: what the daemon decides, as data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

Log: TypeAlias = Callable[[str, str], None]  # (level, text); levels are info, warning, error


class DriverFds(NamedTuple):
    """Descriptors that a driver process inherits, under the same numbers."""

    channel: int
    arena: int
    rows: int  # read-only
    extra: Mapping[str, int] = {}


Argv: TypeAlias = Callable[[DriverFds, str], list[str]]  # (descriptors, configuration as JSON) -> command line


class Timing(NamedTuple):
    """Deadlines and delays of one driver."""

    probe_ns: int = 300_000_000_000  # from spawn to the probe's answer: loading weights happens in between
    exec_ns: int = 120_000_000_000  # one pass, and
    exec_token_ns: int = (
        250_000_000  # for each token of it: a large model on few cores prefills only some tokens a second
    )
    transfer_ns: int = 10_000_000_000  # one transfer, and
    transfer_frame_ns: int = 50_000_000  # for each of its frames
    health_every_ns: int = 5_000_000_000  # between health questions, asked only when nothing is in flight
    health_ns: int = 10_000_000_000  # for their answer
    stop_ns: int = 2_000_000_000  # from a closed channel to SIGTERM, and from that to SIGKILL
    backoff_first_ns: int = 250_000_000  # before the second restart in a row; the first is immediate; then doubled
    backoff_cap_ns: int = 30_000_000_000
    stable_ns: int = 10_000_000_000  # a life that was up this long was no failure: counting begins anew
    start_attempts: int = 3  # at boot
    restart_attempts: int = 10  # in a row, while serving; then only `restart` by hand


def driver_argv(module: str) -> Argv:
    """The command line of a driver that is a Python module of this installation."""

    def build(fds: DriverFds, config: str) -> list[str]:
        descriptors = ["--channel", str(fds.channel), "--arena", str(fds.arena), "--rows", str(fds.rows)]
        return [sys.executable, "-m", module, *descriptors, "--config", config]

    return build


@dataclass(frozen=True)
class DriverSpec:
    """One driver of the system.

    device       its number, the one in every event and effect
    name         for people: hbm0
    tier         hbm, or the kind of memory that this driver keeps stored frames in
    argv         builds the command line
    config       the driver's own settings, handed over as JSON
    arena_bytes  size of the memfd of its frames
    device_bytes  of an accel whose frames lie in its device's own memory: how much of that; 0: they lie in the arena
    rows_bytes   size of the memfd of its page-table rows (RowLayout.total_bytes)
    fds          further descriptors that it inherits, by name; they stay the caller's
    environment  added to the daemon's own
    arena        what a restart leaves of the frames: "kept" when they lie in the memfd, "lost" when in device memory.
                 The driver of a slower tier says by `found` what it still has: for the rest, "lost" is the truth
    """

    device: int
    name: str
    argv: Argv
    config: Mapping[str, Any]
    arena_bytes: int
    rows_bytes: int
    fds: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    arena: Literal["kept", "lost"] = "kept"
    tier: str = "hbm"
    device_bytes: int = 0
    timing: Timing = field(default_factory=Timing)
