"""Waiting for tools through the socket: answers as text and messages, and the notice of a deadline."""

from __future__ import annotations

from typing import Any

import pytest

from attnix.syscalls import exceptions
from tests.wire.conftest import until


def test_an_answer_as_tokens_text_and_messages(serve: Any) -> None:
    client = serve().connect()
    with client.alloc_context() as ctx:
        ctx.append("ask")
        wait = ctx.wait_tool("search", eta=0.5, deadline=60.0)
        assert (wait.expected_ms, wait.deadline_ms) == (500, 60_000)
        assert ctx.stat().state == "tool_wait"
        with pytest.raises(exceptions.AttnixError, match="search"):
            ctx.append("more")
        assert ctx.resume("abc", wait=wait.wait).appended == 3
        ctx.wait_tool("search")
        assert ctx.resume(messages=[("tool", "42")]).appended == len("tool:42;")
        ctx.wait_tool("search")
        assert ctx.resume(tokens=[1, 2]).appended == 2
        ctx.wait_tool("search")
        said = ctx.resume()
        assert (said.appended, said.tokens) == (0, 3 + 3 + 8 + 2)
        assert ctx.generate(4).tokens_total == 20


def test_text_for_a_wait_that_is_over_is_refused_before_it_is_tokenized(serve: Any) -> None:
    client = serve(text_ms=50).connect()
    with client.alloc_context() as ctx:
        with pytest.raises(exceptions.AttnixError, match="waits for no tool"):
            ctx.resume("abc")
        first = ctx.wait_tool("search")
        with pytest.raises(
            exceptions.InvalidArgument, match=rf"never was a wait .* 'search' now \(wait {first.wait}\)"
        ):
            ctx.resume("abc", wait=first.wait + 7)
        ctx.resume("abc")
        with pytest.raises(exceptions.StaleHandle, match="is over"):
            ctx.resume("abc", wait=first.wait)
        with pytest.raises(exceptions.AttnixError, match="exactly one"):
            client.resume(ctx.handle, 0, b"\1\0\0\0", "abc", ())
        assert ctx.stat().tokens == 3


def test_a_deadline_that_comes_while_the_answer_is_tokenized(serve: Any) -> None:
    client = serve(text_ms=300).connect()
    with client.alloc_context() as ctx:
        ctx.append(tokens=[1])
        ctx.wait_tool("search", deadline=0.05)
        with pytest.raises(exceptions.StaleHandle, match="is over"):
            ctx.resume("abc")
        assert ctx.stat().tokens == 1 and ctx.stat().state == "idle"


def test_the_notice_of_a_deadline(serve: Any) -> None:
    client = serve().connect()
    with client.alloc_context() as ctx:
        wait = ctx.wait_tool("search", deadline=0.02)
        until(lambda: ctx.stat().state == "idle")
        client.vmstat()
        (notice,) = client.notices
        assert notice.kind == "wait"
        assert notice.payload == (ctx.handle, ctx.stat().cid, wait.wait, "search", "deadline")


def test_without_a_tokenizer(serve: Any) -> None:
    client = serve(pieces=None).connect()
    with client.alloc_context() as ctx:
        ctx.wait_tool("search")
        with pytest.raises(exceptions.NoSuchCall, match="resume: this model has no tokenizer"):
            ctx.resume("text")
        assert ctx.resume(tokens=[3]).tokens == 1
