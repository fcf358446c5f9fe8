"""Cases 12, 30, 32, 38 and 40 from the field, through HTTP (28 is in test_requests.py)."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from .conftest import Gateway
from .rig import END, LONG, Daemon, Served, calls, environment, says, sse, until


def raw(served: Served, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request for a chat has been sent."""
    at = urlsplit(served.url)
    assert at.hostname and at.port
    connection = socket.create_connection((at.hostname, at.port), timeout=30)
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def asks(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def passes(served: Served) -> int:
    """Of the model, since boot."""
    with served.daemon.client() as client:
        return client.vmstat().counters.get("passes", 0)


# -- 12: a client of several replies goes away ----------------------------------------------------------------------


def test_case_12_four_replies_cut_after_the_first_chunk(gateway: Gateway) -> None:
    served = gateway(script=says("x" * 3000, ends=False), pass_ms=2)
    connection = raw(served, asks("hi", n=4, stream=True, max_tokens=4096))
    assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    with served.daemon.client() as client:
        until(lambda: client.vmstat().counters["contexts"] == 4, "four contexts")
    connection.close()
    served.daemon.at_rest()


def test_case_12_room_for_two_of_four(gateway: Gateway) -> None:
    served = gateway(script=says("yes"), max_contexts=6, pass_ms=1)
    with served.daemon.client() as other:
        held = [other.alloc_context() for _ in range(4)]
        refused = served.chat("hi", n=4)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert "context slots" in refused.json()["error"]["message"]
        until(lambda: other.vmstat().counters["contexts"] == 4, "all or none")
        assert [choice["message"]["content"] for choice in served.chat("hi", n=2).json()["choices"]] == ["yes", "yes"]
        for context in held[:2]:
            context.release()
        assert len(served.chat("hi", n=4).json()["choices"]) == 4
    served.daemon.at_rest()


def test_case_12_a_reply_that_ends_early_closes_nothing(gateway: Gateway) -> None:
    served = gateway(vocab_tokens=END + 1)  # what the simulated model says by itself; a token in 258 ends a turn
    chunks = sse(served.chat("hi", n=6, stream=True, max_tokens=120, temperature=1.7, seed=5))
    seen: dict[int, int] = {}
    ended: dict[int, str] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["index"] not in ended, "nothing comes after a reply's end"
        seen[choice["index"]] = seen.get(choice["index"], 0) + 1
        if choice["finish_reason"]:
            ended[choice["index"]] = choice["finish_reason"]
    assert set(ended) == set(range(6))
    assert set(ended.values()) == {"stop", "length"}, "the seed has both kinds"


# -- 30: stop strings ---------------------------------------------------------------------------------------------


DE, HI, J, EFG = range(258, 258 + len(LONG))
SPELLED = [DE, ord("F"), ord("G"), HI, J, END]  # DEFGHIJ tail


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["DEFGHIJ"], "", "stop"),
        (["DEFX"], "DEFGHIJ tail", "stop"),
        (["AB", "ABC"], "DEFGHIJ tail", "stop"),
        (["J t"], "DEFGHI", "stop"),
        (["E"], "D", "stop"),
        (["GHIJ tail and more"], "DEFGHIJ tail", "stop"),
        (["FG", "EFGH"], "DE", "stop"),
    ],
)
def test_case_30_stop_strings(stop_gateway: Served, stop: list[str], text: str, reason: str) -> None:
    whole = stop_gateway.chat("hi", stop=stop).json()
    assert (whole["choices"][0]["message"]["content"], whole["choices"][0]["finish_reason"]) == (text, reason)
    chunks = sse(stop_gateway.chat("hi", stop=stop, stream=True))
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == text
    said = stop_gateway.http.post(
        "/v1/messages",
        json={
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 50,
            "stop_sequences": stop,
            "temperature": 0,
        },
    ).json()
    assert "".join(block["text"] for block in said["content"]) == text
    assert said["stop_reason"] == ("end_turn" if text.endswith("tail") else "stop_sequence")


def test_case_30_the_length_ends_while_text_is_held(stop_gateway: Served) -> None:
    cut = stop_gateway.chat("hi", stop=["GHIJ tail"], max_tokens=4).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("DEFGHI", "length")


@pytest.fixture(scope="module")
def stop_gateway(tmp_path_factory: pytest.TempPathFactory) -> Any:
    served = Served(Daemon(tmp_path_factory.mktemp("stop"), script=SPELLED))
    yield served
    served.stop()
    served.daemon.at_rest()
    assert served.daemon.process.stop() == 0


