"""200 agents that call ten tools each, on an hbm that holds eight of them: the real model behind the real socket.

What is right comes from a daemon whose hbm holds all of them and where nobody waits.  Which tools are called and how long
they take is drawn from a public agent trace, ten times as fast (at most three seconds).  Traces are not in this repository: where
`$ATTNIX_TRACES` (../shared/traces) has none, from a log-normal distribution like that of its Bash calls (median 1.7 s, mean
5.2 s).
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from attnix.syscalls.aclient import AsyncClient, AsyncContext, aconnect
from attnix.syscalls.exceptions import StaleHandle
from attnix.userland.bench.agents_workload import read_durations

if TYPE_CHECKING:
    from tests.e2e.conftest import Daemon, Start

pytestmark = [pytest.mark.e2e, pytest.mark.model]

KV_FRAME_BYTES, STORED_BYTES = 368_640, 372_736  # SmolLM2's in bfloat16, in hbm and below
AGENTS, CALLS = 200, 10
SYSTEM_TOKENS, TASK_TOKENS, ANSWER_TOKENS, SAID_TOKENS = 32, 16, 6, 3
LONGEST = SYSTEM_TOKENS + TASK_TOKENS + (CALLS + 1) * (ANSWER_TOKENS + SAID_TOKENS)
BLOCKS = -(-LONGEST // 16)
TOOLS = ("search", "shell", "read")
TRACE = Path(os.environ.get("ATTNIX_TRACES", "../shared/traces"), "agentcgroup_tools.jsonl.gz")


def drawn(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(count)]


class Ended(NamedTuple):
    said: list[bytes]
    computed: int
    recomputed: int
    overtaken: list[int]  # turns of others that ended between an answer of its tools and the end of its own turn


class Fleet:
    """All agents of one daemon."""

    def __init__(self, client: AsyncClient, waits: bool) -> None:
        self._client = client
        self._waits = waits
        self._calls = read_durations(str(TRACE)) if TRACE.exists() else []
        self._turns = 0

    async def run(self, agents: int) -> list[Ended]:
        head = await self._client.alloc_context()
        await head.append(tokens=drawn("system", SYSTEM_TOKENS), more=True)
        await head.forward(1)
        contexts = await head.fork(agents)
        return await asyncio.gather(*(self._agent(n, context) for n, context in enumerate(contexts)))

    async def _agent(self, number: int, context: AsyncContext) -> Ended:
        draw = random.Random(f"tools of {number}")
        said, overtaken = [], []
        await context.append(tokens=drawn(f"task {number}", TASK_TOKENS), more=True)
        for call in range(CALLS + 1):
            before = self._turns
            result = await context.generate(SAID_TOKENS, ignore_eos=True, temperature=float(number % 2), seed=7)
            overtaken.append(self._turns - before)
            self._turns += 1
            said.append(result.tokens)
            if call < CALLS:
                await self._tool(context, draw, drawn(f"answer {number} {call}", ANSWER_TOKENS))
        usage = (await context.stat()).usage
        await context.release()
        return Ended(said, usage.computed_tokens, usage.recomputed_tokens, overtaken)

    async def _tool(self, context: AsyncContext, draw: random.Random, answer: list[int]) -> None:
        """A third of the agents says when its tool will be back, a third is wrong by half, a third does not know."""
        tool, seconds = draw.choice(self._calls or [(draw.choice(TOOLS), draw.lognormvariate(0.53, 1.5))])
        takes_s = min(3.0, seconds / 10)
        eta = (takes_s, takes_s * draw.uniform(0.5, 1.5), None)[draw.randrange(3)]
        if not self._waits:
            await context.append(tokens=answer, more=True)
            return
        wait = await context.wait_tool(tool, eta)
        await asyncio.sleep(takes_s)
        await context.resume(tokens=answer, wait=wait.wait, more=True)
        with pytest.raises(StaleHandle):
            await context.resume(tokens=answer, wait=wait.wait)


def fleet(daemon: Daemon, waits: bool, agents: int = AGENTS) -> tuple[list[Ended], dict[str, int]]:
    async def go() -> tuple[list[Ended], dict[str, int]]:
        async with aconnect(daemon.socket, name="agents") as client:
            ended = await Fleet(client, waits).run(agents)
            assert (await client.fsck()).problems == ()
            return ended, (await client.vmstat()).counters

    return asyncio.run(go())


@pytest.mark.slow
def test_200_agents_of_ten_tool_calls_on_an_hbm_that_holds_8(start: Start) -> None:
    daemon = start("--hbm", str(AGENTS * (BLOCKS + 1) * KV_FRAME_BYTES), "--max-contexts", "256")
    right, counters = fleet(daemon, waits=False)
    daemon.end()
    assert counters.get("preemptions", 0) == 0, "it was meant to hold everything"
    assert len({tokens for ended in right for tokens in ended.said}) > AGENTS * CALLS // 2

    dram_bytes = AGENTS * (BLOCKS + 1) * STORED_BYTES
    daemon = start("--hbm", str(8 * BLOCKS * KV_FRAME_BYTES), "--dram", str(dram_bytes), "--max-contexts", "256")
    ended, counters = fleet(daemon, waits=True)
    daemon.end()
    assert [e.said for e in ended] == [e.said for e in right]
    assert counters["tool_waits"] == AGENTS * CALLS

    # A server without state reads the whole context again at every turn: all but what is new in it is recomputed.
    lengths = [SYSTEM_TOKENS + TASK_TOKENS + call * (ANSWER_TOKENS + SAID_TOKENS) for call in range(1, CALLS + 1)]
    stateless = AGENTS * sum(length - ANSWER_TOKENS for length in lengths)
    recomputed = sum(e.recomputed for e in ended)
    computed = sum(e.computed for e in ended)
    new = AGENTS * (TASK_TOKENS + CALLS * ANSWER_TOKENS + (CALLS + 1) * SAID_TOKENS)
    print(f"waits from {TRACE if TRACE.exists() else 'a distribution'}; recomputed {recomputed} tokens,")
    print(f"computed {computed} for {new} new ones; a stateless server would recompute {stateless}")
    assert recomputed <= stateless // 50
    assert computed <= new + stateless // 50

    # Fair: no turn of any agent was pending while more than three times as many turns of others ended as on average.
    seen = [turns for e in ended for turns in e.overtaken]
    mean = sum(seen) / len(seen)
    print(f"turns of others during one: mean {mean:.0f}, most {max(seen)}")
    assert max(seen) <= 3 * mean
