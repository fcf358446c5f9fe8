"""`attnix boot`: start the system, in this terminal or in the background."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Final

import typer

from attnix.syscalls import default_socket_path

from ..launch import boot_command, launch
from ..output import JsonOption, SocketOption, print_json, show

_DEFAULT_DEADLINE_S: Final = 300.0


def boot(
    model: Annotated[
        str, typer.Option(help="A pulled model, a GGUF file, a Hugging Face directory, or sim (no model).")
    ] = "smollm2",
    device: Annotated[
        str, typer.Option(help="What computes: auto, cpu, or cuda (auto: cuda where there is one).")
    ] = "",
    hbm: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Memory for frames, per accel (default: 256MiB); on cuda also a share (default: 90%)."
        ),
    ] = "",
    dram: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Second tier, in shared memory: blocks that leave hbm go there (default: none)."
        ),
    ] = "",
    nvme: Annotated[
        list[str] | None, typer.Option(metavar="SIZE[@PATH]", help="A file tier below it. Repeatable.")
    ] = None,
    remote: Annotated[
        list[str] | None, typer.Option(metavar="URL[,SIZE]", help="A Redis or Valkey server as a tier. Repeatable.")
    ] = None,
    tier_write: Annotated[str, typer.Option(help="When blocks are copied down: back, through or selective.")] = "",
    accels: Annotated[int | None, typer.Option(help="Compute devices, each a driver process (default: 1).")] = None,
    block_tokens: Annotated[int | None, typer.Option(help="Tokens per block (default: 16).")] = None,
    window: Annotated[
        int | None, typer.Option(help="Longest context in tokens (default: the model's, which is the most).")
    ] = None,
    max_contexts: Annotated[int | None, typer.Option(help="Context slots (default: 4096).")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "",
    kv_dtype: Annotated[str, typer.Option(help="Of the frames: float32, bfloat16 or int8.")] = "",
    numerics: Annotated[str, typer.Option(help="fast, or invariant: results do not depend on the batch.")] = "",
    threads: Annotated[int | None, typer.Option(help="Threads of each accel.")] = None,
    sharing: Annotated[str, typer.Option(help="Who shares prefixes: uid or none.")] = "",
    state_dir: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Where secret, journal, snapshots and tiers' files lie (default: ~/.local/state/attnix).",
        ),
    ] = "",
    sim: Annotated[str, typer.Option(metavar="JSON", help="Settings of the simulated accel, with --model sim.")] = "",
    sim_tier: Annotated[
        list[str] | None, typer.Option(metavar="SIZE[,JSON]", help="A simulated tier. Repeatable.")
    ] = None,
    sysctl: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Set a tunable. Repeatable.")] = None,
    socket_group: Annotated[
        str, typer.Option(metavar="GROUP", help="Members of this group may connect too; each uid has its own quota.")
    ] = "",
    groups: Annotated[
        str, typer.Option(metavar="FILE", help="Limits of groups from the start, as TOML: docs/groups.md.")
    ] = "",
    record: Annotated[
        str, typer.Option(metavar="FILE", help="Write every event down, for `attnix replay FILE`. Holds all tokens.")
    ] = "",
    daemon: Annotated[
        bool, typer.Option("--daemon", "-d", help="Run in the background; return when it accepts.")
    ] = False,
    log: Annotated[str, typer.Option(metavar="PATH", help="With --daemon: what it says (default: SOCKET.log).")] = "",
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="With --daemon: how long it may take.", min=0, max=1_000_000)
    ] = _DEFAULT_DEADLINE_S,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Start the daemon: the kernel, and one driver process per device.

    In the foreground it takes this process's place and Ctrl-C stops it.
    """
    if as_json and not daemon:
        raise typer.BadParameter("--json goes with --daemon: in the foreground the daemon has the terminal")
    given = {
        "model": model, "device": device, "hbm": hbm, "accels": accels, "block-tokens": block_tokens, "window": window,
        "max-contexts": max_contexts, "dtype": dtype, "kv-dtype": kv_dtype, "numerics": numerics, "threads": threads,
        "sharing": sharing, "socket-group": socket_group, "state-dir": state_dir, "sim": sim, "dram": dram, "tier-write": tier_write, "record": os.path.abspath(record) if record else "",
        "groups": os.path.abspath(groups) if groups else "",
    }  # fmt: skip
    flags = [text for name, value in given.items() if value not in ("", None) for text in (f"--{name}", str(value))]
    repeated = {"nvme": nvme, "remote": remote, "sim-tier": sim_tier}
    flags += [text for name, values in repeated.items() for value in values or () for text in (f"--{name}", value)]
    flags += [text for setting in sysctl or () for text in ("--sysctl", setting)]
    path = os.path.abspath(socket or default_socket_path())
    if not daemon:
        sys.stdout.flush()
        command = [*boot_command(flags), "--socket", path]
        os.execv(command[0], command)
    launched = launch(flags, path, os.path.abspath(log or f"{path}.log"), wait)
    for line in launched.warnings:
        print(line, file=sys.stderr)
    if as_json:
        print_json({"pid": launched.process.pid, "socket": launched.socket, "log": launched.log})
    else:
        text = f"ready on {launched.socket} (process {launched.process.pid}, log {launched.log})"
        show(text)
    launched.process.returncode = 0  # it stays when we go: nobody shall warn that it still runs
