"""What a dump, a name or an answer holds is shown, and steers no terminal; in pipes neither."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from attnix.userland.errors import CommandError
from attnix.userland.output import console, say_error, show, table
from attnix.userland.visible import visible

from .conftest import Attnix

DUMPS = Path(__file__).resolve().parents[1] / "golden" / "dumps"
# Sets the title, clears the screen, turns red (CSI as one character), writes from right to left, goes back to the line's start.
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\x7f\r"
SHOWN = "\u241b]0;owned\u2407\u241b[2J\ufffd31m\ufffd\u2421\u240d"
IN_TABLES = SHOWN.replace("\u2407", "").removesuffix("\u240d")  # rich leaves bells and carriage returns out by itself
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
COLOURS = re.compile("\x1b\\[[0-9;]*m")
TELL = ("ps -l", "dmesg", "names", "explain", "tiers", "group ls")  # those that are sure to print a text of the dump
LOOKS = (
    *TELL, "ps -c", "lsctx", "tree", "pmap 4", "cat 4", "stat 4", "free", "df", "vmstat", "sysctl", "uname", "fsck", "top",
    "doctor",
)  # fmt: skip


def spoilt(value: Any) -> Any:
    """Every text of an answer with EVIL at its end."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, list):
        return [spoilt(each) for each in value]
    return value


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts(each)


@pytest.fixture(scope="module")
def evil_dump(tmp_path_factory: pytest.TempPathFactory) -> str:
    dump = json.loads((DUMPS / "agents.json").read_text())
    for call in dump["calls"]:
        if call["call"] == "read":  # a context's text is bytes
            text = base64.b64decode(call["result"][3]["b64"])
            call["result"][3]["b64"] = base64.b64encode(b"\x1b[2J" + text[4:]).decode()
        elif "result" in call:
            call["result"] = spoilt(call["result"])
    path = tmp_path_factory.mktemp("evil") / "dump.json"
    path.write_text(json.dumps(dump))
    return str(path)


@pytest.mark.parametrize("words", LOOKS)
def test_a_crafted_dump_steers_nothing_and_is_exact_as_json(attnix: Attnix, evil_dump: str, words: str) -> None:
    said = attnix(*words.split(), "--from", evil_dump)
    assert not STEERING.search(said.out + said.err)
    exact = attnix(*words.split(), "--from", evil_dump, "--json")
    assert not STEERING.search(exact.out)
    if words in TELL:
        assert IN_TABLES in said.out
        assert any(EVIL in text for text in texts(exact.json))
    if words == "cat 4":
        assert said.out.startswith("\u241b[2J")
        assert exact.json["parts"][0]["text"].startswith("\x1b[2J")


def test_on_a_terminal_the_colours_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    made = table("NAME", "WHAT")
    made.add_row(EVIL, Text(EVIL, "red"))
    to = console()
    show(made, to)
    show(Text(EVIL, "green"), to)
    show(EVIL, to)
    out = screen.getvalue()
    assert COLOURS.search(out)
    assert not STEERING.search(COLOURS.sub("", out))
    assert out.count("owned") == 4


def test_errors_quote_what_they_were_told(capsys: pytest.CaptureFixture[str]) -> None:
    say_error(CommandError(f"there is no {EVIL}"), as_json=True)
    said = capsys.readouterr()
    assert said.err == f"attnix: there is no {SHOWN}\n"
    assert not STEERING.search(said.out)
    assert json.loads(said.out)["error"]["message"] == f"there is no {EVIL}"


def test_what_steers_nothing_stays() -> None:
    """Tabs and line feeds; accents, joined emoji, Arabic."""
    text = "a\tb\nc é \U0001f468\u200d\U0001f469\u200d\U0001f467 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 e\u0301"
    assert visible(text) == text


def test_half_a_character_of_a_crafted_document_can_be_printed() -> None:
    assert visible("\ud800").encode() == "\ufffd".encode()
