"""A streamed reply is the whole one in pieces: 200 seeded requests over the three endpoints, each asked for both ways.

What the model says is told by the test (texts in several scripts, cut inside their characters; tool calls; noise), so both
are also held to what they have to be.  Under a grammar the model says what it likes: that is valid whatever it likes.
Anthropic's interface has no seed: there the requests are greedy.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx2 as httpx
import jsonschema

from .conftest import Gateway
from .rig import END, LONG, says, sse

REQUESTS = 200
AT_ONCE = 16
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog", "axolotl", "ねこ"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 30}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "kind", "ages", "home"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Told(NamedTuple):
    """What the model says, and what a reader of tool calls makes of it."""

    script: list[int]
    text: str
    calls: list[tuple[str, Any]]


def told(written: str, text: str | None = None, *calls: tuple[str, Any]) -> Told:
    return Told(says(written), written if text is None else text, list(calls))


EFG = 258 + LONG.index("EFG")
TEXTS = [
    told("Grüße aus Köln: 世界, 😀 und 🙂🙂. Naïve café?"),
    told(
        '見ます。\n<tool_call>\n{"name": "pet", "arguments": {"name": "ミケ 🐈"}}\n</tool_call>',
        "見ます。",
        ("pet", {"name": "ミケ 🐈"}),
    ),
    Told([], "", []),  # noise
    told("Le cœur a ses raisons — «что?» 答えは四十二。🇳🇴 e\u0301"),
    told(
        '<tool_call>{"name": "nothing"}</tool_call> and <tool_call>\n{"name": "pet", "arguments": {"ages": [3]}}',
        "and",
        ("nothing", {}),
        ("pet", {"ages": [3]}),
    ),
    Told([*b"ABCD", EFG, *"HIJ 世 <tool_cal".encode(), END], "ABCDEFGHIJ 世 <tool_cal", []),
    told("no <tool_call>{not a call}</tool_call> でも文。"),
]
STOPS = ["界, 😀", "что?» 答", "DEFGH", "é?", "🙂🙂.", "文。", "never said", "見ます。\n<tool"]


def until_stop(text: str, stops: list[str]) -> tuple[str, str]:
    """The text before the stop that ends first, the longest of those that end there; and that stop."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, ""


def spelled(tokens: list[int]) -> str:
    """Of one text, with its end or without."""
    pieces = [
        bytes([token]) if token < 256 else b"" if token == END else LONG[token - 258].encode() for token in tokens
    ]
    return b"".join(pieces).decode("utf-8", "replace")


