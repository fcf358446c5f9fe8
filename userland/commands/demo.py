"""`attnix demo`: the system in a minute, on a daemon of its own."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from attnix.syscalls import aconnect, connect

from ..demo.page import Page
from ..demo.story import AGENTS
from ..demo.work import Work, work_shared, work_stateless
from ..launch import launch, stop
from ..models import CATALOG, find_model
from ..output import CommandError, JsonOption, console, plain, print_json
from ..units import count, size
from .pull import pull_with_bar

_DEADLINE_S = 300.0


def demo(
    model: Annotated[
        str, typer.Option(help="A pulled model or a path; the default one is pulled when missing.")
    ] = "smollm2",
    numerics: Annotated[
        str, typer.Option(help="invariant (the runs must agree token for token) or fast.")
    ] = "invariant",
    hbm: Annotated[str, typer.Option(metavar="SIZE", help="Memory for frames.")] = "128MiB",
    as_json: JsonOption = False,
) -> None:
    """Eight agents fork one system prompt and generate at once, the accel driver is killed in the middle, and all go on.

    Then the same work again, undisturbed, and stateless: each agent with the whole prompt on a daemon that shares
    nothing.  Everything is really run, each time on a fresh private daemon.
    """
    if model in CATALOG and find_model(model) is None:
        pull_with_bar(CATALOG[model], quiet=as_json)
    page = Page(console(stderr=as_json))
    flags = ["--model", model, "--numerics", numerics, "--hbm", hbm]

    page.step("boot")
    with private_daemon([*flags]) as socket:
        tell_system(page, socket)
        page.step(f"{len(AGENTS)} agents, one system prompt")
        killed = asyncio.run(shared(page, socket, kill_driver=True))
    page.step("the same work, undisturbed and then stateless")
    with private_daemon([*flags]) as socket:
        undisturbed = asyncio.run(shared(page, socket, kill_driver=False))
    with private_daemon([*flags, "--sharing", "none"]) as socket:
        stateless = asyncio.run(alone(page, socket))
    page.comparison(undisturbed, stateless)
    different = [
        agent.name
        for agent, *said in zip(AGENTS, killed.answers, undisturbed.answers, stateless.answers, strict=True)
        if len({answer.tokens for answer in said}) > 1
    ]
    page.verdict(different, numerics)
    if as_json:
        print_json(summary(killed, undisturbed, stateless, different))
    if different and numerics == "invariant":
        raise CommandError("the three runs differ")


async def shared(page: Page, socket: str, kill_driver: bool) -> Work:
    """The agents as forks; with the kill also what they said, and who holds what while they still live."""
    async with aconnect(socket, name="demo") as system:
        if not kill_driver:
            return await work_shared(system, AGENTS, False, _unwatched)
        with page.streams(AGENTS) as watch:
            work = await work_shared(system, AGENTS, True, watch)
        page.line(f"{count(work.shared_tokens)} tokens were read once, and forked {len(AGENTS)} times")
        page.killed(work.killed)
        page.step("what they said")
        page.answers(AGENTS, work)
        page.inspect(socket)
        return work


async def alone(page: Page, socket: str) -> Work:
    """The agents without anything in common."""
    async with aconnect(socket, name="demo") as system:
        return await work_stateless(system, AGENTS, _unwatched)


def _unwatched(index: int, text: str) -> None:
    pass


def tell_system(page: Page, socket: str) -> None:
    """What was booted."""
    with connect(socket, name="attnix demo") as system:
        seen, tier = system.uname(), system.tiers().tiers[0]
    page.line(f"{seen.model}, {seen.numerics} numerics; accel driver: pid {tier.driver_pid}")
    frames = f"{count(tier.capacity_frames)} frames of {size(tier.frame_bytes)}"
    page.line(f"{tier.device}: {frames}, {seen.block_tokens} tokens each")


@contextmanager
def private_daemon(flags: list[str]) -> Iterator[str]:
    """A daemon that nobody else knows, and its socket.  Gone with its files afterwards."""
    with tempfile.TemporaryDirectory(prefix="attnix-demo-") as folder:
        run = os.path.join(folder, "run")
        launched = launch(
            [*flags, "--state-dir", os.path.join(folder, "state")],
            os.path.join(run, "attnix.sock"), os.path.join(folder, "daemon.log"), _DEADLINE_S,
        )  # fmt: skip
        try:
            yield launched.socket
        finally:
            stop(launched.process)


def summary(killed: Work, undisturbed: Work, stateless: Work, different: list[str]) -> dict[str, Any]:
    """The demo for `--json`."""
    answers = [
        {
            "agent": agent.name,
            "question": agent.message,
            "text": answer.text,
            "reason": answer.reason,
            "tokens": answer.tokens,
        }
        for agent, answer in zip(AGENTS, killed.answers, strict=True)
    ]
    return {
        "system_prompt_tokens": killed.shared_tokens,
        "answers": answers,
        "killed": killed.killed,
        "shared": _cost(undisturbed),
        "stateless": _cost(stateless),
        "different": different,
    }


def _cost(work: Work) -> dict[str, Any]:
    names = ("seconds", "computed_tokens", "mapped_frames")
    return {name: plain(getattr(work, name)) for name in names}
