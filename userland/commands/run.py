"""`attnix run`: one prompt, one answer."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from attnix.syscalls.records import unpack_ids
from attnix.syscalls.types import GenerateResult

from ..answers import MaxTokensOption, SeedOption, StopOption, TemperatureOption, TopPOption, sampling, stream_answer
from ..output import JsonOption, SocketOption, call_system, plain, print_json
from ..visible import visible


def run(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    system_prompt: Annotated[str, typer.Option("--system", help="A system message before it.")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="The prompt is token ids, as 1,2,3; so is the answer.")
    ] = False,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    stop: StopOption = None,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Ask once; the answer comes as it is generated.  Ctrl-C ends it early."""
    if raw and tokens:
        raise typer.BadParameter("--raw and --tokens exclude each other")
    if system_prompt and (raw or tokens):
        raise typer.BadParameter("--system needs the chat template: leave --raw and --tokens out")
    text = sys.stdin.read() if prompt == "-" else prompt
    ids = parse_ids(text) if tokens else []
    options = sampling(temperature, top_p, seed, stop)
    with call_system(socket, "run") as system, system.alloc_context() as context:
        if any(row.state == "asleep" for row in system.tiers().tiers):
            print("attnix: the system is asleep: this waits for `attnix wake`", file=sys.stderr)
        if tokens:
            context.append(tokens=ids, more=True)
        elif raw:
            context.append(text, more=True)
        else:
            asked = [*([("system", system_prompt)] if system_prompt else []), ("user", text)]
            context.append(messages=asked, more=True)
        shown = (lambda piece: None) if as_json or tokens else _write
        result = stream_answer(context, max_tokens, options, shown)
    if as_json:
        print_json(answer_json(result))
    elif tokens:
        print(",".join(map(str, unpack_ids(result.tokens))))
    else:
        _write("\n")
        if result.reason not in ("stop", "length"):
            print(f"attnix: {result.reason}", file=sys.stderr)


def parse_ids(text: str) -> list[int]:
    """`1,2,3`.  Error: BadParameter."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of token ids such as 1,2,3") from None


def answer_json(result: GenerateResult) -> dict[str, object]:
    """A generation for `--json`."""
    fields = dict(plain(result))
    fields.pop("logprobs")
    return fields


def _write(piece: str) -> None:
    sys.stdout.write(visible(piece))
    sys.stdout.flush()
