"""What HTTP costs: `attnix bench gateway`.

Batches of streamed generations, the same number of the same length, in turns through `attnix serve` and straight over the
socket, on one daemon with the real model.  Both clients are one asyncio process that only reads: over the socket the
asynchronous client, over HTTP a kept connection per stream, on which events are counted.  Prompts are token ids, new ones
each turn, so nothing is found in a cache.  Measured per turn: the median time to the first token, and tokens per second of the batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from attnix.syscalls import AsyncClient, aconnect

from .decode_engines import BenchError, booted
from .report import show
from .row import Row, rate_row, time_row

BATCH: Final = 8
PROMPT_TOKENS: Final = 128
NEW_TOKENS: Final = 256
TURNS: Final = 7
RUNS: Final = 5  # of --cut
HBM_BYTES: Final = 256 << 20
_FIRST_ID: Final = 64  # ids below are control tokens in many models


class Plan(NamedTuple):
    """What to measure."""

    model: str
    batch: int = BATCH
    prompt_tokens: int = PROMPT_TOKENS
    new_tokens: int = NEW_TOKENS
    turns: int = TURNS


class Turn(NamedTuple):
    """One batch: seconds to each stream's first token, and to the end of all."""

    first_s: list[float]
    whole_s: float


def prompts(plan: Plan, draw: random.Random, vocab_tokens: int) -> list[list[int]]:
    """Of one turn."""
    return [draw.choices(range(_FIRST_ID, vocab_tokens), k=plan.prompt_tokens) for _ in range(plan.batch)]


async def over_socket(client: AsyncClient, plan: Plan, asked: list[list[int]]) -> Turn:
    """The batch as a program of system calls has it."""
    began = time.perf_counter()

    async def one(prompt: list[int]) -> float:
        process = await client.spawn("bench")
        context = await process.alloc_context()
        await context.append(tokens=prompt, more=True)
        stream = context.generate(plan.new_tokens, ignore_eos=True)
        first_s = 0.0
        async for _ in stream:
            first_s = first_s or time.perf_counter() - began
        result = await stream.result()
        if len(result.tokens) != 4 * plan.new_tokens:
            raise BenchError(f"{len(result.tokens) // 4} tokens came, not {plan.new_tokens}")
        await process.kill(9)
        await process.wait()
        return first_s

    first_s = await asyncio.gather(*(one(prompt) for prompt in asked))
    return Turn(list(first_s), time.perf_counter() - began)


async def over_http(connections: list[Connection], plan: Plan, asked: list[list[int]]) -> Turn:
    """The same batch through the gateway."""
    began = time.perf_counter()

    async def one(connection: Connection, prompt: list[int]) -> float:
        events = await connection.post(
            {"prompt": prompt, "max_tokens": plan.new_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
             "stream_options": {"include_usage": True}}
        )  # fmt: skip
        usage = events.last.get("usage")
        if not usage or usage["completion_tokens"] != plan.new_tokens:
            raise BenchError(f"the gateway answered {events.last}")
        return events.times[0] - began

    first_s = await asyncio.gather(*(one(*pair) for pair in zip(connections, asked, strict=True)))
    return Turn(list(first_s), time.perf_counter() - began)


class Events(NamedTuple):
    """A stream of events.  times: when each event with JSON came; answer: all that was read."""

    times: list[float]
    answer: bytes

    @property
    def last(self) -> dict[str, Any]:
        """The last event with JSON."""
        found: dict[str, Any] = json.loads(b"{" + self.answer.rpartition(b"data: {")[2].partition(b"\n")[0])
        return found


class Connection(asyncio.Protocol):
    """An HTTP client that does no more than it must: the machine's cores are the engine's.  One request at a time.

    lost  the server has closed it, as it does with those that nobody uses
    """

    def __init__(self) -> None:
        self.lost = False
        self._transport: asyncio.Transport | None = None
        self._answer = bytearray()
        self._times: list[float] = []
        self._leave_after = 0
        self._whole: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._answer += data
        self._times += [time.perf_counter()] * data.count(b"data: {")
        if 0 < self._leave_after <= len(self._times):
            self._leave()
        elif data.endswith(b"0\r\n\r\n") or not self._times:
            self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._look(ended=True)

    def _look(self, ended: bool = False) -> None:
        """Is the answer there?  A stream ends with an empty chunk; what is no stream is an error, and short."""
        head, whole_head, _ = bytes(self._answer).partition(b"\r\n\r\n")
        refused = bool(whole_head) and b"chunked" not in head.lower()
        if self._whole is not None and not self._whole.done():
            if refused or ended:
                self._whole.set_exception(BenchError(f"the gateway answered {bytes(self._answer[-300:])!r}"))
            elif self._answer.endswith(b"\r\n0\r\n\r\n"):
                self._whole.set_result(None)

    def _leave(self) -> None:
        assert self._transport is not None
        self._transport.abort()
        if self._whole is not None and not self._whole.done():
            self._whole.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def post(self, asked: dict[str, Any], leave_after: int = 0) -> Events:
        """Ask for a streamed completion, and leave_after so many events; 0: read it to its end.  Error: BenchError."""
        assert self._transport is not None
        if self.lost:
            raise BenchError("the gateway has closed the connection")
        body = json.dumps(asked).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._answer.clear()
        self._times = []
        self._leave_after = leave_after
        self._whole = asyncio.get_running_loop().create_future()
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await self._whole
        return Events(self._times, bytes(self._answer))


