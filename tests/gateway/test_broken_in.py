"""What broke the gateway when it was attacked: each of these was a 5xx, or a connection that stayed for ever."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from attnix.userland.gateway.tools.hermes import Hermes
from attnix.userland.gateway.tools.protocol import Said, Tool, call_rules

from .conftest import Gateway
from .rig import Served, calls, says, sse, until

M = [{"role": "user", "content": "hi"}]
RESULT = {"role": "tool", "tool_call_id": "c", "content": "4"}


def answered(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*M, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT]


def function(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def nested(depth: int) -> str:
    """A schema as text: json.dumps here would give up before the gateway does."""
    return '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth


def post(served: Served, body: dict[str, Any]) -> Any:
    return served.http.post("/v1/chat/completions", json={"messages": M, "max_tokens": 4, **body})


def test_odd_arguments_and_depth_are_no_fault_of_the_gateways(gateway: Gateway) -> None:
    served = gateway(script=says("yes"))
    # Half a character: JSON has an escape for it, UTF-8 has not, and the template would hand it to the tokenizer.
    for arguments in ('{"x": "\\ud800"}', '{"\\uDFFF": [1, {"y": "a\\ud83d b"}]}', '{"x": "\\ud83d\\ude00"}'):
        assert post(served, {"messages": answered(arguments)}).status_code == 200, arguments
    assert post(served, {"messages": answered("[" * 100_000 + "]" * 100_000)}).status_code == 400
    for depth in (100, 200, 300, 400, 440, 480):
        body = json.dumps({"messages": M, "max_tokens": 4, "tools": function({"x": 0}), "tool_choice": "required"})
        body = body.replace('{"x": 0}', nested(depth))
        got = served.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert got.status_code in (200, 400), got.text
    assert post(served, {}).status_code == 200


def test_a_grammar_that_shows_late_that_it_cannot_be_followed(gateway: Gateway) -> None:
    served = gateway(script=says("yes"))
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    for schema in (endless, {"$ref": "#"}, {"type": "array", "minItems": 10**9, "items": {"type": "null"}}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        got = post(served, {"response_format": form, "temperature": 0, "max_tokens": 12})
        assert got.status_code in (200, 400), (schema, got.text)
        assert "\n" not in got.json().get("error", {}).get("message", "")


def test_references_in_a_tools_parameters(gateway: Gateway) -> None:
    city = {
        "type": "object",
        "properties": {"$ref": {"const": "#"}},
        "required": ["$ref"],
        "additionalProperties": False,
    }
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/City"}},
        "required": ["at"],
        "additionalProperties": False,  # the model of these tests would never stop to think of more
        "$defs": {"City": city},
    }
    rules = call_rules([Tool("f", "", {**parameters, "enum": [{"$ref": "#/a"}]})], "arguments")
    arguments = json.loads(rules.partition("%json ")[2])["properties"]["arguments"]
    assert arguments["properties"]["at"] == {"$ref": "#/properties/arguments/$defs/City"}
    assert arguments["enum"] == [{"$ref": "#/a"}]  # a value, whatever it looks like
    assert arguments["$defs"]["City"] == city
    forced = {"tools": function(parameters), "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    got = post(gateway(script=says("yes")), {**forced, "max_tokens": 400})
    assert got.status_code == 200, got.text
    (call,) = got.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": {"$ref": "#"}}


def test_more_replies_than_there_are_slots(gateway: Gateway) -> None:
    served = gateway(script=says("yes"), max_contexts=8)
    assert post(served, {"n": 20}).status_code == 400  # no waiting would help
    assert post(served, {"n": 8}).status_code == 200


def test_more_prompts_than_there_are_slots(gateway: Gateway) -> None:
    served = gateway(script=says("yes"), max_contexts=40)
    got = served.http.post("/v1/completions", json={"prompt": ["a"] * 100, "max_tokens": 4})
    assert got.status_code == 200 and [choice["text"] for choice in got.json()["choices"]] == ["yes"] * 100


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', '{"x": "\ufffd"}'),
        ('<tool_call>{"name": "f\\n", "arguments": {}}</tool_call>', ""),
        ('<tool_call>{"name": "' + "f" * 200 + '", "arguments": {}}</tool_call>', ""),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', ""),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', ""),
        ('<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', '{"x": 1.7976931348623157e+308}'),
    ],
)
def test_calls_that_a_model_may_well_write(gateway: Gateway, stream: bool, said: str, arguments: str) -> None:
    served = gateway(script=says(said))
    got = post(served, {"tools": function({}), "max_tokens": 400, "stream": stream})
    assert got.status_code == 200, got.text
    if stream:
        deltas = [event["choices"][0]["delta"] for event in sse(got)]
        text = "".join(delta.get("content") or "" for delta in deltas)
        found = [call for delta in deltas for call in delta.get("tool_calls", ())]
    else:
        message = got.json()["choices"][0]["message"]
        text, found = message["content"] or "", message.get("tool_calls", [])
    assert [call["function"]["arguments"] for call in found] == ([arguments] if arguments else [])
    assert text == ("" if arguments else said)  # what is no call is text, as it was written


def test_a_call_nested_deeper_than_python_goes() -> None:
    """The JSON parser goes deeper than a function of ours that walks through what it found."""
    written = "<tool_call>" + "[" * 900 + '{"name": "f"}' + "]" * 900 + "</tool_call>"
    scanner = Hermes().scanner(frozenset(["f"]))
    assert scanner.push(written) + scanner.finish() == [Said(written)]


def test_the_gateways_own_process_is_killed(gateway: Gateway) -> None:
    served = gateway(script=says("yes"))
    with served.daemon.client() as client:
        (own,) = [process.pid for process in client.ps().processes if process.name == "gateway"]
        client.kill(own, 9)
        assert post(served, {}).status_code in (503, 200), "which: whether it has another connection already"
        until(lambda: bool(post(served, {}).status_code == 200), "another connection")
        (other,) = [process.pid for process in client.ps().processes if process.name == "gateway"]
        assert other != own


def test_a_parked_conversation_is_killed(gateway: Gateway) -> None:
    """The follow-up finds it gone, and is answered in a new context."""
    said = calls("f")
    served = gateway(scripts=[says(said), says("yes")])
    first = post(served, {"tools": function({}), "max_tokens": 400}).json()["choices"][0]["message"]
    with served.daemon.client() as client:
        (parked,) = [process.pid for process in client.ps().processes if process.name == "local"]
        client.kill(parked, 9)
        until(lambda: client.vmstat().counters["contexts"] == 0, "its end")
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "4"}
    got = post(served, {"messages": [*M, first, result], "tools": function({}), "max_tokens": 400})
    assert got.status_code == 200, got.text


def connected(served: Served) -> socket.socket:
    url = urlsplit(served.url)
    connection = socket.create_connection((url.hostname, url.port), timeout=30)
    return connection


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 500\r\n"


def test_slow_heads_and_bodies_end(gateway: Gateway) -> None:
    served = gateway("--time-limit", "0.3", script=says("yes"))
    with connected(served) as head, connected(served) as body, connected(served) as silent:
        head.sendall(HEAD)
        body.sendall(HEAD + b"\r\n{")
        assert body.recv(1000).startswith(b"HTTP/1.1 408 ")
        for each in (head, silent):
            with pytest.raises(ConnectionResetError):
                if not each.recv(1):
                    raise ConnectionResetError


def test_who_takes_nothing_of_an_answer_is_left(gateway: Gateway) -> None:
    served = gateway("--time-limit", "2", vocab_tokens=262, script=list(b"x" * 3000))
    body = json.dumps({"messages": M, "stream": True, "n": 8, "max_tokens": 3000, "logprobs": True}).encode()
    with connected(served) as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.sendall(HEAD.replace(b"500", b"%d" % len(body)) + b"\r\n" + body)
        assert reader.recv(8) == b"HTTP/1.1"  # it runs
        served.daemon.at_rest()  # and ends, though nobody reads on
