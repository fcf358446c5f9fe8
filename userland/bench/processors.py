"""Processor time, from /proc: of processes, and of everything else on the machine while something is measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

TICKS: Final = os.sysconf("SC_CLK_TCK")


def cores() -> int:
    return len(os.sched_getaffinity(0))


def cpu_seconds(pid: int) -> float:
    """What a process and its descendants have used; those that ended count where their parent has waited for them."""
    ticks = 0
    pids = [pid]
    for each in pids:
        try:
            pids += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
            ticks += sum(map(int, Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11:15]))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return ticks / TICKS


def busy_seconds() -> float:
    """What the whole machine has used, what the hypervisor took away included."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS


class Others:
    """How much of the machine others use while we measure.

    mine   processor time of everything that takes part, in seconds, so far
    """

    def __init__(self, mine: Callable[[], float]) -> None:
        self._mine = mine
        self.start()

    def start(self) -> None:
        self._at, self._busy, self._own = time.perf_counter(), busy_seconds(), self._mine()

    def share(self) -> float:
        """Of all processors, since `start`, 0..1; to about a tick of 10 ms per process."""
        spent = busy_seconds() - self._busy - (self._mine() - self._own)
        return max(0.0, spent / (time.perf_counter() - self._at) / (os.cpu_count() or 1))
