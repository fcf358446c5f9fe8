"""Every command against a real daemon, over a real socket."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attnix.syscalls import connect
from attnix.userland import cli, output
from attnix.userland.commands import kill

from .conftest import COMMAND, Attnix, Serve, serving

# What `--json` prints, per command: names and types, nothing more and nothing less.  [x] is a list of x.
USAGE = dict.fromkeys(
    ("computed_tokens", "hit_tokens", "recomputed_tokens", "generated_tokens", "preemptions", "dram_tokens", "nvme_tokens", "remote_tokens"), int
)  # fmt: skip
CONTEXT = {
    "cid": int, "pid": int, "state": str, "device": str, "tokens": int, "cached_tokens": int, "blocks": int,
    "shared_blocks": int, "kv_bytes": int, "proportional_bytes": int, "usage": USAGE, "parent": int,
    "tool": str, "wait": int, "due_ms": int, "deadline_ms": int,
}  # fmt: skip
PROCESS = {
    "pid": int, "parent": int, "uid": int, "name": str, "state": str, "nice": int, "contexts": [CONTEXT],
    "kv_bytes": int, "proportional_bytes": int, "tokens": int, "age_ns": int, "usage": USAGE,
    "group": str, "oom_score": int, "oom_score_adj": int,
}  # fmt: skip
TIER = {
    "device": str, "tier": str, "state": str, "epoch": int, "capacity_frames": int, "free_frames": int,
    "reclaimable_frames": int, "mapped_frames": int, "wired_frames": int, "frame_bytes": int, "driver_pid": int,
    "restarts": int, "policy": str, "engine": str,
    **dict.fromkeys(("read_bytes_s", "write_bytes_s", "latency_ns", "read_bytes", "write_bytes", "errors", "corrupt"), int),
    **dict.fromkeys(("prefill_token_ns", "prefill_pair_ns", "prefill_pass_ns"), (int, float)),
}  # fmt: skip
PAGEMAP = {
    "cid": int, "device": str, "block_tokens": int, "tokens": int,
    **{name: [int] for name in ("frames", "shifts", "counts", "sharers", "flags", "hits", "copies", "ages")},
}  # fmt: skip
UNAME = {
    **dict.fromkeys(("system", "version", "model", "fingerprint", "architecture", "kv_dtype", "numerics", "tokenizer"), str),
    **dict.fromkeys(("abi_version", "vocab_tokens", "window_tokens", "block_tokens", "frame_bytes", "token_bytes", "pid"), int),
    "stop_tokens": [int], "devices": [str],
}  # fmt: skip
ANSWER = {
    "reason": str,
    "tokens": [int],
    "text": str,
    "usage": USAGE,
    "tokens_total": int,
    "injected": [[int]],
    "stop": str,
}
SHAPES: dict[str, Any] = {
    "ps": {"processes": [PROCESS]},
    "pmap": {"tiers": [TIER], "contexts": [{"name": str, "pagemap": PAGEMAP}]},
    "pmap CID": PAGEMAP,
    "free": {"tiers": [TIER]},
    "tiers": {"tiers": [TIER]},
    "stat CID": CONTEXT,
    "fsck": {"problems": [str], "checked_blocks": int, "checked_contexts": int},
    "uname": UNAME,
    "dmesg": {"rows": [{"number": int, "at_ns": int, "level": str, "text": str}]},
    "vmstat": {"counters": {"passes": int}},
    "sysctl": {"rows": [{"name": str, "value": (int, str), "meaning": str, "writable": bool}]},
    "run hello -n 3": ANSWER,
}


def misfit(shape: Any, value: Any, where: str = "$") -> list[str]:
    """Where a value is not of a shape."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{where}: {value!r} is no object"]
        if where == "$.counters":  # open: counters come and go
            return [f"{where}.{k}" for k, v in value.items() if type(v) is not int] + [
                f"no {k}" for k in shape if k not in value
            ]
        wrong = [f"{where}: {sorted(set(shape) ^ set(value))}"] if set(shape) != set(value) else []
        return wrong + [each for k in shape if k in value for each in misfit(shape[k], value[k], f"{where}.{k}")]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        return [each for n, item in enumerate(value) for each in misfit(shape[0], item, f"{where}[{n}]")]
    kinds = shape if isinstance(shape, tuple) else (shape,)
    return [] if type(value) in kinds else [f"{where}: {value!r} is no {shape}"]


class Held(NamedTuple):
    """A daemon that tests only look at, and a context in it."""

    socket: str
    cid: int


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """`holder` has two contexts, the second a fork that has generated."""
    with serving(tmp_path_factory.mktemp("forked")) as start, connect(start(), name="holder") as system:
        context = system.alloc_context()
        context.append(tokens=range(10))
        child = context.fork()[0]
        child.generate(2)
        yield Held(system.path, child.cid)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """`holder` has one context of ten computed tokens."""
    with serving(tmp_path_factory.mktemp("alone")) as start, connect(start(), name="holder") as system:
        context = system.alloc_context()
        context.append(tokens=range(10))
        context.forward(1)
        yield Held(system.path, context.cid)


