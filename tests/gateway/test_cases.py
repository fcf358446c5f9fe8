"""Waits that end in other ways, and who may what (cases 38 and 40), through HTTP.

Cases 12 and 32 are in test_leaving.py, 28 in test_window.py, 30 in test_stops.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from attnix.syscalls import Client
from attnix.syscalls.exceptions import StaleHandle
from attnix.syscalls.paths import MAX_PATH_BYTES

from .conftest import Gateway
from .rig import BLOCK, DEADLINE_S, Daemon, Process, Served, calls, environment, says, until
from .test_leaving import asks

# -- 38: waits that end in other ways ---------------------------------------------------------------------------------

TOOL = [{"type": "function", "function": {"name": "weather"}}]


def called(served: Served, question: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A conversation up to a tool's result, and the usage so far."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    got = served.http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOL, "temperature": 0}).json()
    reply = got["choices"][0]["message"]
    (call,) = reply["tool_calls"]
    return [*messages, reply, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}], got["usage"]


def answered(served: Served, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "tools": TOOL, "temperature": 0, **fields}
    got = served.http.post("/v1/chat/completions", json=body)
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


def conversation(client: Client) -> Any:
    """The context of the conversation that is kept; None: there is none."""
    rows = [row for process in client.ps().processes if process.name == "local" for row in process.contexts]
    return min(rows, key=lambda row: row.cid, default=None)


def waits(client: Client) -> bool:
    kept = conversation(client)
    return kept is not None and kept.state == "tool_wait"


def test_case_38_a_result_between_the_deadline_and_the_end(gateway: Gateway) -> None:
    """The deadline makes the context idle, with all that it holds, until the gateway gives it up: a result goes on in it."""
    served = gateway("--parked", "0.3", scripts=SCRIPTS)
    with served.daemon.client() as client:
        for attempt in range(20):  # now and then the gateway looks just after the deadline
            messages, spent = called(served, f"weather {attempt}? " * 20)
            waiting = conversation(client)
            until(lambda: not waits(client), "the deadline")
            late = answered(served, messages)
            kept = conversation(client)
            if kept is not None and waiting is not None and kept.cid == waiting.cid:
                break
        assert kept is not None and waiting is not None and kept.cid == waiting.cid
        assert client.vmstat().counters["tool_waits_late"] > 0
    assert late["choices"][0]["message"]["content"] == "It rains."
    there = spent["prompt_tokens"] + spent["completion_tokens"]
    assert late["usage"]["prompt_tokens_details"]["cached_tokens"] >= there - 1, "nothing was computed again"


def test_case_38_a_wait_that_somebody_else_has_ended(gateway: Gateway) -> None:
    """Its owner answers it through the socket: the result that comes by HTTP finds it over, and is appended."""
    served = gateway(scripts=SCRIPTS)
    messages, _ = called(served, "weather?")
    with served.daemon.client() as client:
        waiting = conversation(client)
        assert waits(client)
        client.resume(0, 0, b"", "", (), waiting.cid)
        with pytest.raises(StaleHandle):
            client.resume(0, 0, b"", "", (), waiting.cid)
        assert answered(served, messages)["choices"][0]["message"]["content"] == "It rains."
        assert conversation(client).cid == waiting.cid


def test_case_38_what_waits_may_lie_in_another_tier(gateway: Gateway) -> None:
    """Others need the frames: what waits is copied down, and an answer finds it there.  What the model then says is what it says
    on a machine on which nobody was in the way."""
    scripts: list[list[int]] = [says(calls("weather", city="Oslo")), []]
    crowded = gateway(scripts=scripts, frames=48, dram_frames=200, window_tokens=48 * BLOCK)
    alone = gateway(scripts=scripts)
    with crowded.daemon.client() as client:
        client.sysctl("wait.policy", "ttl")
        client.sysctl("wait.ttl_ms", 0)
        messages, spent = called(crowded, "weather? " * 30)
        crowded.chat("something else " * 35, max_tokens=20)
        assert waits(client)
        said = answered(crowded, messages, max_tokens=40)
        assert client.fsck().problems == ()
    there = spent["prompt_tokens"] + spent["completion_tokens"]
    assert said["usage"]["attnix"]["dram_tokens"] > there // 2
    assert said["usage"]["attnix"]["recomputed_tokens"] <= BLOCK
    calm, _ = called(alone, "weather? " * 30)
    assert answered(alone, calm, max_tokens=40)["choices"] == said["choices"]


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


# -- 40: who may -----------------------------------------------------------------------------------------------------


def keys_file(directory: Path, mode: int = 0o600) -> str:
    path = directory / "keys.toml"
    rows = [f'[[key]]\nname = "{name}"\nkey = "sk-{name}-secret"\n' for name in ("alice", "bob")]
    path.write_text("\n".join(rows) + "concurrent = 2\n[key.limits]\ncontexts = 3\n")
    path.chmod(mode)
    return str(path)


def test_case_40_keys_are_apart(gateway: Gateway, tmp_path: Path) -> None:
    file = Path(keys_file(tmp_path))
    served = gateway("--keys", str(file), scripts=SCRIPTS)
    file.write_text("[[key")  # it was read, and what becomes of it is the next start's
    file.chmod(0o644)
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


def test_case_40_a_call_id_of_somebody_else_opens_nothing(gateway: Gateway, tmp_path: Path) -> None:
    served = gateway("--keys", keys_file(tmp_path), scripts=SCRIPTS)
    question = {"role": "user", "content": "weather? " * 20}

    def ask(key: str, messages: list[Any]) -> Any:
        body = {"messages": messages, "tools": TOOL, "temperature": 0}
        got = served.http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer sk-{key}-secret"})
        assert got.status_code == 200, got.text
        return got.json()

    reply = ask("alice", [question])["choices"][0]["message"]
    messages = [question, reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "rain"}]
    with served.daemon.client() as client:

        def held(name: str) -> list[tuple[int, str]]:
            return [(row.cid, row.state) for p in client.ps().processes if p.name == name for row in p.contexts]

        (before,) = held("alice")
        assert before[1] == "tool_wait"
        bobs = ask("bob", messages)
        assert bobs["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "nothing of alice's was found"
        assert held("alice") == [before], "hers waits as it did"
        assert [cid for cid, _ in held("bob")] != [before[0]]
        hers = ask("alice", messages)
        assert hers["choices"][0]["message"]["content"] == "It rains."
        assert hers["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        assert [cid for cid, _ in held("alice")] == [before[0]]


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


def serve(*options: str) -> list[str]:
    return [sys.executable, "-m", "attnix.userland.cli", "serve", *options]


@pytest.mark.parametrize(
    "wrong",
    [
        "others may read it",
        "no loopback without keys",
        "no such file",
        "a wrong field",
        "a directory",
        "a long socket path",
    ],
)
def test_case_40_what_is_refused_at_the_start(tmp_path: Path, wrong: str) -> None:
    long = str(tmp_path / ("x" * 200))[: MAX_PATH_BYTES + 1]
    options = {
        "others may read it": ["--keys", keys_file(tmp_path, 0o644)],
        "no loopback without keys": ["--host", "0.0.0.0"],
        "no such file": ["--keys", str(tmp_path / "none.toml")],
        "a wrong field": ["--keys", str(tmp_path / "wrong.toml")],
        "a directory": ["--keys", str(tmp_path)],
        "a long socket path": ["--socket", long],
    }[wrong]
    (tmp_path / "wrong.toml").write_text('[[key]]\nname = "a"\nkey = "12345678"\nquota = 5\n')
    (tmp_path / "wrong.toml").chmod(0o600)
    said = subprocess.run(serve("--port", "0", *options), capture_output=True, text=True, env=environment(), timeout=60)
    assert said.returncode == 1 and said.stdout == "" and len(said.stderr.splitlines()) == 1, said
    if "socket" in wrong:
        assert "108 bytes" in said.stderr and str(MAX_PATH_BYTES) in said.stderr, said.stderr


def test_case_40_a_second_gateway_on_a_port_that_is_taken(gateway: Gateway) -> None:
    served = gateway(script=says("yes"))
    port = str(urlsplit(served.url).port)
    command = serve("--port", port, "--socket", served.daemon.socket)
    said = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert said.returncode == 1 and said.stdout == ""
    assert said.stderr.startswith(f"attnix: cannot serve on 127.0.0.1:{port}: Address already in use; --port "), (
        said.stderr
    )
    assert len(said.stderr.splitlines()) == 1
    beyond = subprocess.run(serve("--port", "65536"), capture_output=True, text=True, env=environment(), timeout=60)
    assert beyond.returncode == 2 and beyond.stdout == "", "and not on the port that 16 bits of it make"
    assert served.chat().json()["choices"][0]["message"]["content"] == "yes", "the first one works on"


def refused(process: Process) -> str:
    """What a gateway without a daemon says: everything but its own health is 503, in the shape of each API."""
    assert process.said.startswith("attnix: serving on http://"), process.said
    with httpx.Client(base_url=process.said.rpartition(" ")[2], timeout=DEADLINE_S) as http:
        assert http.get("/healthz").status_code == 200

        def reason() -> str:
            ready = http.get("/readyz")
            assert ready.status_code == 503 and ready.json()["status"] == "no daemon"
            return str(ready.json()["message"])

        while True:  # it looks four times a second, and may find something else meanwhile
            why, chat = reason(), http.post("/v1/chat/completions", json=asks("hi"))
            if "not connected yet" not in why and reason() == why:
                break
        assert chat.status_code == 503 and "retry-after" in chat.headers
        assert chat.json()["error"]["type"] == "server_error" and why in chat.json()["error"]["message"]
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        said = http.post("/v1/messages", json=body)
        assert said.status_code == 503 and said.json()["error"]["type"] == "overloaded_error"
        assert http.get("/v1/models").status_code == 503
    return why


def test_case_40_a_daemon_of_another_user_lets_no_gateway_in(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, uid=4242)
    assert daemon.process.said == "ready"
    process = Process(serve("--port", "0", "--socket", daemon.socket))
    try:
        assert f"belongs to uid {os.geteuid()}; you are uid 4242" in refused(process)
    finally:
        process.stop()
        daemon.process.stop()


def test_case_40_something_else_at_the_socket_path(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It says so, to clients and on its terminal; deletes nothing, and connects when a daemon has come."""
    path = tmp_path / "run" / "a.sock"
    path.parent.mkdir(mode=0o700)
    path.write_text("mine")
    process = Process(serve("--port", "0", "--socket", str(path)))
    try:
        assert str(path) in refused(process) and path.read_text() == "mine"
        told = capfd.readouterr().err.splitlines()  # once, though it tries four times a second
        assert len(told) == 1 and str(path) in told[0] and told[0].endswith("requests get 503 until there is one"), told
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
        assert str(path) in refused(process) and path.is_symlink()
        path.unlink()
        path.mkdir()
        assert str(path) in refused(process) and path.is_dir()
        path.rmdir()
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
        assert str(path) in refused(process) and path.is_socket()
        daemon = Daemon(tmp_path, script=says("yes"))  # which takes the place of a socket that nobody serves
        assert daemon.socket == str(path) and daemon.process.said == "ready"
        with httpx.Client(base_url=process.said.rpartition(" ")[2], timeout=DEADLINE_S) as http:
            until(lambda: http.get("/readyz").status_code == 200, "its connection")
            assert http.post("/v1/chat/completions", json=asks("hi")).status_code == 200
        process.stop()
        assert daemon.process.stop() == 0
    finally:
        process.stop()
