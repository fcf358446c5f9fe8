"""The `attnix` command: one subcommand per file, in commands/ (what does something) and shell/ (what looks)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

from .commands.agent import agent
from .commands.batch import batch
from .commands.bench import bench
from .commands.boot import boot
from .commands.chat import chat
from .commands.demo import demo
from .commands.durable import names, publish, restore, sleep, snapshot, unlink, wake
from .commands.kill import kill
from .commands.memory import demote, evict, pin, prefetch, unpin
from .commands.pull import pull
from .commands.replay import SETTINGS as REPLAY_SETTINGS
from .commands.replay import replay
from .commands.run import run
from .commands.serve import serve
from .commands.shutdown import shutdown
from .commands.study import study
from .commands.tiers import attach_tier, detach_tier
from .doctor.command import doctor
from .output import AttnixError, CommandError, say_error
from .shell.dmesg import dmesg
from .shell.explain import explain
from .shell.free import free
from .shell.fsck import fsck
from .shell.group import group
from .shell.pmap import pmap
from .shell.ps import ps
from .shell.stat import stat
from .shell.sysctl import sysctl
from .shell.tiers import tiers
from .shell.uname import uname
from .shell.vmstat import vmstat

app = typer.Typer(
    help="attnix: an operating system for attention state.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_PROGRAMS: tuple[Callable[..., None], ...] = (
    demo, pull, boot, run, chat, agent, batch, serve, shutdown, kill
)  # fmt: skip
_MEMORY: tuple[Callable[..., None], ...] = (prefetch, demote, evict, pin, unpin, attach_tier, detach_tier)
_INSPECTOR: tuple[Callable[..., None], ...] = (
    ps, pmap, free, tiers, stat, explain, doctor, fsck, uname, dmesg, vmstat, sysctl
)  # fmt: skip
for _command in _PROGRAMS:
    app.command()(_command)
_DURABLE: tuple[Callable[..., None], ...] = (names, publish, unlink, snapshot, restore, sleep, wake)
for _command in _DURABLE:
    app.command(rich_help_panel="Contexts that last")(_command)
for _command in _MEMORY:
    app.command(rich_help_panel="Memory")(_command)
for _command in _INSPECTOR:
    app.command(rich_help_panel="Inspector")(_command)
app.command(context_settings=REPLAY_SETTINGS, add_help_option=False)(replay)  # its options are its own process's
app.add_typer(group, name="group", rich_help_panel="Inspector")
app.add_typer(bench, name="bench")
app.add_typer(study, name="study")


def main() -> None:
    """Entry point.  Exit status: 0 done, 1 the system said no or is not there, 2 wrong usage, 130 interrupted."""
    try:
        app()
    except CommandError as error:
        say_error(error, "--json" in sys.argv)
        sys.exit(error.exit_status)
    except AttnixError as error:
        say_error(error, "--json" in sys.argv)
        sys.exit(1)
    except BrokenPipeError:  # the reader went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
