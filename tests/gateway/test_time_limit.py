"""`--time-limit`: a request that takes longer ends in 408, or in an event that says so, and what it held is given back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from .rig import DEADLINE_S, Daemon, Served, says

LONG = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "minLength": 500}}}
OPENAI = {"message": "the request took longer than this server allows", "type": "timeout_error", "param": None, "code": "timeout"}  # fmt: skip
ANTHROPIC = {"type": "error", "error": {"type": "timeout_error", "message": OPENAI["message"]}}


async def ask(served: Served, path: str, key: str = "free", **fields: Any) -> httpx.Response:
    said = {"prompt": "hi"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    body = {**said, "temperature": 0, "max_tokens": 3000, **fields}
    async with httpx.AsyncClient(base_url=served.url, timeout=DEADLINE_S) as client:
        return await client.post(f"/v1/{path}", json=body, headers={"x-api-key": f"sk-{key}-key"})


async def streamed(served: Served, path: str, **fields: Any) -> httpx.Response:
    """One that has begun in its time: where the machine was held up for as long, it was refused whole, and is asked for again."""
    for _ in range(3):
        response = await ask(served, path, stream=True, **fields)
        if response.text.count("\n\n") > 2:
            break
    return response


def last_event(response: httpx.Response) -> tuple[str, Any]:
    """Name and content of a stream's last event; it had begun, and does not end as if it were whole."""
    assert response.status_code == 200, response.text
    *begun, last = [block for block in response.text.split("\n\n") if block]
    assert len(begun) > 1 and "[DONE]" not in last
    name, _, data = last.rpartition("data: ")
    return name.strip(), json.loads(data)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that never comes to an end, 20 ms a token, and 2 s for it.  A group may have one token a second."""
    directory = tmp_path_factory.mktemp("short")
    keys = directory / "keys.toml"
    keys.write_text(
        '[[key]]\nname = "free"\nkey = "sk-free-key"\n'
        '[[key]]\nname = "held"\nkey = "sk-held-key"\n[key.limits]\ntokens_s = 1\n'
    )
    keys.chmod(0o600)
    served = Served(Daemon(directory, script=says("x" * 3000, ends=False), pass_ms=20), "--keys", str(keys), "--time-limit", "2")  # fmt: skip
    yield served
    served.stop()
    assert served.daemon.process.stop() == 0


async def test_generations_that_take_too_long(short: Served) -> None:
    paths = ("chat/completions", "completions", "messages")
    whole: list[tuple[str, dict[str, Any]]] = [(path, {}) for path in paths]
    whole += [(paths[0], {"n": 3}), (paths[0], {"response_format": LONG})]
    asked = [ask(short, path, **fields) for path, fields in whole]
    asked += [streamed(short, path, **fields) for path, fields in whole]
    answers = await asyncio.gather(*asked)
    for (path, fields), one, stream in zip(whole, answers, answers[len(whole) :], strict=False):
        expected: Any = ANTHROPIC if path == "messages" else {"error": OPENAI}
        assert (one.status_code, one.json()) == (408, expected), (path, fields)
        assert last_event(stream) == ("event: error" if path == "messages" else "", expected), (path, fields)
    short.daemon.at_rest()


async def test_prompts_that_take_turns_have_one_time_together(short: Served) -> None:
    """128 of them in four turns, each of which is short enough, 0.8 s at least."""
    answer = await ask(short, "completions", prompt=["hi"] * 128, max_tokens=40)
    assert (answer.status_code, answer.json()) == (408, {"error": OPENAI})
    short.daemon.at_rest()


async def test_the_time_that_a_group_is_held_back_counts(short: Served) -> None:
    """Each of these for a minute at least, by its limit on tokens."""
    long = {"messages": [{"role": "user", "content": "m" * 60}]}
    for answer in await asyncio.gather(
        *(ask(short, "chat/completions", "held", **long, **form) for form in ({}, {"response_format": LONG}))
    ):
        assert (answer.status_code, answer.json()) == (408, {"error": OPENAI})
    short.daemon.at_rest()
