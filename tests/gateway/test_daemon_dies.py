"""A daemon that goes away: 503 and when to come again, a stream ends in an error, and the gateway is back with the daemon."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from .conftest import Gateway
from .rig import DEADLINE_S, TEMPLATE, Daemon, Process, calls, says, until, write_text
from .test_cases import TOOL


def test_the_daemon_dies_and_comes_back(gateway: Gateway) -> None:
    served = gateway(script=says("x" * 2000, ends=False), pass_ms=5)
    kept = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    assert served.http.post("/v1/chat/completions", json=kept).status_code == 200
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0}
    with served.http.stream("POST", "/v1/chat/completions", json=body) as streamed:
        lines = streamed.iter_lines()
        assert next(lines).startswith("data: {")
        served.daemon.process.stop(signal.SIGKILL)
        rest = "\n".join(lines)
    assert '"error"' in rest and "[DONE]" not in rest
    refused = served.http.post("/v1/chat/completions", json=kept)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "unavailable"
    said = served.http.post("/v1/messages", json=kept)
    assert said.status_code == 503 and said.json()["error"]["type"] == "overloaded_error"
    assert served.http.get("/healthz").status_code == 200
    assert served.http.get("/readyz").status_code == 503
    assert "attnix_daemon_connected 0.0" in served.http.get("/metrics").text
    served.daemon.again()
    until(lambda: served.http.get("/readyz").status_code == 200, "the gateway's return")
    again = served.http.post("/v1/chat/completions", json=kept).json()
    follow = [*kept["messages"], again["choices"][0]["message"], {"role": "user", "content": "more"}]  # type: ignore[misc]
    assert served.http.post("/v1/chat/completions", json={**kept, "messages": follow}).status_code == 200


@pytest.mark.parametrize("waits", [False, True])
def test_a_kept_context_on_a_device_that_is_gone_is_begun_anew(gateway: Gateway, waits: bool) -> None:
    """The prompt is in the request, and there is another device: that is no reason to send the client away."""
    said = calls("weather", city="Oslo") if waits else "Hello."
    served = gateway(accels=2, scripts=[says(said), says("It rains.")])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Well?"}]

    def turn() -> Any:
        got = served.http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOL, "temperature": 0})
        assert got.status_code == 200, got.text
        messages.append(got.json()["choices"][0]["message"])
        return got.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def device() -> str:
        with served.daemon.client() as client:
            return {c.device for p in client.ps().processes if p.name == "local" for c in p.contexts}.pop()

    turn()
    assert device() == "hbm0"
    served.daemon.process.popen.send_signal(signal.SIGUSR1)
    with served.daemon.client() as client:
        until(lambda: client.tiers().tiers[0].state != "up", "the end of the device")
    call = (messages[-1].get("tool_calls") or [{}])[0].get("id")
    messages.append(
        {"role": "tool", "content": "rain", "tool_call_id": call} if call else {"role": "user", "content": "So?"}
    )
    assert turn() == 0 and device() == "hbm1", "all of it is computed there"
    messages.append({"role": "user", "content": "And?"})
    assert turn() > 100, "and kept"


def test_a_daemon_that_comes_back_with_another_template(gateway: Gateway) -> None:
    """The weights are the same, and so is the path: the prompts would be those of the model as it was."""
    served = gateway(script=says("yes"))
    before = served.chat("hi").json()["usage"]["prompt_tokens"]
    served.daemon.process.stop(signal.SIGKILL)
    until(lambda: served.http.get("/readyz").status_code == 503, "the gateway's notice of it")
    write_text(
        Path(served.daemon.socket).parents[1] / "model",
        TEMPLATE.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\nWell, {% endif %}"),
    )
    served.daemon.again()
    until(lambda: served.http.get("/readyz").status_code == 200, "the gateway's return")
    assert served.chat("hi").json()["usage"]["prompt_tokens"] == before + len("Well, ")


def test_a_tokenizer_that_cannot_be_loaded_yet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is nobody's fault who asks, it is said, and it is over when the file is whole."""
    daemon = Daemon(tmp_path, script=says("yes"))
    assert daemon.process.said == "ready"
    file = tmp_path / "model" / "tokenizer.json"
    whole = file.read_text()
    file.write_text("{")
    command = [sys.executable, "-m", "attnix.userland.cli", "serve", "--port", "0", "--socket", daemon.socket]
    process = Process(command)
    try:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        with httpx.Client(base_url=process.said.rpartition(" ")[2], timeout=DEADLINE_S) as http:
            until(lambda: http.get("/readyz").json()["status"] == "no tokenizer", "a look at it")
            assert http.get("/readyz").status_code == 503
            refused = http.post("/v1/messages", json=body)
            assert refused.status_code == 503 and str(file) in refused.json()["error"]["message"]
            file.unlink()
            until(lambda: "has no tokenizer.json" in http.get("/readyz").json()["message"], "another look")
            (tmp_path / "whole").write_text(whole)
            (tmp_path / "whole").rename(file)  # it is looked at at any moment, and half of it would be told too
            until(lambda: http.get("/readyz").status_code == 200, "its loading")
            assert http.post("/v1/messages", json=body).json()["content"][0]["text"] == "yes"
    finally:
        process.stop()
        daemon.process.stop()
    told = capfd.readouterr().err.splitlines()
    assert [str(file) in line for line in told] == [True, True], told


