"""The inspector against a real daemon: forks, texts, system calls of others, dumps; and every command's exit status."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attnix.syscalls import Client, connect
from attnix.syscalls.exceptions import NotFound
from attnix.syscalls.types import PagemapResult, PressureResult, ReadResult, SyscallNote, TierRow
from attnix.userland import cli
from attnix.userland.shell import blocks, cat, manual, strace, top, tree, vmstat, waits

from .conftest import COMMAND, Attnix, Serve, serving
from .test_commands import CONTEXT, TIER, misfit

LIVE_ONLY = {
    "agent", "attach-tier", "batch", "boot", "chat", "demo", "demote", "detach-tier", "dump", "evict", "help", "kill", "nice", "pin",
    "prefetch", "publish", "pull", "restore", "run", "sh", "shutdown", "sleep", "snapshot", "strace", "study", "trace", "unlink", "unpin", "wake",
    "bench", "replay", "serve",
}  # fmt: skip
LOOKS = {
    "cat": "cat CID", "df": "df", "doctor": "doctor", "dmesg": "dmesg", "explain": "explain", "free": "free", "fsck": "fsck", "group": "group ls", "lsctx": "lsctx",
    "names": "names", "pmap": "pmap CID", "ps": "ps -c -l", "stat": "stat CID", "sysctl": "sysctl evict.", "tiers": "tiers",
    "top": "top --once", "tree": "tree", "uname": "uname", "vmstat": "vmstat",
}  # fmt: skip
# Say how long ago, how many calls so far, or something of the dump itself.
PER_MOMENT = {"doctor", "explain", "lsctx", "pmap", "ps", "top", "vmstat"}


class Held(NamedTuple):
    """A daemon that tests only look at, its client, and contexts in it: `fork` is of `first`, `grown` of `fork`."""

    system: Client
    first: int
    fork: int
    grown: int


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    with serving(tmp_path_factory.mktemp("held")) as start, connect(start(script=list(b"ok")), name="holder") as system:
        first = system.alloc_context()
        first.append("naïve text")  # 11 bytes, so 11 tokens: two full blocks of 4 and a tail of 3
        first.forward(1)
        fork = first.fork()[0]
        fork.append("!?")
        fork.forward(1)
        grown = fork.fork()[0]
        grown.generate(2)
        grown.wait_tool("weather", eta=500, deadline=900)
        first.publish("kept")
        yield Held(system, first.cid, fork.cid, grown.cid)
        system.unlink("kept")


@pytest.fixture
def looked_at(held: Held, monkeypatch: pytest.MonkeyPatch) -> Held:
    monkeypatch.setenv("ATTNIX_SOCKET", held.system.path)
    return held


def test_tree_and_lsctx_show_forks(looked_at: Held, attnix: Attnix) -> None:
    """11 tokens in blocks of 4: a fork that appends copies the tail, and the two full blocks stay shared.  The next one shares
    three: its 13th token and what it generates come behind them."""
    _, first, fork, grown = looked_at
    lines = attnix("tree").out.splitlines()
    assert lines[0].startswith(f"cid {first}  holder") and lines[0].endswith("11 tokens")
    assert lines[1].startswith(f"└─ cid {fork}  ") and lines[1].endswith(f"13 tokens, 8 shared with cid {first}")
    assert lines[2].startswith(f"   └─ cid {grown}  ") and lines[2].endswith(f"15 tokens, 12 shared with cid {fork}")
    document = attnix("tree", "--json").json["forks"]
    assert document[0]["forks"][0]["forks"][0]["shared_tokens"] == 12
    rows = {row.split()[0]: row.split() for row in attnix("lsctx").out.splitlines()[1:]}
    assert rows[str(first)][2:4] == ["kept", "idle"] and rows[str(grown)][2:4] == ["[holder]", "tool_wait"]
    assert rows[str(fork)][-3:] == [str(first), "-", "-"] and rows[str(grown)][-3] == "weather"
    assert attnix("tree", "-p", "999").out == ""


def test_ps_says_what_is_waited_for_and_until_when(looked_at: Held, attnix: Attnix) -> None:
    line = attnix("ps").out.splitlines()[1].split()
    assert line[2:4] == ["holder", "tool_wait"] and line[-3] == "weather" and line[-1] == "s"
    assert 400 < int(line[-2]) <= 500
    assert attnix("ps", "-l").out.splitlines()[0].split()[10:14] == ["COMP", "HIT", "OOM", "ADJ"]


def test_cat(looked_at: Held, attnix: Attnix) -> None:
    assert attnix("cat", str(looked_at.first)).out == "naïve text"
    assert attnix("cat", str(looked_at.grown)).out == "naïve text!?ok"
    ids = attnix("cat", str(looked_at.first), "--tokens").out.split()
    assert bytes(map(int, ids)).decode() == "naïve text"
    parts = attnix("cat", str(looked_at.fork), "--json").json["parts"]
    # The third byte of the text begins a character that the fourth ends; blocks are of four tokens.
    assert [(p["text"], p["where"], p["shared"]) for p in parts] == [
        ("naï", "resident", True), ("ve t", "resident", True), ("ext!", "resident", True), ("?", "resident", False),
    ]  # fmt: skip


def test_cat_on_a_terminal_is_coloured_and_steers_nothing() -> None:
    counts, frames, copies = [4, 4], [7, 8], [0b01, 0b11, 0b10, 0, 0b01]
    rows = [
        array("i", frames),
        array("i", [0, 0]),
        array("h", counts),
        array("i", [2, 1]),
        array("B", [7, 7]),
        array("i", [0, 0]),
    ]
    six = [row.tobytes() for row in rows]
    table = PagemapResult(3, "hbm0", 4, 18, six[0], six[1], six[2], six[3], six[4], six[5], bytes(copies))
    text = b"ab\x1b[cdefghijklmno\n"
    log = ReadResult(3, 0, b"\0" * 4 * 18, text, array("i", range(1, 19)).tobytes())
    parts = list(cat.parts_of(log, table, ["hbm0", "dram0"]))
    # Two mapped, one that dram alone has, one in no tier, and one of two tokens that others keep in hbm.
    assert [part.where for part in parts] == ["resident", "resident", "demoted", "absent", "resident"]
    assert [part.shared for part in parts] == [True, False, False, False, False]
    shown = cat.coloured(parts)
    assert shown.plain == "ab␛[cdefghijklmno\n"
    assert [str(span.style) for span in shown.spans] == ["green underline", "green", "blue", "red", "green"]
    assert "demoted" in cat.legend().plain


def test_df_says_how_full_and_how_fast(looked_at: Held, attnix: Attnix) -> None:
    line = attnix("df").out.splitlines()[1].split()
    assert line[:3] == ["hbm0", "hbm", "up"] and line[-1] == "-"
    assert attnix("df", "--json").json["tiers"][0]["device"] == "hbm0"


def test_strace_shows_calls_until_the_process_goes(serve: Serve, attnix: Attnix) -> None:
    """A thread calls for as long as somebody looks; what it calls, and how that ends, is known."""
    socket = serve()
    traced, done = connect(socket, name="traced"), threading.Event()

    def call() -> None:
        while not done.is_set():
            traced.uname()
            with pytest.raises(NotFound):
                traced.stat(0, 999)
            time.sleep(0.002)

    thread = threading.Thread(target=call)
    thread.start()
    pid = str(traced.server.pid)
    try:
        said = attnix("strace", pid, "-n", "4")
        documents = attnix("strace", pid, "-n", "2", "--json").out.splitlines()
        summed = attnix("strace", pid, "-n", "6", "-c", "--json").json["calls"]
    finally:
        done.set()
        thread.join()
    lines = said.out.splitlines()
    assert len(lines) == 4 and said.status == 0
    (failed,) = {line.split("] ")[1].split(" <")[0] for line in lines if "stat(" in line}
    assert failed == "stat(cid=999) = -1 ENOENT (no context 999 of this user)"
    assert any('uname() = {system="attnix"' in line and line.endswith(" us>") for line in lines)
    assert {json.loads(line)["name"] for line in documents} == {"uname", "stat"}
    assert {(row["name"], row["calls"], row["errors"]) for row in summed} == {("uname", 3, 0), ("stat", 3, 3)}
    traces = subprocess.Popen([*COMMAND, "strace", pid], stdout=subprocess.PIPE, text=True)
    assert traces.stdout is not None
    while not traces.poll() and not select_line(traces, traced):
        pass
    traced.close()
    assert traces.wait(30) == 0
    traces.stdout.close()


def select_line(process: subprocess.Popen[str], traced: Client) -> str:
    """Call until the tracer has said something: from then on it traces."""
    import select

    assert process.stdout is not None
    traced.uname()
    return process.stdout.readline() if select.select([process.stdout], [], [], 0.02)[0] else ""


def test_strace_of_nobody(looked_at: Held, attnix: Attnix) -> None:
    assert "ENOENT" in attnix("strace", "999").err


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        (SyscallNote(1, 2_500_000_000, 7, "generate", "ctx=1"), "[    2.500000] generate(ctx=1) <unfinished>"),
        (SyscallNote(1, 0, 7, "exit", "", 1999), "[    0.000000] exit() = 0 <1 us>"),
        (
            SyscallNote(1, 0, 7, "ps", "", 5000, 0, "processes=[]", 3),
            "[    0.000000] (3 lost) ps() = {processes=[]} <5 us>",
        ),
        (SyscallNote(1, 0, 7, "ps", "", 5000, 12345, "new"), "[    0.000000] ps() = -1 errno 12345 (new) <5 us>"),
    ],
)
def test_lines_of_strace(note: SyscallNote, expected: str) -> None:
    assert strace.line(note) == expected


# -- dumps ----------------------------------------------------------------------------------------------------------


def test_every_command_either_looks_or_acts() -> None:
    """One that is new has to be put into one of the two."""
    commands = cli.command().commands
    assert {name for name, found in commands.items() if cli._looks(found, ["ls"])} == set(LOOKS)
    assert set(commands) == LIVE_ONLY | set(LOOKS)


@pytest.fixture(scope="module")
def dumped(held: Held, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dump") / "all.json"
    said = subprocess.run(
        [*COMMAND, "dump", "--text", str(path), "--socket", held.system.path], capture_output=True, text=True
    )
    assert (said.returncode, said.stderr) == (0, "")
    assert path.stat().st_mode & 0o777 == 0o600
    return path


@pytest.mark.parametrize("name", LOOKS)
def test_what_looks_at_a_system_looks_at_its_dump(looked_at: Held, dumped: Path, attnix: Attnix, name: str) -> None:
    words = LOOKS[name].replace("CID", str(looked_at.fork)).split()
    saved = attnix(*words, "--from", str(dumped))
    assert saved.err == "" and saved.status == (attnix("doctor").status if name == "doctor" else 0)
    if name in PER_MOMENT:
        live, again = (attnix(*words, *more).out.split("\n")[0].split() for more in ((), ("--from", str(dumped))))
        assert name in ("doctor", "explain") or live == again
    else:
        assert saved.out == attnix(*words).out
    assert isinstance(attnix(*words, "--json", "--from", str(dumped)).json, dict)


@pytest.mark.parametrize("name", sorted(LIVE_ONLY - {"bench", "replay", "study"}))
def test_what_acts_refuses_a_dump(attnix: Attnix, dumped: Path, name: str) -> None:
    said = attnix(name, "--from", str(dumped))
    assert said.status == 2 and "--from is for commands that only look" in " ".join(said.err.replace("│", " ").split())


@pytest.mark.parametrize(
    "line", ["sysctl evict.policy=lru", "vmstat 1", "dmesg -f", "stat 999", "pmap 999", "cat 999", "ps -p 999"]
)
def test_what_a_dump_cannot_answer(attnix: Attnix, dumped: Path, line: str) -> None:
    said = attnix(*line.split(), "--from", str(dumped))
    assert said.status == 1 and str(dumped) in said.err


def test_a_dump_without_text(looked_at: Held, attnix: Attnix, tmp_path: Path) -> None:
    path = str(tmp_path / "bare.json")
    assert attnix("dump", path, "--json").json["refused"] == []
    assert "made without `attnix dump --text`" in attnix("cat", str(looked_at.first), "--from", path).err
    assert "8 shared" in attnix("tree", "--from", path).out  # frames tell


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no dump"), ("[1, 2]", "no dump"), ('{"attnix_dump": NaN}', "no dump"), ('{"a": 1}', "no dump"), ('{"attnix_dump": 2}', "version 2"),
        ('{"attnix_dump": 1, "at": "x"}', "damaged"), ('{"attnix_dump": 1, "at": "x", "server": [1], "calls": []}', "damaged"),
        ('{"attnix_dump": 1, "at": "", "server": ["a", 4, 1, 1], "calls": [{"call": "no", "args": []}]}', "damaged"),
    ],
)  # fmt: skip
def test_what_is_no_dump(attnix: Attnix, tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    said = attnix("ps", "--from", str(path))
    assert said.status == 1 and complaint in said.err and str(path) in said.err


def test_half_a_dump_is_none(attnix: Attnix, dumped: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.json"
    torn.write_bytes(dumped.read_bytes()[:-100])
    assert "only a part of one" in attnix("ps", "--from", str(torn)).err
    assert "No such file" in attnix("ps", "--from", str(tmp_path / "none")).err
    assert attnix("dump", str(tmp_path / "no" / "where"), "--socket", "").status == 1


@pytest.mark.parametrize("line", ["pmap", "ps --json"])
def test_a_terminal_of_fewer_letters(dumped: Path, line: str) -> None:
    """As in a locale of ISO 8859-1: what it has no letter for is `?`, in JSON its escape."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [*COMMAND, *line.split(), "--from"]
    text = dumped.read_text().replace('"holder"', '"\u65e5\u672c"')
    source = dumped.with_name("unicode.json")
    source.write_text(text)
    said = subprocess.run([*words, str(source)], capture_output=True, text=True, env=environment)
    assert (said.returncode, said.stderr) == (0, "")
    assert (
        "2?9+ shared" in said.stdout if line == "pmap" else "\u65e5" in json.loads(said.stdout)["processes"][0]["name"]
    )


