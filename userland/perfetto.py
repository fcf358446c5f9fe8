"""What was traced, as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is the JSON object form of Google's "Trace Event Format": times in microseconds, `X` a span, `i` an instant, `C` a counter,
`M` the name of a process or thread.  A process here is one of the system's, or 0 for the system itself.  Spans of one thread
must nest; system calls of one connection overlap, so each process has as many threads as calls were ever outstanding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from attnix.syscalls.types import DecisionRow, SampleRow, SyscallNote

SYSTEM: Final = 0  # pid of the system itself
STATE: Final = 0  # thread of a process's states; its calls have those from 1 on
_US: Final = 1000  # ns


class Span(NamedTuple):
    """A process was in a state."""

    pid: int
    state: str
    from_ns: int
    to_ns: int


class Traced(NamedTuple):
    """names: of processes, by pid.  end_ns: when the trace ended; what had no answer then ends there."""

    names: Mapping[int, str]
    calls: Sequence[SyscallNote]
    spans: Sequence[Span]
    samples: Sequence[SampleRow]
    decisions: Sequence[DecisionRow]
    end_ns: int
    lost: int = 0


def document(traced: Traced, about: Mapping[str, Any]) -> dict[str, Any]:
    """The whole file."""
    events = [*_names(traced), *_states(traced.spans), *_calls(traced.calls, traced.end_ns)]
    events += [*_counters(traced.samples), *_decisions(traced.decisions)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**about, "lost": traced.lost}}


def _event(phase: str, name: str, pid: int, tid: int, at_ns: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": at_ns / _US, **fields}


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _names(traced: Traced) -> Iterable[dict[str, Any]]:
    yield _named("process_name", SYSTEM, 0, "attnix")
    for pid, name in sorted(traced.names.items()):
        yield _named("process_name", pid, 0, f"{name or 'process'} {pid}")
        yield _named("thread_name", pid, STATE, "state")
    for pid, lane in sorted({(note.pid, lane) for note, lane in _lanes(traced.calls, traced.end_ns)}):
        yield _named("thread_name", pid, lane, f"calls {lane}")


def _states(spans: Sequence[Span]) -> Iterable[dict[str, Any]]:
    for span in spans:
        took_us = (span.to_ns - span.from_ns) / _US
        yield _event("X", span.state, span.pid, STATE, span.from_ns, dur=took_us, cat="state")


def _end_ns(note: SyscallNote, end_ns: int) -> int:
    return note.at_ns + note.took_ns if note.took_ns >= 0 else max(end_ns, note.at_ns)


def _lanes(calls: Sequence[SyscallNote], end_ns: int) -> Iterable[tuple[SyscallNote, int]]:
    """Each call with the first thread of its process that is free when it comes."""
    busy: dict[int, list[int]] = {}  # by pid: when each thread is free again
    for note in sorted(calls, key=lambda note: (note.at_ns, note.request)):
        threads = busy.setdefault(note.pid, [])
        lane = next((i for i, free_ns in enumerate(threads) if free_ns <= note.at_ns), len(threads))
        threads[lane : lane + 1] = [_end_ns(note, end_ns)]
        yield note, lane + 1


def _calls(calls: Sequence[SyscallNote], end_ns: int) -> Iterable[dict[str, Any]]:
    for note, lane in _lanes(calls, end_ns):
        args: dict[str, Any] = {"args": note.args, "request": note.request}
        args |= {"result": note.result} if note.took_ns >= 0 else {"unfinished": True}
        args |= {"errno": note.errno} if note.errno else {}
        dur_us = (_end_ns(note, end_ns) - note.at_ns) / _US
        yield _event("X", note.name, note.pid, lane, note.at_ns, dur=dur_us, cat="syscall", args=args)


def _counters(samples: Sequence[SampleRow]) -> Iterable[dict[str, Any]]:
    for s in samples:
        frames = {"free": s.free_frames, "cache": s.reclaimable_frames}
        yield _event("C", "frames", SYSTEM, 0, s.at_ns, args=frames)
        yield _event("C", "contexts", SYSTEM, 0, s.at_ns, args={"running": s.active, "queued": s.queued})
    for a, b in pairwise(samples):
        seconds = (b.at_ns - a.at_ns) / 1e9
        if seconds > 0:
            rates = {
                "computed": b.computed_tokens - a.computed_tokens,
                "generated": b.generated_tokens - a.generated_tokens,
            }
            each = {name: round(n / seconds, 1) for name, n in rates.items()}
            yield _event("C", "tokens per second", SYSTEM, 0, b.at_ns, args=each)


def _decisions(rows: Sequence[DecisionRow]) -> Iterable[dict[str, Any]]:
    for row in rows:
        args = {"why": row.why, "device": row.device, "cid": row.cid, "blocks": row.blocks}
        yield _event("i", f"{row.what} {row.device}", SYSTEM, 0, row.at_ns, s="p", cat="decision", args=args)
