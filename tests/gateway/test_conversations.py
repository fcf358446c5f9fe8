"""Contexts between requests: found again, cut where the client changed something, given up past their limits, pinned where marked."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from attnix.syscalls.text import Piece
from attnix.userland.gateway.conversations import Conversation, Parked, fingerprints

from .conftest import Gateway
from .rig import BLOCK, LONG, Served, calls, says, until


def talk(served: Served, messages: list[Any], **fields: Any) -> Any:
    got = served.http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields})
    assert got.status_code == 200, got.text
    return got.json()


def contexts(served: Served) -> list[Any]:
    with served.daemon.client() as client:
        return [row for process in client.ps().processes for row in process.contexts]


def test_a_chat_goes_on_in_its_context(gateway: Gateway) -> None:
    served = gateway(scripts=[says("One."), says("Two."), says("Three.")])
    messages: list[Any] = [{"role": "system", "content": "Count. " * 30}]
    for turn in range(3):
        messages.append({"role": "user", "content": f"turn {turn}"})
        got = talk(served, messages)
        messages.append(got["choices"][0]["message"])
    (row,) = contexts(served)
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["One.", "Two.", "Three."]
    assert row.usage.computed_tokens == row.tokens, (
        "each token once: a prompt and its reply's first token take one pass"
    )
    assert got["usage"]["attnix"]["computed_tokens"] < 2 * BLOCK + len("turn 2")
    # A client that sends only what the API needs is understood as well.
    short = [{"role": m["role"], "content": m["content"]} for m in messages] + [{"role": "user", "content": "more"}]
    talk(served, short)
    assert len(contexts(served)) == 1


def test_what_the_client_changed_is_what_the_model_reads(gateway: Gateway) -> None:
    """An edited reply, an edited question, other tools: each is answered as if it were new."""
    served = gateway(scripts=[says(calls("weather", city="Oslo")), says("It rains.")])
    tools = [{"type": "function", "function": {"name": "weather"}}]
    question = {"role": "user", "content": "weather? " * 20}
    reply = talk(served, [question], tools=tools)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "rain"}
    edited = {**reply, "content": "Let me look."}
    changed = talk(served, [question, edited, result], tools=tools)
    assert len(contexts(served)) == 1, "it is found by the call's id"
    assert changed["usage"]["prompt_tokens_details"]["cached_tokens"] > 20 * len("weather? ")
    fresh = gateway(scripts=[says("unused"), says("It rains.")])
    same = talk(fresh, [question, edited, result], tools=tools)
    assert same["usage"]["prompt_tokens"] == changed["usage"]["prompt_tokens"]
    other = talk(served, [{"role": "user", "content": "something else"}], tools=tools)
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] < BLOCK * 12


def test_a_reply_cut_inside_a_token_is_rendered_anew(gateway: Gateway) -> None:
    """The token "J tail" stays in the context, of which the client has seen "J": the next prompt is what it saw."""
    tail = 258 + LONG.index("J tail")
    served = gateway(scripts=[[ord("a"), tail, *says("x")], says("yes")])
    first = {"role": "user", "content": "hi"}
    reply = talk(served, [first], stop=[" t"])["choices"][0]["message"]
    assert reply["content"] == "aJ"
    messages = [first, reply, {"role": "user", "content": "more"}]
    again = talk(served, messages)
    fresh = gateway(script=says("yes"))
    assert again["usage"]["prompt_tokens"] == talk(fresh, messages)["usage"]["prompt_tokens"]


def test_of_calls_that_may_not_be_parallel_the_first_is_told(gateway: Gateway) -> None:
    """The other one is in the context, but the client knows nothing of it: the next prompt is what it saw."""
    served = gateway(scripts=[says(f"{calls('weather', city='Oslo')}\n{calls('weather', city='Rome')}"), says("yes")])
    tools = [{"type": "function", "function": {"name": "weather"}}]
    question = {"role": "user", "content": "weather?"}
    asked = {"tools": tools, "parallel_tool_calls": False}
    assert len(talk(served, [question], tools=tools)["choices"][0]["message"]["tool_calls"]) == 2
    reply = talk(served, [question], **asked)["choices"][0]["message"]
    (call,) = reply["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Oslo"}'
    messages = [question, reply, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    again = talk(served, messages, **asked)
    other = [question, {**reply, "tool_calls": [{**call, "id": "c"}]}, {**messages[2], "tool_call_id": "c"}]
    unknown = talk(served, other, **asked)  # of an id that no context is found by: rendered anew
    assert again["usage"]["prompt_tokens"] == unknown["usage"]["prompt_tokens"]
    body = {"model": "", "messages": [question], "tools": [{"name": "weather", "input_schema": {}}], "max_tokens": 400}
    one = {**body, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert [len(served.http.post("/v1/messages", json=each).json()["content"]) for each in (body, one)] == [2, 1]
    # Some libraries send "" for the arguments of a tool that takes none, which a template would show as a text.
    spent = []
    for arguments in ("{}", ""):
        other[1] = {**reply, "tool_calls": [{**call, "id": "d", "function": {"name": "now", "arguments": arguments}}]}
        other[2] = {**other[2], "tool_call_id": "d"}
        spent.append(talk(served, other)["usage"]["prompt_tokens"])
    assert spent[0] == spent[1]


def test_case_2_requests_share_with_those_of_their_salt(gateway: Gateway) -> None:
    """vLLM's cache_salt: not taken and not refused, a client would think its tenants kept apart.  A kept conversation is found
    by those of its salt too, or the time to the first token told what another's said."""
    served = gateway(scripts=[says("Hello.")])
    asked = [{"role": "user", "content": "How are you? " * 20}]

    def cached(path: str = "/v1/chat/completions", **body: Any) -> int:
        got = served.http.post(path, json={"temperature": 0, "max_tokens": 20, **body})
        assert got.status_code == 200, got.text
        found: int = got.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a\0b"}):
        assert cached(messages=asked, **salt) == 0 and cached(messages=asked, **salt) > 200, salt
        assert cached("/v1/completions", prompt="Well, " * 40, **salt) == 0, salt
        assert cached("/v1/completions", prompt="Well, " * 40, **salt) > 200, salt
    again = [*asked, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "So?"}]
    assert cached(messages=again, cache_salt="c") == 0 and cached(messages=again, cache_salt="a") > 200
    for wrong in ("", 1, ["a"], "a" * 2000):
        assert served.chat("hi", cache_salt=wrong).status_code == 400, wrong


