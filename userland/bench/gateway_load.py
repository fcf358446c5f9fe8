"""`attnix bench gateway --cut N`: N streams through `attnix serve` at once, half of which are cut at a random moment.

What matters is whether those who stay notice: the pauses between their tokens before the first cut and after the last, and
whether everything that the others held is given back.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Final

from attnix.syscalls import aconnect

from .decode_engines import BenchError, booted
from .gateway import served
from .report import show
from .row import Row, time_row

PROMPT_TOKENS: Final = 16
NEW_TOKENS: Final = 40
HBM_BYTES: Final = 1 << 30
_CUT_AFTER: Final = (8, 24)  # tokens of its own after which a client goes away, drawn evenly
_GONE_S: Final = 30.0  # for what they held to be given back


class Load:
    """times: per stream that stayed, when each of its tokens came.  cuts: when the others went."""

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.times: list[list[float]] = []
        self.cuts: list[float] = []

    async def run(self, at: tuple[str, int], vocab_tokens: int) -> None:
        draw = random.Random(256)
        leave = set(draw.sample(range(self.streams), self.streams // 2))
        await asyncio.gather(
            *(
                self._one(
                    at, draw.choices(range(64, vocab_tokens), k=PROMPT_TOKENS),
                    draw.randrange(*_CUT_AFTER) if number in leave else NEW_TOKENS,
                )
                for number in range(self.streams)
            )
        )  # fmt: skip

    async def _one(self, at: tuple[str, int], prompt: list[int], tokens: int) -> None:
        body = json.dumps(
            {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        ).encode()
        reader, writer = await asyncio.open_connection(*at)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        times: list[float] = []
        answer = b""
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                if len(times) == tokens < NEW_TOKENS:
                    writer.transport.abort()
                    self.cuts.append(times[-1])
                    return
            else:
                answer += line
        writer.close()
        if len(times) < NEW_TOKENS // 2:  # an event may hold more than one token's text
            raise BenchError(f"a stream brought {len(times)} events: {answer[-300:].decode(errors='replace')}")
        self.times.append(times)

    def pauses_ms(self, first: float, last: float) -> list[float]:
        """Between tokens of those who stayed, of pauses that began within these two moments."""
        return [1e3 * (b - a) for times in self.times for a, b in pairwise(times) if first <= a < last]


async def ready(at: tuple[str, int]) -> None:
    """The gateway has its connection to the daemon.  Error: BenchError."""
    end = time.monotonic() + _GONE_S
    while time.monotonic() < end:
        reader, writer = await asyncio.open_connection(*at)
        writer.write(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        status = await reader.readline()
        writer.close()
        if b" 200 " in status:
            return
        await asyncio.sleep(0.05)
    raise BenchError("the gateway does not get ready")


async def measure(load: Load, socket: str, at: tuple[str, int]) -> dict[str, tuple[int, int]]:
    """Contexts before and after, by that name.  Error: BenchError: some were not given back."""
    await ready(at)
    async with aconnect(socket, name="bench") as client:
        vocab = (await client.uname()).vocab_tokens
        before = (await client.vmstat()).counters
        await load.run(at, vocab)
        end = time.monotonic() + _GONE_S
        while (after := (await client.vmstat()).counters)["contexts"] > before["contexts"]:
            if time.monotonic() > end:
                raise BenchError(
                    f"{after['contexts'] - before['contexts']} contexts are still there after {_GONE_S:.0f} s"
                )
            await asyncio.sleep(0.05)
    return {"contexts": (before["contexts"], after["contexts"])}


def run(model: str, streams: int) -> list[Row]:
    """Error: BenchError."""
    load = Load(streams)
    with (
        tempfile.TemporaryDirectory(prefix="attnix-bench-") as directory,
        booted(model, directory, HBM_BYTES) as ours,
        served(ours.client.path) as at,
    ):
        asyncio.run(measure(load, ours.client.path, at))
    early = load.pauses_ms(0.0, min(load.cuts))
    late = load.pauses_ms(max(load.cuts), float("inf"))
    if min(len(early), len(late)) < 100:
        raise BenchError(
            f"{len(early)} pauses before the first cut and {len(late)} after the last are too few to compare"
        )
    rows = []
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        before, after = (statistics.quantiles(pauses, n=100)[round(share * 100) - 1] for pauses in (early, late))
        case = f"between tokens, {name}, {streams} streams, half of them cut"
        rows.append(time_row("gateway", case, after, "ms", "before the cuts", before, len(load.times), None))
    return rows


def main(model: str, streams: int, as_json: bool) -> None:
    """Error: BenchError."""
    show(run(model, streams), as_json)
