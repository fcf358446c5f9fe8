"""`python tests/stalls.py PYTEST_ARGUMENT...`: a test run on a machine that stands still for a second now and then.

Pytest, one process below it, or all of them are stopped for 1.1 s about once a second (ATTNIX_STALL_S, ATTNIX_STALL_SEED).  A test
that fails here and not alone asserts something that nobody promises, or has found a race.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path


def below(pid: int) -> list[int]:
    """A process and all below it that are neither stopped nor over."""
    children: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            children[int(parent)].append((int(stat.parent.name), state))
    found, todo = [pid], [pid]
    while todo:
        for child, state in children[todo.pop()]:
            todo.append(child)
            if state not in "TtZ":
                found.append(child)
    return found


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def main(arguments: list[str]) -> int:
    draw = random.Random(int(os.environ.get("ATTNIX_STALL_SEED", "1")))
    stall_s = float(os.environ.get("ATTNIX_STALL_S", "1.1"))
    run = subprocess.Popen([sys.executable, "-m", "pytest", *arguments], stdin=subprocess.DEVNULL)
    while run.poll() is None:
        time.sleep(draw.uniform(0.1, 1.2))
        everybody = below(run.pid)
        stopped = draw.choice([everybody, [run.pid], [draw.choice(everybody)]])
        if run.poll() is None:
            signal_all(stopped, signal.SIGSTOP)
            time.sleep(stall_s)
            signal_all(stopped[::-1], signal.SIGCONT)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
