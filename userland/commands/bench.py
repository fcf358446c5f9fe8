"""`attnix bench`: runs one of the benchmarks, each in a process of its own: some measure below the system calls."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import typer

BENCHES: Final = {
    "core": "What the kernel's hot operations cost, against the Python twin and vLLM's scheduler.",
    "syscall": "What a system call costs, against a raw socket echo in the same run.",
    "decode": "Prefill and decode tokens/s, against the machine's limits and other engines.",
    "tiers": "How fast frames move between tiers, against memcpy and fio.",
    "resume": "Time to first token of a long context by where its KV is, against llama.cpp's slot restore.",
    "overlap": "Whether loading a context hides behind computing its new tokens.",
    "gateway": "What HTTP costs: first tokens and tokens/s through `attnix serve`, against the socket client.",
    "attention": "The GPU attention kernels, against the GPU's limits, SDPA, flex_attention and FlashInfer.",
    "agents": "Agents that wait for tools: job completion and first tokens, against llama.cpp's server and vLLM.",
}

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure, beside peers and the machine's limits in the same run.  All take --json and --help.",
)


def _register(name: str, about: str) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    # Without a help of its own: `--help`, like all other options, is the benchmark's.
    @bench.command(name, help=about, context_settings=settings, add_help_option=False)
    def command(context: typer.Context) -> None:
        module = f"attnix.userland.bench.{name}"
        raise typer.Exit(subprocess.run([sys.executable, "-m", module, *context.args]).returncode)


for _name, _about in BENCHES.items():
    _register(_name, _about)
