"""Chat and completions: what is said arrives, whole and streamed, with its usage."""

from __future__ import annotations

from .conftest import Gateway
from .rig import says, sse


def test_a_reply_whole_and_streamed(gateway: Gateway) -> None:
    served = gateway(script=says("Grüße, 世界!"))
    whole = served.chat().json()
    assert whole["choices"][0]["message"]["content"] == "Grüße, 世界!"
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == len("Grüße, 世界!".encode())
    chunks = sse(served.chat(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == "Grüße, 世界!"
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "stop"
    # The older log-probabilities say where in the text a token begins, and name each part of a character apart.
    body = {"prompt": "hi", "max_tokens": 7, "temperature": 0, "logprobs": 2}
    choice = served.http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == "Grüße"
    names = ["G", "r", "bytes:\\xc3", "bytes:\\xbc", "bytes:\\xc3", "bytes:\\x9f", "e"]
    assert choice["logprobs"]["tokens"] == names
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 3, 3, 4]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * len(names)
    chunks = [
        event["choices"][0]["logprobs"]
        for event in sse(served.http.post("/v1/completions", json={**body, "stream": True}))
    ]
    for what in ("tokens", "text_offset"):
        assert [one for chunk in chunks if chunk for one in chunk[what]] == choice["logprobs"][what]