def test_kept_contexts_have_a_limit_and_an_age(gateway: Gateway) -> None:
    served = gateway("--max-parked", "2", script=says("yes"))
    for n in range(5):
        talk(served, [{"role": "user", "content": f"{n}"}])
    until(lambda: len(contexts(served)) == 2, "two are left")
    aged = gateway("--parked", "0.2", script=says("yes"))
    talk(aged, [{"role": "user", "content": "hi"}])
    aged.daemon.at_rest()


@pytest.mark.parametrize("ttl", ["5m", "1h"])
def test_cache_control_pins_a_beginning(gateway: Gateway, ttl: str) -> None:
    served = gateway(script=says("yes"), frames=2048)
    system = [{"type": "text", "text": "Be terse. " * 40, "cache_control": {"type": "ephemeral", "ttl": ttl}}]

    def ask(text: str) -> Any:
        body = {"system": system, "messages": [{"role": "user", "content": text}], "max_tokens": 9}
        got = served.http.post("/v1/messages", json=body)
        assert got.status_code == 200, got.text
        return got.json()["usage"]

    first, second = ask("one"), ask("two")
    assert first["cache_read_input_tokens"] == 0 and first["cache_creation_input_tokens"] > 400
    assert second["cache_creation_input_tokens"] == 0 and second["cache_read_input_tokens"] >= 400 - BLOCK
    with served.daemon.client() as client:
        pinned = [p for p in client.ps().processes if p.name == "local cache"]
        assert len(pinned) == 1, "one beginning, one pin"
        (row,) = pinned[0].contexts
        assert row.tokens == first["cache_creation_input_tokens"]
        assert client.explain(0, row.cid).rows[-1].what == "pin"


