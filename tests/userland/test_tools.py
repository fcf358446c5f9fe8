"""The tools of agents: what they can do, and what no model can make them do."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnix.userland.programs.tools import CALCULATOR, Tool, ToolError, calculate, command_runner, file_search, http_get


def call(tool: Tool, **arguments: Any) -> str:
    return asyncio.run(tool.call(arguments))


def refused(tool: Tool, **arguments: Any) -> str:
    with pytest.raises(ToolError) as caught:
        call(tool, **arguments)
    return str(caught.value)


# -- calculator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", 14), ("(17 + 4) * 2.5", 52.5), ("-7 // 2", -4), ("-7 % 3", 2), ("2 ** 10", 1024), ("2^10", 1024),
        ("6 × 7 ÷ 2", 21), ("sqrt(2)", math.sqrt(2)), ("max(3, 9, 4)", 9), ("round(2.567, 2)", 2.57), ("pi", math.pi),
        ("2 ** -1", 0.5), ("1e3", 1000.0), ("  7  ", 7), ("7" * 40 + " % 10", 7), ("--3", 3), ("log(e)", 1.0),
    ],
)  # fmt: skip
def test_it_calculates(expression: str, value: float) -> None:
    assert calculate(expression) == value


def test_what_the_model_reads() -> None:
    assert call(CALCULATOR, expression="6 * 7") == "42"
    assert call(CALCULATOR, expression="0.1 + 0.2") == "0.3"
    assert call(CALCULATOR, expression="1 / 3") == "0.333333333333333"


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "open('/etc/passwd')", "().__class__", "[].append", "'a' * 9", "lambda: 1",
        "x", "True", "1 if 2 else 3", "1 < 2", "f'{1}'", "abs.__self__", "(1).real", "max(*[1, 2])", "round(1, ndigits=2)",
        "1 and 2", "{1}", "1j", "...", "~5", "1 << 9999", "print(1)", "(x := 5)",
    ],
)  # fmt: skip
def test_it_evaluates_nothing_else(expression: str) -> None:
    assert "not evaluated" in refused(CALCULATOR, expression=expression)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("1 / 0", "division by zero"), ("sqrt(-1)", "math domain error"), ("(-8) ** 0.5", "no real number"),
        ("9 ** 9 ** 9", "too large"), ("2 ** 99999999", "too large"), ("1e308 * 10", "too large"), ("1e999", "too large"),
        ("exp(1000)", "math range error"), ("round(5, -99999999)", "at most 15"), ("round(2.5, 1.0)", "whole number of digits"), ("2 +", "no arithmetic expression"),
        ("", "no arithmetic expression"), ("two plus two", "no arithmetic expression"), ("1 +\0 2", "no"),
        ("max()", "has no value"), ("1" * 500, "500 characters"), ("2.0 ** 99999", "no value"),
    ],
)  # fmt: skip
def test_it_says_what_has_no_value(expression: str, words: str) -> None:
    started = time.process_time()
    assert words in refused(CALCULATOR, expression=expression)
    assert time.process_time() - started < 1


def test_products_stay_small() -> None:
    """The largest that 400 characters can ask for."""
    started = time.process_time()
    refused(CALCULATOR, expression="*".join(["9**3000"] * 50))
    refused(CALCULATOR, expression="(" * 199 + "1")
    refused(CALCULATOR, expression="-" * 399)
    assert time.process_time() - started < 1


def test_arguments_are_checked() -> None:
    assert "needs 'expression'" in refused(CALCULATOR)
    assert "no argument 'code'; it has: expression" in refused(CALCULATOR, expression="1", code="2")
    assert call(CALCULATOR, expression=42) == "42", "a number is as good as its text"


# -- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "docs" / "old").mkdir(parents=True)
    (root / "a.py").write_text("import os\nprint('Secret of A')\n")
    (root / "docs" / "b.md").write_text("# Bees\n\nBees make honey.\n")
    (root / "docs" / "old" / "c.md").write_text("nothing here\n")
    (root / "docs" / "image").write_bytes(b"honey\0\1\2")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "key.md").write_text("the secret honey\n")
    return root


def test_it_finds_by_name_and_by_content(tree: Path) -> None:
    tool = file_search(tree)
    assert call(tool, name="*.md").splitlines() == ["docs/b.md", "docs/old/c.md"]
    assert call(tool, name="docs/*.md", folder="docs/old") == "docs/old/c.md"
    assert call(tool, content="HONEY") == "docs/b.md:3: Bees make honey."
    assert call(tool, name="*.py", content="secret") == "a.py:2: print('Secret of A')"
    assert call(tool, folder="docs/old").splitlines() == ["docs/old/c.md"]
    assert call(tool, name="*.txt") == "nothing found in 4 files"


@pytest.mark.parametrize("folder", ["..", "docs/../..", "/etc", "../outside", "docs/../../outside"])
def test_no_way_up(tree: Path, folder: str) -> None:
    assert "is not below the root" in refused(file_search(tree), name="*", folder=folder)


def test_no_way_through_links(tree: Path) -> None:
    (tree / "link").symlink_to("../outside")
    (tree / "key.md").symlink_to("../outside/key.md")
    (tree / "docs" / "up").symlink_to("/")
    tool = file_search(tree)
    assert "key.md" not in call(tool, name="*")
    assert call(tool, content="secret") == "a.py:2: print('Secret of A')"
    for folder in ("link", "docs/up/etc", "docs/up"):
        assert "there is no folder" in refused(tool, name="*", folder=folder)


def test_a_link_put_there_in_the_middle(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A regular file when it was looked at, a link when it is opened."""
    real = os.open

    def swapped(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if path == "b.md":
            (tree / "docs" / "b.md").unlink()
            (tree / "docs" / "b.md").symlink_to("../../outside/key.md")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", swapped)
    assert call(file_search(tree), content="honey") == "nothing found in 4 files"


def test_a_pipe_and_a_closed_folder_do_not_stop_it(tree: Path) -> None:
    os.mkfifo(tree / "docs" / "pipe")
    assert call(file_search(tree), content="honey") == "docs/b.md:3: Bees make honey."


def test_it_says_what_it_left_out(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "many").write_text("word\n" * 200)
    said = call(file_search(tree), content="word").splitlines()
    assert (len(said), said[-1]) == (51, "[more than 50 matches: ask for something narrower]")
    monkeypatch.setattr("attnix.userland.programs.tools.files.MAX_FILES", 2)
    assert call(file_search(tree), name="*").splitlines()[-1].startswith("[the search ended after 2 files")


def test_no_descriptor_is_left(tree: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tool = file_search(tree)
    call(tool, content="honey")
    refused(tool, folder="docs/none")
    (tree / "many").write_text("word\n" * 200)
    call(tool, content="word")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_root_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="name one that exists"):
        file_search(tmp_path / "nowhere")


# -- commands -------------------------------------------------------------------------------------------------------


def test_it_runs_a_command(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "do not tell")
    tool = command_runner(tree)
    assert call(tool, command="ls docs").split() == ["b.md", "image", "old"]
    assert "API_KEY" not in call(tool, command="env")
    assert call(tool, command="cat") == "", "standard input is empty"
    assert call(tool, command="sh -c 'echo out; echo err >&2; exit 3'") == "out\nerr\n\n[exit status 3]"


def test_there_is_no_shell_unless_asked_for(tree: Path) -> None:
    assert call(command_runner(tree), command="echo $HOME; ls | cat > x") == "$HOME; ls | cat > x\n"
    assert not (tree / "x").exists()
    assert call(command_runner(tree, shell=True), command="echo a | tr a b; exit 0") == "b\n"


def test_it_says_what_cannot_be_run(tree: Path) -> None:
    tool = command_runner(tree)
    assert "'nosuch' cannot be started: No such file" in refused(tool, command="nosuch 1")
    assert "split into words" in refused(tool, command="echo 'a")
    assert "empty" in refused(tool, command="  ")
    assert "cannot be started" in refused(tool, command="a\0b")


def alive(pid_file: Path) -> bool:
    return Path(f"/proc/{pid_file.read_text().strip()}").exists()


def test_too_long_and_it_is_killed_with_all_it_started(tree: Path, until: Callable[..., None]) -> None:
    child = tree / "child"
    for limit_s in (0.4, 2.0, 5.0):  # a machine that was held up may not have come to the child
        tool = command_runner(tree, time_limit_s=limit_s, shell=True)
        started = time.monotonic()
        said = refused(tool, command="echo begun; sleep 60 & echo $! > child; wait")
        assert f"longer than {limit_s:g} s" in said and time.monotonic() - started < 20
        if child.exists() and child.read_text():
            break
    assert said.endswith("begun\n")
    until(lambda: not alive(tree / "child"), "the end of what it started")


def test_what_it_leaves_behind_is_killed(tree: Path, until: Callable[..., None]) -> None:
    tool = command_runner(tree, shell=True)
    assert call(tool, command="sleep 60 > /dev/null 2>&1 & echo $! > child; echo done") == "done\n"
    until(lambda: not alive(tree / "child"), "the end of what it left")


def test_too_much_output_is_cut(tree: Path) -> None:
    said = call(command_runner(tree, output_limit_bytes=100), command="yes")
    assert said == "y\n" * 50 + "\n[cut after 100 bytes, and killed]"


def test_cancelled_it_is_killed(tree: Path, until: Callable[..., None]) -> None:
    async def cancelled() -> None:
        tool = command_runner(tree, shell=True)
        task = asyncio.create_task(tool.call({"command": "echo $$ > child; sleep 60"}))
        while not (tree / "child").exists() or not (tree / "child").read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    started = time.monotonic()
    asyncio.run(cancelled())
    assert time.monotonic() - started < 20
    assert not alive(tree / "child"), "reaped, too"


# -- HTTP -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Callable[..., tuple[int, list[bytes]]]]:
    """server(answer, hold=False) -> (port, what it was sent): says the answer to whoever connects; hold: never hangs up."""
    closing = threading.Event()
    threads: list[threading.Thread] = []
    sockets: list[socket.socket] = []

    def start(answer: bytes, hold: bool = False) -> tuple[int, list[bytes]]:
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)
        heard: list[bytes] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    heard.append(connection.recv(65_536))
                    connection.sendall(answer)
                    if hold:
                        closing.wait(30)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return listener.getsockname()[1], heard

    yield start
    closing.set()
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
    for thread in threads:
        thread.join(10)


