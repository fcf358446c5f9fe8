"""`attnix boot`, the demo's work on it, and the dashboard beside it: the page shows what `attnix ps --json` gives."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from selenium.webdriver import Chrome

from attnix.syscalls import AsyncClient, aconnect
from attnix.userland.demo.story import AGENTS as ALL
from attnix.userland.demo.work import work_shared

from ..gateway.rig import Process, environment
from .browser import each, text, until

pytestmark = [pytest.mark.e2e, pytest.mark.model]

AGENTS: Final = ALL[:5]
CLI: Final = [sys.executable, "-m", "attnix.userland.cli"]
TIERS: Final = ("--hbm", "64MiB", "--dram", "32MiB", "--nvme", "64MiB")
QUESTION: Final = "Tell me about every room of the museum, one after another."
DEADLINE_S: Final = 300.0  # of the model's work, on a machine that is busy
COLUMNS: Final = ("pid", "name", "state", "contexts", "tokens")
# The table as it stands, by pid: a row's words, its state, and the marks of its timeline from the left.
TABLE: Final = """return [...document.querySelectorAll("#process-rows tr")].map((row) => {
  const cell = (i) => row.cells[i].textContent, number = (i) => Number(cell(i).replaceAll(",", ""));
  const marks = [...row.cells[6].querySelectorAll("rect")].map((mark) =>
    [mark.getAttribute("class"), ...["x", "width", "height"].map((name) => Number(mark.getAttribute(name))), getComputedStyle(mark).fill]);
  return {pid: number(0), name: row.cells[1].lastChild.textContent, words: cell(2), state: row.querySelector(".state").classList[1],
          contexts: number(3), tokens: number(4), kv: cell(5), marks};
})"""
WIDTH: Final = 240.0  # of a timeline, in the units of its marks


class Mark(NamedTuple):
    """What a process was doing for a while, as its timeline draws it."""

    state: str
    x: float
    width: float
    height: float
    colour: str

    @property
    def end(self) -> float:
        return self.x + self.width


class Work:
    """The demo's work.  Then `visitor` talks until it was seen doing so, is asked the same once more, finds its KV again that was sent
    to nvme, and waits for a tool until the end."""

    def __init__(self, socket: str) -> None:
        self.seen, self._leave = threading.Event(), threading.Event()
        self._waits = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._do(socket)))
        self._thread.start()

    async def _do(self, socket: str) -> None:
        async with aconnect(socket, name="demo") as system:
            await work_shared(system, AGENTS, False, lambda index, text: None)
            await self._visit(system)
            self._waits.set()
            await asyncio.to_thread(self._leave.wait)

    async def _visit(self, system: AsyncClient) -> None:
        visitor = await system.spawn("visitor")
        context, again = await visitor.alloc_context(), await visitor.alloc_context()
        await context.append(messages=[("user", QUESTION)])
        await context.generate(48, ignore_eos=True).result()
        while not self.seen.is_set():
            await context.generate(16, ignore_eos=True).result()
        await again.append(messages=[("user", QUESTION)])
        await again.generate(1).result()
        await again.release()
        await system.sys.demote(context.handle, "nvme")
        await context.append(text=" And the garden?")
        await context.generate(4).result()
        await system.sys.demote(context.handle, "dram")
        await context.wait_tool("weather", eta=5000.0, deadline=9000.0)

    def wait(self) -> None:
        """Until only the tool is waited for."""
        assert self._waits.wait(DEADLINE_S)

    def end(self) -> None:
        self.seen.set()
        self._leave.set()
        self._thread.join()


class Booted(NamedTuple):
    socket: str
    url: str

    def said(self, *words: str) -> Any:
        """`attnix ... --json`, as its own process."""
        done = subprocess.run(
            [*CLI, *words, "--json", "--socket", self.socket], capture_output=True, text=True, env=environment()
        )
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def booted(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    folder = tmp_path_factory.mktemp("booted")
    socket = str(folder / "run" / "a.sock")
    command = ["boot", "--model", str(smollm2), "--socket", socket, "--state-dir", str(folder / "state"), *TIERS]
    daemon = Process([*CLI, *command, "--threads", os.environ.get("OMP_NUM_THREADS", "0")])
    serve = Process([*CLI, "serve", "--port", "0", "--socket", socket])
    try:
        assert "ready on" in daemon.said
        yield Booted(socket, serve.said.rpartition(" ")[2])
    finally:
        serve.stop()
        status = daemon.stop()
    assert status == 0


@pytest.fixture(scope="module")
def page(chrome: Chrome, booted: Booted) -> Iterator[Chrome]:
    """It has watched the work from before its beginning until only a tool is waited for."""
    chrome.get(booted.url + "/")
    until(chrome, lambda: text(chrome, "#live-text") == "live")
    work = Work(booted.socket)
    try:
        until(chrome, lambda: table(chrome).get("visitor", {}).get("state") == "running", DEADLINE_S)
        work.seen.set()
        work.wait()
        until(chrome, lambda: table(chrome)["visitor"]["state"] == "tool_wait")
        yield chrome
    finally:
        work.end()


@pytest.fixture(scope="module")
def processes(page: Chrome, booted: Booted) -> list[dict[str, Any]]:
    """What `attnix ps --json` gives; nothing changes any more.  It was a process itself, which the page may have seen."""
    rows: list[dict[str, Any]] = booted.said("ps")["processes"]
    until(page, lambda: set(table(page)) == {row["name"] for row in rows})
    return rows


def table(chrome: Chrome) -> dict[str, Any]:
    """The page's rows by name: each process has a name of its own here."""
    return {row["name"]: row for row in chrome.execute_script(TABLE)}


