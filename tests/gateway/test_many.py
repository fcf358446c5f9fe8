"""256 streaming clients at once, half of which go away somewhere: nothing of them is left, and the others are told everything."""

from __future__ import annotations

import asyncio
import json
import os
import random
from urllib.parse import urlsplit

from .conftest import Gateway
from .rig import says, until

CLIENTS = 256
TEXT = "all of it, to the end" * 3


async def one(host: str, port: int, number: int, leaves_after: int) -> str:
    """What a client got; it leaves after so many events, -1: it stays."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": f"client {number}"}], "stream": True, "temperature": 0}
    ).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    got: list[str] = []
    events = 0
    try:
        while events != leaves_after:
            line = await reader.readline()
            if not line:
                break
            if line.startswith(b"data: {"):
                events += 1
                for choice in json.loads(line[6:])["choices"]:
                    got.append(choice["delta"].get("content") or "")
            if line.startswith(b"data: [DONE]"):
                break
    finally:
        if leaves_after >= 0 and number % 3 == 0:
            writer.transport.abort()
        else:
            writer.close()
    return "".join(got)


async def test_256_clients_half_of_which_leave(gateway: Gateway) -> None:
    served = gateway(script=says(TEXT), frames=4096, max_contexts=600)
    at = urlsplit(served.url)
    assert at.hostname and at.port
    descriptors = f"/proc/{served.process.popen.pid}/fd"
    assert await one(at.hostname, at.port, 0, -1) == TEXT
    before = len(os.listdir(descriptors))
    draw = random.Random(6)
    leaving = {number: draw.randrange(0, len(TEXT)) for number in draw.sample(range(CLIENTS), CLIENTS // 2)}
    got = await asyncio.gather(
        *(one(at.hostname, at.port, number, leaving.get(number, -1)) for number in range(CLIENTS))
    )
    for number, text in enumerate(got):
        if number in leaving:
            assert TEXT.startswith(text)
        else:
            assert text == TEXT, number
    kept = 1 + CLIENTS - len(leaving)
    with served.daemon.client() as client:
        # Who stayed has a conversation that is kept (256 at most are); who left has nothing.
        until(lambda: client.vmstat().counters["contexts"] <= min(kept + len(leaving), 256), "who left is gone")
        until(lambda: len(client.ps().processes) - 2 == client.vmstat().counters["contexts"], "a process each")
        assert client.fsck().problems == ()
    until(lambda: len(os.listdir(descriptors)) <= before, "descriptors are back")
    metrics = served.http.get("/metrics").text
    assert "vllm:num_requests_running 0.0" in metrics
