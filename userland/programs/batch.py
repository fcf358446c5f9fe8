"""Thousands of prompts, from one file of JSON lines (prompts.py) into another (batch_output.py).

A line of the output is {"id": "a7", "text": ..., "reason": ..., "tokens": ..., "usage": {...}} or {"id": "a7", "error": {...}},
in the order in which they are done, each written in one go.  A run that was interrupted, or whose machine lost power, is
gone on with by running it again: what is in the output is skipped, and a last line that is torn is cut off and done again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from attnix.syscalls import AsyncClient
from attnix.syscalls.client import GenerateOptions
from attnix.syscalls.exceptions import InvalidArgument

from .batch_line import USAGE, Answers
from .batch_output import BatchOutput
from .patience import patiently
from .prompts import Prompt

WINDOW: Final = 32  # prompts at work at once: a context each
PATIENCE_S: Final = 600.0


class Summary(NamedTuple):
    """A run: lines of the input, and what became of them now."""

    lines: int
    skipped: int  # in the output already
    done: int
    errors: int  # of those done
    generated_tokens: int
    computed_tokens: int  # passed through the model
    hit_tokens: int  # found instead of computed


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
        self.summary = Summary(0, 0, 0, 0, 0, 0, 0)

    async def run(self, prompts: Iterator[Prompt]) -> Summary:
        """Do what the output does not hold yet.

        A prompt that cannot be done has its error in its line.  Error: BatchStopped, ConnectionLost, Canceled when the system
        goes down, OSError when the output cannot be written; then, and when it is cancelled, it can be gone on with.
        """
        base, lead = None, [("system", self._system_prompt)] if self._system_prompt else []
        if lead:
            base = context = await patiently(self._system.alloc_context)
            try:
                await patiently(lambda: context.append(messages=lead))
                lead = []
            except InvalidArgument:  # some templates show a system prompt with the first question only
                await context.release()
                base = None
        answers = Answers(self._system, base, lead, self._max_tokens, self._options, self._patience_s)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._window):
                    group.create_task(self._work(prompts, answers))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the others were cancelled, or failed of the same
        if base is not None:
            await base.release()
        return self.summary

    async def _work(self, prompts: Iterator[Prompt], answers: Answers) -> None:
        for prompt in prompts:  # one iterator for all workers: each prompt is taken once
            if prompt.id in self._output.ids:
                self.summary = self.summary._replace(lines=self.summary.lines + 1, skipped=self.summary.skipped + 1)
                continue
            line = await answers.of(prompt)
            self._output.write({"id": prompt.id, **line})
            self._count(line)
            self._told(self.summary)

    def _count(self, line: dict[str, Any]) -> None:
        s, usage = self.summary, line.get("usage", dict.fromkeys(USAGE, 0))
        self.summary = s._replace(
            lines=s.lines + 1,
            done=s.done + 1,
            errors=s.errors + ("error" in line),
            **{name: getattr(s, name) + usage[name] for name in USAGE},
        )
