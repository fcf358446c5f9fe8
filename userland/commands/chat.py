"""`attnix chat`: a conversation on a terminal; what it is made of is programs/chat.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Final, TypeAlias

import typer

from attnix.syscalls import Stream
from attnix.syscalls.client import GenerateOptions
from attnix.syscalls.exceptions import SyscallError, TooBig
from attnix.syscalls.types import GenerateResult

from ..answers import MaxTokensOption, SeedOption, StopOption, TemperatureOption, TopPOption, read_answer, sampling
from ..output import JsonOption, SocketOption, call_system, print_json, say_error
from ..programs.chat import Chat
from ..visible import visible
from .run import answer_json

Ask: TypeAlias = Callable[[], str]  # the next line; EOFError at the end, KeyboardInterrupt for Ctrl-C

_HELP: Final = (
    "/new starts over, /undo takes the last turn back, /fork goes on in a copy and /back returns from it, "
    "/name NAME keeps the conversation, /stat shows the context, /quit or Ctrl-D leaves; Ctrl-C interrupts an answer"
)


def chat(
    system_prompt: Annotated[str, typer.Option("--system", help="A system message to begin with.")] = "",
    name: Annotated[
        str, typer.Option("--name", help="Keep the conversation under this name, or go on with the one that has it.")
    ] = "",
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    stop: StopOption = None,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Talk to the model, over many turns.  Ctrl-C interrupts the answer, not the session; /help lists commands.

    When the window is full the oldest turns are left out.  With --json every turn's answer is one JSON document on one line.
    """
    options = sampling(temperature, top_p, seed, stop)
    with call_system(socket, "chat") as system:
        ask = _terminal_input() if sys.stdin.isatty() and not as_json else _plain_input(quiet=as_json)
        Conversation(Chat(system, system_prompt, name), max_tokens, options, as_json).hold(ask)


class Conversation:
    """A chat and those that it was forked from, for as long as the user wants."""

    def __init__(self, chat: Chat, max_tokens: int, options: GenerateOptions, as_json: bool) -> None:
        self._chat = chat
        self._left: list[Chat] = []  # to come back to
        self._max_tokens = max_tokens
        self._options: GenerateOptions = options
        self._as_json = as_json

    def hold(self, ask: Ask) -> None:
        """Turn after turn until the input ends or says /quit."""
        if self._chat.reopened:
            self._say(f"{self._chat.name} goes on, at {self._chat.context.stat().tokens} tokens")
        if self._chat.unfinished is not None:
            self._show(self._chat.unfinished)
        while True:
            try:
                line = ask().strip()
            except EOFError:
                return
            except KeyboardInterrupt:  # at the prompt: only the line typed so far is gone
                self._say("")
                continue
            if line in ("/quit", "/exit"):
                return
            if line:
                self._turn(line)

    def _turn(self, line: str) -> None:
        try:
            if line.startswith("/"):
                self._command(*line.split(maxsplit=1))
            else:
                self._answer(line)
        except TooBig as error:
            say_error(error, self._as_json)
            self._say("the conversation has no room for that: /new starts over")
        except SyscallError as error:  # nothing was done: the conversation is as it was
            say_error(error, self._as_json)

    def _command(self, word: str, rest: str = "") -> None:
        if word == "/new":
            self._chat.start_over()
        elif word == "/undo":
            if self._chat.turns:
                self._say(f"taken back: {self._chat.undo()}")
            else:
                self._say("there is no turn to take back")
        elif word == "/fork":
            self._left.append(self._chat)
            self._chat = self._chat.branch()
            self._say("this is a copy: /back returns to where it was forked")
        elif word == "/back":
            if self._left:
                self._chat.close()
                self._chat = self._left.pop()
            else:
                self._say("this is no copy: /fork makes one")
        elif word == "/name" and rest:
            self._chat.publish(rest)
            self._say(f"kept as {rest}: attnix chat --name {rest} goes on with it")
        elif word == "/stat":
            row = self._chat.context.stat()
            self._say(f"cid {row.cid}: {row.tokens} tokens, {row.blocks} blocks, {row.shared_blocks} shared")
        else:
            self._say(_HELP if word == "/help" else f"no command {word}: {_HELP}")

    def _answer(self, line: str) -> None:
        dropped = self._chat.dropped
        stream = self._chat.say(line, self._max_tokens, **self._options)
        if self._chat.dropped > dropped:
            self._say(f"[the window is full: {self._chat.dropped - dropped} of the oldest turns left out]")
        self._show(stream)

    def _show(self, stream: Stream) -> None:
        result = read_answer(stream, (lambda piece: None) if self._as_json else _write)
        if self._as_json:
            print_json(answer_json(result))
        else:
            _write(_ending(result))

    def _say(self, text: str) -> None:
        if not self._as_json:
            print(text, flush=True)


def _ending(result: GenerateResult) -> str:
    notes = {"stop": "", "length": " [...]", "cancelled": " [interrupted]"}
    return notes.get(result.reason, f" [{result.reason}]") + "\n"


def _write(piece: str) -> None:
    sys.stdout.write(visible(piece))
    sys.stdout.flush()


def _plain_input(quiet: bool) -> Ask:
    def ask() -> str:
        if not quiet:
            _write("> ")
        line = sys.stdin.readline()
        if not line:
            if not quiet:
                _write("\n")  # what comes next begins a line of its own
            raise EOFError
        return line

    return ask


def _terminal_input() -> Ask:
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession("> ")
    _write(f"{_HELP}\n")
    return session.prompt
