"""A live run written down, and decided again: a real daemon with clients that fork, leave and stop, and a driver that dies."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from attnix.kernel import calls
from attnix.kernel import events as ev
from attnix.kernel.errors import E, Panic
from attnix.kernel.events import Bug, Effect, Event, ExecDone
from attnix.kernel.journal import ContextRecord, Generation, RestoredContext
from attnix.kernel.snapshot import SnapshotEntry
from attnix.recording import FLUSH_NS, MAGIC, BadRecording, Header, Recorder, Recording, Step
from attnix.replay import again
from attnix.replay.__main__ import main
from attnix.simulated import SimulatedSystem
from attnix.syscalls.client import Client, Context, connect

DEADLINE_S = 60.0


def until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, f"{what} did not happen"
        time.sleep(0.005)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[str, Path, subprocess.Popen[str]]]:
    """(socket, log, process) of a daemon that records: a simulated accel and dram, hbm for six contexts of 40 tokens."""
    socket, log = str(tmp_path / "run" / "s.sock"), tmp_path / "run.log"
    command = [sys.executable, "-m", "attnix.replay", "--record", str(log), "--model", "sim", "--socket", socket]
    command += ["--state-dir", str(tmp_path / "state"), "--hbm", "4KiB", "--dram", "256KiB", "--block-tokens", "4"]
    process = subprocess.Popen([*command, "--window", "256", "--max-contexts", "64"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "ready on" in process.stdout.readline()
    yield socket, log, process
    process.kill()
    process.wait()
    process.stdout.close()


def converse(socket: str) -> None:
    """Prompts that share a stem, forks, a stopped process, a driver that dies, clients that leave in the middle of an answer."""
    with connect(socket, name="one", timeout=DEADLINE_S) as one, connect(socket, name="two", timeout=DEADLINE_S) as two:
        stem = list(range(1, 33))
        first = one.alloc_context()
        first.append(tokens=stem)
        first.generate(8)
        streams = [fork.stream(24, seed=n, temperature=1.0) for n, fork in enumerate(first.fork(3))]
        other = two.alloc_context()
        other.append(tokens=[*stem, 40, 41, 42])
        other.publish("kept")
        left = other.stream(180)
        next(iter(left))
        _kill_driver(one)
        child = one.spawn("child")
        forked = child.alloc_context()
        forked.append(tokens=stem)
        child.kill(signal.SIGSTOP)
        child.kill(signal.SIGCONT)
        assert len(forked.score([1, 2, 3])) == 3
        for stream in streams:
            assert len(list(stream)) == 24
        waiting_for_tool(first)
    with connect(socket, name="three", timeout=DEADLINE_S) as three:
        until(lambda: any(row.name == "kept" for row in three.names().rows), "the name")
        kept = three.open("kept")
        list(kept.reattach())
        assert len(kept.forward(5)) == 5
        kept.append(tokens=[9, 9, 9])
        assert len(kept.generate(5).tokens) == 5 * 4
        assert three.fsck().problems == ()


def waiting_for_tool(context: Context) -> None:
    """Two waits: one is answered, the other given up at its deadline."""
    wait = context.wait_tool("grep", eta=0.05).wait
    assert context.resume(tokens=[5, 6], wait=wait).appended == 2
    context.generate(3)
    context.wait_tool("pytest", deadline=0.01)
    until(lambda: context.stat().state != "tool_wait", "the deadline")


def _kill_driver(client: Client) -> None:
    os.kill(client.tiers().tiers[0].driver_pid, signal.SIGKILL)
    until(lambda: client.tiers().tiers[0].restarts == 1, "the restart")


def test_a_live_run_is_decided_again_the_same(
    daemon: tuple[str, Path, subprocess.Popen[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    socket, log, process = daemon
    converse(socket)
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert main([str(log), "--check", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["same"] and not told["cut_short"] and not told["panicked"]
    assert told["events"]["DriverDown"] == 1 and told["events"]["ExecDone"] > 10 and told["events"]["Disconnect"] == 3
    assert told["effects"]["Exec"] >= told["events"]["ExecDone"]
    assert told["counters"]["generated_tokens"] >= 8 + 3 * 24 + 5
    assert told["counters"]["contexts"] >= 1, "the published one"
    assert (told["counters"]["tool_waits_answered"], told["counters"]["tool_waits_late"]) == (1, 1)

    steps = list(Recording(log).steps())
    assert len(steps) == told["steps"]

    # One sampled token of one pass altered: the first step whose effects hold it is named.
    def change(step_number: int, edit: Callable[[ExecDone], ExecDone]) -> Path:
        path = tmp_path / "altered.log"
        records = _raw(log)
        now_ns, kind, _, digest = msgspec.msgpack.decode(records[step_number + 1])
        event = edit(steps[step_number].event)  # type: ignore[arg-type]
        records[step_number + 1] = msgspec.msgpack.encode((now_ns, kind, event, digest))
        path.write_bytes(MAGIC + b"".join(map(_framed, records)))
        return path

    at = [n for n, s in enumerate(steps) if isinstance(s.event, ExecDone) and s.event.tokens][3]
    altered = change(at, lambda e: e._replace(tokens=bytes([e.tokens[0] ^ 1]) + e.tokens[1:]))
    assert main([str(altered), "--json", "-"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["same"], told["differs_at"]) == (False, at)
    assert "ExecDone" in told["difference"][0]
    assert main([str(altered)]) == 1
    assert f"step {at:,} is the first that differs" in capsys.readouterr().out


def _framed(record: bytes) -> bytes:
    return len(record).to_bytes(4, "little") + zlib.crc32(record).to_bytes(4, "little") + record


def _raw(path: Path) -> list[bytes]:
    data = path.read_bytes()
    at, records = len(MAGIC), []
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        records.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return records


def test_a_daemon_that_was_killed_leaves_a_log_that_is_good_up_to_its_end(
    daemon: tuple[str, Path, subprocess.Popen[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    socket, log, process = daemon
    with connect(socket, timeout=DEADLINE_S) as client:
        context = client.alloc_context()
        until(lambda: (client.ps(), log.stat().st_size > 20_000)[1], "a log of some length")
        context.append(tokens=[1, 2, 3])
        process.kill()
        process.wait()
    assert main([str(log)]) == 0
    capsys.readouterr()
    short = tmp_path / "short.log"
    short.write_bytes(log.read_bytes()[:-3])
    outcome = again.replay(short)
    assert outcome.cut_short and outcome.differs_at < 0 and outcome.steps > 10
    assert main([str(short)]) == 1
    assert "the file is torn" in capsys.readouterr().out
    bent = bytearray(log.read_bytes())
    bent[len(bent) // 2] ^= 1
    short.write_bytes(bent)
    assert main([str(short)]) == 1
    said = capsys.readouterr()
    assert "checksum" in said.err or "the file is torn" in said.out  # the bit may be one of a length
    short.write_bytes(log.read_bytes()[: len(MAGIC) + 20])
    assert main([str(short)]) == 1
    assert "torn" in capsys.readouterr().err


def test_what_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.log"
    wrong.write_bytes(MAGIC + _framed(b"\xc1\xc1"))
    with pytest.raises(BadRecording, match="header"):
        Recording(wrong)
    assert main([str(wrong)]) == 1
    assert "header" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == f"attnix: {tmp_path / 'none'}: No such file or directory\n"
    wrong.write_bytes(b"attnix recording 1\n")
    assert main([str(wrong)]) == 1
    assert "no recording of this version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recorded", "options"),
    [(True, ["--policy", "lru"]), (True, ["--rate=2"]), (False, ["--check"]), (True, ["--waits", "--capacity", "5%"])],
)
def test_an_option_that_would_be_ignored_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: bool, options: list[str]
) -> None:
    path = tmp_path / "which"
    path.write_bytes(MAGIC if recorded else b"{}")
    with pytest.raises(SystemExit) as ended:
        main([str(path), *options])
    assert ended.value.code == 2
    assert f"is a {'recorded run' if recorded else 'trace'}: {options[0].partition('=')[0]}" in capsys.readouterr().err


def test_a_bit_that_is_not_as_it_was_written_is_found(tmp_path: Path) -> None:
    system = SimulatedSystem()
    path = tmp_path / "run.log"
    recorder = Recorder(system.kernel, path, Header(system.kernel.machine.config, bytes(range(16))))
    recorder.step(Bug("info", "one"), 10)
    recorder.step(Bug("info", "two"), 20)
    recorder.close()
    good = path.read_bytes()
    path.write_bytes(good.replace(b"two", b"twp"))
    with pytest.raises(BadRecording, match="step 1: damaged"):
        list(Recording(path).steps())


def test_the_log_is_nobody_elses_file_and_its_end_is_not_the_daemons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, link, log = tmp_path / "target", tmp_path / "link", tmp_path / "run.log"
    target.write_text("somebody else's")
    link.symlink_to(target)
    system = SimulatedSystem()
    header = Header(system.kernel.machine.config, bytes(range(16)))
    for taken in (target, link):
        with pytest.raises(FileExistsError):
            Recorder(system.kernel, taken, header)
    assert target.read_text() == "somebody else's"
    recorder = Recorder(system.kernel, log, header)
    assert recorder.step(Bug("info", "one"), 10) == []
    assert recorder.step(Bug("info", "two"), FLUSH_NS + 11) == []
    assert [s.now_ns for s in Recording(log).steps()] == [10, FLUSH_NS + 11]

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    assert recorder.step(Bug("info", "three"), 3 * FLUSH_NS) == []
    monkeypatch.undo()
    assert "nothing more is recorded" in capsys.readouterr().err
    assert recorder.step(Bug("info", "four"), 5 * FLUSH_NS) == []
    recorder.close()
    assert len(list(Recording(log).steps())) == 2


def test_a_panic_is_on_record(tmp_path: Path) -> None:
    """What the kernel was asked when it broke is the last step of the log; a kernel that does not break there differs."""
    system = SimulatedSystem()

    class Broken:
        tail = system.kernel.tail

        def step(self, event: Event, now_ns: int) -> list[Effect]:
            raise Panic("made up")

    path = tmp_path / "run.log"
    recorder = Recorder(Broken(), path, Header(system.kernel.machine.config, bytes(range(16))))
    with pytest.raises(Panic):
        recorder.step(Bug("info", "the last straw"), 5)
    assert list(Recording(path).steps()) == [Step(5, Bug("info", "the last straw"), b"")]
    outcome = again.replay(path)
    assert outcome.differs_at == 0 and "panicked here then" in outcome.difference[0]


EVENTS: tuple[Event, ...] = (
    ev.Connect(1, 1000, 1001, 77, "token"),
    ev.Disconnect(1),
    ev.Syscall(1, 2, "generate", calls.GenerateArgs(5, 6, 0.5, stop=("a", "b"), stop_tokens=b"\1\0\0\0")),
    ev.Syscall(1, 3, "append", calls.AppendArgs(5, b"\1\0\0\0", "text", (calls.Message("user", "hello"),))),
    ev.Syscall(1, 4, "ps", calls.PsArgs()),
    ev.StopAt(1, 2, 3),
    ev.Pause(1),
    ev.Resume(1),
    ev.DriverUp(0, 2, 99, "lost", "cpu", ("direct",), 10, 20, 30, ((512, 0, 1000), (512, 512, 1100))),
    ev.DriverDown(0, 2, "killed"),
    ev.DriverGone(0, "why"),
    ev.ExecDone(0, 7, b"\1\0\0\0", b"\0\0\0\0", ((b"\2\0\0\0", b"\0\0\0\0"),), (b"\0\0\0\0",), 5, 6, 7),
    ev.ExecFailed(0, 7, int(E.EIO), "no"),
    ev.TransferDone(1, 8, ((0, 5), (3, 74)), 4096, 12),
    ev.DriverAsleep(0),
    ev.Found(1, 2, b"rows"),
    ev.Timer(9),
    ev.Bug("warning", "text"),
    ev.Restored(
        5, 6, 2,
        (RestoredContext(ContextRecord(6, 1000, "name", True, "digest", Generation(calls.GenerateArgs(0, 4), 3)), b"log!"),),
    ),
    ev.Suspend(),
    ev.Plug(),
    ev.Unplug(),
    ev.SnapshotWritten(1, 2, E.ENOSPC, {"message": "full", "bytes": 5, "share": 0.5}, 4096),
    ev.SnapshotRead(1, 2, 0, {}, (("weights", "x"),), (SnapshotEntry(1, "n", b"log!", 16, b"kv"),)),
)  # fmt: skip


def test_every_kind_of_event_comes_back_as_it_was(tmp_path: Path) -> None:
    """With values in every field that has several types, lists or records in it."""
    assert {type(e) for e in EVENTS} == set(get_args(Event)), "a kind of event is not tried here"

    class Silent:
        def step(self, event: Event, now_ns: int) -> list[Effect]:
            return []

        def tail(self, conn: int, args: object, count: int) -> tuple[int, bytes]:
            return 0, b""

    path = tmp_path / "run.log"
    config = dataclasses.replace(
        SimulatedSystem().kernel.machine.config, stop_tokens=(3, 4), sysctl={"evict.policy": "arc"}
    )
    recorder = Recorder(Silent(), path, Header(config, b"secret", ("third.party",)))
    for now_ns, event in enumerate(EVENTS):
        recorder.step(event, now_ns)
    recorder.close()
    recording = Recording(path)
    assert recording.header == Header(config, b"secret", ("third.party",))
    for step, (now_ns, event) in zip(recording.steps(), enumerate(EVENTS), strict=True):
        assert (step.now_ns, type(step.event), step.event) == (now_ns, type(event), event)
        if isinstance(event, ev.Syscall):
            assert type(step.event.args) is type(event.args)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"third\.party"):
        again.replay(path)
