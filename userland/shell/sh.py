"""`attnix sh`: the inspector's own prompt.

A line is attnix commands, joined by `;`, `&&` or `||`; what stands behind the first `|` or `>` of one is the system's shell's:
`ps | grep run | wc -l`.  A line that begins with `!` is the system's whole.  Commands that only look run inside this process; those that take the
terminal or the process (boot, chat, run, ...) in one of their own.  Each command connects by itself, so a daemon that was
restarted is met again by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer

from ..output import SocketOption, show
from ..visible import visible
from .words import Line, split, statements

HISTORY: Final = "sh_history"
_OWN_PROCESS: Final = frozenset({
    "agent", "batch", "bench", "boot", "chat", "demo", "pull", "replay", "run", "serve", "sh", "shutdown", "study", "top",
})  # fmt: skip
_BYE: Final = ("exit", "quit")
_ENTRY: Final = (sys.executable, "-m", "attnix.userland.cli")
_OTHER_STREAMS: Final = re.compile(r"[0-9]>|<|>&")  # what a redirection says of more than standard output

Run: TypeAlias = Callable[[list[str]], int]
Ask: TypeAlias = Callable[[], str]  # the next line; EOFError at the end, KeyboardInterrupt for Ctrl-C


def sh(
    context: typer.Context,
    command: Annotated[str, typer.Option("--command", "-c", help="Run this line and end.")] = "",
    socket: SocketOption = "",
) -> None:
    """Start a shell of attnix commands, without `attnix` in front.

    Tab completes commands, options, pids, contexts, tunables and groups; what is behind `|` or `>` is the system's
    (`ps | grep run | wc -l`), as is a line that begins with `!`.  `help NAME` explains a command or a system call.  Ctrl-C ends a
    command, Ctrl-D the shell.  Without a terminal lines come from standard input, and the exit status is the last command's.
    """
    commands: dict[str, Any] = getattr(context.find_root().command, "commands", {})
    if socket:
        os.environ["ATTNIX_SOCKET"] = socket
    shell = Shell(commands)
    if command:
        raise typer.Exit(shell.line(command))
    if sys.stdin.isatty():
        show("attnix commands without `attnix`; `help` lists them, Tab completes, Ctrl-D leaves")
        shell.hold(_prompt(commands, socket))
    else:
        shell.hold(_plain_lines)
    raise typer.Exit(shell.status)


class Shell:
    """One line after the other, whatever they do.  status: of the last command.  left: it was told to exit."""

    def __init__(self, commands: Mapping[str, Any], run: Run | None = None) -> None:
        self._commands = commands
        self._run = run or _entry
        self.status = 0
        self.left = False

    def hold(self, ask: Ask) -> None:
        """Until the input ends or says exit."""
        while True:
            try:
                line = ask()
            except EOFError:
                return
            except KeyboardInterrupt:  # at the prompt: only what was typed is gone
                continue
            self.line(line)
            if self.left:
                return

    def line(self, text: str) -> int:
        """Run a line; its exit status."""
        try:
            if text.lstrip().startswith("!"):
                self.status = _system(text.lstrip()[1:])
            else:
                for joint, statement in statements(text):
                    if statement and not (joint == "&&" and self.status) and not (joint == "||" and not self.status):
                        own = not statement.startswith("!")
                        self.status = self._attnix(split(statement)) if own else _system(statement[1:])
                    if self.left:
                        break
        except ValueError as error:
            self.status = _complain(str(error))
        except KeyboardInterrupt:
            print(file=sys.stderr)
            self.status = 130
        return self.status

    def _attnix(self, line: Line) -> int:
        if not line.words:
            return _complain(f"there is no command before {line.rest!r}")
        words = list(line.words)
        if words[0] == "attnix":  # out of habit
            words = words[1:] or ["help"]
        if words[0] in _BYE and not line.rest:
            return self._leave(words[1:])
        if words[0] not in self._commands and not words[0].startswith("-"):
            return _complain(f"there is no command {words[0]!r}: `help` lists them, `!{words[0]}` is the system's")
        return self._piped(words, line.rest) if line.rest else self._one(words)

    def _leave(self, words: list[str]) -> int:
        """`exit`, with the status of the last command, or with one of its own."""
        if len(words) > 1 or not all(each.isascii() and each.isdecimal() and int(each) < 256 for each in words):
            return _complain("exit takes a status from 0 to 255, or nothing")
        self.left = True
        return int(words[0]) if words else self.status

    def _one(self, words: list[str], out: Any = None) -> int:
        if words[0] in _OWN_PROCESS:
            return _finished(subprocess.Popen([*_ENTRY, *words], stdout=out))
        try:
            return self._run(words)
        except Exception as error:  # a bug in a command is not the end of the shell
            print(visible(f"attnix: {words[0]} broke: {type(error).__name__}: {error}"), file=sys.stderr)
            return 1

    def _piped(self, words: list[str], rest: str) -> int:
        """The status is that of the last command behind the operator, as in any shell; behind a redirection the command's own."""
        if rest[0] == "<":
            return _complain("`<` is for commands that read: !attnix COMMAND < FILE")
        if _OTHER_STREAMS.search(rest.partition("|")[0]):  # its own, not those of the cat that would stand for it
            return _finished(subprocess.Popen(["/bin/sh", "-c", f'"$@" {rest}', "attnix", *_ENTRY, *words]))
        with _quiet_interrupts():
            script = rest[1:] if rest[0] == "|" else f"cat {rest}"
            other = subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, text=True, errors="replace")
        assert other.stdin is not None
        own = 0
        try:
            with contextlib.suppress(BrokenPipeError), other.stdin, _stdout(other.stdin):
                own = self._one(words, other.stdin)
        finally:
            status = _finished(other)
        return status if rest[0] == "|" else status or own


def _complain(text: str) -> int:
    print(visible(f"attnix: {text}"), file=sys.stderr)
    return 2


def _entry(words: list[str]) -> int:
    from ..cli import run

    return run(words)


def _system(script: str) -> int:
    return _finished(subprocess.Popen(["/bin/sh", "-c", script]))


def _finished(process: subprocess.Popen[Any]) -> int:
    """Its exit status.  Ctrl-C goes to the whole foreground group, so it has it too: it is waited for, not left behind."""
    while True:
        try:
            code = process.wait()
            return 128 - code if code < 0 else code
        except KeyboardInterrupt:
            continue


@contextlib.contextmanager
def _quiet_interrupts() -> Iterator[None]:
    """What is started inside does not die of a Ctrl-C: it ends when its input does, and says what it counted."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not in the main thread: nothing to keep from
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _stdout(file: Any) -> Iterator[None]:
    """What is printed inside goes to `file`."""
    before, sys.stdout = sys.stdout, file
    try:
        yield
        with contextlib.suppress(BrokenPipeError):
            file.flush()
    finally:
        sys.stdout = before


def history_path() -> Path:
    """In the user's state folder: $XDG_STATE_HOME/attnix, or ~/.local/state/attnix."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "attnix" / HISTORY


def _prompt(commands: Mapping[str, Any], socket: str) -> Ask:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    from .complete import ShellCompleter, Values

    path = history_path()
    history: History
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND, 0o600))
        history = FileHistory(str(path))
    except OSError:  # a home that cannot be written to: this session's history alone
        history = InMemoryHistory()
    completer = ShellCompleter(commands, Values(socket, commands))
    session: PromptSession[str] = PromptSession(
        "attnix> ", history=history, completer=completer, complete_while_typing=False, complete_in_thread=True
    )
    return session.prompt


def _plain_lines() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
