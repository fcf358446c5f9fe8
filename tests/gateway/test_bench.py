"""`attnix bench gateway`: what its rows say of given times, and that both ways run on a daemon and give what was asked for."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from attnix.userland.bench import gateway as bench

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