def test_no_more_marks_than_at_anthropic(gateway: Gateway) -> None:
    """Each is a rendering of its own: 20,000 of them held everybody's text up for hours, long after the request was over."""
    served = gateway(script=says("yes"))
    block = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    tool = {"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}

    def ask(path: str, marks: int) -> Any:
        messages = [{"role": "user", "content": [block] * marks}, {"role": "assistant", "content": "Well"}]
        body = {"system": [block], "tools": [tool], "messages": messages, "max_tokens": 1}
        return served.http.post(path, json=body)

    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert ask(path, 2).status_code == 200
        refused = ask(path, 3)
        assert refused.status_code == 400
        assert "4 blocks can" in refused.json()["error"]["message"] and "5 do" in refused.json()["error"]["message"]


def test_tokens_are_counted_as_they_are_taken(gateway: Gateway) -> None:
    served = gateway(script=says("yes"))
    body = {
        "system": "Be terse.",
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}],
    }
    counted = served.http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    usage = served.http.post("/v1/messages", json={**body, "max_tokens": 5}).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


# -- the table --------------------------------------------------------------------------------------------------------


class _Named:
    """A context, as far as the table looks."""

    def __init__(self, cid: int) -> None:
        self.cid = cid


def conversation(cid: int, owner: str = "a") -> Conversation:
    made = Conversation(owner, 1, None, _Named(cid))  # type: ignore[arg-type]
    made.tokens = array("i", [cid])
    made.pieces = [Piece("x", ())]
    return made


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "r", "tool_call_id": "c1"},
]


def test_the_longest_history_is_found_and_each_context_once() -> None:
    parked = Parked(10, 60)
    prints = fingerprints("a", CHAT)
    first, second = conversation(1), conversation(2)
    assert parked.park(first, prints[1], ["c1"]) == parked.park(second, prints[1], ["c1"]) == []
    assert parked.find("b", CHAT, fingerprints("b", CHAT)) is None
    assert parked.find("a", CHAT, prints) == (second, True)
    assert parked.find("a", CHAT, prints) == (first, True)
    assert parked.find("a", CHAT, prints) is None and len(parked) == 0


def test_a_changed_history_is_found_by_its_calls() -> None:
    parked = Parked(10, 60)
    held = conversation(1)
    parked.park(held, fingerprints("a", CHAT)[1], ["c1"])
    edited = [CHAT[0], {**CHAT[1], "content": "b"}, CHAT[2]]
    assert parked.find("b", edited, fingerprints("b", edited)) is None
    assert parked.find("a", edited, fingerprints("a", edited)) == (held, False)


def test_what_client_libraries_leave_out_makes_no_difference() -> None:
    spaced = {
        **CHAT[1],
        "content": "a",
        "refusal": None,
        "tool_calls": [{**CHAT[1]["tool_calls"][0], "type": "function"}],
    }
    spaced["tool_calls"][0]["function"] = {"name": "f", "arguments": " {} "}
    assert fingerprints("a", CHAT[:2]) == fingerprints("a", [{**CHAT[0], "name": "me"}, spaced])
    assert fingerprints("a", CHAT)[1] != fingerprints("b", CHAT)[1]


def test_a_wait_that_is_over_by_itself_is_over_for_who_is_parked() -> None:
    """A notice of an earlier wait, or of a context that is not there any more, says nothing."""
    parked = Parked(10, 60)
    held = conversation(1)
    held.wait = 7
    parked.park(held, b"x", [])
    parked.woke(1, 6)
    parked.woke(2, 7)
    assert held.wait == 7 and parked.waiting == 1
    parked.woke(1, 7)
    assert held.wait == 0 and parked.waiting == 0


def test_the_oldest_go_first() -> None:
    parked = Parked(2, 60)
    made = [conversation(n) for n in range(3)]
    left = [one for n, each in enumerate(made) for one in parked.park(each, b"%d" % n, [])]
    assert left == [made[0]] and parked.oldest() is made[1] and len(parked) == 1
    assert parked.drop_all() == [made[2]] and parked.oldest() is None
