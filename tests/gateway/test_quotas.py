"""What the keys of a group may have together: requests, the daemon's limits, and what is said to those who ask for more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from attnix.syscalls import Client
from attnix.userland.gateway.errors import ApiError
from attnix.userland.gateway.keys import BadKeys, Keys, Quota

from .conftest import Gateway
from .rig import BLOCK, Daemon, Served, says, until

MESSAGES = [{"role": "user", "content": "hi"}]
ENDLESS = says("x" * 3000, ends=False)


def keys_file(directory: Path, **rows: str) -> str:
    """Keys by name, each with what its row says besides."""
    path = directory / "keys.toml"
    path.write_text(
        "\n".join(f'[[key]]\nname = "{name}"\nkey = "sk-{name}-key"\n{row}\n' for name, row in rows.items())
    )
    path.chmod(0o600)
    return str(path)


def chat(key: str, **fields: Any) -> dict[str, Any]:
    """A request of OpenAI's interface, as httpx takes it."""
    return {
        "url": "/v1/chat/completions", "headers": {"authorization": f"Bearer sk-{key}-key"},
        "json": {"messages": MESSAGES, "temperature": 0, **fields},
    }  # fmt: skip


def message(key: str, **fields: Any) -> dict[str, Any]:
    """A request of Anthropic's interface."""
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 9, **fields}
    return {"url": "/v1/messages", "headers": {"x-api-key": f"sk-{key}-key"}, "json": body}


def refused(served: Served, key: str, **fields: Any) -> tuple[dict[str, Any], int]:
    """Both interfaces say 429, each in its own shape, also to who would have it streamed.  The error, and when to come again."""
    for stream in (False, True):
        anthropic = served.http.post(**message(key, stream=stream, **fields))
        assert anthropic.status_code == 429 and int(anthropic.headers["retry-after"]) >= 1
        said = anthropic.json()
        assert said["type"] == "error" and said["error"]["type"] == "rate_limit_error" and said["error"]["message"]
        openai = served.http.post(**chat(key, stream=stream, **fields))
        assert openai.status_code == 429, openai.text
        error: dict[str, Any] = openai.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
    return error, int(openai.headers["retry-after"])


def test_requests_a_minute_are_a_token_bucket() -> None:
    """It holds one minute's worth, here 30, and gets one back every 2 s."""
    quota = Quota(requests_per_minute=30)

    def waits(now_s: float) -> float:
        with pytest.raises(ApiError) as refusal:
            quota.enter(now_s)
        return refusal.value.retry_after_s

    for _ in range(30):
        quota.enter(100.0)
    assert waits(100.0) == pytest.approx(2.0) and waits(101.5) == pytest.approx(0.5)
    quota.enter(102.0)
    assert waits(102.0) == pytest.approx(2.0)
    for _ in range(30):
        quota.enter(9999.0)
    assert waits(9999.0) == pytest.approx(2.0), "an hour brings no more than a minute's worth"
    assert quota.running == 61, "who is refused is not at work"


def test_what_is_limited_is_a_group(tmp_path: Path) -> None:
    team = 'group = "team"\n'
    keys = Keys.load(
        keys_file(tmp_path, a=team + "concurrent = 3\n[key.limits]\nhbm_frames = 9", b=team, c="concurrent = 4")
    )
    a, b, c = keys.keys
    assert a.quota is b.quota is not c.quota and (a.quota.concurrent, c.quota.concurrent) == (3, 4)
    assert keys.sharing("team") == {"a", "b"}
    for one, other in (("concurrent = 3", "concurrent = 4"), ("[key.limits]\nweight = 5", "[key.limits]\nweight = 6")):
        with pytest.raises(BadKeys, match="team differ in"):
            Keys.load(keys_file(tmp_path, a=team + one, b=team + other))


