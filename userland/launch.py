"""Starts the daemon as a process of its own: programs may not import what boots the system, they can only run it.

`python -m attnix.boot` says one line on standard output when it accepts, `attnix: ready on SOCKET`, and why it cannot
on standard error.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from .output import CommandError

BOOT_MODULE: Final = "attnix.boot"
_SHOWN_LINES: Final = 12
_WARNING: Final = "attnix: warning: "
_CANNOT: Final = "attnix: cannot boot: "


class BootFailed(CommandError):
    """The daemon did not come up; the message holds the last lines that it and its drivers said."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = status


class Launched(NamedTuple):
    """A daemon that accepts.  The process is this program's child, in a session of its own."""

    process: subprocess.Popen[bytes]
    socket: str
    log: str
    warnings: list[str]  # what it said on the way up that somebody ought to know


def boot_command(flags: Sequence[str]) -> list[str]:
    """The command line that boots in the foreground."""
    return [sys.executable, "-m", BOOT_MODULE, *flags]


def launch(flags: Sequence[str], socket: str, log: str, deadline_s: float) -> Launched:
    """Start a daemon in the background and wait until it accepts.

    Error: BootFailed, and then nothing of it runs any more.
    """
    path = Path(log)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise BootFailed(f"the log {log} cannot be written: {error.strerror}") from error
    with os.fdopen(fd, "rb") as said:
        start = os.fstat(fd).st_size
        process = subprocess.Popen(
            [*boot_command(flags), "--socket", socket],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, start_new_session=True,
        )  # fmt: skip
        try:
            line = _first_line(process, deadline_s)
        except BaseException:
            stop(process)
            raise
        said.seek(start)
        if "ready on" in line:
            return Launched(process, socket, log, _warnings(said.read().decode(errors="replace").splitlines()))
        if process.poll() is None and not line:
            stop(process)
            why = f"the daemon did not come up within {deadline_s:.0f} s (--wait)"
        else:
            stop(process)
            why = f"the daemon ended with status {process.returncode}"
        said.seek(start)
        lines = _reason(said.read().decode(errors="replace").splitlines())[-_SHOWN_LINES:]
    raise BootFailed("\n  ".join([why + (":" if lines else ""), *lines]), 2 if process.returncode == 2 else 1)


def _warnings(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.startswith(_WARNING)]


def _reason(lines: list[str]) -> list[str]:
    """Why it cannot boot, if it says that, without what went well before and what it has said already."""
    last = next((at for at in reversed(range(len(lines))) if lines[at].startswith(_CANNOT)), 0)
    return _warnings(lines[:last]) + lines[last:]


def stop(process: subprocess.Popen[bytes], patience_s: float = 10.0) -> int:
    """SIGTERM, then SIGKILL; reaped in any case.  Its exit status.  Its drivers end with it (PDEATHSIG)."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def _first_line(process: subprocess.Popen[bytes], deadline_s: float) -> str:
    """What it says first; "" when it says nothing before it ends or the deadline passes.  Its output is closed then."""
    assert process.stdout is not None
    end = time.monotonic() + deadline_s
    line = b""
    with process.stdout as output, selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, end - time.monotonic())):
                return ""
            byte = os.read(output.fileno(), 1)  # no more than the line: nobody reads what comes after it
            if not byte:
                process.wait(max(1.0, end - time.monotonic()))
                return line.decode(errors="replace")
            line += byte
    return line.decode(errors="replace")
