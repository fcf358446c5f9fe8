"""Stop strings through HTTP (case 30): every character once, nothing at or after the stop, and nothing of it in the context."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from attnix.syscalls.records import unpack_ids

from .conftest import Gateway
from .rig import END, LONG, TEMPLATE, Daemon, Served, says, sse, until
from .test_leaving import asks, raw

DE, HI, J_TAIL, EFG = range(258, 258 + len(LONG))
SPELLED = [DE, ord("F"), ord("G"), HI, J_TAIL, END]  # DEFGHIJ tail


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Says SPELLED, or the characters to a prompt that is longer by one."""
    served = Served(Daemon(tmp_path_factory.mktemp("stop"), texts=[SPELLED, says("aé世😀b")]))
    yield served
    served.stop()
    served.daemon.at_rest()
    assert served.daemon.process.stop() == 0


def prompted(served: Served, script: int) -> str:
    """What to ask for this script: it goes by the prompt's length."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    length: int = served.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    return "hi" + "." * ((length + script) % 2)


def newest(served: Served) -> tuple[int, list[int]]:
    """The context that was made last: its length, and its tokens."""
    with served.daemon.client() as client:
        cid = max(row.cid for process in client.ps().processes for row in process.contexts)
        return client.stat(cid=cid).tokens, list(unpack_ids(client.read(0, cid).tokens))


def three_ways(served: Served, script: int, stop: list[str], most: int) -> list[tuple[str, str, int]]:
    """(text, reason, tokens counted) of the whole reply, the streamed one and Anthropic's, streamed; the context of each holds
    the prompt and the tokens that were counted, nothing else."""
    question = prompted(served, script)
    found = []
    for way in ("whole", "streamed", "anthropic"):
        if way == "anthropic":
            messages = [{"role": "user", "content": question}]
            body = {"messages": messages, "max_tokens": most, "stop_sequences": stop, "temperature": 0}
            said = served.http.post("/v1/messages", json=body).json()
            text, reason = "".join(block["text"] for block in said["content"]), said["stop_reason"]
            assert (said["stop_sequence"] in stop) == (reason == "stop_sequence")
            reason = {"stop_sequence": "stop", "end_turn": "stop", "max_tokens": "length"}[reason]
            spent = said["usage"]
            prompt, counted = spent["input_tokens"] + spent["cache_read_input_tokens"], spent["output_tokens"]
        elif way == "whole":
            whole = served.chat(question, stop=stop, max_tokens=most).json()
            text, reason = whole["choices"][0]["message"]["content"], whole["choices"][0]["finish_reason"]
            prompt, counted = whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]
        else:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = sse(served.chat(question, stop=stop, max_tokens=most, **options))
            choices = [chunk["choices"][0] for chunk in chunks[:-1]]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            reason = choices[-1]["finish_reason"]
            prompt, counted = chunks[-1]["usage"]["prompt_tokens"], chunks[-1]["usage"]["completion_tokens"]
        tokens, log = newest(served)
        assert (tokens, len(log)) == (prompt + counted, prompt + counted), (way, log)
        says_ = SPELLED if script == 0 else says("aé世😀b")
        assert log[prompt:] == says_[:counted], way
        found.append((text, reason, counted))
    return found


@pytest.mark.parametrize(
    ("script", "stop", "text", "kept"),
    [
        (0, ["DEFGHIJ"], "", 0),
        (0, ["DEFX"], "DEFGHIJ tail", 5),
        (0, ["AB", "ABC"], "DEFGHIJ tail", 5),
        (0, ["J t"], "DEFGHI", 4),
        (0, ["E"], "D", 1),
        (0, ["EF"], "D", 1),
        (0, ["GHIJ tail and more"], "DEFGHIJ tail", 5),
        (0, ["FG", "EFGH"], "DE", 1),
        (0, ["FGX", "GH"], "DEF", 2),
        (0, ["DEFGHIJ tail"], "", 0),
        (1, ["é世"], "a", 1),
        (1, ["世"], "aé", 3),
        (1, ["😀b"], "aé世", 6),
        (1, ["世😁"], "aé世😀b", 11),
    ],
)
def test_case_30_stop_strings(served: Served, script: int, stop: list[str], text: str, kept: int) -> None:
    """kept: tokens that stay in the context, counted by hand; the token that ends the turn is not among them."""
    ends = kept == (5 if script == 0 else 11)
    for said in three_ways(served, script, stop, 50):
        assert said[:2] == (text, "stop")
        assert said[2] - kept in ((0, 1) if ends else (0,)), said


@pytest.mark.parametrize(
    ("script", "stop", "most", "text"),
    [
        (0, ["GHIJ tail"], 4, "DEFGHI"),
        (0, ["DEFGHIJ!"], 3, "DEFG"),
        (1, ["é世😀!"], 6, "aé世"),
        (1, ["é世😀!"], 5, "aé\ufffd"),  # the length ends inside a character
        (1, ["世"], 5, "aé\ufffd"),
    ],
)
def test_case_30_the_length_ends_while_text_is_held(
    served: Served, script: int, stop: list[str], most: int, text: str
) -> None:
    assert three_ways(served, script, stop, most) == [(text, "length", most)] * 3


HELD = "é" * 60
ASIDE = "x" * 200


@pytest.mark.parametrize(("stop", "text"), [(HELD + "!", "so "), (HELD + "?", f"so {HELD}! and on")])
def test_case_30_a_preemption_while_text_is_held(gateway: Gateway, stop: str, text: str) -> None:
    """An older generation grows until the frames are too few: the newer one loses its own, and is computed again."""
    texts = [says(f"so {HELD}! and on"), says(ASIDE)]
    served = gateway(texts=texts, frames=16, window_tokens=256, stepped=True)
    daemon = served.daemon
    for streaming in (False, True):
        daemon.let_none()
        with daemon.client() as client, ThreadPoolExecutor(1) as other:
            before = client.vmstat().counters.get("preemptions_running", 0)
            older = raw(served, asks(prompted(served, 1), stream=True, max_tokens=210))
            daemon.let(3)
            assert older.recv(100).startswith(b"HTTP/1.1 200")
            there = {p.pid for p in client.ps().processes}
            newer = other.submit(served.chat, prompted(served, 0), stop=[stop], stream=streaming)
            until(
                lambda: any(c.tokens for p in client.ps().processes if p.pid not in there for c in p.contexts),  # noqa: B023
                "the newer one's prompt",
            )
            daemon.let_all()
            got = newer.result()
            assert client.vmstat().counters.get("preemptions_running", 0) > before
        if streaming:
            choices: list[Any] = [chunk["choices"][0] for chunk in sse(got)]
            said, reason = "".join(c["delta"].get("content") or "" for c in choices), choices[-1]["finish_reason"]
        else:
            (choice,) = got.json()["choices"]
            said, reason = choice["message"]["content"], choice["finish_reason"]
            assert got.json()["usage"]["attnix"]["recomputed_tokens"] > 0
        assert (said, reason) == (text, "stop")
        rest = b""
        while b"[DONE]" not in rest:
            rest += older.recv(65536)
        older.close()


WRITTEN = ["1ABX", "1éBX tail", "12"]


def test_case_30_where_control_tokens_are_read(gateway: Gateway) -> None:
    """Families whose tool calls begin with a control token: the gateway spells the reply itself, and stops where the daemon does."""
    template = "{#- [TOOL_CALLS] -#}" + TEMPLATE
    served = gateway(texts=[says(written) for written in WRITTEN], template=template, markers=["[TOOL_CALLS]"])
    tools = [{"type": "function", "function": {"name": "f"}}]
    length = served.chat("", tools=tools).json()["usage"]["prompt_tokens"]
    for script, stop, text in (
        (0, ["ABC", "BX"], "1A"),  # X brings the stop, and lets go of A
        (1, ["éBC", "BX"], "1é"),
        (0, ["ABC"], "1ABX"),
        (2, ["2"], "1"),
    ):
        question = "." * ((script - length) % len(WRITTEN))
        whole = served.chat(question, tools=tools, stop=stop).json()["choices"][0]
        assert (whole["message"]["content"], whole["finish_reason"]) == (text, "stop")
        chunks = sse(served.chat(question, tools=tools, stop=stop, stream=True))
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text
