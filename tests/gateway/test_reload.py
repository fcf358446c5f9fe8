"""SIGHUP: the file of keys is read again, and nothing else changes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnix.syscalls import connect
from attnix.userland.gateway.keys import Keys

from .rig import Daemon, Served, says, until
from .test_quotas import chat, keys_file, message, of_group

ENDLESS = says("x" * 3000, ends=False)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    rows = {"a": "", "b": "concurrent = 1\n[key.limits]\nhbm_frames = 300\nweight = 7\ncontexts = 9", "c": ""}
    served = Served(Daemon(tmp_path, script=ENDLESS, pass_ms=5), "--keys", keys_file(tmp_path, **rows))
    yield served
    served.stop()
    served.daemon.at_rest()
    assert served.daemon.process.stop() == 0


def reload(served: Served) -> None:
    served.process.popen.send_signal(signal.SIGHUP)


def status(served: Served, key: str) -> int:
    return int(served.http.post(**message(key)).status_code)


def test_keys_come_and_go(served: Served, tmp_path: Path) -> None:
    assert [status(served, key) for key in "abcd"] == [200, 200, 200, 401]
    with connect(served.daemon.socket) as client:

        def kept() -> list[str]:
            return sorted(row.name for row in client.ps().processes if row.name in "abcd")

        def limits() -> dict[str, int]:
            row = of_group(client, "b")
            hard = {limit.resource: limit.hard for limit in row.limits}
            return {"hbm": hard["hbm"], "contexts": hard["contexts"], "weight": row.weight}

        assert kept() == ["a", "b", "c"] and limits() == {"hbm": 300, "contexts": 9, "weight": 7}
        with served.http.stream("POST", **chat("b", stream=True)) as streaming:
            assert streaming.status_code == 200 and status(served, "b") == 429
            keys_file(tmp_path, b="concurrent = 1\n[key.limits]\ncontexts = 5", c='domain = "wide"', d="")
            reload(served)
            until(lambda: status(served, "d") == 200, "the new key")
            assert status(served, "a") == 401
            assert status(served, "b") == 429, "what runs counts on"
            assert next(streaming.iter_lines()), "and goes on"
        until(lambda: limits() == {"hbm": 0, "contexts": 5, "weight": 100}, "the new limits")
        until(lambda: kept() == ["b", "d"], "the end of what nobody, or another domain, could ask for")


@pytest.mark.parametrize("how", ["torn", "readable", "gone"])
def test_a_file_that_is_wrong_changes_nothing(served: Served, tmp_path: Path, how: str) -> None:
    path = tmp_path / "keys.toml"
    right = path.read_text()
    if how == "torn":
        path.write_text(right[:-20] + "[")
    elif how == "readable":
        path.chmod(0o644)
    else:
        path.unlink()
    reload(served)
    assert [status(served, key) for key in "abc"] == [200, 200, 200]
    keys_file(tmp_path, d="")
    reload(served)
    until(lambda: status(served, "d") == 200, "the new key")
    assert [status(served, key) for key in "abc"] == [401, 401, 401]


def test_a_minute_is_not_begun_anew(tmp_path: Path) -> None:
    keys: Any = Keys.load(keys_file(tmp_path, a="requests_per_minute = 2"))
    keys.keys[0].quota.enter(100.0)
    after: Any = Keys.load(keys_file(tmp_path, a="requests_per_minute = 60", b=""))
    assert after.follow(keys) == frozenset()
    quota = after.keys[0].quota
    assert (quota.running, quota.requests_per_minute) == (1, 60)
    quota.enter(100.0)
    assert quota.running == 2