def test_it_reads_a_page(server: Any) -> None:
    port, heard = server(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhello \xc3\xa4")
    assert call(http_get(), url=f"http://localhost:{port}/a b?q=1&x=\r\nHost: evil#part") == "hello ä"
    lines = heard[0].split(b"\r\n")
    assert lines[0].startswith(b"GET /a%20b?q=1&x=") and lines[0].endswith(b" HTTP/1.0")
    assert [line for line in lines if line.lower().startswith(b"host:")] == [f"Host: localhost:{port}".encode()]


def test_status_redirects_and_chunks(server: Any) -> None:
    port, _ = server(b"HTTP/1.0 302 Found\r\nLocation: http://example.com/\r\n\r\ngone")
    assert call(http_get(), url=f"http://127.0.0.1:{port}") == "[status 302 Found, Location: http://example.com/]\ngone"
    port, _ = server(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x\r\nde\r\n0\r\n\r\n")
    assert call(http_get(), url=f"http://127.0.0.1:{port}/") == "abcde"
    port, _ = server(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc\r\n")
    assert call(http_get(), url=f"http://127.0.0.1:{port}/") == ""
    port, _ = server(b"SSH-2.0-x\r\n")
    assert "did not answer in HTTP" in refused(http_get(), url=f"http://127.0.0.1:{port}/")


def test_size_and_time_have_limits(server: Any) -> None:
    port, _ = server(b"HTTP/1.0 200 OK\r\n\r\n" + b"x" * 5000)
    said = call(http_get(size_limit_bytes=100), url=f"http://127.0.0.1:{port}/")
    assert said == "x" * 100 + "\n[cut after 100 bytes]"
    port, _ = server(b"HTTP/1.0 200 OK\r\n\r\nslow", hold=True)
    started = time.monotonic()
    assert "within 0.3 s" in refused(http_get(time_limit_s=0.3), url=f"http://127.0.0.1:{port}/")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/", "http://10.0.0.1/", "http://169.254.169.254/latest", "http://[::2]/", "http://0.0.0.0/",
        "http://localhost.example.com/", "http://127.0.0.1@example.com/", "http://2130706433/", "http://0x7f.1/",
        "http:///x", "http://[::ffff:10.0.0.1]/",
    ],
)  # fmt: skip
def test_no_other_machine(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "open_connection", None)  # nothing may even try
    assert "is not this machine" in refused(http_get(), url=url)


def test_no_other_scheme_and_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("file:///etc/passwd", "https://localhost/", "ftp://localhost/", "localhost:80"):
        assert "only http:// is read" in refused(http_get(), url=url)
    assert "is no URL" in refused(http_get(), url="http://[::1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert "cannot be reached" in refused(http_get(), url=f"http://127.0.0.1:{port}/")
