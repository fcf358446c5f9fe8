"""The work that pictures are taken of: agents forked off one prompt, some of them waiting for tools, and readers of long texts.

python -m tests.dashboard.work SOCKET        says `working` when all of it is under way, and goes on until it is ended
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from attnix.syscalls import AsyncClient, AsyncContext, aconnect

SYSTEM: Final = "You are a careful assistant who plans a journey with a family and answers in short sentences. " * 12
AGENTS: Final = {
    "trains": "Which trains go to Vienna?", "hotels": "Which hotels take dogs?", "museums": "Which museums are open on Mondays?",
    "food": "Where can children eat well?", "walks": "Which walks are short?", "budget": "What does a week cost?",
}  # fmt: skip
WAITING: Final = {"weather": ("forecast", 45.0), "tickets": ("booking", 20.0)}
TEXT: Final = "The river rose in spring, and the people of the valley carried their books to the upper rooms, as they had always done. "
TURN: Final = 24  # tokens of an answer


async def agent(base: AsyncContext, system: AsyncClient, name: str, question: str) -> None:
    """A child process that answers, asks itself on, and begins anew when its context is long."""
    while True:
        child = await system.spawn(name, fork_of=base)
        assert child.context is not None
        for turn in range(6):
            await child.context.append(messages=[("user", question if not turn else f"And what else? ({turn})")])
            await child.context.generate(TURN).result()
            await asyncio.sleep(0.3)
        await child.exit()
        await system.wait(child.pid)


async def waiter(base: AsyncContext, system: AsyncClient, name: str, tool: str, eta_s: float) -> None:
    child = await system.spawn(name, fork_of=base)
    assert child.context is not None
    await child.context.append(messages=[("user", f"Ask the {tool}.")])
    await child.context.generate(TURN).result()
    while True:
        wait = await child.context.wait_tool(tool, eta=eta_s, deadline=10 * eta_s)
        await asyncio.sleep(eta_s)
        await child.context.resume(text=" It is well. ", wait=wait.wait)


async def reader(system: AsyncClient, number: int) -> None:
    """Reads long texts, one after another: what it has read stays behind as cache."""
    process = await system.spawn(f"reader-{number}")
    at = 0
    while True:
        context = await process.alloc_context()
        await context.append(text=f"Chapter {number}.{at}. " + TEXT * 14)
        await context.generate(TURN).result()
        await asyncio.sleep(2.0)
        await context.release()
        at += 1


async def work(socket: str) -> None:
    async with aconnect(socket, name="planner") as system:
        base = await system.alloc_context()
        await base.append(messages=[("system", SYSTEM)])
        await base.generate(1).result()
        jobs = [agent(base, system, name, question) for name, question in AGENTS.items()]
        jobs += [waiter(base, system, name, *wait) for name, wait in WAITING.items()]
        jobs += [reader(system, number) for number in (1, 2, 3)]
        tasks = [asyncio.ensure_future(job) for job in jobs]
        await asyncio.sleep(3.0)
        print("working", flush=True)
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]))
