"""One line of a batch: its prompt answered in a fork of the system prompt, and tried again while it is not its own fault."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from attnix.syscalls import AsyncClient, AsyncContext, SyscallError
from attnix.syscalls.client import GenerateOptions
from attnix.syscalls.exceptions import BadHandle, Canceled, NoMemory, QuotaExceeded, StaleHandle, TryAgain

from .patience import delay_before
from .prompts import Prompt

USAGE: Final = ("computed_tokens", "hit_tokens", "generated_tokens")
_NOT_NOW: Final = (TryAgain, NoMemory, QuotaExceeded)
_MAKES: Final = ("fork", "alloc_context")


class BatchStopped(Exception):
    """The run ended before its input did, and not because of a line; it can be gone on with."""


class Answers:
    """Gives lines their answers, any number of them at once.

    base                 context to fork for each; None: each has an empty one
    lead                 messages before each prompt
    max_tokens, options  of the prompts that have none of their own
    patience_s           how long a line is tried again when the system says EAGAIN
    """

    def __init__(
        self,
        system: AsyncClient,
        base: AsyncContext | None,
        lead: Sequence[tuple[str, str]],
        max_tokens: int,
        options: GenerateOptions,
        patience_s: float,
    ) -> None:
        self._system = system
        self._base = base
        self._lead = lead
        self._max_tokens = max_tokens
        self._options = options
        self._patience_s = patience_s
        self._at_work = 0

    async def of(self, prompt: Prompt) -> dict[str, Any]:
        """What the output says of it, be it its error.

        Error: Canceled when the system goes down, BatchStopped when this program's contexts are gone, ConnectionLost.
        """
        if prompt.wrong:
            return {"error": {"message": prompt.wrong}}
        end = asyncio.get_running_loop().time() + self._patience_s
        tries = 0
        self._at_work += 1
        try:
            while True:
                try:
                    async with await self._fork() as context:
                        return await self._answer(context, prompt)
                except SyscallError as error:
                    tries += 1
                    delay = self._delay(error, tries)
                    if delay is None or asyncio.get_running_loop().time() + delay > end:
                        return {"error": _described(error)}
                await asyncio.sleep(delay)
        finally:
            self._at_work -= 1

    def _delay(self, error: SyscallError, tries: int) -> float | None:
        """Seconds after which the line is worth another try; None when it is the line that is at fault."""
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
        await context.append(messages=[*self._lead, *prompt.messages], more=True)
        options: GenerateOptions = {**self._options, **(prompt.options or {})}
        max_tokens = self._max_tokens if prompt.max_tokens is None else prompt.max_tokens
        result = await context.generate(max_tokens, **options)
        if result.reason not in ("stop", "length"):
            raise BatchStopped(f"somebody ended its generations ({result.reason}); run it again to go on")
        usage = {name: getattr(result.usage, name) for name in USAGE}
        return {"text": result.text, "reason": result.reason, "tokens": len(result.tokens) // 4, "usage": usage}


def _described(error: SyscallError) -> dict[str, Any]:
    name = error.code.name if error.code else str(error.errno)
    return {"errno": name, "call": error.call, "message": error.message, "detail": error.detail}
