"""Prompts longer than the window (case 28): refused with both numbers, or trimmed where the request says so."""

from __future__ import annotations

from typing import Any

import pytest

from attnix.syscalls.text import TextModel, load_text
from attnix.userland.gateway.ask import Ask
from attnix.userland.gateway.errors import ApiError
from attnix.userland.gateway.families import family_of
from attnix.userland.gateway.keys import Key
from attnix.userland.gateway.plan import Plan, plan
from attnix.userland.gateway.tools.protocol import Tool

from .conftest import Gateway
from .rig import Served, says, sse, until, write_text
from .test_leaving import conversations, raw

WINDOW = 64
AROUND = len("<user\n>\n<assistant\n")  # tokens that the template writes around one message: one per control token


def posted(served: Served, **body: Any) -> Any:
    return served.http.post("/v1/chat/completions", json={"temperature": 0, **body})


@pytest.fixture
def small(gateway: Gateway) -> Served:
    return gateway(script=says("x" * 400, ends=False), window_tokens=WINDOW, block_tokens=4)


def test_case_28_a_prompt_that_is_too_long_is_refused_with_both_numbers(small: Served) -> None:
    said = "MARKER" + "m" * (80 - AROUND - 6)
    for streaming in (False, True):
        refused = posted(small, messages=[{"role": "user", "content": said}], stream=streaming)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["code"] == "context_length_exceeded"
        assert (error["attnix"]["wanted"], error["attnix"]["limit"]) == (80, WINDOW)
        assert "80" in error["message"] and str(WINDOW) in error["message"]
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 8}
    anthropic = small.http.post("/v1/messages", json=body)
    assert anthropic.status_code == 400 and anthropic.json()["error"]["type"] == "invalid_request_error"
    assert anthropic.json()["error"]["attnix"]["wanted"] == 80
    completion = small.http.post("/v1/completions", json={"prompt": "m" * 80})
    assert completion.status_code == 400 and completion.json()["error"]["attnix"]["wanted"] == 80
    small.daemon.at_rest()


def test_case_28_a_model_that_never_stops_ends_with_the_window(small: Served) -> None:
    messages = [{"role": "user", "content": "m" * (60 - AROUND)}]
    for most in ({}, {"max_tokens": 4000}, {"max_completion_tokens": 4000}):
        endless = posted(small, messages=messages, **most).json()
        assert endless["usage"]["prompt_tokens"] == 60
        assert endless["choices"][0]["finish_reason"] == "length"
        assert endless["usage"]["total_tokens"] == WINDOW
    chunks = sse(posted(small, messages=messages, stream=True))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    small.daemon.at_rest(contexts=4)


def test_case_28_trimmed_where_the_request_says_so(small: Served) -> None:
    system = {"role": "system", "content": "keep"}
    for streaming in (False, True):
        body = {"messages": [system, {"role": "user", "content": "A" * 60 + "B" * 20}], "max_tokens": 8}
        got = posted(small, truncation="auto", stream=streaming, stream_options={"include_usage": True}, **body)
        usage = sse(got)[-1]["usage"] if streaming else got.json()["usage"]
        gone = usage["attnix"]["trimmed_tokens"]
        whole = len("<system\nkeep>\n") + 80 + AROUND
        assert usage["prompt_tokens"] == whole - gone <= WINDOW - 8
        assert gone % 4 == 0 and usage["prompt_tokens"] > WINDOW - 8 - 4, (
            "whole blocks, and no more of them than needed"
        )
    huge = [{"role": "system", "content": "s" * 60}, {"role": "user", "content": "hi"}]
    refused = posted(small, messages=huge, truncation="auto", max_tokens=8)
    assert refused.status_code == 400 and refused.json()["error"]["attnix"]["limit"] == WINDOW - 8
    small.daemon.at_rest()


