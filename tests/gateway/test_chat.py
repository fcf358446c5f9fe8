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