def test_a_dump_as_it_is_sent(attnix: Attnix, dumped: Path, tmp_path: Path) -> None:
    packed = tmp_path / "all.json.gz"
    data = gzip.compress(dumped.read_bytes())
    packed.write_bytes(data)
    assert attnix("ps", "--from", str(packed)).out == attnix("ps", "--from", str(dumped)).out
    for torn in (data[:-100], data[:100] + b"?" + data[101:]):
        packed.write_bytes(torn)
        said = attnix("ps", "--from", str(packed))
        assert said.status == 1 and "is no dump, or only a part of one" in said.err


@pytest.mark.parametrize(("call", "column"), [("pagemap", 4), ("pagemap", 11), ("read", 2), ("read", 4)])
def test_a_dump_whose_columns_do_not_fit_is_damaged(attnix: Attnix, dumped: Path, call: str, column: int) -> None:
    document = json.loads(dumped.read_text())
    for answer in document["calls"]:
        if answer["call"] == call:
            answer["result"][column] = {"b64": "AAAA"}
    damaged = dumped.with_name("damaged.json")
    damaged.write_text(json.dumps(document))
    said = attnix("pmap", "--from", str(damaged))
    assert said.status == 1 and f"damaged: an answer of {call}" in said.err


def test_a_dump_of_an_older_system_says_so(attnix: Attnix) -> None:
    """This one was taken before there was the call `health`."""
    said = attnix("doctor", "--from", str(Path(__file__).resolve().parents[1] / "golden" / "dumps" / "agents.json"))
    assert said.status == 3 and "no answer of health: another version" in said.err


