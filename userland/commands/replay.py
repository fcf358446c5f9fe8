"""`attnix replay`: a recorded trace through the kernel; in a process of its own, since it reaches below the system calls."""

from __future__ import annotations

import subprocess
import sys

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def replay(context: typer.Context) -> None:
    """Replay a recorded trace through the kernel under a simulated clock: hits, TTFT, the offline bound.  See --help."""
    raise typer.Exit(subprocess.run([sys.executable, "-m", "attnix.replay", *context.args]).returncode)
