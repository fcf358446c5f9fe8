"""What is refused, and how: errors in the shape of their API, no 5xx for bad input."""

from __future__ import annotations

from typing import Any

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
        ({**CHAT, "min_tokens": 5}, "min_tokens"),
        ({**CHAT, "guided_json": {"type": "object"}}, "guided_json"),
        ({**CHAT, "lora_path": "mine"}, "lora_path"),
        ({**CHAT, "typical_p": 0.5}, "typical_p"),
        ({**CHAT, "length_penalty": 0}, "length_penalty"),
        ({**CHAT, "add_generation_prompt": False}, "add_generation_prompt"),
        ({**CHAT, "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({**CHAT, "truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
        ({**CHAT, "top_logprobs": 3}, "top_logprobs"),
        ({**CHAT, "response_format": {"type": "json_object"}, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({**CHAT, "tools": ONE_TOOL, "tool_choice": "required", "repetition_penalty": 0.9}, "repetition_penalty"),
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
    assert served.http.post("/v1/chat/completions", json=CHAT, headers={"content-encoding": "gzip"}).status_code == 415
    assert served.http.post("/v1/chat/completions/", json=CHAT, headers={"host": "elsewhere"}).status_code == 404
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
    assert served.chat(typical_p=1.0, skip_special_tokens=True, min_tokens=0).status_code == 200
    for field in (
        {"mcp_servers": [{"url": "x"}]},
        {"output_format": {"type": "xml"}},
        {"output_config": {"format": {"type": "json_schema"}}},
    ):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **field}
        assert served.http.post("/v1/messages", json=body).status_code == 400, field
    said = served.http.post("/v1/messages", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert said["type"] == "error" and said["error"]["type"] == "invalid_request_error"
    counts = []
    for thought in (
        [],
        [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}],
    ):
        replied = {"role": "assistant", "content": [*thought, {"type": "text", "text": "yes"}]}
        for said in ([], [{"role": "system", "content": "The date is 4 May."}]):
            sent = {
                "messages": [*CHAT["messages"], replied, *CHAT["messages"], *said],
                "thinking": {"type": "adaptive"},
            }
            counts.append(served.http.post("/v1/messages/count_tokens", json=sent).json()["input_tokens"])
    assert counts[:2] == counts[2:] and counts[1] > counts[0] + len("The date is 4 May.")
    for wrong in (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "Hm."}]}]},
    ):
        assert served.http.post("/v1/messages", json={**CHAT, "max_tokens": 4, **wrong}).status_code == 400
    prompts: tuple[Any, ...] = ([], "", [[]], ["a", 3], [VOCAB], [-1])
    for prompt in prompts:
        assert served.http.post("/v1/completions", json={"prompt": prompt}).status_code == 400, prompt
    assert "access-control-allow-origin" not in served.http.get("/v1/models", headers={"origin": "http://a"}).headers
