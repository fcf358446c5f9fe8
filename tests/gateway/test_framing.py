"""HTTP below the interfaces: where a request ends, who is still there, and what stays behind in a connection."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn

from attnix.userland.gateway.protocol import limited

from .conftest import Gateway
from .rig import DEADLINE_S, Served, says, until

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
LENGTH, CODING = b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked"


def request(path: bytes, body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    head = (b"POST %b HTTP/%b" % (path, version), b"Host: localhost", b"Content-Type: application/json", *headers)
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def connected(served: Served) -> socket.socket:
    url = urlsplit(served.url)
    return socket.create_connection((url.hostname, url.port), timeout=DEADLINE_S)


def answers(served: Served, sent: bytes) -> bytes:
    """All that comes until the gateway closes."""
    with connected(served) as client:
        client.sendall(sent)
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_what_is_no_http_is_refused_in_the_words_of_the_api(
    gateway: Gateway, capfd: pytest.CaptureFixture[str]
) -> None:
    """A length that two programs could read in two ways among it: nothing behind it is taken for another request."""
    served = gateway(script=says("yes"))
    openai, anthropic = b"/v1/chat/completions", b"/v1/messages"
    assert answers(served, request(openai, CHUNKED, CODING, b"Connection: close")).startswith(b"HTTP/1.1 200 ")
    two_ways = (
        request(openai, CHUNKED, CODING, b"Content-Length: %d" % len(CHUNKED)),
        request(openai, CHUNKED, b"Content-Length: %d" % len(CHUNKED), CODING),
        request(openai, BODY, LENGTH, CODING),
        request(openai, CHUNKED, CODING, version=b"1.0"),
        request(openai, BODY, LENGTH, b"Content-Length: 3"),
        request(openai, b"zz\r\n" + BODY, CODING),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    )
    for sent in two_ways:
        head, _, said = answers(served, sent + HIDDEN).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 "), (sent, head)
        assert json.loads(said)["error"]["code"] == "invalid_http", "and that is all that is said"
    head, _, said = answers(served, request(anthropic, b"zz\r\n" + BODY, CODING)).partition(b"\r\n\r\n")
    assert json.loads(said)["error"]["type"] == "invalid_request_error" and json.loads(said)["type"] == "error"
    wrong = request(openai, b"2\r\n{}\r\n", b"Content-Type: text/plain", CODING).replace(b"application/json", b"a/b")
    with connected(served) as client:  # it is answered in the midst of its body, of which the rest is no HTTP
        client.sendall(wrong)
        assert client.recv(65536).startswith(b"HTTP/1.1 415 ")
        client.sendall(b"zz\r\n")
        while client.recv(65536):
            pass
    said_there = capfd.readouterr().err
    assert "Traceback" not in said_there and "fatal" not in said_there.lower(), said_there


def test_case_12_clients_that_send_more_than_their_request(gateway: Gateway) -> None:
    """Nothing more is read while a request is answered: its client's end has to be seen all the same, and told from the end of
    what it has to say."""
    served = gateway(script=says("yes"), stepped=True)

    def begin(streaming: bool, more: bytes) -> socket.socket:
        body = json.dumps({**json.loads(BODY), "stream": streaming}).encode()
        client = connected(served)
        client.sendall(request(b"/v1/chat/completions", body, b"Content-Length: %d" % len(body)))
        until(lambda: served.daemon.contexts() == 1, "its context")  # whose pass does not end
        client.sendall(more)
        return client

    for number, (streaming, more) in enumerate([(False, b"\r\n"), (True, b"\r\n"), (False, HIDDEN), (True, HIDDEN)], 1):
        begin(streaming, more).close()
        until(lambda: "vllm:num_requests_running 0.0" in served.http.get("/metrics").text, "the end of the request")
        assert f"attnix_clients_gone_total {number}.0" in served.http.get("/metrics").text
        served.daemon.let_all()
        until(lambda: served.daemon.contexts() == 0, "the end of its context")
        served.daemon.let_none()
    with begin(False, HIDDEN) as client:
        client.shutdown(socket.SHUT_WR)
        while b"102 Processing" not in client.recv(65536):  # it is asked whether it is there
            pass
        served.daemon.let_all()
        got = b"".join(iter(lambda: client.recv(65536), b""))
    assert got.count(b"HTTP/1.1 200 OK") == 2 and b'"content":"yes"' in got and b'"object":"list"' in got


@pytest.mark.parametrize("headers", [b"", b"Connection: close\r\n"], ids=["kept alive", "closed"])
async def test_who_does_not_read_the_end_of_an_answer_is_left(headers: bytes) -> None:
    """Less of it waits in the gateway than would make the gateway wait."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"60000")]})
        await send({"type": "http.response.body", "body": bytes(60000)})

    with socket.socket() as listening, socket.socket() as client:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        listening.bind(("127.0.0.1", 0))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        config = uvicorn.Config(app, http=limited(0.2), ws="none", lifespan="off", log_level="warning")
        config.timeout_keep_alive = 0
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve([listening]))
        while not server.started:
            await asyncio.sleep(0)
        client.connect(listening.getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
        while not server.server_state.total_requests:
            await asyncio.sleep(0.005)
        async with asyncio.timeout(DEADLINE_S):
            while server.server_state.connections:
                await asyncio.sleep(0.005)
        server.should_exit = True
        await serving
