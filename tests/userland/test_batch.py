"""`attnix batch` against real daemons; the answers are worked out from the simulated model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from attnix.drivers.sim_model import SamplingChoice, reference_tokens
from attnix.syscalls import AsyncContext, aconnect, connect
from attnix.syscalls.exceptions import TryAgain
from attnix.userland.programs.batch import Batch
from attnix.userland.programs.batch_output import BatchOutput
from attnix.userland.programs.patience import delay_before
from attnix.userland.programs.prompts import check_ids, read_prompts
from tests.wire.turnstile import Turnstile

from .conftest import COMMAND, Attnix, Serve, until

SYSTEM = "be kind"
TOKENS = 6


def answer(messages: str, n: int = TOKENS, **choice: Any) -> str:
    """What the simulated model says after them."""
    tokens = reference_tokens(list(messages.encode()), n, choice=SamplingChoice(**choice))
    pieces = [chr(token).encode() if token < 128 else bytes.fromhex(f"{token:02x}") for token in tokens]
    return b"".join(pieces).decode(errors="replace")


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[Any, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["id"]: line for line in lines}
    assert len(found) == len(lines), "an id is there twice"
    return found


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def many(source: Path, n: int) -> dict[str, str]:
    """Prompts in a file, and what must be answered to each."""
    write(source, *({"id": f"p{i}", "prompt": f"question {i}"} for i in range(n)))
    return {f"p{i}": answer(f"system:{SYSTEM};user:question {i};") for i in range(n)}


def test_a_system_prompt_that_a_template_shows_with_a_question_only(
    serve: Serve, attnix: Attnix, files: tuple[Path, Path]
) -> None:
    serve(frames=400)
    write(files[0], {"id": "p", "prompt": "question"})
    said = attnix("batch", *map(str, files), "--system", "!not alone", "-n", str(TOKENS), "--json")
    assert (said.status, said.err) == (0, "")
    assert read(files[1])["p"]["text"] == answer("system:!not alone;user:question;")


def test_every_line_is_answered(serve: Serve, attnix: Attnix, files: tuple[Path, Path]) -> None:
    serve(frames=400)
    expected = many(files[0], 40)
    said = attnix("batch", *map(str, files), "--system", SYSTEM, "-n", str(TOKENS), "-w", "12", "--json")
    assert (said.status, said.err) == (0, "")
    out = read(files[1])
    assert {name: line["text"] for name, line in out.items()} == expected
    assert {(line["reason"], line["tokens"]) for line in out.values()} == {("length", TOKENS)}
    summary = said.json
    assert (summary["lines"], summary["done"], summary["errors"], summary["skipped"]) == (40, 40, 0, 0)
    assert summary["generated_tokens"] == 40 * TOKENS
    own = sum(len(f"user:question {i};") for i in range(40))
    assert summary["computed_tokens"] <= own + 40 * (TOKENS + len("system:be kind;") % 4), "the system prompt: once"


def test_lines_may_have_messages_and_options_of_their_own(
    serve: Serve, attnix: Attnix, files: tuple[Path, Path]
) -> None:
    serve()
    write(
        files[0],
        {"prompt": "one"},
        "",
        {"id": 7, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"id": "hot", "prompt": "x", "temperature": 1.5, "seed": 9, "max_tokens": 3},
    )
    said = attnix("batch", *map(str, files), "-n", "4")
    assert said.status == 0
    assert said.out.startswith("3 done, 0 of them errors; 0 were there;")
    assert {name: line["text"] for name, line in read(files[1]).items()} == {
        1: answer("user:one;", 4),
        7: answer("user:a;assistant:b;", 4),
        "hot": answer("user:x;", 3, temperature=1.5, seed=9),
    }


def test_what_is_wrong_with_a_line_is_in_its_answer(serve: Serve, attnix: Attnix, files: tuple[Path, Path]) -> None:
    serve(window_tokens=64)
    write(
        files[0],
        {"id": "good", "prompt": "a"},
        "{not json",
        "[1]",
        {"id": "big", "prompt": "x" * 100},
        {"id": "both", "prompt": "x", "messages": []},
        {"id": "typo", "prompt": "x", "max_token": 3},
        {"id": "kind", "prompt": "x", "temperature": "hot"},
        {"id": "refused", "prompt": "!refuse"},
        {"id": "top_p", "prompt": "x", "top_p": -1},
        r'{"id": "half", "prompt": "\ud800"}',
        {"id": "last", "prompt": "b"},
    )
    said = attnix("batch", *map(str, files), "-n", "2", "--json")
    assert said.status == 0
    assert (said.json["done"], said.json["errors"]) == (11, 9)
    out = read(files[1])
    assert {name for name, line in out.items() if "text" in line} == {"good", "last"}
    assert out["good"]["text"] == answer("user:a;", 2)
    wrong = {2: "line 2 is not JSON", 3: "no JSON object", "both": "either a prompt or messages", "typo": "unknown: max_token;",
             "kind": "temperature cannot be 'hot'", "refused": "refuses", "top_p": "top_p", "half": "no character"}  # fmt: skip
    for name, words in wrong.items():
        assert words in out[name]["error"]["message"]
    assert {len("user:;") + 100, 64} <= set(out["big"]["error"]["detail"].values())
    assert out["big"]["error"]["errno"] == "E2BIG"

    again = attnix("batch", *map(str, files), "-n", "2", "--json")
    assert (again.json["done"], again.json["skipped"]) == (0, 11), "an error is an answer too"
    write(files[0], {"id": "good", "prompt": "a"}, {"id": "big", "prompt": "small"})
    retried = attnix("batch", *map(str, files), "-n", "2", "--json", "--retry-errors")
    assert (retried.json["done"], retried.json["skipped"], retried.json["errors"]) == (1, 1, 0)
    assert {name: line["text"] for name, line in read(files[1]).items()} == {
        "good": answer("user:a;", 2), "last": answer("user:b;", 2), "big": answer("user:small;", 2)
    }  # fmt: skip


@pytest.mark.parametrize("torn", [b'{"id": "p1", "te', b"{", b'{"id": "p1"\0\0\0\0', b""])
def test_a_torn_last_line_is_done_again(serve: Serve, attnix: Attnix, files: tuple[Path, Path], torn: bytes) -> None:
    serve()
    expected = many(files[0], 3)
    whole = json.dumps({"id": "p0", "text": "done before"}).encode() + b"\n"
    files[1].write_bytes(whole + torn)
    said = attnix("batch", *map(str, files), "--system", SYSTEM, "-n", str(TOKENS), "--json")
    assert (said.json["skipped"], said.json["done"]) == (1, 2)
    assert {name: line["text"] for name, line in read(files[1]).items()} == expected | {"p0": "done before"}


def test_a_last_line_that_lacks_only_its_end_counts(serve: Serve, attnix: Attnix, files: tuple[Path, Path]) -> None:
    serve()
    many(files[0], 2)
    files[1].write_text('{"id": "p1", "text": "done before"}')
    assert attnix("batch", *map(str, files), "--json").json["skipped"] == 1
    assert read(files[1])["p1"]["text"] == "done before"


@pytest.mark.parametrize(
    "content", ["Dear diary", '{"name": "x"}\n', '{"id": "p0", "text": ""}\nnot ours\n', '{"id": null}\n']
)
def test_a_file_that_is_no_output_is_not_touched(
    serve: Serve, attnix: Attnix, files: tuple[Path, Path], content: str
) -> None:
    serve()
    many(files[0], 2)
    files[1].write_text(content)
    said = attnix("batch", *map(str, files))
    assert (said.status, "name another file" in said.err) == (1, True)
    assert files[1].read_text() == content


def test_it_says_what_is_wrong_with_the_files(serve: Serve, attnix: Attnix, files: tuple[Path, Path]) -> None:
    serve()
    write(files[0], {"id": 1, "prompt": "a"}, {"prompt": "b"}, {"id": 2, "prompt": "c"})
    assert "the id 2 twice" in attnix("batch", *map(str, files)).err
    many(files[0], 2)
    assert attnix("batch", str(files[0]), str(files[0])).status == 2
    missing = attnix("batch", str(files[0]) + "x", str(files[1]))
    assert (missing.status, "in.jsonlx: No such file" in missing.err) == (1, True)
    with BatchOutput(files[1]):
        said = attnix("batch", *map(str, files), "--json")
        assert (said.status, "another batch writes" in said.json["error"]["message"]) == (1, True)


def answered(path: str, turnstile: Turnstile, output: Path, lines: int) -> None:
    """Passes end until so many lines are answered, and the next ones wait."""
    with connect(path) as system:
        enough = partial(turnstile.step, system, lambda: output.exists() and output.read_bytes().count(b"\n") >= lines)
        until(enough, f"{lines} answers")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_it_can_be_gone_on_with(
    serve: Serve, attnix: Attnix, files: tuple[Path, Path], turnstile: Turnstile, signum: int
) -> None:
    path = serve(turnstile=turnstile.path, frames=200)
    expected = many(files[0], 30)
    words = ["batch", *map(str, files), "--system", SYSTEM, "-n", str(TOKENS), "-w", "4"]
    process = subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True)
    answered(path, turnstile, files[1], 5)
    process.send_signal(signum)
    turnstile.let_all()
    _, said = process.communicate(timeout=30)
    got = len(read(files[1]))
    assert 5 <= got < 30
    if signum == signal.SIGINT:
        assert process.returncode == 130
        assert f"interrupted; {got} of 30 lines are in" in said
    rest = attnix(*words, "--json").json
    assert (rest["skipped"], rest["done"]) == (got, 30 - got)
    assert {name: line["text"] for name, line in read(files[1]).items()} == expected


def test_two_thousand_prompts_interrupted_twice(
    serve: Serve, attnix: Attnix, files: tuple[Path, Path], turnstile: Turnstile
) -> None:
    """By Ctrl-C and by SIGKILL: every prompt is answered once, and no more is done twice than was at work."""
    path = serve(frames=600, max_contexts=40, turnstile=turnstile.path)
    n, window = 2000, 32
    write(files[0], *({"id": f"p{i}", "prompt": f"{i}"} for i in range(n)))
    expected = {f"p{i}": answer(f"user:{i};", 2) for i in range(n)}
    words = ["batch", *map(str, files), "-n", "2", "-w", str(window)]
    there = 0
    for signum, wanted in ((signal.SIGINT, 300), (signal.SIGKILL, 800)):
        turnstile.let_none()
        process = subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True)
        answered(path, turnstile, files[1], wanted)
        process.send_signal(signum)
        turnstile.let_all()
        process.communicate(timeout=30)
        got = len(read(files[1]))
        assert there < wanted <= got < n
        there = got
    rest = attnix(*words, "--json").json
    assert (rest["lines"], rest["skipped"], rest["done"], rest["errors"]) == (n, there, n - there, 0)
    assert {name: line["text"] for name, line in read(files[1]).items()} == expected
    with connect(path) as system:
        assert 2 * n <= system.vmstat().counters["generated_tokens"] <= 2 * (n + 2 * window)


def test_a_daemon_that_goes_away_stops_the_run(
    serve: Serve, attnix: Attnix, files: tuple[Path, Path], turnstile: Turnstile
) -> None:
    path = serve(turnstile=turnstile.path, frames=200)
    expected = many(files[0], 30)
    words = ["batch", *map(str, files), "--system", SYSTEM, "-n", str(TOKENS), "-w", "4"]
    process = subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True)
    answered(path, turnstile, files[1], 5)
    with connect(path) as system:
        system.shutdown()
    turnstile.let_all()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "of 30 lines are in" in said and "Traceback" not in said
    assert not [line for line in read(files[1]).values() if "error" in line], "it was not the lines' fault"
    serve(frames=200)
    assert attnix(*words).status == 0
    assert {name: line["text"] for name, line in read(files[1]).items()} == expected


def test_killed_by_somebody_it_stops_and_no_line_is_blamed(
    serve: Serve, attnix: Attnix, files: tuple[Path, Path]
) -> None:
    path = serve(pass_ms=40, frames=200)
    many(files[0], 30)
    process = subprocess.Popen([*COMMAND, "batch", *map(str, files), "-w", "4"], stderr=subprocess.PIPE, text=True)
    until(lambda: files[1].exists() and files[1].read_bytes().count(b"\n") >= 2, "two answers")
    with connect(path) as system:
        (pid,) = [row.pid for row in system.ps().processes if row.name == "attnix batch"]
        system.kill(pid, signal.SIGKILL)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1 and "run it again to go on" in said
    assert not [line for line in read(files[1]).values() if "error" in line]


def test_a_wider_window_than_there_are_contexts(serve: Serve, attnix: Attnix, files: tuple[Path, Path]) -> None:
    """ENOMEM is no error while others hold what is lacking."""
    serve(max_contexts=5, frames=100)
    expected = many(files[0], 12)
    said = attnix("batch", *map(str, files), "--system", SYSTEM, "-n", str(TOKENS), "-w", "9", "--json")
    assert said.json["errors"] == 0
    assert {name: line["text"] for name, line in read(files[1]).items()} == expected


def test_no_more_than_the_window_are_at_work(
    serve: Serve, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = serve(frames=200)
    many(files[0], 20)
    held = most = 0
    fork, release = AsyncContext.fork, AsyncContext.release

    async def counted_fork(context: AsyncContext, n: int = 1) -> list[AsyncContext]:
        nonlocal held, most
        made = await fork(context, n)
        held += n
        most = max(most, held)
        return made

    async def counted_release(context: AsyncContext) -> None:
        nonlocal held
        held -= 1
        await release(context)

    monkeypatch.setattr(AsyncContext, "fork", counted_fork)
    monkeypatch.setattr(AsyncContext, "release", counted_release)

    async def work() -> None:
        async with aconnect(path) as system:
            with BatchOutput(files[1]) as output:
                run = Batch(system, output, system_prompt=SYSTEM, window=3, max_tokens=TOKENS)
                assert (await run.run(read_prompts(files[0]))).done == 20

    asyncio.run(work())
    assert most == 3


def test_eagain_is_waited_out_as_long_as_it_says(
    serve: Serve, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt is refused twice; with patience for less than that it is the line's error."""
    path = serve()
    expected = many(files[0], 4)
    refusals: dict[str, list[float]] = {}
    append = AsyncContext.append

    async def refusing(context: AsyncContext, text: str = "", *, messages: Any = (), **more: Any) -> Any:
        (role, content) = messages[0]
        seen = refusals.setdefault(content, [])
        seen.append(asyncio.get_running_loop().time())
        if role == "user" and len(seen) <= 2:
            raise TryAgain(11, {"message": "too much to do", "retry_after_ms": 40}, "append")
        return await append(context, text, messages=messages, **more)

    monkeypatch.setattr(AsyncContext, "append", refusing)

    async def work(patience_s: float) -> Any:
        async with aconnect(path) as system:
            with BatchOutput(files[1]) as output:
                run = Batch(system, output, system_prompt=SYSTEM, max_tokens=TOKENS, patience_s=patience_s)
                return await run.run(read_prompts(files[0]))

    assert asyncio.run(work(60)).errors == 0
    assert {name: line["text"] for name, line in read(files[1]).items()} == expected
    waits = [b - a for content, at in refusals.items() if content != SYSTEM for a, b in pairwise(at)]
    assert len(waits) == 8 and min(waits) >= 0.04

    files[1].unlink()
    refusals.clear()
    assert asyncio.run(work(0.01)).errors == 4
    assert {line["error"]["errno"] for line in read(files[1]).values()} == {"EAGAIN"}


