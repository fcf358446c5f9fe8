"""How clients leave, and clients that do not read (cases 12 and 32)."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import pytest

from attnix.syscalls import abi

from .turnstile import Turnstile

pack: Any = msgpack.packb  # its stubs say that it may return None

N = {call.name: call.number for call in abi.CALLS}
INT = struct.Struct("<i")


def ids(n: int) -> bytes:
    return b"".join(INT.pack(k % 250) for k in range(n))


def start(client: Any, prompt_tokens: int, *, generate: int = 4, stream: bool = True) -> None:
    """hello, a context, a prompt and a generation (request 9), the answers to the first three read."""
    client.call(1, N["hello"], ["t", 1])
    client.call(2, N["alloc_context"], [])
    assert client.read()[:2] == [1, 0]
    ctx = client.read()[2][0]
    client.call(3, N["append"], [ctx, ids(prompt_tokens)])
    assert client.read()[:2] == [3, 0]
    options = [0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 0, [], b"", False, stream]
    client.call(9, N["generate"], [ctx, generate, *options])


def counters(inspector: Any) -> Counter[str]:
    return Counter(inspector.vmstat().counters)


def flood(client: Any, inspector: Any, requests: int = 100_000) -> int:
    """Send sysctl requests (ids from 100 on) and read nothing, until the daemon takes no more; how many went out whole."""
    for n in range(requests):
        body = pack([100 + n, N["sysctl"], []])
        left = len(body).to_bytes(4, "little") + body
        while left:
            if not is_taken(client.socket, inspector):
                return n
            left = left[client.socket.send(left, socket.MSG_DONTWAIT) :]
    raise AssertionError(f"the daemon took {requests} requests of a client that reads nothing")


def is_taken(sock: socket.socket, inspector: Any) -> bool:
    """Whether the daemon takes more of it: not if it has answered others for a while, and there still is no room."""
    for _ in range(60):
        if select.select([], [sock], [], 0)[1]:
            return True
        inspector.uname()
    return False


LONG: dict[str, Any] = {"frames": 600, "window_tokens": 2048, "pass_ms": 15}


@pytest.mark.parametrize("how", ["close", "reset", "shut down both"])
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_during_prefill(serve: Any, until: Any, how: str, stream: bool) -> None:
    """2,000 tokens at 64 a pass: at most one more pass runs, nothing is left, a retry starts from what was computed."""
    served = serve(**LONG)
    inspector = served.connect()
    inspector.sysctl("sched.step_tokens", 64)
    client = served.raw()
    start(client, 2000, stream=stream)
    until(lambda: counters(inspector)["passes"] >= 3, "three passes")
    if how == "reset":  # unread bytes in the client's buffer make its close a reset
        client.call(10, N["uname"], [])
        until(lambda: select_readable(client.socket), "an answer")
    if how == "shut down both":
        client.socket.shutdown(socket.SHUT_RDWR)
    else:
        client.close()
    until(lambda: counters(inspector)["connections"] == 1, "the disconnect")
    passes = counters(inspector)["passes"]
    until(lambda: counters(inspector)["contexts"] == 0, "the release of its context")
    short = served.connect()
    with short.alloc_context() as ctx:
        ctx.append(tokens=[1, 2, 3, 4, 5])
        assert len(ctx.generate(2).tokens) == 8
    assert counters(inspector)["passes"] <= passes + 1 + 2, "at most the chunk in flight ran on"
    hits = counters(inspector)["lookup_hits"]
    retry = served.raw()
    start(retry, 2000)
    until(lambda: counters(inspector)["lookup_hits"] > hits, "a hit on the blocks that were finished")


def select_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def test_a_killed_client_leaves_nothing(serve: Any, until: Any) -> None:
    """kill -9 of a process with four contexts generating: contexts gone, frames back (the fixture's `fit`)."""
    served = serve(**LONG)
    program = (
        "import attnix.syscalls as a, sys\n"
        f"c = a.connect({served.path!r})\n"
        "x = c.alloc_context(); x.append(tokens=range(100))\n"
        "s = [y.stream(1500) for y in x.fork(4)]\n"
        "[next(iter(t)) for t in s]; print('going', flush=True)\n"
        "s[0].result()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "going\n"
    inspector = served.connect()
    assert counters(inspector)["contexts"] == 5
    os.kill(child.pid, signal.SIGKILL)
    child.wait(20)
    child.stdout.close()
    until(lambda: counters(inspector)["contexts"] == 0, "the release")


@pytest.mark.parametrize("stream", [True, False])
def test_a_half_closed_client_gets_its_answers(serve: Any, stream: bool) -> None:
    served = serve(**LONG)
    client = served.raw()
    start(client, 300, generate=6, stream=stream)
    client.socket.shutdown(socket.SHUT_WR)
    messages = []
    while (message := client.read()) is not None:
        messages.append(message)
    assert messages[-1][:2] == [9, 0] and messages[-1][2][0] == "length"
    assert sum(m[0] == 9 for m in messages) == 1
    assert (len(messages) > 1) is stream


def test_half_closed_and_then_gone(serve: Any, until: Any) -> None:
    """Nothing can be read from it any more, and its leaving is still seen at once."""
    served = serve(**LONG)
    inspector = served.connect()
    client = served.raw()
    start(client, 100, generate=1500)
    client.socket.shutdown(socket.SHUT_WR)
    until(lambda: counters(inspector)["generated_tokens"] >= 3, "three tokens")
    client.close()
    until(lambda: counters(inspector)["contexts"] == 0, "the release")
    assert counters(inspector)["generated_tokens"] < 1000


def test_half_closed_with_pipelined_text(serve: Any) -> None:
    """Requests that wait behind a text job are answered too, in order, after the end of the stream was seen."""
    served = serve(text_ms=50)
    client = served.raw()
    client.call(1, N["hello"], ["t", 1])
    client.call(2, N["alloc_context"], [])
    assert client.read()[0] == 1
    ctx = client.read()[2][0]
    for request in (3, 4, 5):
        client.call(request, N["append"], [ctx, b"", "ab"])
    client.call(6, N["generate"], [ctx, 2])
    client.socket.shutdown(socket.SHUT_WR)
    got: list[Any] = []
    while (message := client.read()) is not None:
        if message[0]:
            got.append((message[0], message[2][0]))
    assert got == [(3, 2), (4, 4), (5, 6), (6, "length")]


def test_gone_during_a_text_job(serve: Any, until: Any) -> None:
    served = serve(text_ms=200)
    inspector = served.connect()
    client = served.raw()
    client.call(1, N["hello"], ["t", 1])
    client.call(2, N["alloc_context"], [])
    assert client.read()[0] == 1
    ctx = client.read()[2][0]
    client.call(3, N["append"], [ctx, b"", "ab"])
    client.call(4, N["generate"], [ctx, 2])
    until(lambda: counters(inspector)["connections"] == 2)
    client.close()
    until(lambda: counters(inspector)["connections"] == 1, "the disconnect, while the job runs")


def test_a_client_that_does_not_read_pauses_its_generations_only(serve: Any, until: Any, turnstile: Turnstile) -> None:
    served = serve(frames=2000, window_tokens=4096, turnstile=turnstile.path)
    inspector = served.connect()
    lazy = served.raw()
    start(lazy, 4, generate=2500)
    turnstile.let(20)
    flood(lazy, inspector)  # answers that it does not read count as much as tokens do
    turnstile.let_all()

    def tokens_of_lazy() -> int:
        rows = [row for process in inspector.ps().processes for row in process.contexts]
        return max(int(row.tokens) for row in rows)

    held = settled(tokens_of_lazy, until)
    assert held < 2500, "it is paused"
    with inspector.alloc_context() as ctx:
        ctx.append(tokens=[1, 2, 3])
        assert ctx.generate(50).reason == "length", "others are not"
    assert tokens_of_lazy() == held
    seen: Counter[int] = Counter()
    message: list[Any] = [0]
    while message[0] != 9:  # it reads on: everything comes, once
        message = lazy.read()
        seen[message[0]] += 1
    assert message[2][0] == "length" and message[2][4] == 2504
    assert all(count == 1 for request, count in seen.items() if request)


def settled(value: Any, until: Any) -> int:
    """The value once it stays the same over 60 other calls to the daemon."""
    state = [value(), 0]

    def stays() -> bool:
        now = value()
        state[:] = [now, state[1] + 1 if now == state[0] else 0]
        return bool(state[1] >= 60)

    until(stays, "a standstill")
    return int(state[0])


def test_a_flood_without_reading_is_held_back(serve: Any) -> None:
    """The daemon stops taking requests; nothing in it grows without bound; each is answered once when it reads on."""
    served = serve()
    client = served.raw()
    with served.connect() as inspector:
        sent = flood(client, inspector)
    with served.connect() as other:
        status = Path(f"/proc/{other.uname().pid}/status").read_text()
    assert int(status.split("VmRSS:")[1].split()[0]) < 400_000, "kB"
    got = [client.read()[0] for _ in range(sent)]
    assert got == list(range(100, 100 + sent))


def test_a_client_gone_while_it_is_held_back(serve: Any, until: Any) -> None:
    served = serve(frames=2000, window_tokens=4096)
    inspector = served.connect()
    lazy = served.raw()
    start(lazy, 4, generate=2500)
    assert flood(lazy, inspector) > 400
    assert counters(inspector)["contexts"] == 1
    lazy.close()
    until(lambda: counters(inspector)["contexts"] == 0, "the release")


def test_every_way_out_answers_nothing_twice(serve: Any) -> None:
    served, cancelled = serve(pass_ms=3), 0
    for round_ in range(40):
        client = served.raw()
        start(client, 20 + round_, generate=50)
        client.call(10, N["cancel"], [9])
        if round_ % 2:
            client.socket.shutdown(socket.SHUT_WR)
        got: list[Any] = []
        while len(got) < 2:
            message = client.read()
            assert message is not None
            if message[0]:
                got.append(message)
        assert sorted(m[0] for m in got) == [9, 10]
        reply = next(m for m in got if m[0] == 9)
        assert reply[1] == 0 and reply[2][0] in ("cancelled", "length")
        cancelled += reply[2][0] == "cancelled"
        if round_ % 2:
            assert client.read() is None
        client.close()
        served.clients.remove(client)
    assert cancelled > 20, "all but those before which the machine was held up"
