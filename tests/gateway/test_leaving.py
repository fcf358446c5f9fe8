"""Clients that go away, race and come again (cases 12 and 32): what is left, who is served, and after how many passes.

Passes of the model end when the test lets them: what is counted here does not depend on how fast anything is.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from attnix.drivers.sim_model import SamplingChoice, reference_tokens
from attnix.syscalls import Client

from .conftest import Gateway
from .rig import BLOCK, DEADLINE_S, END, Daemon, Served, says, sse, until


def raw(served: Served, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request for a chat has been sent."""
    at = urlsplit(served.url)
    assert at.hostname and at.port
    connection = socket.create_connection((at.hostname, at.port), timeout=DEADLINE_S)
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def asks(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def close(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def conversations(client: Client) -> list[int]:
    """How many contexts each has, as `ps` shows it."""
    return [len(p.contexts) for p in client.ps().processes if p.name == "local"]


def rows(client: Client) -> list[Any]:
    """The contexts of conversations."""
    return [row for p in client.ps().processes if p.name == "local" for row in p.contexts]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


# -- 12: a client of several replies --------------------------------------------------------------------------------


def test_case_12_four_replies_cut_after_the_first_chunk(gateway: Gateway) -> None:
    served = gateway(script=says("x" * 3000, ends=False), stepped=True)
    daemon = served.daemon
    for reset in (False, True):
        begun = daemon.passes()
        connection = raw(served, asks("hi", n=4, stream=True, max_tokens=4096))
        with daemon.client() as client:
            until(lambda: daemon.passes() == begun + 1, "the prompt's pass")  # noqa: B023 (called at once)
            daemon.let(1)
            until(lambda: conversations(client) == [4] and daemon.passes() == begun + 2, "parent and children")  # noqa: B023
            daemon.let(3)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            until(lambda: daemon.passes() == begun + 5, "the fifth pass")  # noqa: B023
            close(connection, reset=reset)
            until(lambda: conversations(client) == [], "parent and children are gone")
            daemon.let(1)
            until(lambda: daemon.contexts() == 0, "the contexts' end")
            assert daemon.passes() == begun + 5, "no other pass has begun"
            tier = client.tiers().tiers[0]
            assert tier.free_frames + tier.reclaimable_frames == tier.capacity_frames


def test_case_12_ps_never_shows_a_part_of_them(gateway: Gateway, threads: ThreadPoolExecutor) -> None:
    """Room for six: of several clients that want four each one at most is served at a time, whole; the others are told to come
    again, and get there."""
    served = gateway(script=says("yes" * 20), max_contexts=6, pass_ms=1)

    def one(number: int) -> tuple[int, list[str]]:
        refused = 0
        while True:
            got = served.http.post("/v1/chat/completions", json=asks(f"client {number}", n=4))
            if got.status_code == 200:
                return refused, [choice["message"]["content"] for choice in got.json()["choices"]]
            assert got.status_code == 503 and "retry-after" in got.headers, got.text
            assert "context slots" in got.json()["error"]["message"]
            refused += 1

    with served.daemon.client() as client:
        answers = [threads.submit(one, number) for number in range(4)]
        seen: set[int] = set()
        while not all(answer.done() for answer in answers):
            seen.update(conversations(client))
    assert seen <= {0, 1, 4} and 4 in seen, "a process, its context, all replies: nothing between"
    assert [answer.result()[1] for answer in answers] == [["yes" * 20] * 4] * 4
    assert any(answer.result()[0] for answer in answers), "it was a race"


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


PROMPT_TOKENS = 70  # several blocks, which the replies share


def oracle(prompt: Sequence[int], seed: int, most: int) -> tuple[str, str]:
    """What a cold machine without a kernel says: text, and why it ended."""
    tokens = reference_tokens(prompt, most, vocab=END + 1, choice=SamplingChoice(temperature=1.7, seed=seed))
    reason = "stop" if END in tokens else "length"
    said = tokens[: tokens.index(END)] if END in tokens else tokens
    return bytes(token for token in said if token < 256).decode("utf-8", "replace"), reason


def test_case_12_few_frames_and_two_clients(gateway: Gateway, threads: ThreadPoolExecutor) -> None:
    """Frames for two of four replies, and another client who wants as much: all get all of it, unharmed by one another and by
    replies that end early."""
    served = gateway(vocab_tokens=END + 1, frames=18, window_tokens=18 * BLOCK)
    most = 100

    def one(number: int) -> Any:
        prompt = [(number + n) % 200 for n in range(PROMPT_TOKENS)]
        body = {"prompt": prompt, "n": 4, "seed": 40 * number, "max_tokens": most, "temperature": 1.7}
        whole = served.http.post("/v1/completions", json=body)
        chunks = sse(served.http.post("/v1/completions", json={**body, "stream": True}))
        assert whole.status_code == 200, whole.text
        return prompt, whole.json()["choices"], chunks

    answers: list[Future[Any]] = [threads.submit(one, number) for number in (1, 2)]
    reasons: list[str] = []
    for number, answer in zip((1, 2), answers, strict=True):
        prompt, choices, chunks = answer.result()
        assert len(choices) == 4
        ended: dict[int, str] = {}
        texts = [""] * 4
        for chunk in chunks:
            (choice,) = chunk["choices"]
            assert choice["index"] not in ended, "nothing comes after a reply's end"
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                ended[choice["index"]] = choice["finish_reason"]
        for index, choice in enumerate(choices):
            said = oracle(prompt, 40 * number + index, most)
            assert (choice["text"], choice["finish_reason"]) == said
            assert (texts[index], ended[index]) == said
            reasons.append(said[1])
    assert {"stop", "length"} <= set(reasons), "the seeds have both kinds"
    with served.daemon.client() as client:
        assert client.vmstat().counters["preemptions"] > 0, "there were too few frames"
    served.daemon.at_rest()


# -- 32: cancelled during the prompt --------------------------------------------------------------------------------

CHUNK = 64
LETTERS = 1980  # of a prompt: 2,000 tokens with what the template writes, near enough


@pytest.fixture(scope="module")
def stepping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    daemon = Daemon(tmp_path_factory.mktemp("stepping"), script=says("yes"), stepped=True)
    served = Served(daemon, "--max-parked", "0")
    with daemon.client() as client:
        client.sysctl("sched.step_tokens", CHUNK)
    yield served
    served.stop()
    assert daemon.process.stop() == 0


@pytest.fixture
def stepped(stepping: Served) -> Iterator[Served]:
    """Passes wait, and nothing is there; each test has to ask for another prompt."""
    stepping.daemon.let_none()
    yield stepping
    stepping.daemon.at_rest()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_case_32_a_client_leaves_during_its_prompt(
    stepped: Served, threads: ThreadPoolExecutor, streaming: bool, reset: bool
) -> None:
    daemon, begun = stepped.daemon, stepped.daemon.passes()
    prompt = "abcd"[2 * streaming + reset] * LETTERS
    connection = raw(stepped, asks(prompt, stream=streaming))
    until(lambda: daemon.passes() == begun + 1, "the first chunk")
    daemon.let(3)
    until(lambda: daemon.passes() == begun + 4, "the fourth chunk")
    with daemon.client() as client:
        close(connection, reset=reset)
        until(lambda: conversations(client) == [], "its process is gone")
        short = threads.submit(stepped.chat, "short", max_tokens=5)
        until(lambda: conversations(client) == [1], "the short request")
        until(lambda: rows(client)[0].tokens > 0, "its prompt")
        assert daemon.passes() == begun + 4, "nothing but the chunk that had begun"
        daemon.let(1 + len(says("yes")))  # that chunk, and each token of the short answer
        assert short.result().json()["choices"][0]["message"]["content"] == "yes"
        assert daemon.passes() <= begun + 5 + len(says("yes")), "it began right behind that chunk"
        until(lambda: daemon.contexts() == 0, "the contexts' end")
        tier = client.tiers().tiers[0]
        assert tier.free_frames + tier.reclaimable_frames == tier.capacity_frames
        daemon.let_all()
        again = stepped.chat(prompt).json()
    assert again["choices"][0]["message"]["content"] == "yes"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * CHUNK, "all that was computed is found"


@pytest.mark.parametrize("streaming", [False, True])
def test_case_32_a_reader_that_has_half_closed_gets_its_answer(stepped: Served, streaming: bool) -> None:
    daemon, begun = stepped.daemon, stepped.daemon.passes()
    said = b""
    with raw(stepped, asks("ef"[streaming] * LETTERS, stream=streaming)) as connection:
        until(lambda: daemon.passes() == begun + 1, "the first chunk")
        connection.shutdown(socket.SHUT_WR)
        daemon.let(3)
        until(lambda: daemon.passes() == begun + 4, "the fourth chunk")
        daemon.let_all()
        while data := connection.recv(65536):
            said += data
    assert b"HTTP/1.1 102" in said and b"HTTP/1.1 200" in said
    assert (b"[DONE]" if streaming else b'"content":"yes"') in said


def test_case_32_a_reader_of_a_stream_half_closes_in_the_midst(stepped: Served) -> None:
    """A comment asks whether it is there, which readers of events pass over; the stream goes on as it would."""
    daemon, begun, said = stepped.daemon, stepped.daemon.passes(), b""
    with raw(stepped, asks("hi", stream=True)) as connection:
        until(lambda: daemon.passes() == begun + 1, "the prompt's pass")
        daemon.let(1)  # no other token until the comment is here: nothing says which of the two would come first
        while b'"content":"y"' not in said:
            said += connection.recv(65536)
        connection.shutdown(socket.SHUT_WR)
        while not said.endswith(b"\r\n:\n\n\r\n"):
            said += connection.recv(65536)
        daemon.let_all()
        while data := connection.recv(65536):
            said += data
    blocks = [block for block in unchunked(said).decode().split("\n\n") if block != ":"]
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks if block.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "yes"
    assert blocks[-2:] == ["data: [DONE]", ""]


def unchunked(said: bytes) -> bytes:
    """The body of an answer, whose chunks have to be whole."""
    rest, body = said.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        assert rest[int(size, 16) :][:2] == b"\r\n"
        rest = rest[int(size, 16) + 2 :]
    return body


def test_case_38_an_impatient_client_gets_there(stepped: Served) -> None:
    """Five times it goes before its prompt is through; each try goes on where the one before has ended."""
    daemon, begun, prompt = stepped.daemon, stepped.daemon.passes(), "g" * LETTERS
    for attempt in range(5):
        connection = raw(stepped, asks(prompt))
        until(lambda: daemon.passes() == begun + 5 * attempt + 1, "the first chunk")  # noqa: B023 (called at once)
        daemon.let(4)
        until(lambda: daemon.passes() == begun + 5 * attempt + 5, "the fifth")  # noqa: B023
        connection.close()
        with daemon.client() as client:
            until(lambda: conversations(client) == [], "its process is gone")
        daemon.let(1)
        until(lambda: daemon.contexts() == 0, "the context's end")
    daemon.let_all()
    final = stepped.chat(prompt).json()
    assert final["usage"]["prompt_tokens_details"]["cached_tokens"] == 5 * 5 * CHUNK
    chunks = -(-final["usage"]["prompt_tokens"] // CHUNK)
    assert daemon.passes() <= begun + chunks + len(says("yes")) + 1, "no chunk was computed twice"
