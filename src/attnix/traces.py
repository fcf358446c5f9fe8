"""The public traces of inference requests, in one form.

    for request in load("mooncake_conversation.jsonl.gz").requests(): ...

Files stay where they are, and are read line by line.  What a source does not say stays empty: nothing is invented,
but for two things a trace of single sessions cannot be replayed without, and both are parameters:

- *how sessions overlap* (claude_code_weka, agentcgroup_tools: times count from each session's own start).  Rule: the
  sessions are put in an order drawn from `seed`; the gaps between their starts are exponential with mean
  (mean length of a session) / `concurrency`, so that on average `concurrency` sessions are between their first and
  last request (a Poisson stream of sessions; Little's law).
- *what the blocks of agentcgroup_tools are* (it has token counts only): a context that grew keeps all it had; one
  that shrank (it was compacted) keeps the tokens that the source counted as read from its cache.  No sharing between
  sessions.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO, TypeAlias

UNKNOWN: Final = "unknown"
TURN: Final = "turn"  # the model ended its turn: a person may answer
TOOL: Final = "tool"  # it waits for a tool


class Request(NamedTuple):
    """One request for the model.

    time_ms        arrival, from the start of the trace
    session        number of the session; -1 where the source has none
    turn           place in its session, from 1; 0 where the source has no sessions
    blocks         number of each full block of the input in order, where equal numbers mean equal content after equal prefixes;
                   None where the source has lengths only
    input_tokens   length of the input; the last input_tokens % block_tokens of them are in no block
    output_tokens
    service_ms     how long the server took; 0 unknown
    after          how the turn before this one ended: TURN, TOOL or UNKNOWN
    ends           how this one ends
    tool           name of the tool that it then waits for, "" if unknown
    tool_ms        how long after the end of this turn the tool answers, as the session's next request tells;
                   -1 unless `ends` is TOOL and there is a next request.  This is the eta of a perfect hint
    think_ms       the client's pause before this request; -1 unknown
    last           1 if the session has no later request; 0 also where there are no sessions
    """

    time_ms: float
    session: int
    turn: int
    blocks: Sequence[int] | None
    input_tokens: int
    output_tokens: int
    service_ms: float
    after: str
    ends: str
    tool: str
    tool_ms: float
    think_ms: float
    last: int


class _Call(NamedTuple):
    """A request of a session whose start is not chosen yet: its blocks are the first `keep` of the call before it, then `new`."""

    request: Request
    keep: int
    new: array[int]


_Session: TypeAlias = list[_Call]  # times from the start of its group
_Group: TypeAlias = list[_Session]  # a session, and its sub-agents', which start when they started in it


@dataclass(frozen=True)
class Trace:
    """A trace file that has not been read yet.

    block_tokens   tokens per block number; 0: the source has lengths only
    concurrency    mean number of sessions at once, where sessions have no absolute times
    """

    path: Path
    form: str
    block_tokens: int
    concurrency: float
    seed: int

    def requests(self) -> Iterator[Request]:
        """In order of time.  ValueError, with the line, for what is not in the file's format."""
        if self.form == "mooncake":
            return _mooncake(self.path, self.block_tokens)
        if self.form == "azure":
            return _azure(self.path)
        read = _weka if self.form == "weka" else _agentcgroup
        return _overlapped(list(read(self.path, self.block_tokens)), self.concurrency, self.seed)


def load(path: str | Path, *, block_tokens: int = 64, concurrency: float = 16.0, seed: int = 1) -> Trace:
    """The trace at `path` (.jsonl, .csv, or either with .gz); the first line tells the format.

    block_tokens   only for agentcgroup_tools, which has no blocks of its own
    ValueError: a format this does not know.
    """
    path = Path(path)
    if block_tokens < 1 or concurrency <= 0:
        raise ValueError("a block has at least one token, and concurrency is more than 0")
    with _open(path) as file:
        first = file.readline()
    if first.startswith("timestamp_ms,"):
        return Trace(path, "azure", 0, concurrency, seed)
    try:
        head = json.loads(first)
    except json.JSONDecodeError:
        head = None
    match head:
        case {"hash_ids": _, "timestamp_ms": _}:
            return Trace(path, "mooncake", 512, concurrency, seed)
        case {"requests": _, "block_size": int(size)}:
            return Trace(path, "weka", size, concurrency, seed)
        case {"calls": _}:
            return Trace(path, "agentcgroup", block_tokens, concurrency, seed)
    raise ValueError(f"{path}: not a trace of a format known here")


