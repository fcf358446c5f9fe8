"""`attnix agent`: a question, answered with the help of tools."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from attnix.syscalls import aconnect

from ..answers import MaxTokensOption, SeedOption, TemperatureOption, TopPOption, sampling
from ..output import CommandError, Interrupted, JsonOption, SocketOption, print_json
from ..programs.agent import MAX_TURNS, Outcome, Step, by_generating, run_agent
from ..programs.tools import CALCULATOR, Tool, command_runner, file_search, http_get
from ..visible import visible


def agent(
    question: Annotated[str, typer.Argument(help="What to find out; - reads it from standard input.")],
    root: Annotated[
        Path,
        typer.Option("--root", help="Folder that it may search, and where commands run.", file_okay=False, exists=True),
    ] = Path("."),
    commands: Annotated[
        bool, typer.Option("--allow-commands", help="Let it run commands there, with your rights, 10 s each.")
    ] = False,
    instructions: Annotated[str, typer.Option("--system", help="What it is told before its tools.")] = "",
    max_turns: Annotated[int, typer.Option("--max-turns", min=0, help="Tool calls at most.")] = MAX_TURNS,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Answer a question with tools: a calculator, a search for files below --root, HTTP GET from this machine, and commands
    if allowed.

    The model has to be one that can call tools; the default one is too small to do so reliably.
    """
    tools: list[Tool] = [CALCULATOR, file_search(root), http_get()]
    if commands:
        tools.append(command_runner(root))
    text = sys.stdin.read() if question == "-" else question
    said = {"instructions": instructions} if instructions else {}

    async def work() -> Outcome:
        async with aconnect(socket or None, name="attnix agent") as system:
            decide = by_generating(max_tokens, sampling(temperature, top_p, seed, None))
            watch = _quiet if as_json else _show
            return await run_agent(system, text, tools, decide=decide, max_turns=max_turns, watch=watch, **said)

    try:
        outcome = asyncio.run(work())
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    if as_json:
        print_json(outcome)
        return
    print(visible(outcome.answer))
    if outcome.reason != "answer":
        why = {"turns": f"it asked for more than {max_turns} tools", "window": "the window is full"}[outcome.reason]
        raise CommandError(f"{why}: that was its last word, not an answer")


def _show(step: Step) -> None:
    """A step as it is done, on standard error: standard output has the answer alone."""
    if step.call is None:
        asked = "a tool call that cannot be read"
    else:
        asked = f"{step.call.name}({', '.join(f'{name}={value!r}' for name, value in step.call.arguments.items())})"
    first = step.result.splitlines()[0] if step.result else ""
    print(visible(f"- {asked}\n  {first[:100]}"), file=sys.stderr, flush=True)


def _quiet(step: Step) -> None:
    pass
