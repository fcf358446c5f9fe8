"""Runs a command: no shell unless told otherwise, a time after which it is killed with all it started, and no more output
than a model can read."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .tool import Tool, ToolError

TIME_LIMIT_S: Final = 10.0
OUTPUT_LIMIT_BYTES: Final = 4096

_KEPT: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")  # of the environment: no secret of the caller's goes along


def command_runner(
    folder: str | Path,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    shell: bool = False,
) -> Tool:
    """The tool that runs commands in `folder`, with the rights of this process.  shell: through /bin/sh."""

    async def run(command: str) -> str:
        argv = ["/bin/sh", "-c", command] if shell else _words(command)
        return await execute(argv, folder, time_limit_s, output_limit_bytes)

    how = "a shell command line" if shell else "a program and its arguments, without a shell: no pipes, no redirection"
    return Tool(
        "run_command", f"Runs a command in the working folder and gives its output; {time_limit_s:g} s at most.",
        {"command": how}, run, ("command",), time_limit_s=time_limit_s + 5,
    )  # fmt: skip


async def execute(argv: Sequence[str], folder: str | Path, time_limit_s: float, output_limit_bytes: int) -> str:
    """Standard output and error together, and the exit status when it is not 0.

    Error: ToolError when it cannot be started, or ran too long: its process group is killed then, and its output so far is
    in the message.  Cancelling kills it too.
    """
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    try:
        process = subprocess.Popen(
            argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:  # not there, not executable; a null byte in its name
        raise ToolError(f"{argv[0]!r} cannot be started: {getattr(error, 'strerror', None) or error}") from None
    with process:
        reading = asyncio.ensure_future(asyncio.to_thread(_read, process, time_limit_s, output_limit_bytes))
        try:
            data, why = await asyncio.shield(reading)
        except asyncio.CancelledError:
            _kill(process)  # its output ends, and so does the thread
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            raise
        _kill(process)  # also what it left running behind it
        process.wait()
    text = data.decode(errors="replace")
    if why == "time":
        raise ToolError(f"it ran longer than {time_limit_s:g} s and was killed; its output until then:\n{text}")
    if why == "size":
        return f"{text}\n[cut after {output_limit_bytes} bytes, and killed]"
    return text if process.returncode == 0 else f"{text}\n[exit status {process.returncode}]"


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ToolError(f"{command!r} cannot be split into words: {error}") from None
    if not words:
        raise ToolError("the command is empty: name a program")
    return words


def _read(process: subprocess.Popen[bytes], time_limit_s: float, limit_bytes: int) -> tuple[bytes, str]:
    """What it says until it ends ("") or a limit is reached ("time", "size")."""
    assert process.stdout is not None
    fd = process.stdout.fileno()
    end = time.monotonic() + time_limit_s
    data = b""
    ended = os.pidfd_open(process.pid)  # tells without reaping: until then its group's number is nobody else's
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while selector.select(max(0.0, end - time.monotonic())):
                piece = os.read(fd, 65_536)
                data += piece
                if len(data) > limit_bytes:
                    return data[:limit_bytes], "size"
                if not piece:  # it may have closed its output and go on
                    selector.unregister(fd)
                    selector.register(ended, selectors.EVENT_READ)
                    return data, "" if selector.select(max(0.0, end - time.monotonic())) else "time"
    finally:
        os.close(ended)
    return data, "time"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