def _open(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _lines(path: Path) -> Iterator[str]:
    with _open(path) as file:
        yield from file


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not an object")
        yield row


def _mooncake(path: Path, block_tokens: int) -> Iterator[Request]:
    """Single requests; an id names the whole prefix up to its block.  The last one may cover a partial block: left out."""
    for row in _rows(path):
        tokens = int(row["input_length"])
        yield Request(
            float(row["timestamp_ms"]), -1, 0, array("i", row["hash_ids"][: tokens // block_tokens]), tokens,
            int(row["output_length"]), 0.0, UNKNOWN, UNKNOWN, "", -1.0, -1.0, 0,
        )  # fmt: skip


def _azure(path: Path) -> Iterator[Request]:
    for row in csv.DictReader(_lines(path)):
        yield Request(
            float(row["timestamp_ms"]), -1, 0, None, int(row["input_length"]), int(row["output_length"]), 0.0, UNKNOWN,
            UNKNOWN, "", -1.0, -1.0, 0,
        )  # fmt: skip


_STOPS: Final = {"t": TOOL, "e": TURN, "?": UNKNOWN}


def _weka(path: Path, block_tokens: int) -> Iterator[_Group]:
    """An id is local to a row and names content at a place: it gets a global number with all ids before it, since attnix
    shares prefixes only.  A row's sub-agents are sessions of their own here."""
    del block_tokens
    names = _PrefixNames()
    for row in _rows(path):
        names.forget()  # ids of one row mean nothing in another
        lists = [row["requests"], *(each["requests"] for each in row.get("subagents") or ())]
        yield [_weka_session(names, listed) for listed in lists if listed]


def _weka_session(names: _PrefixNames, listed: list[Any]) -> _Session:
    session: _Session = []
    blocks: list[int] = []
    after = UNKNOWN
    for place, (at_ms, tokens, output, api_ms, think_ms, stop, _, keep, runs) in enumerate(listed):
        del blocks[keep:]
        local = [i for first, count in zip(runs[::2], runs[1::2], strict=True) for i in range(first, first + count)]
        new = names.after(blocks[-1] if blocks else -1, local)
        blocks.extend(new)
        ends = _STOPS[stop]
        service_ms = float(api_ms or 0)
        later_ms = listed[place + 1][0] if place + 1 < len(listed) else None
        tool_ms = max(0.0, later_ms - at_ms - service_ms) if ends == TOOL and later_ms is not None else -1.0
        request = Request(
            float(at_ms), -1, place + 1, None, tokens, output, service_ms, after, ends, "", tool_ms,
            -1.0 if think_ms is None else float(think_ms), int(later_ms is None),
        )  # fmt: skip
        session.append(_Call(request, keep, new))
        after = ends
    return session


class _PrefixNames:
    """A number for each (number of the prefix, local id): equal numbers are equal prefixes."""

    def __init__(self) -> None:
        self.next = 0
        self.known: dict[tuple[int, int], int] = {}

    def forget(self) -> None:
        self.known.clear()

    def after(self, prefix: int, ids: Sequence[int]) -> array[int]:
        """Numbers of `ids` that follow the block numbered `prefix`, -1 for none."""
        known = self.known
        numbers = array("i")
        for local in ids:
            name = known.get((prefix, local))
            if name is None:
                name = known[prefix, local] = self.next
                self.next += 1
            numbers.append(name)
            prefix = name
        return numbers


def _agentcgroup(path: Path, block_tokens: int) -> Iterator[_Group]:
    next_block = 0
    for row in _rows(path):
        session: _Session = []
        held_tokens = 0
        after = UNKNOWN
        calls = row["calls"]
        for place, (at_ms, tokens, output, cached, tools) in enumerate(calls):
            keep = (held_tokens if tokens >= held_tokens else min(cached, tokens)) // block_tokens
            fresh = tokens // block_tokens - keep
            new = array("i", range(next_block, next_block + fresh))
            next_block += fresh
            held_tokens = tokens
            ends = TOOL if tools else TURN
            later_ms = calls[place + 1][0] if place + 1 < len(calls) else None
            known = [start + took - at_ms for _, start, took in tools if took is not None]
            tool_ms = max(0.0, float(max(known))) if known and later_ms is not None else -1.0
            name = tools[0][0] if tools else ""
            request = Request(
                float(at_ms), -1, place + 1, None, tokens, output, 0.0, after, ends, name, tool_ms, -1.0,
                int(later_ms is None),
            )  # fmt: skip
            session.append(_Call(request, keep, new))
            after = ends
        if session:
            yield [session]


def _overlapped(groups: list[_Group], concurrency: float, seed: int) -> Iterator[Request]:
    """The requests in order of time, groups started as the head of this file says."""
    draw = random.Random(seed)
    draw.shuffle(groups)
    mean_ms = sum(g[0][-1].request.time_ms - g[0][0].request.time_ms for g in groups) / max(1, len(groups))
    start_ms = 0.0
    sessions: list[_Session] = []
    starts_ms: list[float] = []
    ready: list[tuple[float, int, int]] = []
    for group in groups:
        for session in group:
            starts_ms.append(start_ms - group[0][0].request.time_ms)
            ready.append((starts_ms[-1] + session[0].request.time_ms, len(sessions), 0))
            sessions.append(session)
        start_ms += draw.expovariate(1.0) * mean_ms / concurrency
    heapify(ready)
    held: dict[int, array[int]] = {}
    while ready:
        time_ms, number, place = ready[0]
        session = sessions[number]
        request, keep, new = session[place]
        blocks = held.pop(number, array("i"))[:keep] + new
        yield request._replace(time_ms=time_ms, session=number, blocks=blocks)
        if place + 1 < len(session):
            held[number] = blocks
            heapreplace(
                ready, (max(time_ms, starts_ms[number] + session[place + 1].request.time_ms), number, place + 1)
            )
        else:
            heappop(ready)
