"""`attnix trace`: the Trace Event Format, by its specification, and a trace of a real daemon."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from attnix.syscalls import Client, Context, connect
from attnix.syscalls.session import Note
from attnix.syscalls.types import DecisionRow, SampleRow, SyscallNote
from attnix.userland.perfetto import Span, Traced, document

from .conftest import COMMAND, ROOT, Attnix, Serve

MS = 1_000_000
# Fields that the format requires of each phase that is used here, beside ph, name, pid, tid and ts.
REQUIRED = {"X": {"dur"}, "i": {"s"}, "C": {"args"}, "M": {"args"}}


def check(made: dict[str, Any]) -> list[dict[str, Any]]:
    """What the format demands of every event, and that spans of one thread nest."""
    events: list[dict[str, Any]] = json.loads(json.dumps(made))["traceEvents"]
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} | REQUIRED[event["ph"]] <= set(event), event
        assert isinstance(event["name"], str) and event["ts"] >= 0
        assert event["ph"] != "C" or all(isinstance(n, int | float) for n in event["args"].values())
        assert event["ph"] != "i" or event["s"] in ("g", "p", "t")
    ends: dict[tuple[int, int], float] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["pid"], e["tid"], e["ts"])):
        thread = (event["pid"], event["tid"])
        assert event["dur"] >= 0 and event["ts"] >= ends.get(thread, 0) - 1e-3, event
        ends[thread] = event["ts"] + event["dur"]
    return events


def test_calls_that_overlap_are_in_threads_of_their_own() -> None:
    calls = [
        SyscallNote(3, 10 * MS, 1, "append", "ctx=1", 2 * MS, 0, "tokens=4"),
        SyscallNote(3, 11 * MS, 2, "generate", "ctx=1", 9 * MS, 0, 'reason="stop"'),
        SyscallNote(3, 12 * MS, 3, "ps", "", MS, 22, "wrong"),
        SyscallNote(3, 21 * MS, 4, "wait", "pid=0", -1),
    ]
    events = check(document(Traced({3: "agent"}, calls, [], [], [], 30 * MS), {}))
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert [(spans[n]["tid"], spans[n]["ts"], spans[n]["dur"]) for n in ("append", "generate", "ps", "wait")] == [
        (1, 10_000, 2_000),
        (2, 11_000, 9_000),
        (1, 12_000, 1_000),
        (1, 21_000, 9_000),
    ]
    assert spans["ps"]["args"]["errno"] == 22 and spans["wait"]["args"]["unfinished"] is True
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names["process_name", 3, 0] == "agent 3" and names["thread_name", 3, 2] == "calls 2"


def test_states_rates_and_decisions() -> None:
    nothing = SampleRow(*(0 for _ in SampleRow._fields))
    samples = [
        nothing._replace(at_ns=MS),
        nothing._replace(at_ns=501 * MS, computed_tokens=100, generated_tokens=50, free_frames=7),
    ]
    decision = DecisionRow(1, 20 * MS, "evict", "hbm0", 4, 9, 2, "the oldest")
    traced = Traced({3: ""}, [], [Span(3, "running", 5 * MS, 9 * MS)], samples, [decision], 600 * MS)
    events = check(document(traced, {"model": "x"}))
    (rate,) = [e for e in events if e["name"] == "tokens per second"]
    assert rate["args"] == {"computed": 200.0, "generated": 100.0} and rate["ts"] == 501_000
    (instant,) = [e for e in events if e["ph"] == "i"]
    assert instant["name"] == "evict hbm0" and instant["args"]["why"] == "the oldest"
    (state,) = [e for e in events if e["ph"] == "X"]
    assert (state["name"], state["tid"], state["ts"], state["dur"]) == ("running", 0, 5_000, 4_000)
    assert [e["args"]["free"] for e in events if e["name"] == "frames"] == [0, 7]


def test_a_trace_of_a_daemon_has_the_calls_that_were_made(serve: Serve, tmp_path: Path) -> None:
    path = serve(frames=64)
    out = tmp_path / "t.json"
    with connect(path, name="worker") as system:
        words = ["trace", "-o", str(out), "-s", "60", str(system.server.pid)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
        tracer = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True, env=environment)
        assert tracer.stdout is not None
        assert tracer.stdout.readline().startswith("tracing")
        context = system.alloc_context()
        context.append(text="a few words")
        context.generate(max_tokens=3)
        tracer.send_signal(signal.SIGINT)
        assert tracer.wait(30) == 0
        assert str(out) in tracer.stdout.read()
        tracer.stdout.close()
    assert out.stat().st_mode & 0o777 == 0o600, "words of the calls are in it"
    events = check(json.loads(out.read_text()))
    calls = [e for e in events if e.get("cat") == "syscall"]
    (generate,) = [e for e in calls if e["name"] == "generate"]
    (append,) = [e for e in calls if e["name"] == "append"]
    assert "max_tokens=3" in generate["args"]["args"] and append["ts"] < generate["ts"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} >= {"attnix", f"worker {generate['pid']}"}


def test_a_file_that_cannot_be_written_is_said(attnix: Attnix, serve: Serve, tmp_path: Path) -> None:
    serve(frames=16)
    said = attnix("trace", "-o", str(tmp_path / "no" / "t.json"), "-s", "36000")  # at once, not when it is over
    assert said.status == 1 and "No such file" in said.err


@pytest.mark.parametrize("words", [("trace", "-s", "60", "-o"), ("strace", "-c")])
def test_a_daemon_that_goes_meanwhile(
    attnix: Attnix, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """What was told until then is there, and why there is no more."""
    out = tmp_path / "t.json"
    with connect(serve(frames=16), name="worker") as worker:
        notice = Client.notice
        made: list[Context] = []

        def last(system: Client, timeout: float | None = None) -> Note | None:
            if not made:
                made.append(worker.alloc_context())
                system.uname()  # what is told of it has come with the answer
                system._socket.shutdown(socket.SHUT_RDWR)
            return notice(system, timeout)

        monkeypatch.setattr(Client, "notice", last)
        said = attnix(*words, *([str(out)] if words[0] == "trace" else []), str(worker.server.pid))
    assert said.status == 1 and "attnix: the daemon closed the connection" in said.err
    assert "alloc_context" in (out.read_text() if words[0] == "trace" else said.out)