# -- 32: cancelled during the prompt --------------------------------------------------------------------------------

CHUNK = 64
PROMPT = "p" * 1900


@pytest.fixture
def slow(gateway: Gateway) -> Served:
    served = gateway(script=says("yes"), pass_ms=40)
    with served.daemon.client() as client:
        client.sysctl("sched.step_tokens", CHUNK)
    return served


@pytest.mark.parametrize("way", ["stream", "whole", "reset"])
def test_case_32_a_client_leaves_during_its_prompt(slow: Served, way: str) -> None:
    connection = raw(slow, asks(PROMPT, stream=way == "stream"))
    until(lambda: passes(slow) >= 3, "some chunks")
    if way == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    with slow.daemon.client() as client:
        until(lambda: client.vmstat().counters["contexts"] == 0, "the context's end")
        assert passes(slow) < len(PROMPT) // CHUNK, "the prompt was not computed to its end"
        assert slow.chat("short").json()["choices"][0]["message"]["content"] == "yes"
        again = slow.chat(PROMPT).json()
    assert again["choices"][0]["message"]["content"] == "yes"
    found = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found >= 2 * CHUNK, "the retry goes on behind the blocks that were done"


def test_case_32_a_reader_that_has_half_closed_gets_its_answer(slow: Served) -> None:
    for streaming in (False, True):
        connection = raw(slow, asks(PROMPT + str(streaming), stream=streaming))
        connection.shutdown(socket.SHUT_WR)
        said = b""
        while data := connection.recv(65536):
            said += data
        connection.close()
        assert b"HTTP/1.1 102" in said and b"HTTP/1.1 200" in said
        assert (b"[DONE]" if streaming else b'"content":"yes"') in said


# -- 38: waits that end in other ways ---------------------------------------------------------------------------------

TOOL = [{"type": "function", "function": {"name": "weather"}}]


def called(served: Served, question: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A conversation up to a tool's result, and the usage so far."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    got = served.http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOL, "temperature": 0}).json()
    reply = got["choices"][0]["message"]
    (call,) = reply["tool_calls"]
    return [*messages, reply, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}], got["usage"]


def answered(served: Served, messages: list[dict[str, Any]]) -> dict[str, Any]:
    got = served.http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOL, "temperature": 0})
    assert got.status_code == 200, got.text
    answer: dict[str, Any] = got.json()
    return answer


SCRIPTS = [says(calls("weather", city="Oslo")), says("It rains.")]


def test_case_38_a_result_after_the_deadline_and_a_second_one(gateway: Gateway) -> None:
    served = gateway("--parked", "0.3", scripts=SCRIPTS)
    messages, spent = called(served, "weather?" * 20)
    with served.daemon.client() as client:
        until(lambda: client.vmstat().counters["contexts"] == 0, "the end of the wait")
    late = answered(served, messages)
    there = spent["prompt_tokens"] + spent["completion_tokens"]
    assert late["usage"]["prompt_tokens_details"]["cached_tokens"] >= there - 16, "its KV was still there"