def test_trimmed_while_another_with_the_same_prompt_was_cut(gateway: Gateway) -> None:
    """What is trimmed may be there half computed: nothing of it has to be finished for that (case 38)."""
    served = gateway(script=says("yes"), window_tokens=256, stepped=True)
    messages = [{"role": "system", "content": "s" * 100}, {"role": "user", "content": "A" * 100}]
    with served.daemon.client() as client:
        client.sysctl("sched.step_tokens", 64)
        connection = raw(served, {"messages": messages, "temperature": 0})
        until(lambda: served.daemon.passes() == 1, "the first chunk")
        served.daemon.let(1)
        until(lambda: served.daemon.passes() == 2, "the second")
        connection.close()
        until(lambda: conversations(client) == [], "its end")
    served.daemon.let_all()
    messages[1]["content"] += "B" * 200
    got = posted(served, messages=messages, truncation="auto", max_tokens=8).json()
    assert got["choices"][0]["message"]["content"] == "yes"
    assert got["usage"]["attnix"]["trimmed_tokens"] > 0
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] >= 100 // 16 * 16 - 16, "the system message was found"


# -- the tokens that are left ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text(write_text(tmp_path_factory.mktemp("model")).parent)


def planned(model: TextModel, messages: list[dict[str, Any]], room: int, tools: list[Tool], block: int = 4) -> Plan:
    ask = Ask(Key("local"), messages, tools=tools, trim=True)
    return plan(model, family_of(model), ask, None, False, room, block)


def written(model: TextModel, tokens: list[int]) -> str:
    """Control tokens too."""
    return b"".join(model.token_bytes[token] for token in tokens).decode()


TAIL = "<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = {"role": "system", "content": "keep this"}
FIND = Tool("find", "finds it", {"type": "object", "properties": {}})


@pytest.mark.parametrize("tools", [[], [FIND]])
@pytest.mark.parametrize("system", [[], [SYSTEM]])
@pytest.mark.parametrize("less", [1, 4, 5, 60, 79, 80])
def test_what_is_cut_is_the_oldest_behind_the_system_part(
    model: TextModel, system: list[Any], tools: list[Tool], less: int
) -> None:
    """The system part and the tools stay whole, so do the head of the first message and the end of the prompt."""
    said = "".join(f"{n:02d} " for n in range(30))
    messages = [*system, {"role": "user", "content": said}]
    whole = written(model, planned(model, messages, 10_000, tools).tokens)
    room = len(planned(model, messages, 10_000, tools).tokens) - less
    made = planned(model, messages, room, tools)
    head = whole[: whole.index(said)]
    assert all(word in head for word in [*(s["content"] for s in system), *(tool.name for tool in tools)])
    gone = -(-less // 4) * 4
    assert made.trimmed == gone and len(made.tokens) <= room
    assert written(model, made.tokens) == head + said[gone:] + TAIL
    assert made.keep == 0 and not made.resumed


def test_several_messages_are_cut_from_the_oldest_on(model: TextModel) -> None:
    turns = [{"role": role, "content": f"{role} {n} " + "." * 20} for n in range(4) for role in ("user", "assistant")]
    messages = [SYSTEM, *turns, {"role": "user", "content": "the last"}]
    whole = planned(model, messages, 10_000, []).tokens
    for room in range(len(whole) - 1, 60, -7):
        made = planned(model, messages, room, [])
        left = written(model, made.tokens)
        head = "<|im_start|>system\nkeep this<|im_end|>\n<|im_start|>user\n"
        assert left.startswith(head) and left.endswith("the last" + TAIL)
        assert made.trimmed % 4 == 0 and room - 4 < len(made.tokens) <= room
        at = len(planned(model, messages[:1], 10_000, []).tokens)
        assert written(model, whole).endswith(left[len(head) :]), "what is left is what came last"
        assert at < len(whole)


@pytest.mark.parametrize("room", [1, 30, 50])
def test_nothing_but_the_system_part_would_be_left(model: TextModel, room: int) -> None:
    """Then it is refused with both numbers: the prompt must not lose its own end, nor the last message all of itself."""
    messages = [{"role": "system", "content": "s" * 20}, {"role": "user", "content": "0123456789"}]
    with pytest.raises(ApiError) as refused:
        planned(model, messages, room, [])
    assert refused.value.status == 400 and refused.value.fields["limit"] == room
    assert refused.value.fields["wanted"] > room
