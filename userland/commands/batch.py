"""`attnix batch`: a file of prompts into a file of answers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from attnix.syscalls import AttnixError, aconnect

from ..answers import MaxTokensOption, SeedOption, StopOption, TemperatureOption, TopPOption, sampling
from ..output import CommandError, Interrupted, JsonOption, SocketOption, console, print_json
from ..programs.batch import WINDOW, Batch, Summary
from ..programs.batch_line import BatchStopped
from ..programs.batch_output import BatchOutput, OutputError
from ..programs.prompts import BadLine, check_ids, read_prompts


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help='Lines of {"id": ..., "prompt": "..."}.')],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="Where the answers go; what it holds already is skipped.")
    ],
    system_prompt: Annotated[str, typer.Option("--system", help="A system message before every prompt.")] = "",
    window: Annotated[int, typer.Option("--window", "-w", min=1, help="Prompts at work at once.")] = WINDOW,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Do lines again whose answer in OUT is an error.")
    ] = False,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    stop: StopOption = None,
    as_json: JsonOption = False,
    socket: SocketOption = "",
) -> None:
    """Answer every line of IN, many at a time, each in a fork of the system prompt; a line of OUT for each, as it is done.

    A line may have "messages" instead of a prompt, and "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed" and
    "stop" of its own.  Interrupted or broken off, the same command goes on where it was.  What is wrong with a line
    is in its answer.
    """
    started = time.perf_counter()
    options = sampling(temperature, top_p, seed, stop)
    try:
        total = check_ids(source)
        with BatchOutput(_apart(source, target), retry_errors) as output, _progress(total, quiet=as_json) as told:

            async def work() -> Summary:
                async with aconnect(socket or None, name="attnix batch") as system:
                    run = Batch(
                        system, output, system_prompt=system_prompt, window=window, max_tokens=max_tokens,
                        options=options, told=told,
                    )  # fmt: skip
                    return await run.run(read_prompts(source))

            try:
                summary = asyncio.run(work())
            except KeyboardInterrupt:
                raise Interrupted(_so_far(output, total, "interrupted")) from None
            except (AttnixError, BatchStopped) as error:
                if isinstance(error, AttnixError) and not output.ids:
                    raise  # no daemon, most likely: there is nothing to go on with
                raise CommandError(_so_far(output, total, str(error))) from error
    except (BadLine, OutputError) as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{error.filename or target}: {error.strerror}") from error
    seconds = round(time.perf_counter() - started, 3)
    if as_json:
        print_json({**summary._asdict(), "seconds": seconds, "out": str(target)})
    else:
        print(
            f"{summary.done:,} done, {summary.errors:,} of them errors; {summary.skipped:,} were there; {seconds:.1f} s, "
            f"{summary.generated_tokens:,} tokens generated, {summary.computed_tokens:,} computed, "
            f"{summary.hit_tokens:,} found"
        )


def _apart(source: Path, target: Path) -> Path:
    if target.exists() and target.samefile(source):
        raise typer.BadParameter("OUT is IN: name another file")
    return target


def _so_far(output: BatchOutput, total: int, why: str) -> str:
    return f"{why}; {len(output.ids):,} of {total:,} lines are in {output.path}: the same command goes on from there"


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[Summary], None]]:
    """What is told of each line that is done: a bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda summary: None
        return
    columns = (
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), TextColumn("{task.fields[errors]}"),
    )  # fmt: skip
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, rate="", errors="")
        started = time.perf_counter()

        def told(summary: Summary) -> None:
            rate = summary.generated_tokens / (time.perf_counter() - started)
            errors = f"{summary.errors:,} errors" if summary.errors else ""
            bar.update(task, completed=summary.lines, rate=f"{rate:,.0f} tokens/s", errors=errors)

        yield told
