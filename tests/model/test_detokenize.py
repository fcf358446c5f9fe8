"""Streaming text (case 30): whatever the tokens are, the stream is valid UTF-8, complete, and never shows a stop string."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnix.syscalls.text.detokenize import Detokenizer, StopScanner, TextStream, TokenTable


def run(pieces: list[bytes], stops: list[str]) -> tuple[list[str], TextStream]:
    """Push one token at a time, then finish."""
    stream = TextStream(TokenTable(pieces), stops)
    return [*(stream.push([token]) for token in range(len(pieces))), stream.finish()], stream


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The naive rule: grow the text a character at a time; the longest stop that the text then ends with."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), stop
    return None


DEF_TOKENS = [b"DE", b"F", b"G", b"HI", b"J tail"]


@pytest.mark.parametrize(
    ("stops", "text", "keep", "stop"),
    [
        (["DEFGHIJ"], "", 0, "DEFGHIJ"),
        (["DEFX"], "DEFGHIJ tail", None, None),  # near miss: held, then all of it
        (["EFG"], "D", 1, "EFG"),  # D was sent, so its token stays
        (["GH", "GHI"], "DEF", 2, "GH"),
        (["FGHI", "GH"], "DEF", 2, "GH"),  # the one that ends first
        (["FGH", "GH"], "DE", 1, "FGH"),  # the same end: the longer
        (["ta"], "DEFGHIJ ", 5, "ta"),  # inside one token
        ([" tail"], "DEFGHIJ", 5, " tail"),
        (["tail!"], "DEFGHIJ tail", None, None),  # held at the end, flushed
        ([], "DEFGHIJ tail", None, None),
    ],
)
def test_scripted_tokens(stops: list[str], text: str, keep: int | None, stop: str | None) -> None:
    sent, stream = run(DEF_TOKENS, stops)
    assert ("".join(sent), stream.keep_tokens, stream.stop) == (text, keep, stop)


def test_two_stops_one_the_prefix_of_the_other() -> None:
    sent, stream = run([b"x", b"A", b"B", b"C"], ["AB", "ABC"])
    assert ("".join(sent), stream.keep_tokens, stream.stop) == ("x", 1, "AB")


def test_near_miss_is_held_only_as_long_as_needed() -> None:
    sent, _ = run(DEF_TOKENS, ["DEFX"])
    assert sent == ["", "", "DEFG", "HI", "J tail", ""]


def test_end_of_turn_while_text_is_held() -> None:
    table = TokenTable([b"see ", b"ST", b"<|im_end|>"], hidden=[2])
    stream = TextStream(table, ["STOP"])
    assert [stream.push([0]), stream.push([1]), stream.push([2]), stream.finish()] == ["see ", "", "", "ST"]
    assert stream.keep_tokens is None


def test_nothing_more_after_a_stop() -> None:
    stream = TextStream(TokenTable([b"ab", b"STOP", b"more"]), ["STOP"])
    assert stream.push([0, 1, 2, 2]) == "ab"
    assert stream.push([2]) == "" and stream.finish() == "" and stream.keep_tokens == 1


def test_character_split_over_tokens_waits_for_its_last_byte() -> None:
    euro = "€".encode()
    sent, _ = run([b"a" + euro[:1], euro[1:2], euro[2:] + b"b"], [])
    assert sent == ["a", "", "€b", ""]


def test_unfinished_character_is_replaced_at_the_end_only() -> None:
    sent, _ = run([b"ok", "🙂".encode()[:2]], [])
    assert sent == ["ok", "", "\ufffd"]


def test_stop_of_one_split_character_keeps_no_token_of_it() -> None:
    sent, stream = run([b"ok", "🙂".encode()[:2], "🙂".encode()[2:]], ["🙂"])
    assert ("".join(sent), stream.keep_tokens) == ("ok", 1)


def test_ids_outside_the_vocabulary_are_no_text() -> None:
    assert Detokenizer(TokenTable([b"a"])).push([0, 7, -1, 0]) == "aa"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopScanner(["ok", ""])


alphabet = st.sampled_from("AB€é")
stop_lists = st.lists(st.text(alphabet, min_size=1, max_size=5), max_size=4)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A text and its bytes cut anywhere, also inside characters, with empty tokens among them."""
    text = draw(st.text(alphabet, max_size=24))
    data = text.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=16)))
    edges = [0, *cuts, len(data)]
    return text, [data[a:b] for a, b in pairwise(edges)]


@given(cut_texts(), stop_lists)
@example(("ABAB", [b"ABA", b"B"]), ["BAB"])
def test_any_cut_gives_the_text_before_the_first_stop(cut: tuple[str, list[bytes]], stops: list[str]) -> None:
    text, pieces = cut
    sent, stream = run(pieces, stops)
    expected = first_stop(text, stops)
    if expected is None:
        assert "".join(sent) == text and stream.keep_tokens is None
        return
    start, stop = expected
    assert ("".join(sent), stream.stop) == (text[:start], stop)
    keep = stream.keep_tokens
    assert keep is not None
    kept = b"".join(pieces[:keep])
    assert kept.startswith(text[:start].encode())
    if keep > 0:  # the fewest
        assert len(b"".join(pieces[: keep - 1])) < len(text[:start].encode())


@given(cut_texts(), stop_lists, st.integers(1, 5))
def test_grouping_tokens_changes_nothing(cut: tuple[str, list[bytes]], stops: list[str], group: int) -> None:
    _, pieces = cut
    one, single = run(pieces, stops)
    stream = TextStream(TokenTable(pieces), stops)
    ids = list(range(len(pieces)))
    many = [stream.push(ids[i : i + group]) for i in range(0, len(ids), group)] + [stream.finish()]
    assert ("".join(many), stream.keep_tokens, stream.stop) == ("".join(one), single.keep_tokens, single.stop)


@given(st.lists(st.binary(max_size=4), max_size=12))
def test_any_bytes_stream_as_they_decode_at_once(pieces: list[bytes]) -> None:
    sent, _ = run(pieces, [])
    assert "".join(sent) == b"".join(pieces).decode("utf-8", "replace")
    for text in sent:
        text.encode("utf-8")  # raises on a lone surrogate


@given(st.text(alphabet, max_size=24), stop_lists)
def test_only_the_beginning_of_a_stop_is_held(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    passed = scanner.push(text)
    if scanner.match is None:
        held = text[len(passed) :]
        prefixes = {stop[:n] for stop in stops for n in range(1, len(stop))}
        longest = max((n for n in range(1, len(text) + 1) if text[-n:] in prefixes), default=0)
        assert len(held) == longest and scanner.flush() == held
