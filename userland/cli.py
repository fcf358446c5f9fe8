"""The `attnix` command: one subcommand per file, in commands/ (what does something) and shell/ (what looks)."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from attnix import __version__

from .commands.agent import agent
from .commands.batch import batch
from .commands.bench import bench
from .commands.boot import boot
from .commands.chat import chat
from .commands.demo import demo
from .commands.durable import names, publish, restore, sleep, snapshot, unlink, wake
from .commands.kill import kill
from .commands.memory import demote, evict, pin, prefetch, unpin
from .commands.nice import nice
from .commands.pull import pull
from .commands.replay import SETTINGS as REPLAY_SETTINGS
from .commands.replay import replay
from .commands.run import run as run_
from .commands.serve import serve
from .commands.shutdown import shutdown
from .commands.study import study
from .commands.tiers import attach_tier, detach_tier
from .doctor.command import doctor
from .errors import WrongUsage
from .output import AttnixError, CommandError, is_utf8, say_error
from .shell.cat import cat
from .shell.df import df
from .shell.dmesg import dmesg
from .shell.dump import dump
from .shell.explain import explain
from .shell.free import free
from .shell.fsck import fsck
from .shell.group import group
from .shell.help import help_
from .shell.lsctx import lsctx
from .shell.pmap import pmap
from .shell.ps import ps
from .shell.sh import sh
from .shell.stat import stat
from .shell.strace import strace
from .shell.sysctl import sysctl
from .shell.tiers import tiers
from .shell.top import top
from .shell.trace import trace
from .shell.tree import tree
from .shell.uname import uname
from .shell.vmstat import vmstat

_NO_COMMAND: Final[Any] = typer.BadParameter.__bases__[0]  # UsageError, for which typer has no name of its own


class Commands(TyperGroup):
    """Says more than `no such option` of --from where it has no meaning."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        given = any(word == "--from" or word.startswith("--from=") for word in rest)
        if "--from=" in rest or ("--from", "") in pairwise(rest):  # a variable that is empty is no running system
            ctx.fail("--from names no file")
        if given and command is not None and command.params and not _looks(command, rest):
            ctx.fail(
                f"{name} needs a running system: --from is for commands that only look, such as ps, pmap, tree and df"
            )
        return name, command, rest


def _looks(command: Any, rest: list[str]) -> bool:
    inner = getattr(command, "commands", None)
    if inner is not None:
        return any(_looks(inner[word], rest) for word in rest[:1] if word in inner)
    return any("--from" in parameter.opts for parameter in command.params)


app = typer.Typer(
    cls=Commands,
    help="attnix: an operating system for attention state.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"attnix {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Say which attnix this is.")
    ] = False,
) -> None:
    pass


_PROGRAMS: tuple[Callable[..., None], ...] = (
    demo, pull, boot, run_, chat, agent, batch, serve, shutdown
)  # fmt: skip
_MEMORY: tuple[Callable[..., None], ...] = (prefetch, demote, evict, pin, unpin, attach_tier, detach_tier)
_INSPECTOR: tuple[Callable[..., None], ...] = (
    sh, ps, top, lsctx, tree, pmap, cat, stat, free, df, tiers, vmstat, explain, doctor, strace, trace, sysctl, dmesg, fsck, uname, dump, kill
)  # fmt: skip
for _command in _PROGRAMS:
    app.command()(_command)
_DURABLE: tuple[Callable[..., None], ...] = (names, publish, unlink, snapshot, restore, sleep, wake)
for _command in _DURABLE:
    app.command(rich_help_panel="Contexts that last")(_command)
for _command in _MEMORY:
    app.command(rich_help_panel="Memory")(_command)
app.command(context_settings={"ignore_unknown_options": True}, rich_help_panel="Inspector")(nice)  # -5 is a value
for _command in _INSPECTOR:
    app.command(rich_help_panel="Inspector")(_command)
app.command(context_settings=REPLAY_SETTINGS, add_help_option=False)(replay)  # its options are its own process's
app.command("help", rich_help_panel="Inspector")(help_)
app.add_typer(group, name="group", rich_help_panel="Inspector")
app.add_typer(bench, name="bench")
app.add_typer(study, name="study")


@cache
def command() -> Any:
    """What typer makes of all this, once: it takes a tenth of a second, and the shell runs many commands."""
    return get_command(app)


def main() -> None:
    """Entry point of the console script."""
    # Closed by whoever started us: its number must not become that of a socket, nor its object None.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (open until we end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not is_utf8(stream):
            stream.reconfigure(errors="replace")  # a terminal that has no such letter shows ?, and the rest
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """One command.  Exit status: 0 done, 1 the system said no or is not there, 2 wrong usage, 130 interrupted."""
    try:
        try:
            # Without --json typer says by itself what is wrong with a command line, for people only.
            done = command()(list(words), prog_name="attnix", standalone_mode="--json" not in words)
            status = done if isinstance(done, int) else 0
        except _NO_COMMAND as error:
            raise WrongUsage(error.format_message()) from error
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        sys.stdout.flush()  # what cannot be written fails here, and not when Python ends
        return status
    except CommandError as error:
        say_error(error, "--json" in words)
        return error.exit_status
    except AttnixError as error:
        say_error(error, "--json" in words)
        return 1
    except BrokenPipeError:  # the reader went away, as `head` does
        _stop_writing()
        return 1
    except OSError as error:
        if not error.filename:  # nobody opened that: it is where the output goes, a disk that is full
            _stop_writing()
        what = error.filename or "the output cannot be written"
        say_error(CommandError(f"{what}: {error.strerror or error}"), "--json" in words)
        return 1


def _stop_writing() -> None:
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    main()