# -- requests: (endpoint, what is asked for) --------------------------------------------------------------------------

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
TOOLS = [
    {"type": "function", "function": {"name": "pet", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "nothing"}},
]
ANTHROPIC_TOOLS = [{"name": "pet", "input_schema": SCHEMA}, {"name": "nothing", "input_schema": NOTHING}]
PET = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
ENOUGH = 1500  # tokens, for whatever a grammar allows
KINDS: list[tuple[str, str, dict[str, Any]]] = [
    (CHAT, "text", {}),
    (CHAT, "cut", {"max_tokens": 21}),
    (CHAT, "stop", {"stop": STOPS}),
    (CHAT, "logprobs", {"logprobs": True, "top_logprobs": 2}),
    (CHAT, "logprobs and stop", {"logprobs": True, "stop": STOPS}),
    (CHAT, "tools", {"tools": TOOLS}),
    (CHAT, "required", {"tools": TOOLS, "tool_choice": "required", "max_tokens": ENOUGH}),
    (CHAT, "schema", {"response_format": PET, "max_tokens": ENOUGH}),
    (CHAT, "object", {"response_format": {"type": "json_object"}, "max_tokens": ENOUGH, "top_p": 0.9}),
    (COMPLETIONS, "text", {}),
    (COMPLETIONS, "stop", {"stop": STOPS[:4]}),
    (COMPLETIONS, "logprobs and stop", {"logprobs": 2, "stop": STOPS}),
    (COMPLETIONS, "prompts", {}),
    (MESSAGES, "text", {}),
    (MESSAGES, "cut", {"max_tokens": 21}),
    (MESSAGES, "stop", {"stop_sequences": STOPS}),
    (MESSAGES, "tools", {"tools": ANTHROPIC_TOOLS}),
    (
        MESSAGES,
        "schema",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": ENOUGH},
    ),
    (MESSAGES, "required", {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": ENOUGH}),
]


class Asked(NamedTuple):
    endpoint: str
    kind: str
    body: dict[str, Any]


def request(number: int) -> Asked:
    """The kinds take turns, and how many replies are wanted does so by itself."""
    endpoint, kind, fields = KINDS[number % len(KINDS)]
    said = f"Grüße {number} 世界" + "." * (number // len(KINDS) % len(TEXTS))
    body: dict[str, Any] = {"max_tokens": 200, "temperature": 1, **fields}
    if endpoint == MESSAGES:
        return Asked(endpoint, kind, {**body, "messages": [{"role": "user", "content": said}], "temperature": 0})
    body |= {"seed": number, "n": 1 + number // len(KINDS) % 3}
    if endpoint == CHAT:
        return Asked(endpoint, kind, {**body, "messages": [{"role": "user", "content": said}]})
    return Asked(endpoint, kind, {**body, "prompt": [said, "é", said + "?"] if kind == "prompts" else said})


# -- replies: the same of all endpoints, whole or streamed --------------------------------------------------------------


class Reply:
    def __init__(self) -> None:
        self.text = ""
        self.calls: list[tuple[str, str]] = []  # name, arguments as they were written
        self.reason: str | None = None
        self.stop: str | None = None
        self.logprobs: list[Any] = []

    def __repr__(self) -> str:
        return repr(vars(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reply) and vars(self) == vars(other)


def listed(logprobs: Any) -> list[Any]:
    """One entry per token, in either of OpenAI's shapes."""
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    return [list(row) for row in zip(*columns, strict=True)]


def chat_whole(answer: Any) -> list[Reply]:
    replies = [Reply() for _ in answer["choices"]]
    for choice in answer["choices"]:
        reply, message = replies[choice["index"]], choice["message"]
        reply.text, reply.reason = message["content"] or "", choice["finish_reason"]
        reply.logprobs = listed(choice["logprobs"])
        reply.calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    return replies


def chat_streamed(chunks: list[Any]) -> list[Reply]:
    replies: dict[int, Reply] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            reply, delta = replies.setdefault(choice["index"], Reply()), choice["delta"]
            assert reply.reason is None, "nothing comes behind the end"
            reply.text += delta.get("content") or ""
            reply.logprobs += listed(choice["logprobs"])
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(reply.calls):
                    reply.calls.append(("", ""))
                name, arguments = reply.calls[call["index"]]
                function = call["function"]
                whole = (name + (function.get("name") or ""), arguments + (function.get("arguments") or ""))
                reply.calls[call["index"]] = whole
            reply.reason = choice["finish_reason"]
    return [replies[index] for index in range(len(replies))]


def completion_whole(answer: Any) -> list[Reply]:
    return completion_streamed([answer])


def completion_streamed(chunks: list[Any]) -> list[Reply]:
    replies: dict[int, Reply] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            reply = replies.setdefault(choice["index"], Reply())
            assert reply.reason is None, "nothing comes behind the end"
            reply.text += choice["text"]
            reply.logprobs += listed(choice["logprobs"])
            reply.reason = choice["finish_reason"]
    return [replies[index] for index in range(len(replies))]


def message_whole(answer: Any) -> list[Reply]:
    reply = Reply()
    for block in answer["content"]:
        if block["type"] == "text":
            assert block["text"]
            reply.text += block["text"]
        else:
            reply.calls.append((block["name"], json.dumps(block["input"], ensure_ascii=False)))
    reply.reason, reply.stop = answer["stop_reason"], answer["stop_sequence"]
    return [reply]


def message_streamed(events: list[Any]) -> list[Reply]:
    """Also that the events come in the order which Anthropic's clients count on."""
    assert events[0]["type"] == "message_start" and events[0]["message"]["content"] == []
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            is_open = True
            blocks.append(dict(event["content_block"], written=""))
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1
            delta = event["delta"]
            assert delta["type"] == ("text_delta" if blocks[-1]["type"] == "text" else "input_json_delta")
            blocks[-1]["written"] += delta.get("text", "") + delta.get("partial_json", "")
        else:
            assert event["type"] == "content_block_stop" and is_open and event["index"] == len(blocks) - 1
            is_open = False
    assert not is_open
    content = [
        block | ({"text": block["written"]} if block["type"] == "text" else {"input": json.loads(block["written"])})
        for block in blocks
    ]
    return message_whole({"content": content, **events[-2]["delta"]})


READ: dict[str, tuple[Callable[[Any], list[Reply]], Callable[[list[Any]], list[Reply]]]] = {
    CHAT: (chat_whole, chat_streamed),
    COMPLETIONS: (completion_whole, completion_streamed),
    MESSAGES: (message_whole, message_streamed),
}


def named_events(response: httpx.Response) -> list[Any]:
    """Anthropic's: each has a name, which is its type."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, _, data = block.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# -- what they have to be ---------------------------------------------------------------------------------------------


def check_told(asked: Asked, one: Told, reply: Reply) -> None:
    """The reply is what the model was told to say."""
    stops = asked.body.get("stop") or asked.body.get("stop_sequences") or []
    most = asked.body["max_tokens"]
    if asked.kind == "tools":
        assert most >= len(one.script) and not stops
        assert reply.text == one.text
        assert [(name, json.loads(arguments)) for name, arguments in reply.calls] == one.calls
        assert reply.reason in (("tool_calls", "tool_use") if one.calls else ("stop", "end_turn"))
        return
    text, stop = until_stop(spelled(one.script[:most]), stops)
    ended = "stop" if stop or most >= len(one.script) else "length"
    assert (reply.text, reply.calls) == (text, [])
    if asked.endpoint == MESSAGES:
        reasons = {"stop": "stop_sequence" if stop else "end_turn", "length": "max_tokens"}
        assert (reply.reason, reply.stop) == (reasons[ended], stop or None)
    else:
        assert reply.reason == ended


def check_valid(asked: Asked, reply: Reply) -> None:
    """Whatever follows a grammar has come to its end, and is what was asked for."""
    if asked.kind == "required":
        assert reply.reason in ("tool_calls", "tool_use") and reply.text == "" and reply.calls
        for name, arguments in reply.calls:
            jsonschema.validate(json.loads(arguments), {"pet": SCHEMA, "nothing": NOTHING}[name])
        return
    assert reply.reason in ("stop", "end_turn") and not reply.calls
    jsonschema.validate(json.loads(reply.text), SCHEMA if asked.kind == "schema" else {"type": "object"})


async def test_streamed_equals_whole(gateway: Gateway) -> None:
    scripts = [one.script for one in TEXTS]
    served = gateway(frames=4096, texts=scripts, likes=[ord('"'), ord("}")])
    seen: Counter[str] = Counter()
    turn = asyncio.Semaphore(AT_ONCE)

    async def both(client: httpx.AsyncClient, number: int) -> None:
        asked = request(number)
        streaming = {**asked.body, "stream": True}
        if asked.endpoint != MESSAGES:
            streaming["stream_options"] = {"include_usage": True}
        async with turn:
            got = await client.post(asked.endpoint, json=asked.body)
            streamed = await client.post(asked.endpoint, json=streaming)
        assert got.status_code == 200, got.text
        whole = got.json()
        events = named_events(streamed) if asked.endpoint == MESSAGES else sse(streamed)
        read_whole, read_streamed = READ[asked.endpoint]
        replies = read_whole(whole)
        assert read_streamed(events) == replies, asked
        n, prompts = asked.body.get("n", 1), len(asked.body["prompt"]) if asked.kind == "prompts" else 1
        assert len(replies) == n * prompts
        if asked.endpoint == MESSAGES:
            spent = whole["usage"]
            completion = spent["output_tokens"]
            assert events[-2]["usage"]["output_tokens"] == completion
            prompt = sum(spent[f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_"))
        else:
            prompt, completion = whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]
            assert events[-1]["usage"]["completion_tokens"] == completion
        if "logprobs" in asked.kind:
            assert sum(len(reply.logprobs) for reply in replies) == completion, asked
        for index, reply in enumerate(replies):
            seen["multi-byte"] += any(char > "\x7f" and char != "\ufffd" for char in reply.text)
            if asked.kind in ("required", "schema", "object"):
                check_valid(asked, reply)
                seen[f"{asked.kind}, n {n}"] += 1
                continue
            if asked.kind == "prompts":
                prompt = len(asked.body["prompt"][index // n].encode())
            one = TEXTS[(prompt + asked.body.get("seed", 0) + index % n) % len(TEXTS)]
            if one.script:
                check_told(asked, one, reply)
            else:
                seen["noise"] += 1
            seen[f"{asked.endpoint} called"] += bool(reply.calls)
            seen[f"{asked.endpoint} stopped"] += asked.kind == "stop" and len(reply.text) < len(spelled(one.script))
            seen[f"{asked.endpoint} cut"] += asked.kind == "cut" and reply.text.endswith("\ufffd")

    async with httpx.AsyncClient(base_url=served.url, timeout=120) as client:
        await asyncio.gather(*(both(client, number) for number in range(REQUESTS)))
    # The draw has everything that matters, and more than once.
    assert seen["multi-byte"] > REQUESTS // 2 and seen["noise"] > 10, seen
    for what in (f"{CHAT} called", f"{MESSAGES} called", *(f"{at} stopped" for at in READ), f"{CHAT} cut"):
        assert seen[what] >= 2, (what, seen)
    for kind in ("required", "schema", "object"):
        assert all(seen[f"{kind}, n {n}"] >= n for n in (1, 2, 3)), (kind, seen)
