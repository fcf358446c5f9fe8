"""A chat session: its context holds what it should.  The rig's template writes `role:content;` and its tokens are bytes, so
lengths tell what was appended; what the model says follows from everything before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.syscalls import Client, connect
from attnix.syscalls.exceptions import Busy, TooBig
from attnix.syscalls.records import unpack_ids
from attnix.userland.programs.chat import Chat

from .conftest import Attnix, Serve

N = 4


@pytest.fixture
def system(serve: Serve) -> Iterator[Client]:
    with connect(serve(window_tokens=128, frames=200), name="test") as client:
        yield client


def say(chat: Chat, text: str, n: int = N) -> list[int]:
    return unpack_ids(chat.say(text, n).result().tokens)


class Log:
    """What a conversation's context must hold, worked out from the simulated model."""

    def __init__(self, system_prompt: str = "") -> None:
        self.tokens = list(f"system:{system_prompt};".encode()) if system_prompt else []

    def say(self, text: str, n: int = N) -> list[int]:
        self.tokens += f"user:{text};".encode()
        answer = reference_tokens(self.tokens, n)
        self.tokens += answer
        return answer


def length(chat: Chat) -> int:
    return chat.context.stat().tokens


def test_turns_are_appended(system: Client) -> None:
    chat, log = Chat(system, "be kind"), Log("be kind")
    for text in ("one", "two", "three"):
        assert say(chat, text) == log.say(text)
    assert length(chat) == len(log.tokens)
    assert [turn.question for turn in chat.turns] == ["one", "two", "three"]
    chat.close()


def test_a_system_prompt_that_a_template_shows_with_a_question_only(system: Client) -> None:
    chat, log = Chat(system, "!not alone"), Log("!not alone")
    assert length(chat) == 0
    assert say(chat, "one") == log.say("one")
    assert say(chat, "two") == log.say("two")
    twin = chat.branch()
    chat.undo(), chat.undo()
    assert say(chat, "three") == Log("!not alone").say("three"), "it comes with the first one again"
    assert say(twin, "four") == log.say("four")
    for text in ("five" * 9, "six" * 9, "seven" * 9):
        say(chat, text)
    held = bytes(unpack_ids(system.read(0, chat.context.cid).tokens))
    assert chat.dropped and held.startswith(b"system:!not alone;user:") and held.count(b"system:") == 1


def test_streaming_and_a_turn_taken_back(system: Client) -> None:
    chat, log = Chat(system), Log()
    say(chat, "one")
    log.say("one")
    stream = chat.say("oops", 30)
    next(iter(stream))  # it is being answered still
    assert chat.undo() == "oops"
    assert say(chat, "two") == log.say("two"), "as if it had never been said"
    assert length(chat) == len(log.tokens)
    chat.undo()
    chat.undo()
    assert length(chat) == 0
    with pytest.raises(IndexError):
        chat.undo()


def test_a_branch_is_a_conversation_of_its_own(system: Client) -> None:
    chat, log = Chat(system, "s"), Log("s")
    say(chat, "one")
    log.say("one")
    twin, other = chat.branch(), Log()
    other.tokens = list(log.tokens)
    assert say(twin, "left") == other.say("left")
    assert say(chat, "right") == log.say("right")
    assert twin.undo() == "left" and twin.undo() == "one"
    assert length(chat) == len(log.tokens)
    twin.close()
    assert say(chat, "on") == log.say("on")


def test_the_oldest_turns_go_when_the_window_is_full(system: Client) -> None:
    """Window 128.  Each turn has 26 tokens: `user:` 5, text 16, `;` 1, answer 4; the system prompt 9.

    9 + 4 * 26 = 113 leaves 15 for the fifth, which would be TooBig: the newest two turns (52 <= 64) stay.
    """
    chat = Chat(system, "x")
    texts = [f"{n}" * 16 for n in range(6)]
    for text in texts[:4]:
        say(chat, text)
    assert (length(chat), chat.dropped) == (9 + 4 * 26, 0)
    before = system.vmstat().counters["contexts"]
    answer = say(chat, texts[4])
    assert chat.dropped == 2
    assert [turn.question for turn in chat.turns] == texts[2:5]
    tokens = list(b"system:x;")
    for turn in chat.turns[:2]:
        tokens += f"user:{turn.question};assistant:{turn.answer};".encode()
    tokens += f"user:{texts[4]};".encode()
    assert answer == reference_tokens(tokens, N)
    assert system.vmstat().counters["contexts"] == before, "the full context was given back"
    chat.undo()
    assert length(chat) == len(tokens) - len(f"user:{texts[4]};")


def test_there_is_room_for_an_answer(system: Client) -> None:
    """A quarter of the window, or max_tokens: 9 + 3 * 26 + 22 = 109 leaves 19, enough for an answer of 4 and not for one of 32."""
    short, long = Chat(system, "x"), Chat(system, "x")
    for chat in (short, long):
        for n in range(3):
            say(chat, f"{n}" * 16)
    say(short, "3" * 16)
    assert short.dropped == 0
    say(long, "3" * 16, 32)
    assert long.dropped == 1