def test_its_processes_are_those_of_attnix_ps(page: Chrome, booted: Booted, processes: list[dict[str, Any]]) -> None:
    assert {agent.name for agent in AGENTS} | {"demo", "gateway", "visitor"} == {row["name"] for row in processes}
    expected = {
        row["name"]: [row["pid"], row["name"], row["state"], len(row["contexts"]), row["tokens"]] for row in processes
    }
    shown = table(page)
    assert {name: [row[column] for column in COLUMNS] for name, row in shown.items()} == expected
    assert {row["state"] for row in shown.values()} == {"new", "ready", "tool_wait"}
    words = shown["visitor"]["words"].split()
    assert words[0] == "weather" and words[2] == "s" and 0 < int(words[1]) <= 5000
    people = subprocess.run([*CLI, "ps", "--socket", booted.socket], capture_output=True, text=True, env=environment())
    for line in people.stdout.splitlines()[1:]:
        assert shown[line.split()[2]]["kv"] in line


def test_its_timelines_say_what_each_was_doing(page: Chrome, processes: list[dict[str, Any]]) -> None:
    """Marks lie side by side up to now, the last is the present state, and the three that the docs name differ in height and colour."""
    states = {row["name"]: row["state"] for row in processes}
    shown = table(page)
    marks = {name: [Mark(*mark) for mark in shown[name]["marks"]] for name in states}
    for name, found in marks.items():
        assert found[-1].state == states[name], name
        assert all(mark.x >= 0 and mark.width > 0 for mark in found), name
        assert all(a.state != b.state for a, b in itertools.pairwise(found)), (
            f"{name}: one mark for as long as it lasted"
        )
        assert all(abs(a.end - b.x) < 1.3 for a, b in itertools.pairwise(found)), f"{name}: no gap"
        assert abs(found[-1].end - WIDTH) < 1.3, f"{name}: up to now"
    visitor = marks["visitor"]
    assert [mark.state for mark in visitor if mark.state != "ready"][-2:] == ["running", "tool_wait"]
    height = {mark.state: mark.height for found in marks.values() for mark in found}
    assert 14 == height["running"] > height["ready"] > height["tool_wait"] > 0
    assert {"ready"} == {marks[agent.name][-1].state for agent in AGENTS}
    colours = {mark.state: mark.colour for found in marks.values() for mark in found}
    assert len({colours[state] for state in ("running", "ready", "tool_wait")}) == 3


def test_its_tiers_and_hits_are_those_of_attnix_top(page: Chrome, booted: Booted) -> None:
    top = booted.said("top", "-i", "0.1")
    shown = {said.split()[0]: said for said in each(page, ".tier p", "innerText")}
    assert list(shown) == [tier["device"] for tier in top["tiers"]] == ["hbm0", "dram0", "nvme0"]
    for tier in top["tiers"]:
        capacity, free, cache = (tier[f"{name}_frames"] for name in ("capacity", "free", "reclaimable"))
        mapped = capacity - free - cache
        held = f"{mapped:,} mapped, {cache:,} cache" if tier["tier"] == "hbm" else f"{mapped + cache:,} copies"
        assert f"{held}, {free:,} free of {capacity:,} frames" in shown[tier["device"]]
        if tier["tier"] == "hbm":
            assert text(page, "#value-used") == f"{100 * mapped / capacity:.0f}%"
    counters = booted.said("vmstat")["counters"]
    found = {
        "hbm": counters["lookup_hits"],
        "dram": counters.get("found_blocks_dram", 0),
        "nvme": counters["found_blocks_nvme"],
    }
    looked = sum(found.values()) + counters["lookup_misses"]
    assert (
        found["hbm"] > 0 and found["nvme"] > 0 and top["hit_rates"] == {tier: n / looked for tier, n in found.items()}
    )
    with urllib.request.urlopen(f"{booted.url}/dashboard/state") as answer:
        samples = json.load(answer)["samples"]
    hbm, below, computed = (samples[-1][f"{n}_blocks"] - samples[0][f"{n}_blocks"] for n in ("hit", "fault", "missed"))
    shares = [100 * n / (hbm + below + computed) for n in (hbm + below, hbm, below)]
    words = f"{text(page, '#value-hits')} {text(page, '#more-hits')}".split()
    assert [float(word.rstrip("%")) for word in words if "%" in word] == pytest.approx(shares, abs=0.51)


def test_its_tree_has_every_fork(page: Chrome, processes: list[dict[str, Any]]) -> None:
    rows = [context for row in processes for context in row["contexts"]]
    forks = {context["cid"] for context in rows if context["parent"]}
    assert len(forks) == len(AGENTS)
    assert {int(cid) for cid in each(page, "#tree > ul > li > ul > li > div", "dataset.cid")} == forks
