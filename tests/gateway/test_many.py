"""256 streaming clients at once, half of which go away somewhere: nothing of them is left, and the others notice nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx

from attnix.syscalls import Client

from .conftest import Gateway
from .rig import DEADLINE_S, Served, says, until

CLIENTS = 256
TEXT = "all of it, to the end" * 3
_LISTENS = "0A"  # state of a TCP socket (include/net/tcp_states.h), as /proc/net/tcp has it


class Streaming:
    """One HTTP client.

    leaves_after  events after which it goes away; None: it reads to the end
    heard         called with each event that came, `events` in all
    """

    def __init__(self, number: int, leaves_after: int | None = None) -> None:
        self.number = number
        self.leaves_after = leaves_after
        self.text = ""
        self.events = 0
        self.whole = False
        self.left = False
        self.heard: Callable[[], None] = lambda: None

    async def run(self, served: Served) -> None:
        at = urlsplit(served.url)
        message = {"role": "user", "content": f"client {self.number}"}
        body = json.dumps({"messages": [message], "stream": True, "temperature": 0}).encode()
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        while self.events != self.leaves_after and (line := await reader.readline()):
            if line.startswith(b"data: "):
                self._take(line[6:])
        if self.leaves_after is not None and self.number % 3 == 0:
            writer.transport.abort()
        else:
            writer.close()
        self.left = True

    def _take(self, data: bytes) -> None:
        self.whole = data.strip() == b"[DONE]"
        if not self.whole:
            (choice,) = json.loads(data)["choices"]
            self.text += choice["delta"].get("content") or ""
        self.events += 1
        self.heard()


def half_leave(events: int) -> list[Streaming]:
    """All clients; half of them, drawn at random, go after some of so many events."""
    draw = random.Random(6)
    leaving = set(draw.sample(range(CLIENTS), CLIENTS // 2))
    return [Streaming(n, draw.randrange(events) if n in leaving else None) for n in range(CLIENTS)]


def held(served: Served, client: Client) -> dict[str, Any]:
    """Everything that a client could leave behind, as it is now."""
    tier = client.tiers().tiers[0]
    gateway, daemon = served.process.popen.pid, served.daemon.process.popen.pid
    return {
        "contexts": client.vmstat().counters["contexts"],
        "processes": [(process.pid, process.name) for process in client.ps().processes],
        "frames": tier.capacity_frames - tier.free_frames - tier.reclaimable_frames,
        "connections": connections(served),
        "descriptors of the gateway": len(os.listdir(f"/proc/{gateway}/fd")),
        "descriptors of the daemon": len(os.listdir(f"/proc/{daemon}/fd")),
    }


def connections(served: Served) -> int:
    """Descriptors that the gateway has of HTTP clients (proc_pid_net(5): a socket that is closed already has no inode)."""
    port = f":{urlsplit(served.url).port:04X}"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(port) and row[3] != _LISTENS and row[9] != "0" for row in rows)


async def test_256_clients_half_of_which_leave(gateway: Gateway) -> None:
    served = gateway("--max-parked", "0", script=says(TEXT), frames=4096, max_contexts=600, stepped=True)
    served.http.close()
    first, clients = Streaming(CLIENTS), half_leave(len(TEXT))
    early = [one for one in clients if one.leaves_after and one.leaves_after <= len(TEXT) // 3]
    served.daemon.let_all()
    with served.daemon.client() as client:
        await first.run(served)
        until(lambda: connections(served) == 0 and len(client.ps().processes) == 2, "rest")
        before = held(served, client)
        assert [name for _, name in before["processes"]] == ["gateway", "inspector"]
        assert before["contexts"] == before["frames"] == 0
        served.daemon.let_none()
        tasks = [asyncio.ensure_future(one.run(served)) for one in clients]
        await in_step(served, clients, lambda: not all(one.left for one in early))
        served.daemon.let_all()  # the others may be too late
        await asyncio.gather(*tasks)
        with suppress(AssertionError):
            until(lambda: held(served, client) == before, "rest again")
        assert held(served, client) == before
    for one in (first, *clients):
        assert one.text == TEXT if one.leaves_after is None else TEXT.startswith(one.text), one.number
    metrics = httpx.get(f"{served.url}/metrics").text
    assert "vllm:num_requests_running 0.0" in metrics
    (gone,) = [float(row.split()[1]) for row in metrics.splitlines() if row.startswith("attnix_clients_gone_total ")]
    assert gone >= len(early) > CLIENTS // 8, "the cuts were cuts"
    served.daemon.at_rest()


async def in_step(served: Served, clients: list[Streaming], wanted: Callable[[], bool]) -> None:
    """No pass of the model ends before each who stays has heard what the one before said; as long as it is wanted."""
    news = asyncio.Event()
    for one in clients:
        one.heard = news.set
    with served.daemon.client() as client:
        passes = client.vmstat().counters.get("passes", 0)
        while wanted():
            begun = [(one, one.events) for one in clients if one.leaves_after is None and one.events and not one.whole]
            if not begun:  # a prompt is being read
                arrived = partial(lambda so_far: client.vmstat().counters.get("passes", 0) > so_far, passes)
                await asyncio.to_thread(until, arrived, "a pass")
            served.daemon.let(1)
            passes += 1
            async with asyncio.timeout(DEADLINE_S):
                while any(one.events == had for one, had in begun):
                    news.clear()
                    await news.wait()


async def test_who_stays_has_a_token_of_every_pass(gateway: Gateway) -> None:
    """Their pauses are counted in passes, and whatever the others do, none is longer than one."""
    text = TEXT[:24]
    served = gateway(script=says(text), frames=4096, max_contexts=600, stepped=True)
    clients = half_leave(len(text))
    tasks = [asyncio.ensure_future(one.run(served)) for one in clients]
    try:
        await in_step(served, clients, lambda: not all(one.whole for one in clients if one.leaves_after is None))
    finally:
        served.daemon.let_all()  # those who leave may do so in any pass
        await asyncio.gather(*tasks)
    assert [one.text for one in clients if one.leaves_after is None] == [text] * (CLIENTS // 2)