def test_delays() -> None:
    def refused(**detail: object) -> TryAgain:
        return TryAgain(11, {"message": "", **detail}, "generate")

    assert 0.25 <= delay_before(refused(retry_after_ms=250), 7) <= 0.3125
    for tries, least in ((1, 0.0375), (3, 0.15), (50, 3.75)):
        assert least <= delay_before(refused(), tries) <= least / 0.75 * 1.25


def test_the_output_is_whole_lines_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One system call a line; a disk that takes half of it leaves what the next run cuts off."""
    path = tmp_path / "out"
    written: list[bytes] = []

    def one_write(fd: int, data: bytes) -> int:
        written.append(data)
        return len(data)

    monkeypatch.setattr(os, "write", one_write)
    output = BatchOutput(path)
    output.write({"id": 1, "text": "ä\n"})
    assert written == ['{"id": 1, "text": "ä\\n"}\n'.encode()]
    monkeypatch.undo()
    output.write({"id": 2, "text": "x"})
    os.write(output._fd, b'{"id": 3, "te')
    output.close()
    with BatchOutput(path) as again:
        assert again.ids == {2}
        again.write({"id": 3, "text": "\udcff"})  # text of a model is always valid; an input's id need not be
    with BatchOutput(path) as again:
        assert again.ids == {2, 3}


def test_check_ids_counts(files: tuple[Path, Path]) -> None:
    write(files[0], {"id": "1", "prompt": "a"}, {"id": 1, "prompt": "b"}, "broken", "")
    assert check_ids(files[0]) == 3


def test_without_a_daemon_and_with_wrong_usage(nobody: str, attnix: Attnix, files: tuple[Path, Path]) -> None:
    many(files[0], 2)
    said = attnix("batch", *map(str, files))
    assert (said.status, said.out, "attnix boot" in said.err) == (1, "", True)
    assert attnix("batch", str(files[0])).status == 2
    assert attnix("batch", *map(str, files), "-w", "0").status == 2


@pytest.mark.parametrize("name", ["pipe", "null"])
def test_what_is_no_file_is_no_output(attnix: Attnix, files: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    """It is read first, for what is there: a pipe has no end, and neither has /dev/zero."""
    os.mkfifo(tmp_path / "pipe")
    write(files[0], {"prompt": "a"})
    said = attnix("batch", str(files[0]), str({"pipe": tmp_path / "pipe", "null": Path(os.devnull)}[name]))
    assert said.status == 1 and "is no file" in said.err and "Traceback" not in said.err