ROWS = {
    "minute": 'group = "minute"\nrequests_per_minute = 1', "minute2": 'group = "minute"',
    "one": 'group = "one"\nconcurrent = 1', "one2": 'group = "one"',
    "slot": 'group = "slot"\n[key.limits]\ncontexts = 1', "slot2": 'group = "slot"',
    "frames": "[key.limits]\nhbm_frames = 8", "rate": "[key.limits]\ntokens_s = 1", "other": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One gateway for all: each test has a group of its own."""
    directory = tmp_path_factory.mktemp("limited")
    served = Served(Daemon(directory, script=ENDLESS, pass_ms=5), "--keys", keys_file(directory, **ROWS))
    yield served
    served.stop()
    served.daemon.at_rest()
    assert served.daemon.process.stop() == 0


def test_requests_a_minute_of_a_group(limited: Served) -> None:
    assert limited.http.post(**message("minute")).status_code == 200
    error, retry_s = refused(limited, "minute2")
    assert "1 requests a minute" in error["message"] and retry_s <= 60
    assert limited.http.post(**message("other")).status_code == 200


def test_requests_at_a_time_of_a_group(limited: Served) -> None:
    with limited.http.stream("POST", **chat("one", stream=True)) as streaming:
        assert streaming.status_code == 200
        error, retry_s = refused(limited, "one2")
        assert "1 requests" in error["message"] and retry_s == 1
        assert limited.http.post(**message("other")).status_code == 200
    # The stream's place is free when its client has left, and nothing that failed or was refused holds one.
    until(lambda: limited.http.post(**message("one2")).status_code == 200, "room")
    assert limited.http.post(**message("one2", messages=[])).status_code == 400
    streamed = [
        chat("one2", max_tokens=2, stream=True)
    ] * 20  # as soon as one is read, the next one finds its place free
    for request in (*streamed, message("one2"), chat("one", max_tokens=2)):
        assert limited.http.post(**request).status_code == 200


def of_group(client: Client, name: str) -> Any:
    (row,) = client.groups(f"uid:{os.getuid()}/{name}").rows
    return row


def test_contexts_of_a_group(limited: Served) -> None:
    """EDQUOT is 429 while requests have all that there may be; what is only kept makes room, whichever of its keys it was for."""
    assert limited.http.post(**chat("slot", max_tokens=2)).status_code == 200
    assert limited.http.post(**chat("slot2", max_tokens=2)).status_code == 200
    with limited.http.stream("POST", **chat("slot", stream=True)) as streaming:
        assert streaming.status_code == 200
        error, _ = refused(limited, "slot2")
        assert error["attnix"]["limit"] == 1 and error["attnix"]["resource"] == "contexts"
        assert limited.http.post(**message("other")).status_code == 200
        with limited.daemon.client() as client:
            until(
                lambda: [p.state for p in client.ps().processes if p.name == "slot"] == ["running"], "its own goes on"
            )
    until(lambda: limited.http.post(**message("slot2")).status_code == 200, "room")


def test_frames_of_a_group(limited: Served) -> None:
    """A prompt that its limit never has room for is the caller's fault, with both numbers."""
    long = [{"role": "user", "content": "m" * 200}]
    error = limited.http.post(**chat("frames", messages=long)).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["attnix"]["limit"] == 8 * BLOCK
    assert error["attnix"]["wanted"] > 200
    said = limited.http.post(**message("frames", messages=long))
    assert said.status_code == 400 and said.json()["error"]["type"] == "invalid_request_error"
    assert limited.http.post(**message("other", messages=long)).status_code == 200


def test_tokens_a_second_of_a_group(limited: Served) -> None:
    """What is over its rate is held back, not refused, and holds nobody else up."""
    prompt = [{"role": "user", "content": "m" * 1000}]  # a quarter of an hour's worth
    with limited.daemon.client() as client, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(limited.http.post, **message("rate", messages=prompt))
        until(lambda: of_group(client, "rate").throttled > 0, "the group is held back")
        computed = of_group(client, "rate").served_tokens
        assert limited.http.post(**message("other", messages=prompt)).status_code == 200
        assert of_group(client, "rate").served_tokens == computed and not slow.done()
        client.setlimit(of_group(client, "rate").name, "tokens_s", hard=0)
        assert slow.result().json()["content"][0]["text"] == "x" * 9


def test_more_than_may_wait(gateway: Gateway, tmp_path: Path) -> None:
    """EAGAIN of the daemon's queue."""
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    served = gateway(script=says("yes"), turnstile=str(fifo))  # no pass ends until it is opened
    with served.daemon.client() as client:
        client.sysctl("sched.max_queue", 1)
        waiting = client.alloc_context()
        waiting.append(tokens=range(20))
        error, _ = refused(served, "-")
        assert error["attnix"]["queued"] == 1 and error["attnix"]["limit"] == 1
        fifo.write_bytes(bytes(64))
        until(lambda: served.http.post(**chat("-")).status_code == 200, "its turn")
        waiting.release()
