"""Streamed text over the wire (case 30): every character once, nothing at or after a stop, valid UTF-8, same as whole."""

from __future__ import annotations

from typing import Any

import pytest

from attnix.syscalls import Client, exceptions
from attnix.syscalls.records import unpack_ids

from .turnstile import Turnstile

PIECES = ["?", "DE", "F", "G", "HI", "J tail", "AB", "C", "x", "\u20ac", ""]
CASE_30 = (1, 2, 3, 4, 5)  # "DE" "F" "G" "HI" "J tail"


def both(client: Client, max_tokens: int = 5, **options: Any) -> tuple[str, list[int], str, int]:
    """(text, tokens, reason, tokens in the context); streamed and whole must agree, and so must the context's log."""
    results = []
    for streamed in (True, False):
        with client.alloc_context() as ctx:
            ctx.append(tokens=[8])
            if streamed:
                notes = list(stream := ctx.stream(max_tokens, **options))
                result = stream.result()
                assert "".join(note.text for note in notes) == result.text
                sent = [token for note in notes for token in unpack_ids(note.tokens)]
                kept = unpack_ids(result.tokens)
                assert sent[: len(kept)] == kept, "a stop may take tokens back, never change them"
                at = 0
                for note in notes:
                    assert note.offset == at
                    at += len(note.tokens) // 4
            else:
                result = ctx.generate(max_tokens, **options)
            assert ctx.stat().tokens == result.tokens_total == 1 + len(result.tokens) // 4
            results.append((result.text, unpack_ids(result.tokens), result.reason, result.tokens_total))
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize(
    ("stop", "text", "tokens", "reason"),
    [
        ("DEFGHIJ", "", [], "stop"),  # over five tokens: nothing leaks, nothing stays
        ("DEFX", "DEFGHIJ tail", [1, 2, 3, 4, 5], "length"),  # near miss: what was withheld comes out
        ("FG", "DE", [1], "stop"),
        ("tail", "DEFGHIJ ", [1, 2, 3, 4, 5], "stop"),  # inside a token: its first half was passed on
        ("E", "D", [1], "stop"),  # inside the first token
        ("I", "DEFGH", [1, 2, 3, 4], "stop"),
        ("tail.", "DEFGHIJ tail", [1, 2, 3, 4, 5], "length"),  # withheld at the end, flushed
        ((), "DEFGHIJ tail", [1, 2, 3, 4, 5], "length"),
        (("HI", "GH"), "DEF", [1, 2], "stop"),  # the one that ends first
    ],
)
def test_stops(serve: Any, stop: Any, text: str, tokens: list[int], reason: str) -> None:
    client = serve(pieces=PIECES, script=CASE_30, vocab_tokens=len(PIECES)).connect()
    assert both(client, stop=stop) == (text, tokens, reason, 1 + len(tokens))


def test_one_stop_begins_another(serve: Any) -> None:
    client = serve(pieces=PIECES, script=(6, 7, 8), vocab_tokens=len(PIECES)).connect()
    assert both(client, 3, stop=("AB", "ABC")) == ("", [], "stop", 1)
    assert both(client, 3, stop=("ABD", "BC")) == ("A", [6], "stop", 2)


def test_text_withheld_is_flushed_by_max_tokens_and_by_a_stop_token(serve: Any) -> None:
    client = serve(pieces=PIECES, script=CASE_30, vocab_tokens=len(PIECES)).connect()
    assert both(client, 3, stop="DEFGHIJ") == ("DEFG", [1, 2, 3], "length", 4)
    text, tokens, reason, _ = both(client, 5, stop="DEFGHIJ", stop_tokens=[4])
    assert (text, tokens, reason) == ("DEFG", [1, 2, 3], "stop"), "a stop token is neither text nor in the context"


def test_a_stop_in_the_last_token_allowed(serve: Any) -> None:
    """The generation ends by itself in the very step that completes the stop string."""
    client = serve(pieces=PIECES, script=CASE_30, vocab_tokens=len(PIECES)).connect()
    assert both(client, 3, stop="FG") == ("DE", [1], "stop", 2)


def test_characters_over_several_tokens(serve: Any) -> None:
    """Bytes of the euro sign and of an emoji in tokens of one byte; then a character that never ends."""
    script = (*"a\u20acb\U0001f600".encode(), 0xE2, 0x82)
    client = serve(script=script).connect()
    assert both(client, len(script)) == ("a\u20acb\U0001f600\ufffd", list(script), "length", 1 + len(script))
    assert both(client, len(script), stop="\u20ac")[0] == "a"
    assert both(client, len(script), stop="\ufffd")[:3] == ("a\u20acb\U0001f600", list(script[:9]), "stop")


def test_cancel_keeps_and_flushes(serve: Any, turnstile: Turnstile) -> None:
    options = {"pieces": PIECES, "script": CASE_30 * 20, "vocab_tokens": len(PIECES)}
    client = serve(**options, turnstile=turnstile.path).connect()
    with client.alloc_context() as ctx:
        ctx.append(tokens=[8])
        stream = ctx.stream(100, stop="DEFGHIJ tail.")
        turnstile.let(7)
        while len(stream.notes) < 3:
            client._receive()
        stream.cancel()
        turnstile.let_all()
        text = "".join(note.text for note in stream)
        result = stream.result()
        assert result.reason == "cancelled" and 3 <= len(result.tokens) // 4 < 100
        assert text == result.text == "".join(PIECES[token] for token in unpack_ids(result.tokens))
        assert ctx.stat().tokens == result.tokens_total


def test_logprobs_stream_and_whole_agree(serve: Any) -> None:
    client = serve().connect()
    with client.alloc_context() as ctx:
        ctx.append(tokens=[1, 2, 3])
        whole, streamed = ctx.fork(2)
        result = whole.generate(6, logprobs=3)
        notes = list(stream := streamed.stream(6, logprobs=3))
        assert [lp for note in notes for lp in note.logprobs] == list(result.logprobs) == list(stream.result().logprobs)
        assert [len(lp[1]) for lp in result.logprobs] == [12] * 6
        greedy = unpack_ids(result.tokens)
        assert [unpack_ids(lp[1])[0] for lp in result.logprobs] == greedy, "greedy takes the first alternative"
        whole.release()
        streamed.release()


def test_without_a_tokenizer(serve: Any) -> None:
    """Token ids work, text is refused and says why."""
    client = serve(pieces=None).connect()
    with client.alloc_context() as ctx:
        ctx.append(tokens=[1])
        assert ctx.generate(4).text == ""
        with pytest.raises(exceptions.NoSuchCall, match="no tokenizer"):
            ctx.append("text")
        with pytest.raises(exceptions.NoSuchCall, match="no tokenizer"):
            ctx.append(messages=[("user", "x")])
        with pytest.raises(exceptions.NoSuchCall, match="no tokenizer"):
            ctx.generate(4, stop="x")