def test_case_38_two_answers_to_one_call(gateway: Gateway) -> None:
    served = gateway(scripts=SCRIPTS)
    messages, _ = called(served, "weather?")
    first, second = answered(served, messages), answered(served, messages)
    assert first["choices"][0]["message"]["content"] == "It rains."
    assert second["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 32


def test_case_38_those_that_wait_take_no_place(gateway: Gateway) -> None:
    served = gateway(scripts=SCRIPTS)
    with served.daemon.client() as client:
        client.sysctl("sched.max_running", 4)
        waiting = [called(served, f"weather {n}?")[0] for n in range(4)]
        states = [p.state for p in client.ps().processes if p.name == "local"]
        assert states == ["tool_wait"] * 4
        assert served.chat("fifth", tools=TOOL).json()["choices"][0]["finish_reason"] == "tool_calls"
    for messages in waiting:
        assert answered(served, messages)["choices"][0]["message"]["content"] == "It rains."


def test_case_38_an_impatient_client_gets_there(slow: Served) -> None:
    before = 0
    for _ in range(3):
        connection = raw(slow, asks(PROMPT))
        until(lambda: passes(slow) >= before + 4, "some chunks")  # noqa: B023 (called at once)
        connection.close()
        with slow.daemon.client() as client:
            until(lambda: client.vmstat().counters["contexts"] == 0, "the context's end")
        before = passes(slow)
    final = slow.chat(PROMPT).json()["usage"]
    assert final["prompt_tokens_details"]["cached_tokens"] >= 3 * 2 * CHUNK, "each try began where the one before ended"


# -- 40: who may -----------------------------------------------------------------------------------------------------


def keys_file(directory: Path, mode: int = 0o600) -> str:
    path = directory / "keys.toml"
    rows = [f'[[key]]\nname = "{name}"\nkey = "sk-{name}-secret"\n' for name in ("alice", "bob")]
    path.write_text("\n".join(rows) + "concurrent = 2\n[key.limits]\ncontexts = 3\n")
    path.chmod(mode)
    return str(path)


def test_case_40_keys_are_apart(gateway: Gateway, tmp_path: Path) -> None:
    served = gateway("--keys", keys_file(tmp_path), scripts=SCRIPTS)
    body = asks("the same prompt " * 20, tools=TOOL)

    def cached(key: str) -> Any:
        got = served.http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer sk-{key}-secret"})
        assert got.status_code == 200, got.text
        return got.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("alice") == 0
    assert cached("bob") == 0, "bob finds nothing of alice's"
    assert cached("alice") > 100 and cached("bob") > 100, "each finds its own"
    for headers in ({}, {"authorization": "Bearer sk-alice-secre"}, {"authorization": "Basic sk-alice-secret"}):
        refused = served.http.post("/v1/chat/completions", json=body, headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
    assert served.http.post("/v1/messages", json={}, headers={"x-api-key": "sk-alice-secret"}).status_code == 400
    with served.daemon.client() as client:
        uid = os.getuid()
        groups = {row.name for row in client.groups().rows}
        assert {f"uid:{uid}/alice", f"uid:{uid}/bob"} <= groups
        assert {p.group for p in client.ps().processes if p.name == "bob"} == {f"uid:{uid}/bob"}
    # bob's group may have three contexts, one of which is parked: the oldest parked one makes room, as long as there is one
    for n in range(5):
        got = served.http.post(
            "/v1/chat/completions", json=asks(f"{n}", tools=TOOL), headers={"authorization": "Bearer sk-bob-secret"}
        )
        assert got.status_code == 200, got.text


def test_what_a_key_pins_it_pays_for_and_gives_up_for_its_own_requests(gateway: Gateway, tmp_path: Path) -> None:
    """bob's group may have three contexts.  His pins are among them, and make room for his requests, not for alice's."""
    served = gateway("--keys", keys_file(tmp_path), script=says("yes"), frames=2048)
    uid = os.getuid()

    def ask(key: str, system: str) -> None:
        marked = [{"type": "text", "text": system * 40, "cache_control": {"type": "ephemeral"}}]
        body = {"system": marked, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        got = served.http.post("/v1/messages", json=body, headers={"x-api-key": f"sk-{key}-secret"})
        assert got.status_code == 200, got.text

    ask("alice", "Be terse. ")
    for system in ("Be kind. ", "Be brief. ", "Be exact. ", "Be quick. "):
        ask("bob", system)
    with served.daemon.client() as client:
        groups = [p.group for p in client.ps().processes if p.name.endswith(" cache")]
        assert set(groups) == {f"uid:{uid}/alice", f"uid:{uid}/bob"} and groups.count(f"uid:{uid}/alice") == 1
        (bob,) = [row for row in client.groups().rows if row.name == f"uid:{uid}/bob"]
        assert sum(len(p.contexts) for p in client.ps().processes if p.group == bob.name) <= 3


@pytest.mark.parametrize("wrong", ["others may read it", "no loopback without keys", "no such file", "a wrong field"])
def test_case_40_what_is_refused_at_the_start(tmp_path: Path, wrong: str) -> None:
    options = {
        "others may read it": ["--keys", keys_file(tmp_path, 0o644)],
        "no loopback without keys": ["--host", "0.0.0.0"],
        "no such file": ["--keys", str(tmp_path / "none.toml")],
        "a wrong field": ["--keys", str(tmp_path / "wrong.toml")],
    }[wrong]
    (tmp_path / "wrong.toml").write_text('[[key]]\nname = "a"\nkey = "12345678"\nquota = 5\n')
    (tmp_path / "wrong.toml").chmod(0o600)
    command = [sys.executable, "-m", "attnix.userland.cli", "serve", "--port", "0", *options]
    said = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert said.returncode == 1 and said.stdout == "" and len(said.stderr.splitlines()) == 1, said
