"""`attnix chat`: a conversation in one context.  Each turn appends to it; nothing is ever sent or computed twice."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Final, TypeAlias

import typer

from attnix.syscalls import Client, Context
from attnix.syscalls.client import GenerateOptions
from attnix.syscalls.exceptions import SyscallError, TooBig
from attnix.syscalls.types import GenerateResult

from ..answers import MaxTokensOption, SeedOption, StopOption, TemperatureOption, TopPOption, sampling, stream_answer
from ..output import JsonOption, SocketOption, call_system, print_json, say_error
from .run import answer_json

Ask: TypeAlias = Callable[[], str]  # the next line; EOFError at the end, KeyboardInterrupt for Ctrl-C

_HELP: Final = "/new starts over, /stat shows the context, /quit or Ctrl-D leaves; Ctrl-C interrupts an answer"


def chat(
    system_prompt: Annotated[str, typer.Option("--system", help="A system message to begin with.")] = "",
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    stop: StopOption = None,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Talk to the model, over many turns.  Ctrl-C interrupts the answer, not the session; /help lists commands.

    With --json every turn's answer is one JSON document on one line.
    """
    with call_system(socket, "chat") as system:
        ask = _terminal_input() if sys.stdin.isatty() and not as_json else _plain_input(quiet=as_json)
        options = sampling(temperature, top_p, seed, stop)
        Conversation(system, system_prompt, max_tokens, options, as_json).hold(ask)


class Conversation:
    """One context, for as long as the user wants."""

    def __init__(
        self, system: Client, system_prompt: str, max_tokens: int, options: GenerateOptions, as_json: bool
    ) -> None:
        self.system: Final = system
        self._system_prompt = system_prompt
        self._max_tokens = max_tokens
        self._options: GenerateOptions = options
        self._as_json = as_json
        self._context = self._begin()

    def hold(self, ask: Ask) -> None:
        """Turn after turn until the input ends or says /quit."""
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
        if line == "/new":
            self._context.release()
            self._context = self._begin()
        elif line == "/stat":
            row = self._context.stat()
            self._say(f"cid {row.cid}: {row.tokens} tokens, {row.blocks} blocks, {row.shared_blocks} shared")
        elif line.startswith("/"):
            self._say(_HELP if line == "/help" else f"no command {line.split()[0]}: {_HELP}")
        else:
            try:
                self._answer(line)
            except TooBig as error:
                say_error(error, self._as_json)
                self._say("the conversation has no room for that: /new starts over")
            except SyscallError as error:  # nothing was done: the conversation is as it was
                say_error(error, self._as_json)

    def _answer(self, line: str) -> None:
        self._context.append(messages=[("user", line)])
        write = (lambda piece: None) if self._as_json else _write
        result = stream_answer(self._context, self._max_tokens, self._options, write)
        if self._as_json:
            print_json(answer_json(result))
        else:
            _write(_ending(result))

    def _begin(self) -> Context:
        context = self.system.alloc_context()
        if self._system_prompt:
            context.append(messages=[("system", self._system_prompt)])
        return context

    def _say(self, text: str) -> None:
        if not self._as_json:
            print(text, flush=True)


def _ending(result: GenerateResult) -> str:
    notes = {"stop": "", "length": " [...]", "cancelled": " [interrupted]"}
    return notes.get(result.reason, f" [{result.reason}]") + "\n"


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _plain_input(quiet: bool) -> Ask:
    def ask() -> str:
        if not quiet:
            _write("> ")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line

    return ask


def _terminal_input() -> Ask:
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession("> ")
    _write(f"{_HELP}\n")
    return session.prompt
