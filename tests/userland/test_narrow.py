"""Tables on a terminal that is narrower than they are: numbers are whole, and so are the names of columns."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from attnix.userland.output import show, table

from .conftest import Attnix

DUMPS = Path(__file__).resolve().parents[1] / "golden" / "dumps"
LOOKS = (
    "ps -c -l", "lsctx", "pmap 4", "pmap 4 -a", "stat 4", "free", "df", "tiers", "vmstat", "sysctl", "uname", "names",
    "group ls", "top",
)  # fmt: skip
NUMBER = re.compile(r"(?<!\S)(?:-?\d[\d,.%-]*|[A-Z/%]{2,})(?!\S)")  # and headers


@pytest.mark.parametrize("columns", ["60", "80"])
@pytest.mark.parametrize("command", LOOKS)
def test_a_narrow_terminal(attnix: Attnix, monkeypatch: pytest.MonkeyPatch, command: str, columns: str) -> None:
    words = [*command.split(), "--from", str(DUMPS / "agents.json")]
    whole = attnix(*words).out
    for name, value in {"COLUMNS": columns, "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    shown = re.sub("\x1b\\[[0-9;]*m", "", attnix(*words).out)
    assert sorted(NUMBER.findall(shown)) == sorted(NUMBER.findall(whole))


def test_what_gives_way_first(capsys: pytest.CaptureFixture[str]) -> None:
    """The space between columns, what may wrap, then names; at last the lines are longer than the terminal."""
    row = ("a name of twenty two..", "123,456", "nine words and more, over and over")

    def shown(columns: int) -> list[str]:
        to = Console(width=columns, force_terminal=True, color_system=None)
        made = table("NAME", ">TOKENS", "~MEANING")
        made.add_row(*row)
        show(made, to)
        return capsys.readouterr().out.splitlines()[1:]

    assert shown(67) == ["a name of twenty two..  123,456  nine words and more, over and over"]
    assert shown(65) == ["a name of twenty two.. 123,456 nine words and more, over and over"]
    assert shown(51) == ["a name of twenty two.. 123,456 nine words and more,", " " * 31 + "over and over"]
    assert shown(33)[0] == "a name of t… 123,456 nine words"
    assert shown(20)[0] == "a name of t… 123,456 nine words"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb"), ("TERM", "xterm")])
def test_a_legend_of_colours_is_for_terminals_that_have_them(
    attnix: Attnix, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    last = attnix("cat", "4", "--from", str(DUMPS / "agents.json")).out.splitlines()[-1]
    assert ("demoted" in last) is (value == "xterm") and ("`attnix pmap` tells" in last) is (value != "xterm")
