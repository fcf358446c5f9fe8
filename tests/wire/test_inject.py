"""Interrupting a generation through the socket: as text and as tokens, from the same and from another connection."""

from __future__ import annotations

from typing import Any

import pytest

from attnix.syscalls import exceptions
from attnix.syscalls.records import unpack_ids
from attnix.syscalls.types import InjectArgs, InjectResult

from .turnstile import Turnstile


def test_text_goes_into_a_running_stream(serve: Any, turnstile: Turnstile) -> None:
    daemon = serve(turnstile=turnstile.path)
    client, other = daemon.connect(), daemon.connect()
    with client.alloc_context() as ctx:
        ctx.append("hello")
        cid = ctx.stat().cid
        stream = ctx.stream(40, ignore_eos=True)
        turnstile.let(6)
        notes = []
        for note in stream:
            notes.append(note)
            if len(notes) == 3:  # it is answered when the pass has ended that is under way, which may wait already
                words = other.submit("inject", InjectArgs(0, b"", "stop!", cid), InjectResult)
                turnstile.let(12)
            if len(notes) == 9:
                assert words.result().appended == 5
                other.submit("inject", InjectArgs(0, b"\x21\0\0\0", "", cid), InjectResult)
                turnstile.let_all()
        result = stream.result()
        (first, five), (second, one) = result.injected
        assert (five, one) == (5, 1) and 3 <= first < second < 40
        assert result.tokens_total == 5 + 40 + 6 == ctx.stat().tokens
        assert b"".join(note.tokens for note in notes) == result.tokens and len(result.tokens) == 4 * 40
        sampled = [note.offset for note in notes if note.tokens]  # one without brings text that was withheld
        assert sampled == list(range(40))
        assert "".join(note.text for note in notes) == result.text
        # The same words at the same places, without a generation under way: the same tokens.
        with client.alloc_context() as by_hand:
            by_hand.append("hello")
            said = unpack_ids(by_hand.generate(first, ignore_eos=True).tokens)
            by_hand.append("stop!")
            said += unpack_ids(by_hand.generate(second - first, ignore_eos=True).tokens)
            by_hand.append(tokens=[0x21])
            said += unpack_ids(by_hand.generate(40 - second, ignore_eos=True).tokens)
            assert said == unpack_ids(result.tokens)


def test_refusals(serve: Any) -> None:
    client = serve(window_tokens=32).connect()
    with client.alloc_context() as ctx:
        ctx.append("hello")
        with pytest.raises(exceptions.AttnixError, match="exactly one of tokens and text"):
            client.inject(ctx.handle, b"\1\0\0\0", "x")
        with pytest.raises(exceptions.AttnixError, match="window"):
            ctx.inject("x" * 40)
        ctx.wait_tool("search")
        with pytest.raises(exceptions.AttnixError, match="waits for 'search'"):
            ctx.inject("x")
        ctx.resume()
        assert ctx.inject("x").tokens == 6