def test_a_dump_goes_into_a_pipe_and_replaces_no_link(looked_at: Held, attnix: Attnix, tmp_path: Path) -> None:
    """As root it once put a file in the place of a device."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as reader:
        assert attnix("dump", str(pipe)).status == 0
        assert json.loads(reader.read())["attnix_dump"] == 1
    assert pipe.is_fifo()
    file.write_text("mine")
    link.symlink_to(file)
    said = attnix("dump", str(link))
    assert (said.status, link.is_symlink(), file.read_text()) == (1, True, "mine") and "is a link" in said.err


@pytest.mark.parametrize("line", ["ps", "ps --json", "help"])
def test_output_that_cannot_be_written_is_said_in_a_line(dumped: Path, line: str) -> None:
    words = [*line.split(), *(["--from", str(dumped)] if line != "help" else [])]
    with open("/dev/full", "w") as full:
        said = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert said.returncode == 1 and "No space left on device" in said.stderr and len(said.stderr.splitlines()) == 1
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *words]
    said = subprocess.run(closed, capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (0, ""), "nobody wants it"


@pytest.mark.parametrize("line", ["ps -c -l", "lsctx", "tree", "group ls", "sysctl", "tiers", "names", "uname"])
def test_a_pipe_has_no_edge(attnix: Attnix, dumped: Path, tmp_path: Path, line: str) -> None:
    """Names far longer than any terminal is wide come through whole, on one line."""
    long = "x" * 500
    text = dumped.read_text()
    for name in ("holder", "kept", f'uid:{os.geteuid()}"', '"lru"', '"none"', "hbm0"):
        text = text.replace(name, long + name)
    path = tmp_path / "long.json"
    path.write_text(text)
    said = attnix(*line.split(), "--from", str(path)).out
    assert "…" not in said
    assert line == "sysctl" or long in said


# -- shapes and statuses --------------------------------------------------------------------------------------------


def test_new_documents_have_their_shapes(looked_at: Held, attnix: Attnix) -> None:
    cid = str(looked_at.first)
    part = {"block": int, "tokens": int, "where": str, "shared": bool, "text": str}
    shapes: dict[str, Any] = {
        "lsctx": {"contexts": [CONTEXT]},
        "df": {"tiers": [TIER]},
        f"cat {cid}": {"cid": int, "tokens": [int], "parts": [part]},
        "vmstat 0.01 1": dict.fromkeys(vmstat.Rates._fields, (int, float)),
        f"nice {looked_at.system.server.pid}": {"pid": int, "nice": int, "oom_score": int, "oom_score_adj": int},
    }
    for line, shape in shapes.items():
        assert misfit(shape, attnix(*line.split(), "--json").json) == [], line
    found = attnix("top", "--json", "-i", "0.1").json
    assert set(found) == {"processes", "tokens_s", "rates", "hit_rates", "tiers", "pressure"}
    told = attnix("help", "group", "--json").json
    assert [call["name"] for call in told["calls"]] == ["groups", "setlimit"]
    assert set(attnix("help", "--json").json) == {"commands", "calls"}


STATUSES = {
    "ps": 0, "lsctx -p 999": 1, "cat 999": 1, "cat": 2, "cat 0": 2, "tree -p x": 2, "tree -p 999": 1, "trace -o /dev/null 999": 1, "kill 0": 2, "df --nonsense": 2, "top --sort colour --once": 2,
    "top -i 0": 2, "vmstat -1": 2, "vmstat 0.01 2": 0, "strace 0": 2, "strace 999": 1, "nice 999": 1, "nice 999 5": 1, "nice 1 99": 2,
    "nice x": 2, "dump": 2, "help nothing": 2, "help ps": 0, "help group ls": 0, "help group x": 2, "help ps ls": 2,  "help fork": 0, "help": 0, "sh -c nonsense": 2, "sh -c fsck": 0, "dmesg": 0,
}  # fmt: skip


@pytest.mark.parametrize("line", STATUSES)
def test_exit_statuses(looked_at: Held, attnix: Attnix, line: str) -> None:
    assert attnix(*line.split()).status == STATUSES[line]


def test_a_context_that_has_ended_is_explained(serve: Serve, attnix: Attnix) -> None:
    with connect(serve(), name="holder") as system:
        with system.alloc_context() as context:
            context.append(tokens=range(10))
            context.forward(1)
            context.wait_tool("search", eta=60.0)
        cid = str(context.cid)
        said = attnix("explain", cid)
        assert said.status == 0 and f"wait hbm0 cid {cid}" in said.out
        assert {row["cid"] for row in attnix("explain", cid, "--json").json["rows"]} == {context.cid}
        assert "no context 999" in attnix("explain", "999").err


def test_nice_changes_what_it_says(serve: Serve, attnix: Attnix) -> None:
    with connect(serve(), name="holder") as system:
        pid = str(system.server.pid)
        assert "nice -5, oom score" in attnix("nice", pid, "-5").out
        assert attnix("nice", pid, "--oom", "300", "--json").json["oom_score_adj"] == 300
        row = system.ps(system.server.pid).processes[0]
        assert (row.nice, row.oom_score_adj) == (-5, 300)


def test_help_of_a_call_and_of_a_command(attnix: Attnix) -> None:
    fork = attnix("help", "fork").out
    assert fork.startswith("fork (21), since ABI version 1\n  fork(ctx, n=1) -> (ctxs, cids)\n") and "EDQUOT" in fork
    prefetch = attnix("help", "prefetch").out
    assert "Usage: attnix prefetch" in prefetch and "prefetch (63), since" in prefetch
    everything = attnix("help").out
    assert "\npmap " in everything and "wait_tool" in everything


def test_the_manual_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    assert manual.main(["--check"]) == 0, capsys.readouterr().err
    text = manual.DOCS.read_text()
    assert all(f"\n### {name.split(' CID')[0].split(' -')[0].split(' evict')[0]}\n" in text for name in LOOKS.values())


# -- pieces ---------------------------------------------------------------------------------------------------------


def block(number: int, frame: int, **fields: int) -> blocks.Block:
    plain = {"shift": 0, "sharers": 1, "flags": 7, "hits": 0, "copies": 1, "age_ms": 5}
    return blocks.Block(number, 4 * number, 4, frame, **{**plain, **fields})


def test_blocks_that_are_alike_are_one_run() -> None:
    table = [block(0, 5), block(1, 6, hits=3), block(2, 9, age_ms=900), block(3, 10, sharers=2), block(4, 11, sharers=2, shift=-8),
             block(5, -1, sharers=0, flags=0), block(6, -1, sharers=0, flags=0)]  # fmt: skip
    found = [(run.first.number, run.last.number, run.frames, run.hits, run.ages_ms) for run in blocks.runs(table)]
    assert found == [
        (0, 2, (5, 6, 9), (0, 3), (5, 900)), (3, 3, (10,), (0, 0), (5, 5)), (4, 4, (11,), (0, 0), (5, 5)), (5, 6, (), (0, 0), (5, 5)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("frames", "expected"),
    [((), "-"), ((7,), "7"), ((7, 8, 9), "7-9"), ((9, 8, 7), "9-7"), ((7, 9), "7 9"), ((7, 9, 2, 3, 4), "7 9 2 +2")],
)
def test_frames_of_a_run(frames: tuple[int, ...], expected: str) -> None:
    assert blocks.frames_text(frames) == expected


def test_what_two_contexts_share() -> None:
    parent = [block(0, 5), block(1, 6), block(2, 7)]
    assert blocks.shared_tokens(parent, [block(0, 5), block(1, 6), block(2, 8)]) == (8, True)
    assert blocks.shared_tokens(parent, [block(0, 5), block(1, -1), block(2, 7)]) == (4, False)
    assert blocks.shared_tokens(parent, [block(0, 5)]) == (4, True)
    assert blocks.shared_tokens([], parent) == (0, True)


def test_a_context_without_a_parent_left_is_a_root(looked_at: Held) -> None:
    system = looked_at.system
    rows = [row for row in system.ps().processes if row.pid == system.server.pid]
    orphans = [row._replace(contexts=tuple(c for c in row.contexts if c.cid != looked_at.first)) for row in rows]
    roots = tree.forest(system, orphans)
    assert [root.row.cid for root in roots] == [looked_at.fork] and roots[0].shared_tokens is None
    assert f"forked from cid {looked_at.first}, which is gone" in tree.draw(roots)[0].plain


def test_waits_are_told_by_the_soonest(looked_at: Held) -> None:
    row = looked_at.system.stat(0, looked_at.grown)
    never, late, soon = (
        row._replace(tool=t, due_ms=due, deadline_ms=end)
        for t, due, end in (("a", -1, -1), ("b", -1, 9_000), ("c", 4_500, 0))
    )
    assert [waits.until(each) for each in (never, late, soon, soon._replace(due_ms=0))] == [
        "-",
        "by 9.0 s",
        "4.5 s",
        "overdue",
    ]
    assert waits.soonest([never, late, soon]) == ("c +2", "4.5 s")
    assert waits.soonest([late]) == ("b", "by 9.0 s") and waits.soonest([]) == ("-", "-")


def tier(name: str) -> TierRow:
    return TierRow(name + "0", name, "up", 1, 100, 60, 10, 30, 0, 4096, 0, 0)


CALM = PressureResult((250, 0, 0), (0, 0, 0), 0, 0, 0, 60, 10)


def test_a_line_of_vmstat_fits_a_terminal() -> None:
    numbers = {0: "0", 99_999: "99999", 100_000: "100k", 9_999_999: "9999k", 10_000_000: "10M", 2_345_678_901: "2345M"}
    assert {number: vmstat._short(number) for number in numbers} == numbers
    heads = vmstat._line(vmstat._HEADS)
    assert len(heads) == len(vmstat._line(["99999"] * len(vmstat._HEADS))) < 80 and heads.split() == list(vmstat._HEADS)


def test_rates_are_differences_over_the_time_between() -> None:
    counters = {"syscalls": 10, "computed_tokens": 100, "lookup_hits": 5, "loaded_blocks_dram": 1}
    before = vmstat.Sample(10.0, counters, (tier("hbm"),), CALM)
    grown = {
        "syscalls": 30,
        "computed_tokens": 300,
        "lookup_hits": 9,
        "loaded_blocks_dram": 2,
        "loaded_blocks_nvme": 3,
        "evictions": 1,
    }
    rates = vmstat.between(
        before, vmstat.Sample(12.0, {**grown, "contexts_with_work": 4}, (tier("hbm"), tier("dram")), CALM)
    )
    assert (rates.run, rates.free, rates.cache, rates.some) == (4, 60, 10, 250)
    assert (rates.comp, rates.hit, rates.load, rates.evict, rates.calls) == (100.0, 2.0, 2.0, 0.5, 10.0)
    fresh = vmstat.between(before, vmstat.Sample(11.0, {"syscalls": 3, "computed_tokens": 7}, (), CALM))
    assert (fresh.comp, fresh.calls) == (7.0, 3.0)  # booted anew: from nothing


def test_hit_rates_are_shares_of_what_was_looked_for() -> None:
    tiers = (tier("hbm"), tier("dram"), tier("nvme"))
    counters = {
        "lookup_hits": 40,
        "lookup_misses": 35,
        "fault_blocks": 25,
        "found_blocks_dram": 20,
        "found_blocks_hbm": 5,
    }
    # The hbm of another device counts as hbm.  What was loaded for whatever reason is no share of anything.
    assert top.hit_rates(tiers, counters | {"loaded_blocks_dram": 90}) == {"hbm": 0.45, "dram": 0.2, "nvme": 0.0}
    before = {
        "lookup_hits": 40,
        "lookup_misses": 30,
        "fault_blocks": 20,
        "found_blocks_dram": 15,
        "found_blocks_hbm": 5,
    }
    assert top.hit_rates(tiers, counters, before) == {"hbm": 0.0, "dram": 0.5, "nvme": 0.0}
    assert top.hit_rates(tiers[:1], counters) == {"hbm": 0.45}, "a tier that is gone took part"
    assert top.hit_rates(tiers, {}) == {} == top.hit_rates(tiers, counters, counters)


def test_bars() -> None:
    assert top.bar(30, 10, 100, 10) == "###=......"
    assert top.bar(100, 0, 100, 4) == "####" and top.bar(0, 0, 100, 4) == "...." and top.bar(0, 0, 0, 4) == "...."
    assert top.bar(1, 99, 100, 4) == "#===", "what is there is seen, be it ever so little"
