"""`attnix bench gateway`: what its rows say of given times, and that both ways run on a daemon and give what was asked for."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import pytest

from attnix.userland.bench import gateway as bench
from attnix.userland.bench.decode_engines import BenchError
from attnix.userland.bench.gateway_load import NEW_TOKENS, Load, measure, rows

from .conftest import Gateway


def test_rows_put_http_beside_the_socket() -> None:
    plan = bench.Plan("", batch=2, prompt_tokens=4, new_tokens=50, turns=3)
    http = [bench.Turn([0.1, 0.3], 1.0), bench.Turn([0.2, 0.2], 2.0), bench.Turn([0.5, 0.5], 4.0)]
    socket = [bench.Turn([0.1, 0.1], 1.0), bench.Turn([0.1, 0.1], 1.0), bench.Turn([0.4, 0.4], 4.0)]
    first, rate = bench.rows(plan, http, socket)
    assert (first.ours, first.theirs, first.ratio) == pytest.approx((200, 100, 0.5))
    assert (rate.ours, rate.theirs, rate.ratio) == pytest.approx((50, 100, 0.5))


async def test_both_ways_run(gateway: Gateway) -> None:
    served = gateway()
    at = urlsplit(served.url)
    assert at.hostname and at.port
    plan = bench.Plan("", batch=3, prompt_tokens=40, new_tokens=10, turns=1)
    http, socket = await bench.measure(plan, served.daemon.socket, (at.hostname, at.port))
    for turn in (*http, *socket):
        assert len(turn.first_s) == 3 and all(0 < first <= turn.whole_s for first in turn.first_s)


async def test_a_connection_that_was_closed_meanwhile_is_not_used(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn closes what nobody uses for five seconds, and a turn over the socket may take longer."""
    served = gateway()
    at = urlsplit(served.url)
    assert at.hostname and at.port
    made: list[bench.Connection] = []
    over_socket = bench.over_socket

    class Noted(bench.Connection):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    async def slowly(*given: Any) -> bench.Turn:
        turn = await over_socket(*given)
        for connection in made:
            connection.close()
            while not connection.lost:
                await asyncio.sleep(0)
        return turn

    monkeypatch.setattr(bench, "Connection", Noted)
    monkeypatch.setattr(bench, "over_socket", slowly)
    plan = bench.Plan("", batch=2, prompt_tokens=8, new_tokens=3, turns=1)
    http, _ = await bench.measure(plan, served.daemon.socket, (at.hostname, at.port))
    assert len(http) == 1 and len(made) == 4
    with pytest.raises(BenchError, match="closed"):
        await made[0].post({})


async def test_half_of_the_streams_are_cut_and_nothing_of_them_is_left(gateway: Gateway) -> None:
    for attempt in range(3):  # a gateway that was held up tells many tokens in one event, which is no measurement
        served = gateway(pass_ms=1, frames=256)
        at = urlsplit(served.url)
        assert at.hostname and at.port
        cut, uncut = loads = Load(12, 6, 1), Load(12, 0, 2)
        try:
            held = await measure(loads, served.daemon.socket, (at.hostname, at.port))
            break
        except BenchError as error:
            if attempt == 2 or "a stream brought" not in str(error):
                raise
    assert (len(cut.times), len(uncut.times)) == (6, 12)
    assert all(len(times) >= NEW_TOKENS // 2 for load in loads for times in load.times)
    assert held == {"contexts": (0, 0), "processes": (2, 2), "frames": (0, 0)}


def test_rows_put_streams_beside_those_of_which_none_is_cut() -> None:
    def load(pauses_ms: list[float]) -> Load:
        made = Load(10, 0, 1)
        made.times = [list(accumulate((ms / 1e3 for ms in pauses_ms), initial=5.0)) for _ in range(10)]
        return made

    # A pause of 40 ms among 15 of 20 ms while some go, and 10 ms each afterwards; before, what does not count.
    early, going, afterwards = [900.0] * 8, [20.0] * 8 + [40.0] + [20.0] * 7, [10.0] * 15
    cut = [load([*early, *going, *afterwards])] * 3
    uncut = [load([each * factor for each in (*early, *going, *afterwards)]) for factor in (2, 3, 9)]
    found = rows(256, cut, uncut)
    assert [row.case.partition(", ")[2] for row in found] == [
        f"{name}, 256 streams, {when}" for when in ("while half are cut", "after") for name in ("p50", "p99")
    ]
    assert [(row.ours, row.theirs) for row in found] == [
        pytest.approx(pair) for pair in ((20, 60), (40, 120), (10, 30), (10, 30))
    ]
    assert {(row.peer, row.n) for row in found} == {("none cut", 3)}
