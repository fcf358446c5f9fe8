"""`attnix bench gateway --cut N`: N streams through `attnix serve` at once, half of which are cut at a random moment.

What matters is whether those who stay notice, so the same load is run with nobody cut, in turns: the pauses between their
tokens are compared over the same tokens of each stream, those at which the others go and those after the last has gone.
And everything that the others held has to be given back.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from attnix.syscalls import AsyncClient, aconnect

from .decode_engines import BenchError, booted
from .gateway import Connection, served
from .report import show
from .row import Row, time_row

PROMPT_TOKENS: Final = 16
NEW_TOKENS: Final = 40
HBM_BYTES: Final = 1 << 30
CUT_AFTER: Final = (8, 24)  # tokens of its own after which a client goes away, drawn evenly
_GONE_S: Final = 30.0  # for what they held to be given back


class Load:
    """leaving: how many of the streams are cut.  times: per stream that stayed, when each of its tokens came."""

    def __init__(self, streams: int, leaving: int, seed: int) -> None:
        self.streams = streams
        self.leaving = leaving
        self.times: list[list[float]] = []
        self._draw = random.Random(seed)

    async def run(self, at: tuple[str, int], vocab_tokens: int) -> None:
        draw = self._draw
        leave = set(draw.sample(range(self.streams), self.leaving))
        await asyncio.gather(
            *(
                self._one(
                    at, draw.choices(range(64, vocab_tokens), k=PROMPT_TOKENS),
                    draw.randrange(*CUT_AFTER) if number in leave else NEW_TOKENS,
                )
                for number in range(self.streams)
            )
        )  # fmt: skip

    async def _one(self, at: tuple[str, int], prompt: list[int], tokens: int) -> None:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, *at)
        asked = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        events = await connection.post(asked, leave_after=tokens if tokens < NEW_TOKENS else 0)
        connection.close()
        if tokens < NEW_TOKENS:
            return
        times = events.times
        if len(times) < NEW_TOKENS // 2:  # an event may hold more than one token's text
            raise BenchError(f"a stream brought {len(times)} events: {events.answer[-300:].decode(errors='replace')}")
        self.times.append(times)

    def pauses_ms(self, first: int, last: int) -> list[float]:
        """Between one token and the next, of the tokens from `first` to `last` of each stream that stayed."""
        return [1e3 * (b - a) for times in self.times for a, b in pairwise(times[first : last + 1])]


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


async def measure(loads: Sequence[Load], socket: str, at: tuple[str, int]) -> dict[str, tuple[int, int]]:
    """One after the other.  What was held before and after, by its name.  Error: BenchError: some was not given back."""
    await ready(at)
    async with aconnect(socket, name="bench") as client:
        vocab = (await client.uname()).vocab_tokens
        before = await _held(client)
        for load in loads:
            await load.run(at, vocab)
            end = time.monotonic() + _GONE_S
            while (after := await _held(client)) != before:
                if time.monotonic() > end:
                    raise BenchError(f"held before and {_GONE_S:.0f} s after: {before}, {after}")
                await asyncio.sleep(0.05)
    return {name: (before[name], after[name]) for name in before}


async def _held(client: AsyncClient) -> dict[str, int]:
    tiers = (await client.tiers()).tiers
    return {
        "contexts": (await client.vmstat()).counters["contexts"],
        "processes": len((await client.ps()).processes),
        "frames": sum(tier.capacity_frames - tier.free_frames - tier.reclaimable_frames for tier in tiers),
    }


def rows(streams: int, cut: list[Load], uncut: list[Load]) -> list[Row]:
    """Medians over the runs of each run's quantiles.  Error: BenchError."""
    made = []
    for when, *span in (("while half are cut", *CUT_AFTER), ("after", CUT_AFTER[1], NEW_TOKENS)):
        for name, percent in (("p50", 50), ("p99", 99)):
            ours, theirs = (_quantile_ms(loads, span, percent) for loads in (cut, uncut))
            case = f"between tokens {span[0]} to {span[1]}, {name}, {streams} streams, {when}"
            made.append(time_row("gateway", case, ours, "ms", "none cut", theirs, len(cut), None))
    return made


def _quantile_ms(loads: list[Load], span: Sequence[int], percent: int) -> float:
    found = []
    for load in loads:
        pauses = load.pauses_ms(*span)
        if len(pauses) < 100:
            raise BenchError(f"{len(pauses)} pauses are too few for a quantile")
        found.append(statistics.quantiles(pauses, n=100)[percent - 1])
    return statistics.median(found)


def run(model: str, streams: int, runs: int) -> list[Row]:
    """Error: BenchError."""
    # Other prompts each time: none is found in a cache.
    cut, uncut = (
        [Load(streams, leaving, 2 * n + odd) for n in range(runs)] for odd, leaving in ((0, streams // 2), (1, 0))
    )
    with (
        tempfile.TemporaryDirectory(prefix="attnix-bench-") as directory,
        booted(model, directory, HBM_BYTES) as ours,
        served(ours.client.path) as at,
    ):
        asyncio.run(measure([load for turn in zip(cut, uncut, strict=True) for load in turn], ours.client.path, at))
    return rows(streams, cut, uncut)


def main(model: str, streams: int, runs: int, as_json: bool) -> None:
    """Error: BenchError."""
    show(run(model, streams, runs), as_json)
