"""`attnix bench gateway`: what its rows say of given times, and that both ways run on a daemon and give what was asked for."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from attnix.userland.bench import gateway as bench
from attnix.userland.bench.gateway_load import NEW_TOKENS, Load, measure

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


async def test_half_of_the_streams_are_cut_and_nothing_of_them_is_left(gateway: Gateway) -> None:
    served = gateway(pass_ms=1, frames=256)
    at = urlsplit(served.url)
    assert at.hostname and at.port
    load = Load(12)
    contexts = await measure(load, served.daemon.socket, (at.hostname, at.port))
    assert len(load.times) == len(load.cuts) == 6
    assert all(len(times) >= NEW_TOKENS // 2 for times in load.times)
    assert contexts["contexts"] == (0, 0)


def test_pauses_are_those_that_began_in_the_span() -> None:
    load = Load(2)
    load.times = [[1.0, 1.5, 3.5], [2.0, 2.25]]
    assert load.pauses_ms(1.0, 2.0) == [500.0, 2000.0]
    assert load.pauses_ms(2.0, 9.0) == [250.0]
