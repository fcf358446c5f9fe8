"""`attnix sh`: how a line is taken apart, what is completed, and a session on a terminal and without one."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent, Completion
from prompt_toolkit.document import Document

from attnix.syscalls import connect
from attnix.userland import cli
from attnix.userland.shell.complete import ShellCompleter, Values
from attnix.userland.shell.sh import Shell, history_path
from attnix.userland.shell.words import Line, matching, split, statements, wanted

from .conftest import COMMAND, Attnix, Serve, until
from .terminal import CTRL_C, CTRL_D, Terminal

COMMANDS = cli.command().commands
PROMPT = rb"attnix>"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ps", [("", "ps")]),
        ("ps; free && df||fsck", [("", "ps"), (";", "free"), ("&&", "df"), ("||", "fsck")]),
        ("ps | grep 'a;b' ; df", [("", "ps | grep 'a;b'"), (";", "df")]),
        ("ps # what a day; df", [("", "ps")]),
        ("cat 'it''s' \\; x", [("", "cat 'it''s' \\; x")]),
        ("ps 2>&1 | cat", [("", "ps 2>&1 | cat")]),
        ("", [("", "")]),
    ],
)
def test_statements(line: str, expected: list[tuple[str, str]]) -> None:
    assert statements(line) == expected


def test_nothing_goes_to_the_background() -> None:
    with pytest.raises(ValueError, match="background"):
        statements("ps &")


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("ps -c", Line(("ps", "-c"), "")),
        ("ps | grep x > f", Line(("ps",), "| grep x > f")),
        ("stat '1 | 2'", Line(("stat", "1 | 2"), "")),
        ('run "a > b" >> "c d"', Line(("run", "a > b"), '>> "c d"')),
        ("run a\\|b", Line(("run", "a|b"), "")),
        ("kill 7 2>/dev/null", Line(("kill", "7"), "2>/dev/null")),  # 2 is no process to end
        ("kill 7 2 > f", Line(("kill", "7", "2"), "> f")),
        ("pmap 2>&1 | wc", Line(("pmap",), "2>&1 | wc")),
        ("run a2>f", Line(("run", "a2"), ">f")),
        ("stat 12|wc", Line(("stat", "12"), "|wc")),
        ("", Line((), "")),
    ],
)
def test_split(statement: str, expected: Line) -> None:
    assert split(statement) == expected


def test_an_open_quote_is_said_to_be_one() -> None:
    with pytest.raises(ValueError, match="quotation"):
        split("run 'abc")


@pytest.mark.parametrize(
    ("text", "typed", "kinds", "some_name"),
    [
        ("pm", "pm", (), "pmap"),
        ("ps; pm", "pm", (), "pmap"),
        ("kill ", "", ("pid",), ""),
        ("kill 3 4", "4", ("pid",), ""),
        ("kill -s ", "", ("signal",), ""),
        ("kill -s KILL ", "", ("pid",), ""),
        ("pmap ", "", ("cid",), ""),
        ("pmap 3 ", "", (), ""),
        ("snapshot morning ", "", ("cid", "name"), ""),
        ("sysctl evict.", "evict.", ("sysctl",), ""),
        ("group ", "", (), "set"),
        ("group set uid:1 ", "", ("resource",), ""),
        ("demote 3 --tier ", "", ("tier",), ""),
        ("ps --", "--", (), "--contexts"),
        ("ps --from /tm", "/tm", ("file",), ""),
        ("help st", "st", ("manual",), ""),
        ("help group l", "l", ("manual",), ""),
        ("detach-tier ", "", ("device",), ""),
        ("trace -o t.json 3 ", "", ("pid",), ""),
        ("group ls ", "", ("group",), ""),
        ("pin ", "", ("cid", "name"), ""),
        ("unlink ", "", ("name",), ""),
        ("attnix kill ", "", ("pid",), ""),
        ("dump a\\ ", "a ", ("file",), ""),
        ("nonsense ", "", (), ""),
    ],
)
def test_what_is_wanted_at_the_cursor(text: str, typed: str, kinds: Sequence[str], some_name: str) -> None:
    place = wanted(text, COMMANDS)
    assert place is not None
    assert (place.typed, place.kinds) == (typed, tuple(kinds))
    assert not some_name or some_name in place.names


def test_nothing_is_suggested_behind_an_operator_nor_inside_quotes() -> None:
    assert wanted("ps | gre", COMMANDS) is None and wanted("run 'wha", COMMANDS) is None
    assert list(matching("b", [("a", ""), ("b1", "x"), ("b1", "again"), ("b0", "")])) == [("b1", "x"), ("b0", "")]


def completions(socket: str, text: str) -> list[Completion]:
    completer = ShellCompleter(COMMANDS, Values(socket, COMMANDS))
    return list(completer.get_completions(Document(text), CompleteEvent()))


def suggested(socket: str, text: str) -> dict[str, str]:
    return {each.text: each.display_meta_text for each in completions(socket, text)}


def test_completion_asks_the_system(serve: Serve, tmp_path: Path) -> None:
    with connect(serve(), name="story") as system:
        context = system.alloc_context()
        context.append(tokens=range(10))
        assert suggested(system.path, "kill ") == {str(system.server.pid): "story"}
        assert suggested(system.path, "cat ") == {str(context.cid): "story, 10 tokens"}
        assert "sched.policy" in suggested(system.path, "sysctl sched.")
        assert set(suggested(system.path, "demote 1 -t ")) == {"hbm"}
        assert set(suggested(system.path, "group ls ")) == {f"uid:{os.geteuid()}"}
        assert set(suggested(system.path, "detach-tier ")) == {"hbm0"}
        context.publish("two words")
        assert suggested(system.path, "unlink tw") == {"'two words'": f"cid {context.cid}, 10 tokens"}
        system.unlink("two words")
    (tmp_path / "a dump").write_text("")
    for typed in (f"{tmp_path}/a", f"{tmp_path}/a\\ d"):
        (found,) = completions("", f"ps --from {typed}")
        assert (found.text, found.start_position) == (f"'{tmp_path}/a dump'", -len(typed))
    assert suggested("", "study doc")["doctor"].startswith("A machine with everything wrong")
    assert suggested("", "ps --long") == {"--long": "Parent, tokens computed and found, and oom score, too."}
    assert set(suggested("", "help wait_")) == {"wait_tool"}
    assert set(suggested("", "kill -s S")) == {"STOP"}
    assert "vmstat" in suggested("", "v")


def test_completion_without_a_daemon_suggests_nothing(nobody: str) -> None:
    assert suggested(nobody, "kill ") == {}


def test_joints_look_at_the_status() -> None:
    ran: list[str] = []
    statuses = {"free": 0, "fsck": 1, "df": 3}

    def run(words: list[str]) -> int:
        ran.append(words[0])
        return statuses[words[0]]

    shell = Shell(COMMANDS, run)
    assert shell.line("free && fsck && df") == 1
    assert shell.line("fsck || df; free") == 0
    assert shell.line("free || df") == 0
    assert ran == ["free", "fsck", "fsck", "df", "free", "free"]


@pytest.mark.parametrize(
    ("lines", "ran", "status"),
    [
        (["free; exit; fsck", "df"], ["free"], 0),
        (["fsck || quit", "df"], ["fsck"], 1),
        (["fsck && exit", "free && exit 3", "df"], ["fsck", "free"], 3),
        (["exit x", "exit 1 2", "exit 256", "free", " exit "], ["free"], 0),
    ],
)
def test_exit_is_a_command(lines: list[str], ran: list[str], status: int) -> None:
    seen: list[str] = []

    def run(words: list[str]) -> int:
        seen.append(words[0])
        return int(words[0] == "fsck")

    shell = Shell(COMMANDS, run)
    left = iter(lines)
    shell.hold(lambda: next(left))
    assert (seen, shell.status) == (ran, status)


def test_errors_do_not_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    def run(words: list[str]) -> int:
        raise {"fsck": RuntimeError("a bug"), "free": KeyboardInterrupt()}[words[0]]

    shell = Shell(COMMANDS, run)
    lines = iter(["nonsense", "fsck", "free", "run 'x", "| wc", "ps < x", "ps &", "", "exit", "fsck"])
    statuses: list[int] = []

    def ask() -> str:
        statuses.append(shell.status)
        return next(lines)

    shell.hold(ask)
    assert statuses == [0, 2, 1, 130, 2, 2, 2, 2, 2]
    said = capsys.readouterr().err
    assert "there is no command 'nonsense'" in said and "RuntimeError: a bug" in said


def test_a_script(serve: Serve, tmp_path: Path) -> None:
    """Standard input is no terminal: pipes and files are the system's, and the status is the last command's."""
    with connect(serve(), name="story one") as system:
        context = system.alloc_context()
        context.append(tokens=range(10))
        script = f"""
            ps | grep -c 'story one'      # a pipe
            lsctx --json > {tmp_path}/out.json; lsctx >> {tmp_path}/out.json
            !echo $((6 * 7))
            stat 999 && echo never
            uname | head -1
            kill 999
        """
        said = subprocess.run([*COMMAND, "sh"], input=script, capture_output=True, text=True)
    lines = said.stdout.splitlines()
    assert (lines[:2], lines[2].split()[:2]) == (["1", "42"], ["system", "attnix"])
    assert said.returncode == 1 and "no process 999" in said.stderr and "no context 999" in said.stderr
    written = (tmp_path / "out.json").read_text().splitlines()
    assert written[0].startswith('{"contexts": [') and written[1].startswith("CID  PID")


def test_redirections_of_errors(serve: Serve, tmp_path: Path) -> None:
    serve()
    script = f"""
        stat 98 2> {tmp_path}/err > {tmp_path}/out
        stat 99 2>&1 | sed 's/.*no/no/'
    """
    said = subprocess.run([*COMMAND, "sh"], input=script, capture_output=True, text=True)
    assert (said.stdout, said.stderr, said.returncode) == ("no context 99 of this user\n", "", 0)
    assert "no context 98" in (tmp_path / "err").read_text() and (tmp_path / "out").read_text() == ""


def test_one_line_from_the_command_line(serve: Serve, attnix: Attnix) -> None:
    serve()
    assert attnix("sh", "-c", "fsck && stat 99").status == 1
    assert "every invariant holds" in attnix("sh", "-c", "fsck").out
    assert attnix("sh", "-c", "attnix fsck --json").json["problems"] == []


def test_a_pipeline_whose_reader_leaves(serve: Serve) -> None:
    serve()
    said = subprocess.run([*COMMAND, "sh", "-c", "sysctl | head -1; fsck"], capture_output=True, text=True)
    assert said.stderr == "" and said.stdout.splitlines()[0].startswith("NAME")
    assert "every invariant holds" in said.stdout


@pytest.fixture
def terminal(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    serve()
    made = Terminal([*COMMAND, "sh"])
    yield made
    made.close()


def test_a_session_on_a_terminal(terminal: Terminal, serve: Serve) -> None:
    terminal.read_until(PROMPT)
    terminal.type(b"unam\t")
    terminal.read_until(rb"unam.*e")  # completed
    terminal.type(b"\r")
    terminal.read_until(rb"numerics +\w+")
    terminal.read_until(PROMPT)
    terminal.type(b"ps | wc -l\r")
    terminal.read_until(rb"\n1\r")  # the header: its own process is left out
    terminal.read_until(PROMPT)
    terminal.type(b"vmstat 0.05\r")
    terminal.read_until(rb"SOME%\r?\n.*\n.*\n")
    terminal.type(CTRL_C)  # the command, not the shell
    terminal.read_until(PROMPT)
    terminal.type(b"half a line" + CTRL_C)
    terminal.read_until(PROMPT)
    socket = os.environ["ATTNIX_SOCKET"]
    with connect(socket) as system:
        system.shutdown()
    until(lambda: not os.path.exists(socket), "the daemon's end")
    terminal.type(b"fsck\r")
    terminal.read_until(rb"no attnix at")
    terminal.read_until(PROMPT)
    os.environ["ATTNIX_SOCKET"] = serve(path=socket)  # it is back, at the same place
    terminal.type(b"fsck\r")
    terminal.read_until(rb"every invariant holds")
    terminal.read_until(PROMPT)
    terminal.type(CTRL_D)
    assert terminal.wait() == 0
    lines = [line[1:] for line in history_path().read_text().splitlines() if line.startswith("+")]
    assert lines == ["uname", "ps | wc -l", "vmstat 0.05", "fsck"]
    assert stat.S_IMODE(history_path().stat().st_mode) == 0o600
