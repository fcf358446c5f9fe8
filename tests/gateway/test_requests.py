"""What is refused, and how: errors in the shape of their API, no 5xx for bad input."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Gateway
from .rig import VOCAB, says

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ONE_TOOL = [{"type": "function", "function": {"name": "f"}}]


def test_refusals(gateway: Gateway) -> None:
    served = gateway("--max-body", "100000", script=says("yes"))
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id"),
        ({**CHAT, "temperature": 3}, "temperature"),
        ({**CHAT, "n": 0}, "n"),
        ({**CHAT, "stop": ""}, "stop"),
        ({**CHAT, "logit_bias": {"5": 1}}, "logit_bias"),
        ({**CHAT, "top_logprobs": 3}, "top_logprobs"),
        ({**CHAT, "functions": [{}]}, "functions"),
        ({**CHAT, "modalities": ["audio"]}, "modalities"),
        ({**CHAT, "tool_choice": "required"}, "tool_choice"),
        ({**CHAT, "tools": ONE_TOOL, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({**CHAT, "tools": ONE_TOOL * 2}, "tools"),
        (
            {
                **CHAT,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}},
            },
            "response_format",
        ),
    ]
    for body, param in bad:
        got = served.http.post("/v1/chat/completions", json=body)
        assert got.status_code == 400, (body, got.text)
        error = got.json()["error"]
        assert error["type"] == "invalid_request_error" and error["message"], body
        assert param in (error["param"] or error["message"]), (param, error)
    got = served.http.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
    assert got.status_code == 400 and got.json()["error"]["code"] == "invalid_json"
    assert served.http.post("/v1/chat/completions", content=b"{}").status_code == 415
    assert served.chat("x" * 200_000).status_code == 413
    assert (
        served.http.post("/v1/chat/completions", json={**CHAT, "model": "gpt-9"}).json()["error"]["code"]
        == "model_not_found"
    )
    assert served.http.post("/v1/embeddings", json={"input": "x"}).json()["error"]["code"] == "unsupported"
    assert served.http.get("/v1/chat/completions").status_code == 405
    assert served.http.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert served.http.get("/healthz", headers={"host": "evil.example"}).status_code == 200
    assert served.http.get("/v1/models", headers={"host": "evil.example:80"}).status_code == 403
    said = served.http.post("/v1/messages", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert said["type"] == "error" and said["error"]["type"] == "invalid_request_error"
    prompts: tuple[Any, ...] = ([], "", [[]], ["a", 3], [VOCAB], [-1])
    for prompt in prompts:
        assert served.http.post("/v1/completions", json={"prompt": prompt}).status_code == 400, prompt
    assert "access-control-allow-origin" not in served.http.get("/v1/models", headers={"origin": "http://a"}).headers


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_case_28_a_window_that_is_too_small(gateway: Gateway, field: str) -> None:
    served = gateway(script=says("x" * 400, ends=False), window_tokens=128)
    too_long = served.chat("m" * 200)
    error = too_long.json()["error"]
    assert too_long.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["attnix"]["wanted"] > 200 and error["attnix"]["limit"] == 128
    endless = served.chat("m" * 20, **{field: 4000}).json()
    assert endless["choices"][0]["finish_reason"] == "length"
    assert endless["usage"]["total_tokens"] == 128
    if field == "max_completion_tokens":
        return
    system = {"role": "system", "content": "keep this"}
    talk = [system, {"role": "user", "content": "A" * 100 + "B" * 60}]
    trimmed = served.http.post(
        "/v1/chat/completions", json={"messages": talk, "truncation": "auto", "max_tokens": 8, "temperature": 0}
    ).json()
    gone = trimmed["usage"]["attnix"]["trimmed_tokens"]
    assert gone > 0 and gone % 16 == 0 and trimmed["usage"]["prompt_tokens"] <= 128 - 8
    huge = [{"role": "system", "content": "s" * 300}, {"role": "user", "content": "hi"}]
    refused = served.http.post("/v1/chat/completions", json={"messages": huge, "truncation": "auto", "max_tokens": 8})
    assert refused.status_code == 400 and refused.json()["error"]["attnix"]["limit"] == 120
