"""What a tool is to an agent: a name, what the model is told of it, and something to run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple


class ToolError(Exception):
    """The tool cannot do that.  The message is for the model: what was wrong, and what would be right."""


class Tool(NamedTuple):
    """name: one word.  description: a sentence for the model.  parameters: what each argument is, by name.

    run           is given the arguments as keywords, all of them text; ToolError for what it cannot do
    required      the parameters that must be there
    time_limit_s  after which its work is cancelled
    eta_s         when it is expected to answer; None: not known, and the kernel goes by what it has learnt
    """

    name: str
    description: str
    parameters: Mapping[str, str]
    run: Callable[..., Awaitable[str]]
    required: tuple[str, ...] = ()
    time_limit_s: float = 30.0
    eta_s: float | None = None

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Run it with what a model wrote.  Error: ToolError, also for arguments that it does not have or lacks."""
        has = ", ".join(self.parameters) or "none"
        unknown = [name for name in arguments if name not in self.parameters]
        if unknown:
            raise ToolError(f"{self.name} has no argument {', '.join(map(repr, unknown))}; it has: {has}")
        missing = [name for name in self.required if name not in arguments]
        if missing:
            raise ToolError(f"{self.name} needs {', '.join(map(repr, missing))}; its arguments: {has}")
        return await self.run(
            **{name: value if isinstance(value, str) else str(value) for name, value in arguments.items()}
        )

    async def answer(self, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """What to tell the model, and whether that is an error.  Whatever the tool does wrong is told and raises nothing."""
        try:
            async with asyncio.timeout(self.time_limit_s):
                return await self.call(arguments), False
        except TimeoutError:
            return f"error: {self.name} did not answer within {self.time_limit_s:g} s and was stopped", True
        except ToolError as error:
            return f"error: {error}", True
        except Exception as error:  # a fault of the tool's own: the conversation must not end with it
            return f"error: {self.name} failed: {type(error).__name__}: {error}", True