@pytest.mark.parametrize("command", SHAPES)
def test_json_has_its_shape(forked: Held, attnix: Attnix, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("ATTNIX_SOCKET", forked.socket)
    said = attnix(*command.replace("CID", str(forked.cid)).split(), "--json")
    assert (said.err, said.status) == ("", 0)
    assert said.out.count("\n") == 1
    assert misfit(SHAPES[command], said.json) == []
    if command == "ps":
        assert [(row["name"], len(row["contexts"])) for row in said.json["processes"]] == [("holder", 2)]
    if command == "pmap":
        assert len(said.json["contexts"]) == 2


def test_control_a_misfit_is_found() -> None:
    shape = {"a": [int], "b": {"c": str}}
    assert misfit(shape, {"a": [1], "b": {"c": "x"}}) == []
    wrong: list[Any] = [
        {"a": [1]},
        {"a": [1.5], "b": {"c": "x"}},
        {"a": 1, "b": {"c": "x"}},
        {"a": [1], "b": {"c": "x"}, "d": 1},
        [],
    ]
    assert all(misfit(shape, value) for value in wrong)


@pytest.mark.parametrize(
    "command", ["ps", "ps -c", "pmap", "free", "tiers", "fsck", "uname", "dmesg", "vmstat", "sysctl"]
)
def test_tables_show_what_is_there(alone: Held, attnix: Attnix, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("ATTNIX_SOCKET", alone.socket)
    said = attnix(*command.split())
    assert (said.err, said.status) == ("", 0)
    expected = {
        "ps": r"holder\s+ready\s+0\s+1\s+10 ", "ps -c": r"cid 1 .*idle", "pmap": r"a holder  cid 1: 3 own, 0 shared",
        "free": r"hbm0 +up +64 +61 +0 +3 +0", "tiers": r"hbm0 +hbm +up +64 .* 3 +61 ", "fsck": r"every invariant holds \(\d+ blocks, 1 contexts",
        "uname": r"frame +4 tokens", "dmesg": r"driver 1 is up", "vmstat": r"contexts +1\n", "sysctl": r"sched.step_tokens +512",
    }  # fmt: skip
    assert re.search(expected[command], said.out), said.out


def test_stat_and_pmap_of_one_context(alone: Held, attnix: Attnix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNIX_SOCKET", alone.socket)
    stat, pmap, folded = (attnix(*line.split(), str(alone.cid)) for line in ("stat", "pmap --all", "pmap"))
    assert "10, 10 of them in hbm" in stat.out
    # Blocks of 4: two full ones and a tail of two tokens.
    assert [line.split()[1] for line in pmap.out.splitlines()[2:]] == ["0-3", "4-7", "8-9"]
    assert [line.split()[6] for line in pmap.out.splitlines()[2:]] == ["FIV-", "FIV-", "--V-"]
    assert [line.split()[:2] for line in folded.out.splitlines()[2:]] == [["0-1", "0-7"], ["2", "8-9"]]


@pytest.mark.parametrize("command", ["ps", "pmap", "free", "tiers", "explain", "prefetch 1", "demote 1", "evict 1", "pin 1", "unpin 1", "attach-tier nvme 1MiB", "detach-tier nvme0", "fsck", "uname", "dmesg", "vmstat", "sysctl", "stat 1", "kill 1", "shutdown", "run hi", "chat"])  # fmt: skip
def test_without_a_daemon_it_says_what_to_do(nobody: str, attnix: Attnix, command: str) -> None:
    said = attnix(*command.split())
    assert said.status == 1
    assert said.out == ""
    assert nobody in said.err
    assert "attnix boot" in said.err


@pytest.mark.parametrize(("command", "status"), [("ps", 1), ("doctor", 3)])
def test_a_daemon_that_hangs_is_not_waited_for_for_ever(
    nobody: str, attnix: Attnix, monkeypatch: pytest.MonkeyPatch, command: str, status: int
) -> None:
    monkeypatch.setattr(output, "PATIENCE_S", 0.01)
    Path(nobody).parent.mkdir()
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(nobody)
        hung.listen()
        said = attnix(command)
    assert said.status == status and "the daemon did not answer in time" in said.err


def test_without_a_daemon_json_says_it_too(nobody: str, attnix: Attnix) -> None:
    said = attnix("ps", "--json")
    assert said.status == 1
    assert said.json["error"]["kind"] == "connection"


@pytest.mark.parametrize("line", ["nonsense", "ps --nonsense", "stat", "stat abc", "kill", "kill 0", "kill -s HUP 3", "trace -o F 0", "run", "run --tokens 1,x", "run --raw --tokens 1", "run --raw --system s x", "sysctl =3", "boot --json", "prefetch", "prefetch 0", "pin 0", "attach-tier nvme big", "attach-tier nvme 1GiB path", "study nothing", "run x -t -1", "run x -t nan", "run x --top-p 2", "run x -n -1", "run x --seed -1", "batch IN OUT -t 101", "batch IN OUT --stop=", "chat --top-p 0", "serve --port -1", "serve --port 65536", "serve --time-limit -5", "serve --time-limit nan", "serve --parked inf", "serve --max-parked -1", "serve --max-body 0", "vmstat inf", "top --once -i inf", "boot -d --wait inf", "ps --from="])  # fmt: skip
def test_wrong_usage_is_status_2(nobody: str, attnix: Attnix, line: str) -> None:
    assert attnix(*line.split()).status == 2
    said = attnix(*line.split(), "--json")
    assert said.status == 2 and said.json["error"]["kind"] == "usage"
    assert said.json["error"]["message"] in said.err


@pytest.mark.parametrize(("line", "errno"), [("stat 999", "ENOENT"), ("pmap 999", "ENOENT"), ("kill 999", "ENOENT"), ("sysctl none", "ENOENT"), ("sysctl sched.step_tokens=0", "EINVAL"), ("ps -p 999", "ENOENT")])  # fmt: skip
def test_what_the_system_refuses_is_status_1(serve: Serve, attnix: Attnix, line: str, errno: str) -> None:
    serve()
    said, as_json = attnix(*line.split()), attnix(*line.split(), "--json")
    assert (said.status, as_json.status) == (1, 1)
    assert errno in said.err
    assert as_json.json["error"]["errno"] == errno


def test_kill_and_sysctl_do_what_they_say(serve: Serve, attnix: Attnix) -> None:
    with connect(serve(), name="holder") as system:
        child = system.spawn("child")
        assert attnix("kill", "-s", "STOP", str(child.pid)).status == 0
        assert {row.name: row.state for row in system.ps().processes}["child"] == "stopped"
        assert attnix("kill", "-s", "18", str(child.pid)).status == 0
        said = attnix("kill", str(child.pid), "--json")
        assert said.json == {"pids": [child.pid], "signal": 15}
        assert child.wait().reason == "killed"
        assert attnix("sysctl", "sched.step_tokens=33").status == 0
        assert system.sysctl("sched.step_tokens").rows[0].value == 33


@pytest.mark.parametrize(("name", "number"), [("TERM", 15), ("sigkill", 9), ("Stop", 19), ("cont", 18), ("9", 9)])
def test_signal_names(name: str, number: int) -> None:
    assert kill.signal_number(name) == number


def test_run_streams_an_answer(serve: Serve, attnix: Attnix) -> None:
    serve(script=list(b"Paris, of course."))
    assert attnix("run", "What is the capital of France?", "-n", "5").out == "Paris\n"
    assert attnix("run", "-", "-n", "5", stdin="from a pipe").out == "Paris\n"
    assert attnix("run", "--raw", "once upon", "--stop", ",").out == "Paris\n"


def test_run_sends_the_messages_or_the_text(serve: Serve, attnix: Attnix) -> None:
    """The rig's template writes `role:content;`, and its tokens are bytes, so lengths tell what was appended."""
    serve(script=[65])
    raw = attnix("run", "--raw", "abc", "-n", "1", "--json").json
    assert raw["tokens_total"] == len("abc") + 1
    chat = attnix("run", "abc", "--system", "be kind", "-n", "1", "--json").json
    assert chat["tokens_total"] == len("system:be kind;user:abc;") + 1
    assert chat["text"] == "A"


def test_run_with_token_ids(serve: Serve, attnix: Attnix) -> None:
    serve(script=[70, 71, 72], pieces=None)
    assert attnix("run", "--tokens", "1,2,3", "-n", "2").out == "70,71\n"
    refused = attnix("run", "text", "-n", "2")
    assert (refused.status, "ENOSYS" in refused.err) == (1, True)


def test_run_past_the_window_names_both_numbers(serve: Serve, attnix: Attnix) -> None:
    serve(window_tokens=64)
    said = attnix("run", "--raw", "x" * 80, "--json")
    assert said.status == 1
    assert said.json["error"]["errno"] == "E2BIG"
    assert {80, 64} <= {value for value in said.json["error"]["detail"].values() if isinstance(value, int)}


def test_shutdown_waits_for_the_end(serve: Serve, attnix: Attnix) -> None:
    path = serve()
    with connect(path) as system:
        pid = system.uname().pid
    said = attnix("shutdown", "--json")
    assert (said.status, said.json) == (0, {"stopped_pid": pid})
    assert attnix("ps").status == 1
    assert (
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        if os.path.exists(f"/proc/{pid}")
        else True
    )


def test_fsck_fails_when_an_invariant_is_broken(serve: Serve, attnix: Attnix, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnix.syscalls.types import FsckResult
    from attnix.userland.shell import fsck

    class Broken:
        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def fsck(self) -> FsckResult:
            return FsckResult(("I3: block 4 has 1 reference and 2 entries [x]",), 9, 2)

    monkeypatch.setattr(fsck, "look_at", lambda socket, name, source: Broken())
    said = attnix("fsck")
    assert said.status == 1
    assert "I3: block 4 has 1 reference and 2 entries [x]\n1 broken (9 blocks" in said.out
    assert attnix("fsck", "--json").json["problems"] == ["I3: block 4 has 1 reference and 2 entries [x]"]


def test_every_command_has_help(attnix: Attnix) -> None:
    names = [
        command.name or command.callback.__name__.replace("_", "-")
        for command in cli.app.registered_commands
        if command.callback and command.add_help_option  # else all its options are those of a process of its own
    ]
    assert {"pull", "boot", "run", "chat", "demo", "ps", "pmap", "free", "fsck", "stat"} <= set(names)
    for name in names:
        said = attnix(name, "--help")
        assert said.status == 0
        assert "--help" in said.out


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"attnix {importlib.metadata.version('attnix')}\n"


def test_bench_passes_everything_on() -> None:
    """To a process of its own, whose exit status it takes over."""
    said = subprocess.run([*COMMAND, "bench", "core", "--nonsense"], capture_output=True, text=True)
    assert said.returncode == 2
    assert "attnix bench core" in said.stderr


def test_the_reader_may_leave_early(serve: Serve) -> None:
    """As `attnix dmesg | head -0` does: no traceback."""
    serve()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        said = subprocess.run([*COMMAND, "sysctl"], stdout=gone, stderr=subprocess.PIPE, text=True)
    assert (said.stderr, said.returncode) == ("", 1)


def test_chat_without_a_terminal(serve: Serve, attnix: Attnix) -> None:
    serve(script=list(b"Ja!"))
    said = attnix("chat", "-n", "3", stdin="hello\n\n/stat\n/nonsense\n/new\nagain\n/quit\nnever read\n")
    assert said.status == 0
    lines = said.out.split("> ")
    assert lines[1] == "Ja! [...]\n"
    assert lines[3].startswith("cid 1: ")
    assert "/quit" in lines[4]
    assert lines[6] == "Ja! [...]\n"
    assert len(lines) == 8


def test_chat_is_one_context(serve: Serve, attnix: Attnix) -> None:
    """Each turn appends to it: the second starts where the first ended."""
    serve(script=[65])
    said = attnix("chat", "--system", "s", "-n", "2", "--json", stdin="one\ntwo\n")
    first, second = [json.loads(line) for line in said.out.splitlines()]
    assert misfit(ANSWER, first) == []
    assert first["tokens_total"] == len("system:s;user:one;") + 2
    assert second["tokens_total"] == first["tokens_total"] + len("user:two;") + 2


def test_chat_goes_on_after_a_refusal(serve: Serve, attnix: Attnix) -> None:
    serve(script=[65], window_tokens=64)
    said = attnix("chat", "-n", "1", stdin=f"{'x' * 70}\nhi\n")
    assert "E2BIG" in said.err
    assert "/new starts over" in said.out
    assert said.out.endswith("> A [...]\n> \n")


def test_chat_says_which_command_it_does_not_have(serve: Serve, attnix: Attnix) -> None:
    serve(script=[65])
    said = attnix("chat", stdin="/nosuch thing\n/help\n")
    assert "> no command /nosuch: /new starts over" in said.out
    assert "> /new starts over" in said.out


def test_output_that_goes_nowhere_is_no_traceback() -> None:
    """A disk that is full is said in a line; who closed our output wants none."""
    command = [*COMMAND, "uname", "--from", str(Path(__file__).parents[1] / "golden" / "dumps" / "agents.json")]
    with open("/dev/full", "w") as full:
        said = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (said.returncode, said.stderr) == (1, "attnix: the output cannot be written: No space left on device\n")
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_who_reads_no_more_costs_no_descriptor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The shell runs many commands in one process."""
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        before = os.listdir("/proc/self/fd")
        cli._stop_writing()
        assert os.listdir("/proc/self/fd") == before


def test_ctrl_c_while_commands_are_loaded_is_no_traceback() -> None:
    script = """
import os, signal, sys

class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == "attnix.userland.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Pressed())
from attnix.userland.start import main
main()
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (said.returncode, said.stdout, said.stderr) == (-signal.SIGINT, "", "")
