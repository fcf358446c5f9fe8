"""A trace as sessions of turns, with token arrays in which equal blocks have equal tokens and nothing else is equal.

A block of number g is the tokens g*B .. g*B + B-1, so equal numbers are equal tokens and a token lies in one block only.
What no number names, the rest of a prompt below a whole block and prompts of traces without blocks, is different in every
request; so is every answer (a trace does not say what it was), which means that an answer's KV is never found again: the
next prompt has it inside its own blocks and computes it once more.  The kernel's block is the trace's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from attnix.kernel.evict.protocol import KIND_NONE, KIND_TOOL, KIND_TURN
from attnix.traces import TOOL, TURN, Request, Trace

Int64s: TypeAlias = npt.NDArray[np.int64]
Tokens: TypeAlias = npt.NDArray[np.int32]

VOCAB_TOKENS: Final = (1 << 31) - 1
STOP_TOKEN: Final = VOCAB_TOKENS - 1
ANSWER_TOKENS: Final = 1 << 30  # ids from here on are answers, one id per request
_BLOCK_WITHOUT_NUMBERS: Final = 64  # tokens
_KINDS: Final = {TURN: KIND_TURN, TOOL: KIND_TOOL}


@dataclass(slots=True)
class Turn:
    """One request.

    number   its place in the trace
    blocks   numbers of the prompt's full blocks
    unnamed  first token id of what the blocks do not cover
    pause_ns between the end of the turn before it and its arrival; the first turn of a session has `Session.start_ns`
    kind     why it ends (kernel/evict/protocol.py)
    tool     name of the tool that it then waits for; "" where the trace has no names
    """

    number: int
    blocks: Int64s
    unnamed: int
    prompt_tokens: int
    output_tokens: int
    pause_ns: int
    kind: int
    tool: str = ""


@dataclass(slots=True)
class Session:
    """Turns that follow one another: the next arrives `pause_ns` after the one before it has ended (a closed loop)."""

    start_ns: int
    turns: list[Turn] = field(default_factory=list)


@dataclass(slots=True)
class Workload:
    """All that is replayed.

    distinct_blocks  how many different full blocks the prompts have; block numbers are below block_numbers
    has_sessions     else every session has one turn
    follows          a turn's prompt is what comes behind the answer before it, instead of the whole from the start on
    """

    name: str
    block_tokens: int
    sessions: list[Session]
    block_numbers: int
    distinct_blocks: int
    has_sessions: bool
    follows: bool = False

    @property
    def turns(self) -> int:
        return sum(len(s.turns) for s in self.sessions)

    @property
    def longest_tokens(self) -> int:
        """Of a context, its answer included."""
        sizes = ([t.prompt_tokens + t.output_tokens for t in s.turns] for s in self.sessions)
        return max((sum(turns) if self.follows else max(turns) for turns in sizes), default=1)

    def prompt(self, turn: Turn, start_tokens: int) -> Tokens:
        """The prompt's tokens from `start_tokens` on."""
        size = self.block_tokens
        first = min(start_tokens // size, len(turn.blocks))
        named = (turn.blocks[first:, None] * size + np.arange(size)).ravel()
        rest = turn.prompt_tokens - len(turn.blocks) * size
        tokens = np.concatenate((named, np.arange(turn.unnamed, turn.unnamed + rest))).astype(np.int32)
        return tokens[start_tokens - first * size :]


def common_blocks(a: Int64s, b: Int64s) -> int:
    """How many blocks both begin with."""
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    if a[n - 1] == b[n - 1]:  # a number names the whole prefix
        return n
    return int(np.argmax(a[:n] != b[:n]))


def from_trace(trace: Trace, *, rate: float = 1.0, limit: int = 0, limit_sessions: int = 0) -> Workload:
    """rate: arrivals of sessions (of requests, where there are none) come this much faster; pauses stay.  limit: only the
    first so many requests; 0 all.  limit_sessions: only the sessions that come first, whole.  ValueError: more token ids
    than there are."""
    name = trace.path.name.split(".")[0]
    return from_requests(
        name, trace.requests(), trace.block_tokens, rate=rate, limit=limit, limit_sessions=limit_sessions
    )


def from_requests(
    name: str, requests: Iterable[Request], block_tokens: int, *, rate: float = 1.0, limit: int = 0,
    limit_sessions: int = 0,
) -> Workload:  # fmt: skip
    size = block_tokens or _BLOCK_WITHOUT_NUMBERS
    sessions: dict[int, Session] = {}
    before: dict[int, Request] = {}
    alone: list[Session] = []
    kept: list[Turn] = []
    none = np.zeros(0, np.int64)
    for number, request in enumerate(requests):
        if limit and number >= limit:
            break
        if limit_sessions and request.session not in sessions and len(sessions) >= limit_sessions:
            continue
        blocks = none if request.blocks is None else np.asarray(request.blocks, np.int64)
        pause_ns = _pause_ns(before.get(request.session), request)
        turn = Turn(
            number, blocks, 0, request.input_tokens, max(1, request.output_tokens), pause_ns,
            _KINDS.get(request.ends, KIND_NONE), request.tool,
        )  # fmt: skip
        kept.append(turn)
        start_ns = round(request.time_ms * 1e6 / rate)
        if request.session < 0:
            alone.append(Session(start_ns, [turn]))
        else:
            sessions.setdefault(request.session, Session(start_ns)).turns.append(turn)
            before[request.session] = request
    named = [t.blocks for t in kept if len(t.blocks)]
    block_numbers = int(max((b.max() for b in named), default=-1)) + 1
    seen = np.zeros(block_numbers, np.bool_)
    for blocks in named:
        seen[blocks] = True
    unnamed = block_numbers * size
    for turn in kept:
        turn.unnamed = unnamed
        unnamed += turn.prompt_tokens - len(turn.blocks) * size
    if unnamed >= ANSWER_TOKENS or ANSWER_TOKENS + len(kept) >= STOP_TOKEN:
        raise ValueError(f"{name}: {unnamed} different tokens are more than there are ids")
    return Workload(
        name, size, [*sessions.values(), *alone], block_numbers, int(np.count_nonzero(seen)), bool(sessions)
    )


def _pause_ns(before: Request | None, request: Request) -> int:
    """The client's own pause: what the trace says, or the tool's time, or what the server's time leaves of the gap."""
    if before is None:
        return 0
    if request.think_ms >= 0:
        return round(request.think_ms * 1e6)
    if before.tool_ms >= 0:
        return round(before.tool_ms * 1e6)
    return round(max(0.0, request.time_ms - before.time_ms - before.service_ms) * 1e6)
