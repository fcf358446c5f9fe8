"""The demo's work, done two ways on a daemon: agents forked off one system prompt, or each with the whole of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from attnix.syscalls import AsyncClient, AsyncContext, AsyncStream
from attnix.syscalls.types import GenerateResult

from .story import KILL_AFTER_TOKENS, MAX_TOKENS, SYSTEM_PROMPT, Agent

Watch: TypeAlias = Callable[[int, str], None]  # (agent's index, new text)


class Killed(NamedTuple):
    """The accel driver's death as the clients saw it."""

    driver_pid: int
    next_pid: int
    streams: int  # in flight at that moment
    tokens_so_far: int
    silence_s: float  # until the next token came, on any stream


class Work(NamedTuple):
    """What was done, and what it took.

    seconds          from the first append to the last token
    computed_tokens  passed through the model, prompts and generated
    mapped_frames    with all contexts still there
    """

    answers: tuple[GenerateResult, ...]
    context_tokens: tuple[int, ...]
    seconds: float
    computed_tokens: int
    mapped_frames: int
    shared_tokens: int
    killed: Killed | None


async def work_shared(system: AsyncClient, agents: Sequence[Agent], kill_driver: bool, watch: Watch) -> Work:
    """One context reads the system prompt; every agent is a child process with a fork of it."""
    started = time.perf_counter()
    base = await system.alloc_context()
    read = await base.append(messages=[("system", SYSTEM_PROMPT)])
    contexts = []
    for agent in agents:
        child = await system.spawn(agent.name, fork_of=base)
        assert child.context is not None
        await child.context.append(messages=[("user", agent.message)])
        contexts.append(child.context)
    return await _generate(system, contexts, started, read.tokens, kill_driver, watch)


async def work_stateless(system: AsyncClient, agents: Sequence[Agent], watch: Watch) -> Work:
    """Every agent sends the system prompt and its question, as to a server that keeps nothing between requests."""
    started = time.perf_counter()
    contexts = []
    for agent in agents:
        child = await system.spawn(agent.name)
        context = await child.alloc_context()
        await context.append(messages=[("system", SYSTEM_PROMPT), ("user", agent.message)])
        contexts.append(context)
    return await _generate(system, contexts, started, 0, False, watch)


async def _generate(
    system: AsyncClient,
    contexts: Sequence[AsyncContext],
    started: float,
    shared_tokens: int,
    kill_driver: bool,
    watch: Watch,
) -> Work:
    driver_pid = (await system.tiers()).tiers[0].driver_pid if kill_driver else 0
    streams = [context.generate(MAX_TOKENS) for context in contexts]
    killer = _Killer(streams, driver_pid)
    answers = await asyncio.gather(*(_read(stream, index, killer, watch) for index, stream in enumerate(streams)))
    seconds = time.perf_counter() - started
    tier = (await system.tiers()).tiers[0]
    return Work(
        answers=tuple(answers),
        context_tokens=tuple([(await context.stat()).tokens for context in contexts]),
        seconds=seconds,
        computed_tokens=(await system.vmstat()).counters["computed_tokens"],
        mapped_frames=tier.mapped_frames,
        shared_tokens=shared_tokens,
        killed=killer.report(tier.driver_pid),
    )


async def _read(stream: AsyncStream, index: int, killer: _Killer, watch: Watch) -> GenerateResult:
    async for note in stream:
        killer.saw(index, len(note.tokens) // 4)
        watch(index, note.text)
    killer.ended(index)
    return await stream.result()


class _Killer:
    """Kills the driver once, when every stream has begun, and times the silence that follows."""

    def __init__(self, streams: Sequence[AsyncStream], driver_pid: int) -> None:
        self._pid: Final = driver_pid
        self._counts = [0] * len(streams)
        self._live = set(range(len(streams)))
        self._at: float | None = None
        self._streams = 0
        self._tokens = 0
        self._silence_s = 0.0

    def saw(self, index: int, tokens: int) -> None:
        self._counts[index] += tokens
        if self._at is not None and not self._silence_s:
            self._silence_s = time.perf_counter() - self._at
        if self._pid and self._at is None and min(self._counts) >= KILL_AFTER_TOKENS:
            os.kill(self._pid, signal.SIGKILL)
            self._at = time.perf_counter()
            self._streams, self._tokens = len(self._live), sum(self._counts)

    def ended(self, index: int) -> None:
        self._live.discard(index)

    def report(self, next_pid: int) -> Killed | None:
        if self._at is None:
            return None
        return Killed(self._pid, next_pid, self._streams, self._tokens, self._silence_s)
