"""A daemon that goes away: 503 and when to come again, a stream ends in an error, and the gateway is back with the daemon."""

from __future__ import annotations

import signal

from .conftest import Gateway
from .rig import says, until


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
