"""Thousands of prompts, from one file of JSON lines into another.

In:   {"id": "a7", "prompt": "..."} or {"id": "a7", "messages": [{"role": ..., "content": ...}, ...]}, and if wanted
      "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop" of its own.  Without an id it is the line's number.
Out:  {"id": "a7", "text": ..., "reason": ..., "tokens": ..., "usage": {...}} or {"id": "a7", "error": {...}}, in the order in
      which they are done, each written in one go.

A run that was interrupted, or whose machine lost power, is gone on with by running it again: what is in the output is
skipped, and a last line that is torn is cut off and done again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from attnix.syscalls import AsyncClient, AsyncContext, SyscallError
from attnix.syscalls.client import GenerateOptions
from attnix.syscalls.exceptions import BadHandle, Canceled, NoMemory, QuotaExceeded, StaleHandle, TryAgain

from .batch_output import BatchOutput
from .patience import delay_before, patiently

WINDOW: Final = 32  # prompts at work at once: a context each
PATIENCE_S: Final = 600.0
_NOT_NOW: Final = (TryAgain, NoMemory, QuotaExceeded)
_MAKES: Final = ("fork", "alloc_context")
_USAGE: Final = ("computed_tokens", "hit_tokens", "generated_tokens")
_OPTIONS: Final[dict[str, tuple[type, ...]]] = {
    "max_tokens": (int,), "temperature": (int, float), "top_p": (int, float), "top_k": (int,), "min_p": (int, float),
    "seed": (int,), "stop": (str, list),
}  # fmt: skip


class BatchStopped(Exception):
    """The run ended before its input did, and not because of a line; it can be gone on with."""


class BadLine(ValueError):
    """A line that asks for nothing that can be done; the message says what is wrong with it."""


class Prompt(NamedTuple):
    """A line of the input.  wrong: why it cannot be done; the rest is empty then."""

    id: str | int
    messages: tuple[tuple[str, str], ...] = ()
    options: GenerateOptions | None = None
    max_tokens: int | None = None
    wrong: str = ""


class Summary(NamedTuple):
    """A run: lines of the input, and what became of them now."""

    lines: int
    skipped: int  # in the output already
    done: int
    errors: int  # of those done
    generated_tokens: int
    computed_tokens: int  # passed through the model
    hit_tokens: int  # found instead of computed


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The lines of a file, one by one; blank ones are left out.  Error: OSError."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _prompt(number, line)


def check_ids(path: Path) -> int:
    """How many prompts there are.  Error: BadLine when two have one id: the output could not tell them apart."""
    seen: set[str | int] = set()
    for prompt in read_prompts(path):
        if prompt.id in seen:
            raise BadLine(f"{path} has the id {prompt.id!r} twice: give each line one of its own, or none")
        seen.add(prompt.id)
    return len(seen)


def _prompt(number: int, line: str) -> Prompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Prompt(number, wrong=f"line {number} is not JSON: {error}")
    if not isinstance(fields, dict):
        return Prompt(number, wrong=f"line {number} is no JSON object")
    name = fields.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        return Prompt(number, wrong=f"line {number}: the id is neither text nor a whole number")
    try:
        messages, options = _messages(fields), _options(fields)
    except BadLine as error:
        return Prompt(name, wrong=f"line {number}: {error}")
    max_tokens = options.pop("max_tokens", None)
    return Prompt(name, messages, GenerateOptions(**options), max_tokens)  # type: ignore[typeddict-item]


def _messages(fields: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    if ("prompt" in fields) == ("messages" in fields):
        raise BadLine("give either a prompt or messages")
    if "prompt" in fields:
        if not isinstance(fields["prompt"], str):
            raise BadLine("the prompt is no text")
        return (("user", fields["prompt"]),)
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise BadLine("messages is no list of messages")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise BadLine('a message is {"role": "user", "content": "..."}')
    return tuple((message["role"], message["content"]) for message in messages)


def _options(fields: dict[str, Any]) -> dict[str, Any]:
    known = {"id", "prompt", "messages", *_OPTIONS}
    if unknown := sorted(set(fields) - known):
        raise BadLine(f"unknown: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    options = {name: fields[name] for name in _OPTIONS if name in fields}
    for name, value in options.items():
        fits = isinstance(value, _OPTIONS[name]) and not isinstance(value, bool)
        if not fits or (isinstance(value, list) and not all(isinstance(each, str) for each in value)):
            raise BadLine(f"{name} cannot be {value!r}")
    return options


class Batch:
    """A run.  `system_prompt` is appended to one context, and every prompt to a fork of it: it is computed once.

    window         prompts at work at once
    max_tokens, options  of the prompts that have none of their own
    told           called after each line that is done
    patience_s     how long a line is tried again when the system says EAGAIN
    """

    def __init__(
        self,
        system: AsyncClient,
        output: BatchOutput,
        *,
        system_prompt: str = "",
        window: int = WINDOW,
        max_tokens: int = 256,
        options: GenerateOptions | None = None,
        told: Callable[[Summary], None] = lambda summary: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._system = system
        self._output = output
        self._system_prompt = system_prompt
        self._window = window
        self._max_tokens = max_tokens
        self._options: GenerateOptions = options or {}
        self._told = told
        self._patience_s = patience_s
        self._base: AsyncContext | None = None
        self._at_work = 0
        self.summary = Summary(0, 0, 0, 0, 0, 0, 0)

    async def run(self, prompts: Iterator[Prompt]) -> Summary:
        """Do what the output does not hold yet.

        A prompt that cannot be done has its error in its line.  Error: BatchStopped, ConnectionLost, Canceled when the system
        goes down, OSError when the output cannot be written; then, and when it is cancelled, it can be gone on with.
        """
        if self._system_prompt:
            base = await patiently(self._system.alloc_context)
            await patiently(lambda: base.append(messages=[("system", self._system_prompt)]))
            self._base = base
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._window):
                    group.create_task(self._work(prompts))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the others were cancelled, or failed of the same
        if self._base is not None:
            await self._base.release()
        return self.summary

    async def _work(self, prompts: Iterator[Prompt]) -> None:
        for prompt in prompts:  # one iterator for all workers: each prompt is taken once
            if prompt.id in self._output.ids:
                self.summary = self.summary._replace(lines=self.summary.lines + 1, skipped=self.summary.skipped + 1)
                continue
            self._at_work += 1
            try:
                line = await self._line(prompt)
            finally:
                self._at_work -= 1
            self._output.write({"id": prompt.id, **line})
            self._count(line)
            self._told(self.summary)

    def _count(self, line: dict[str, Any]) -> None:
        s, usage = self.summary, line.get("usage", dict.fromkeys(_USAGE, 0))
        self.summary = s._replace(
            lines=s.lines + 1,
            done=s.done + 1,
            errors=s.errors + ("error" in line),
            **{name: getattr(s, name) + usage[name] for name in _USAGE},
        )

    async def _line(self, prompt: Prompt) -> dict[str, Any]:
        if prompt.wrong:
            return {"error": {"message": prompt.wrong}}
        end = asyncio.get_running_loop().time() + self._patience_s
        tries = 0
        while True:
            try:
                context = await self._fork()
                async with context:
                    return await self._answer(context, prompt)
            except SyscallError as error:
                tries += 1
                delay = self._delay(error, tries)
                if delay is None or asyncio.get_running_loop().time() + delay > end:
                    return {"error": _described(error)}
            await asyncio.sleep(delay)

    def _delay(self, error: SyscallError, tries: int) -> float | None:
        """Seconds after which the line is worth another try; None when it is the line that is at fault.

        Error: Canceled when the system goes down, BatchStopped when this program's contexts are gone.
        """
        if isinstance(error, Canceled):
            raise error
        if isinstance(error, StaleHandle | BadHandle) or (error.call in _MAKES and not isinstance(error, _NOT_NOW)):
            raise BatchStopped(f"its contexts are gone ({error}); run it again to go on") from error
        # What others hold they give back: only alone is a lack of memory this prompt's own.
        if isinstance(error, TryAgain) or (isinstance(error, _NOT_NOW) and self._at_work > 1):
            return delay_before(error, tries)
        return None

    async def _fork(self) -> AsyncContext:
        return await self._system.alloc_context() if self._base is None else (await self._base.fork())[0]

    async def _answer(self, context: AsyncContext, prompt: Prompt) -> dict[str, Any]:
        await context.append(messages=prompt.messages)
        options: GenerateOptions = {**self._options, **(prompt.options or {})}
        max_tokens = self._max_tokens if prompt.max_tokens is None else prompt.max_tokens
        result = await context.generate(max_tokens, **options)
        if result.reason not in ("stop", "length"):
            raise BatchStopped(f"somebody ended its generations ({result.reason}); run it again to go on")
        usage = {name: getattr(result.usage, name) for name in _USAGE}
        return {"text": result.text, "reason": result.reason, "tokens": len(result.tokens) // 4, "usage": usage}


def _described(error: SyscallError) -> dict[str, Any]:
    name = error.code.name if error.code else str(error.errno)
    return {"errno": name, "call": error.call, "message": error.message, "detail": error.detail}
