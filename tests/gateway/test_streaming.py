"""A streamed reply is the whole one in pieces: 200 seeded requests of every kind, each asked for both ways.

The model is the simulated one, drawn from at temperature 1: noise, with characters cut anywhere.  JSON by a schema and tool
calls that are required are valid whatever it says, unless the length ended them.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx

from .conftest import Gateway
from .rig import sse

REQUESTS = 200
AT_ONCE = 16
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog", "axolotl"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 30}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "kind", "ages", "home"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "pet", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "nothing"}},
]


def request(number: int) -> dict[str, Any]:
    """The kinds take turns."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Grüße {number} 世界"}], "seed": number, "temperature": 1, "max_tokens": 24,
    }  # fmt: skip
    kind = number % 8
    if kind == 1:
        body |= {"stop": [chr(97 + n) for n in range(4)]}
    elif kind == 2:
        body |= {"n": 3}
    elif kind == 3:
        body |= {"logprobs": True, "top_logprobs": 2}
    elif kind == 4:
        body |= {"tools": TOOLS}
    elif kind == 5:
        body |= {"tools": TOOLS, "tool_choice": "required", "max_tokens": 170, "parallel_tool_calls": number % 3 == 0}
    elif kind == 6:
        format_ = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
        body |= {"response_format": format_, "max_tokens": 170, "n": 1 + number % 2}
    elif kind == 7:
        body |= {"response_format": {"type": "json_object"}, "max_tokens": 60, "top_p": 0.9, "presence_penalty": 1}
    return body


def from_chunks(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Replies, put together as a client does it."""
    replies: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            reply = replies.setdefault(choice["index"], {"text": "", "calls": {}, "reason": None, "tokens": []})
            reply["text"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                made = reply["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                made["name"] += call["function"].get("name") or ""
                made["arguments"] += call["function"].get("arguments") or ""
            reply["reason"] = choice["finish_reason"] or reply["reason"]
            reply["tokens"] += (choice["logprobs"] or {}).get("content") or []
    return replies


def from_whole(answer: Any) -> dict[int, dict[str, Any]]:
    replies = {}
    for choice in answer["choices"]:
        calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
        replies[choice["index"]] = {
            "text": choice["message"]["content"] or "",
            "calls": dict(enumerate(calls)),
            "reason": choice["finish_reason"],
            "tokens": (choice["logprobs"] or {}).get("content") or [],
        }
    return replies


def check_pet(value: Any) -> None:
    assert set(value) == set(SCHEMA["properties"])  # type: ignore[call-overload]
    assert isinstance(value["name"], str) and len(value["name"]) <= 12
    assert value["kind"] in ("cat", "dog", "axolotl")
    assert len(value["ages"]) <= 3 and all(isinstance(age, int) and 0 <= age <= 30 for age in value["ages"])
    assert value["home"] in (None, True, False)


async def test_streamed_equals_whole(gateway: Gateway) -> None:
    served = gateway(frames=4096)
    ended: dict[int, int] = {}
    turn = asyncio.Semaphore(AT_ONCE)

    async def both(client: httpx.AsyncClient, number: int) -> None:
        body = request(number)
        async with turn:
            got = await client.post("/v1/chat/completions", json=body)
            streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
            chunks = sse(await client.post("/v1/chat/completions", json=streaming))
        assert got.status_code == 200, got.text
        whole = got.json()
        replies = from_whole(whole)
        assert from_chunks(chunks) == replies, body
        assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert len(replies) == body.get("n", 1)
        for reply in replies.values():
            if body.get("logprobs"):
                assert len(reply["tokens"]) == whole["usage"]["completion_tokens"]
            for stop in body.get("stop", ()):
                assert stop not in reply["text"]
            if reply["reason"] == "length":
                continue
            ended[number % 8] = ended.get(number % 8, 0) + 1
            if number % 8 == 5:
                assert reply["reason"] == "tool_calls" and reply["text"] == ""
                for call in reply["calls"].values():
                    arguments = json.loads(call["arguments"])
                    check_pet(arguments) if call["name"] == "pet" else None
            elif number % 8 == 6:
                check_pet(json.loads(reply["text"]))
            elif number % 8 == 7:
                assert isinstance(json.loads(reply["text"]), dict)

    async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
        await asyncio.gather(*(both(client, number) for number in range(REQUESTS)))
    assert ended.get(5, 0) >= 10 and ended.get(6, 0) >= 10 and ended.get(1, 0) >= 5, ended
