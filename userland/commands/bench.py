"""`attnix bench`: runs one of the benchmarks, each in a process of its own: some measure below the system calls."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import typer

from ..output import JsonOption

BENCHES: Final = {
    "core": "What the kernel's hot operations cost, against the Python twin and vLLM's scheduler.",
    "syscall": "What a system call costs, against a raw socket echo in the same run.",
    "decode": "Prefill and decode tokens/s, against the machine's limits and other engines.",
}

bench = typer.Typer(no_args_is_help=True, help="Measure, beside peers and the machine's limits in the same run.")


def _register(name: str, about: str) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @bench.command(name, help=f"{about}\n\nFurther options go to the benchmark.", context_settings=settings)
    def command(context: typer.Context, as_json: JsonOption = False) -> None:
        flags = [*(["--json"] if as_json else []), *context.args]
        raise typer.Exit(subprocess.run([sys.executable, "-m", f"attnix.userland.bench.{name}", *flags]).returncode)


for _name, _about in BENCHES.items():
    _register(_name, _about)
