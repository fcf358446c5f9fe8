"""An agent: a model that may use tools, in one context of a process of its own.

While a tool works, the context is in the state `tool_wait` (`wait_tool`): the kernel knows what it waits for and for about how
long, and decides whether its KV stays in hbm, goes to a slower tier or is dropped meanwhile.  `resume` appends the answer.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from attnix.syscalls import AsyncClient, AsyncContext
from attnix.syscalls.client import GenerateOptions
from attnix.syscalls.exceptions import ConnectionLost, NotFound, StaleHandle, TooBig

from .patience import patiently
from .thoughts import THINK, spoken, thinks
from .tool_calls import CLOSE, OPEN, BadCall, ToolCall, described, goes_on, parse, response
from .tools import Tool

MAX_TURNS: Final = 8

Decide: TypeAlias = Callable[[AsyncContext], Awaitable[str]]
"""What the agent says next; when it returns, that is in the context.  A tool call ends before `</tool_call>`."""


class Step(NamedTuple):
    """One tool call.

    call       None: what was said could not be read as one
    result     what the model was given back
    failed     the tool, or the call, was at fault, or the deadline passed
    waited_ms  as the kernel measured it; 0 when the wait was over by then, or none was begun
    """

    said: str
    call: ToolCall | None
    result: str
    failed: bool
    waited_ms: int


class Outcome(NamedTuple):
    """How it ended.

    reason  answer | turns (too many tool calls) | window (no room for more)
    answer  the model's last words
    """

    reason: str
    answer: str
    steps: tuple[Step, ...]


def by_generating(max_tokens: int, options: GenerateOptions) -> Decide:
    """The model decides, in at most `max_tokens` each time."""

    async def decide(context: AsyncContext) -> str:
        stop = options.get("stop", ())
        stops = (CLOSE, *((stop,) if isinstance(stop, str) else stop))
        asked: GenerateOptions = {**options, "stop": stops}
        # What a template begins a thought with is said, though not by the model.
        left, said = max_tokens, THINK if await thinks(context) else ""
        while True:
            result = await patiently(partial(context.generate, left, **asked))
            left, said = left - result.usage.generated_tokens, said + result.text
            if result.stop != CLOSE or left <= 0 or not goes_on(said):
                return said
            said += CLOSE  # it stands in an argument or a thought, whose end is still to come
            await patiently(partial(context.append, CLOSE, more=True))

    return decide


async def run_agent(
    system: AsyncClient,
    question: str,
    tools: Sequence[Tool],
    *,
    instructions: str = "You are a helpful assistant.",
    decide: Decide | None = None,
    max_turns: int = MAX_TURNS,
    name: str = "agent",
    watch: Callable[[Step], None] = lambda step: None,
) -> Outcome:
    """Answer `question`, with at most `max_turns` tool calls.

    decide  says what comes next, `by_generating` unless given
    watch   is told of each step
    Whatever a tool does wrong is told to the model and ends nothing.  Error: the system's own, and those of `decide`.  In
    every case the process has ended and its context is released.
    """
    decide = decide or by_generating(512, {})
    process = await patiently(lambda: system.spawn(name))
    try:
        context = await patiently(process.alloc_context)
        told = f"{instructions}\n\n{described(tools)}" if tools else instructions
        messages = [("system", told), ("user", question)]
        await patiently(lambda: context.append(messages=messages))
        return await _turns(context, {tool.name: tool for tool in tools}, decide, max_turns, watch)
    finally:
        with suppress(ConnectionLost):  # then the kernel has ended it
            with suppress(NotFound):  # somebody else has
                await process.kill(signal.SIGKILL)
            await process.wait()


async def _turns(
    context: AsyncContext, tools: dict[str, Tool], decide: Decide, max_turns: int, watch: Callable[[Step], None]
) -> Outcome:
    steps: list[Step] = []
    while True:
        said = await decide(context)
        if OPEN not in spoken(said):
            return Outcome("answer", said.strip(), tuple(steps))
        if len(steps) == max_turns:
            return Outcome("turns", said.strip(), tuple(steps))
        try:
            steps.append(await _step(context, tools, said))
        except TooBig:
            return Outcome("window", said.strip(), tuple(steps))
        watch(steps[-1])


async def _step(context: AsyncContext, tools: dict[str, Tool], said: str) -> Step:
    """Do what was asked for, and append the answer.  Error: TooBig when it has no room."""
    if CLOSE not in said[said.rfind("}") + 1 :]:
        await patiently(lambda: context.append(CLOSE, more=True))  # the stop string is not in the context
    try:
        call = parse(said)
        assert call is not None
        tool = tools.get(call.name)
        if tool is None:
            raise BadCall(f"there is no tool {call.name!r}; there are: {', '.join(tools) or 'none'}")
    except BadCall as error:
        result = f"error: {error}"
        await patiently(lambda: context.append(messages=[("user", response(result))], more=True))
        return Step(said, None, result, True, 0)
    wait = await patiently(lambda: context.wait_tool(tool.name, eta=tool.eta_s, deadline=tool.time_limit_s))
    result, failed = await tool.answer(call.arguments)
    answer = [("user", response(result))]
    try:
        resumed = await patiently(lambda: context.resume(messages=answer, wait=wait.wait, more=True))
    except StaleHandle:  # the deadline came first: the context is ready again, and still to be told
        await patiently(lambda: context.append(messages=answer, more=True))
        return Step(said, call, result, True, 0)
    return Step(said, call, result, failed, resumed.waited_ms)