def test_a_daemon_that_hangs_is_not_ready(gateway: Gateway) -> None:
    """Probes, numbers and the dashboard say so within their time; when it goes on, so do they."""
    served = gateway("--time-limit", "0.5", script=says("yes"))
    hung = served.daemon.process.popen
    hung.send_signal(signal.SIGSTOP)
    try:
        ready = served.http.get("/readyz")
        assert ready.status_code == 503 and "did not answer within 0.5 s" in ready.json()["message"]
        assert "attnix_daemon_connected 0.0" in served.http.get("/metrics").text
        shown = served.http.get("/dashboard/state")
        assert shown.status_code == 503 and shown.json()["error"]["code"] == "unavailable"
        assert served.http.get("/healthz").status_code == 200
        late = served.chat()
        assert late.status_code == 408 and late.json()["error"]["code"] == "timeout"
    finally:
        hung.send_signal(signal.SIGCONT)
    until(lambda: served.http.get("/readyz").status_code == 200, "an answer")
    until(lambda: "attnix_daemon_connected 1.0" in served.http.get("/metrics").text, "numbers")


def test_a_daemon_that_hangs_in_the_midst_of_replies(gateway: Gateway) -> None:
    """The time limit holds for them too, though nobody says that they were cancelled."""
    served = gateway("--time-limit", "3", script=says("x"), stepped=True)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"n": 2}),
        ("/v1/messages", {}),
        ("/v1/chat/completions", {"stream": True}),
    ]
    with ThreadPoolExecutor(len(asked)) as others:
        answers = [others.submit(served.http.post, path, json={**body, **more}) for path, more in asked]
        until(lambda: served.daemon.contexts() == 4 and served.daemon.passes() == 1, "a pass of theirs")
        hung = served.daemon.process.popen
        hung.send_signal(signal.SIGSTOP)
        try:
            assert [answer.result().status_code for answer in answers] == [408] * len(asked)
        finally:
            hung.send_signal(signal.SIGCONT)


def test_a_gateway_that_is_stopped_says_so(gateway: Gateway, capfd: pytest.CaptureFixture[str]) -> None:
    """To whoever still waits when it has waited long enough: in the API's words, and without a traceback in its log."""
    served = gateway(script=says("x" * 3900, ends=False), pass_ms=5)
    whole = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3900}
    with ThreadPoolExecutor(1) as other:
        refused = other.submit(served.http.post, "/v1/messages", json=whole)
        body = {**whole, "stream": True}
        with served.http.stream("POST", "/v1/chat/completions", json=body) as streamed:
            until(lambda: served.daemon.contexts() == 2, "both requests")
            served.process.popen.send_signal(signal.SIGTERM)
            rest = streamed.read().decode()
        answer = refused.result()
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "overloaded_error"
    assert '"this gateway is being stopped"' in rest and "[DONE]" not in rest
    served.process.stop()
    assert "Traceback" not in capfd.readouterr().err
