"""`attnix shutdown`: stop the daemon and its drivers."""

from __future__ import annotations

import time
from typing import Final

from ..output import CommandError, JsonOption, SocketOption, call_system, print_json

_DEADLINE_S: Final = 30.0
_POLL_S: Final = 0.02


def shutdown(as_json: JsonOption = False, socket: SocketOption = "") -> None:
    """Stop the system and wait until its process has ended."""
    with call_system(socket, "shutdown") as system:
        pid = system.uname().pid
        system.shutdown()
    deadline = time.monotonic() + _DEADLINE_S
    while _runs(pid):
        if time.monotonic() > deadline:
            raise CommandError(f"the daemon (process {pid}) was asked to stop and still runs after {_DEADLINE_S:.0f} s")
        time.sleep(_POLL_S)
    if as_json:
        print_json({"stopped_pid": pid})


def _runs(pid: int) -> bool:
    """False for a zombie, too: it has ended, and reaping it is its parent's business."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