def test_what_never_fits_changes_nothing(system: Client) -> None:
    chat, log = Chat(system, "s"), Log("s")
    say(chat, "one")
    log.say("one")
    with pytest.raises(TooBig):
        chat.say("x" * 200)
    assert (length(chat), chat.dropped, len(chat.turns)) == (len(log.tokens), 0, 1)
    assert say(chat, "two") == log.say("two")
    assert system.vmstat().counters["contexts"] == 1


def test_a_long_system_prompt_does_not_make_it_rebuild_for_nothing(system: Client) -> None:
    chat, log = Chat(system, "x" * 90), Log("x" * 90)
    cid = chat.context.cid
    assert say(chat, "hi") == log.say("hi")
    assert chat.context.cid == cid


def test_a_refused_answer_was_not_asked_for(system: Client) -> None:
    chat, log = Chat(system), Log()
    say(chat, "one")
    log.say("one")
    stream = chat.say("two", top_p=-1.0)
    with pytest.raises(Exception, match="top_p"):
        stream.result()
    assert say(chat, "three") == log.say("three")
    assert [turn.question for turn in chat.turns] == ["one", "three"]


def test_starting_over(system: Client) -> None:
    chat = Chat(system, "s")
    say(chat, "one")
    chat.start_over()
    assert (length(chat), chat.turns) == (len("system:s;"), [])
    assert say(chat, "one") == Log("s").say("one")


def test_a_name_outlives_the_program_and_the_daemon(serve: Serve, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    path, log = serve(state=state, window_tokens=128, frames=200), Log("s")
    with connect(path) as system:
        chat = Chat(system, "s", "evening")
        assert not chat.reopened
        say(chat, "one")
        log.say("one")
        with connect(path) as other, pytest.raises(Busy):
            Chat(other, name="evening")
    with connect(path) as system:
        again = Chat(system, "s", "evening")
        assert again.reopened and again.turns == []
        assert say(again, "two") == log.say("two")
        system.shutdown()
    path = serve(state=state, window_tokens=128, frames=200)
    with connect(path) as system:
        again = Chat(system, "s", "evening")
        assert say(again, "three") == log.say("three")
        say(again, "4" * 40)
        say(again, "5" * 40)  # it is full: what only the context held goes, the system prompt and the newest turns stay
        assert [turn.question for turn in again.turns] == ["4" * 40, "5" * 40]
        assert not again.reopened
        assert system.names().rows[0].cid == again.context.cid, "the name went along"
        assert [row.name for row in system.names().rows] == ["evening"]
        system.unlink("evening")
        again.close()


def test_it_reads_to_the_end_what_it_was_in_the_middle_of(serve: Serve, tmp_path: Path) -> None:
    path, log = serve(state=str(tmp_path / "state"), pass_ms=20, window_tokens=128, frames=200), Log()
    with connect(path) as system:
        chat = Chat(system, name="evening")
        next(iter(chat.say("one", 12)))
    expected = log.say("one", 12)
    with connect(path) as system:
        again = Chat(system, name="evening")
        assert again.unfinished is not None
        assert unpack_ids(again.unfinished.result().tokens) == expected
        assert say(again, "two") == log.say("two")
        system.unlink("evening")
        again.close()


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_forks_and_takes_back(serve: Serve, attnix: Attnix) -> None:
    serve(script=[65])
    lines = ["/back", "/undo", "one", "/fork", "/stat", "two", "/undo", "/back", "/stat", "/undo", "/stat"]
    said = attnix("chat", "-n", "1", stdin="\n".join(lines)).out.split("> ")[1:]
    one = len("user:one;") + 1
    assert said[0] == "this is no copy: /fork makes one\n"
    assert said[1] == "there is no turn to take back\n"
    assert said[3].startswith("this is a copy")
    assert f": {one} tokens" in said[4]
    assert said[6] == "taken back: two\n"
    assert f": {one} tokens" in said[8] and said[9] == "taken back: one\n"
    assert ": 0 tokens" in said[10]


def test_the_command_keeps_a_conversation(serve: Serve, attnix: Attnix) -> None:
    path = serve(script=[65])
    said = attnix("chat", "-n", "1", stdin="one\n/name evening\n")
    assert "kept as evening: attnix chat --name evening goes on with it" in said.out
    again = attnix("chat", "-n", "1", "--name", "evening", stdin="two\n/new\n/stat\n")
    assert f"evening goes on, at {len('user:one;') + 1} tokens" in again.out
    assert ": 0 tokens" in again.out
    with connect(path) as system:
        assert [row.name for row in system.names().rows] == ["evening"]
        system.unlink("evening")


def test_the_command_says_when_turns_are_left_out(serve: Serve, attnix: Attnix) -> None:
    serve(script=[65], window_tokens=64)
    said = attnix("chat", "-n", "1", stdin="".join(f"{n}{'x' * 14}\n" for n in range(4)))
    # A turn has 22 tokens: two of them leave no room for a third, and one is the most that half a window holds.
    assert said.out.count("[the window is full: 1 of the oldest turns left out]") == 2
    assert said.err == ""