@contextmanager
def served(socket: str) -> Iterator[tuple[str, int]]:
    """A gateway process; where it serves.  Error: BenchError."""
    command = [sys.executable, "-m", "attnix.userland.cli", "serve", "--port", "0", "--socket", socket]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        at = urlsplit(process.stdout.readline().strip().rpartition(" ")[2])
        if not at.hostname or not at.port:
            raise BenchError("the gateway did not start")
        yield at.hostname, at.port
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


async def measure(plan: Plan, socket: str, at: tuple[str, int]) -> tuple[list[Turn], list[Turn]]:
    """Turns over the socket and over HTTP, after one of each that does not count."""
    draw = random.Random(20261130)
    loop = asyncio.get_running_loop()
    ours: list[Turn] = []
    theirs: list[Turn] = []
    async with aconnect(socket, name="bench") as client:
        vocab = (await client.uname()).vocab_tokens
        connections: list[Connection] = []
        for _ in range(plan.turns + 1):
            theirs.append(await over_socket(client, plan, prompts(plan, draw, vocab)))
            connections = [connection for connection in connections if not connection.lost]
            while len(connections) < plan.batch:
                connections.append((await loop.create_connection(Connection, *at))[1])
            ours.append(await over_http(connections, plan, prompts(plan, draw, vocab)))
        for connection in connections:
            connection.close()
    return ours[1:], theirs[1:]


def rows(plan: Plan, http: list[Turn], socket: list[Turn]) -> list[Row]:
    """HTTP beside the socket: medians over the turns."""
    tokens = plan.batch * plan.new_tokens

    def first_ms(turns: list[Turn]) -> float:
        return 1e3 * statistics.median(statistics.median(turn.first_s) for turn in turns)

    def rate(turns: list[Turn]) -> float:
        return statistics.median(tokens / turn.whole_s for turn in turns)

    case = f"batch {plan.batch}, {plan.prompt_tokens} + {plan.new_tokens} tokens"
    peer = "the socket client"
    return [
        time_row("gateway", f"first token, {case}", first_ms(http), "ms", peer, first_ms(socket), len(http), None),
        rate_row("gateway", f"throughput, {case}", rate(http), "tokens/s", peer, rate(socket), len(http), None),
    ]


def run(plan: Plan) -> list[Row]:
    """Error: BenchError."""
    with (
        tempfile.TemporaryDirectory(prefix="attnix-bench-") as directory,
        booted(plan.model, directory, HBM_BYTES) as ours,
    ):
        socket = ours.client.path
        with served(socket) as at:
            http, direct = asyncio.run(measure(plan, socket, at))
    return rows(plan, http, direct)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="attnix bench gateway", description="HTTP beside the socket client, in turns."
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--model", default="smollm2", help="a pulled model or GGUF file (%(default)s)")
    parser.add_argument("--batch", type=int, default=BATCH, help="streams at a time (%(default)s)")
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="generated by each stream (%(default)s)")
    parser.add_argument("--turns", type=int, default=TURNS, help="batches behind each median (%(default)s)")
    parser.add_argument("--cut", type=int, default=0, metavar="N", help="instead: N streams at once, half of them cut")
    parser.add_argument("--runs", type=int, default=RUNS, help="with --cut: runs behind each median (%(default)s)")
    a = parser.parse_args()
    try:
        if a.cut:
            from .gateway_load import main as load  # which imports this module

            load(a.model, a.cut, a.runs, a.json)
            return
        show(run(Plan(a.model, a.batch, a.prompt, a.tokens, a.turns)), a.json)
    except BenchError as error:
        sys.exit(f"attnix bench gateway: {error}")


if __name__ == "__main__":
    main()
