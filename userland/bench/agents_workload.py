"""The work of `attnix bench agents`: the same for every engine, drawn once from a seed.

Sixteen agents share a system prompt.  Each takes ten turns; a turn adds a tool's result to the agent's context, generates
some tokens, and then waits for the next tool.  Agents never see each other's results.  Lengths and waits do not depend
on what an engine generates, so that every engine has the same to do even where their tokens part.

Waits are drawn, with the tool's name, from the tool calls of a trace (`agentcgroup_tools.jsonl.gz`: names and durations
of real tools, docs in ../shared/traces/README.md), or else from the log-normal distributions of BUILT_IN.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

RESULT_TOKENS: Final = (20, 52)  # of a tool's result: from, to
ANSWER_TOKENS: Final = (24, 40)  # to generate in a turn
CHUNK_TOKENS: Final = 256  # llama.cpp rounds each sequence's part of its KV cache up to this
BUILT_IN: Final = {"Read": (0.05, 0.5), "Bash": (0.5, 1.5)}  # median in seconds, sigma of the logarithm; equally often

Encode = Callable[[str], Sequence[int]]


class Turn(NamedTuple):
    """ids are added, `answer` tokens are generated, then the agent waits for `tool` so many seconds."""

    ids: list[int]
    answer: int
    tool: str
    wait_s: float


class Workload(NamedTuple):
    system: list[int]
    agents: list[list[Turn]]

    @property
    def longest_tokens(self) -> int:
        """Of the longest context at its end."""
        return len(self.system) + max(self.private_tokens)

    @property
    def private_tokens(self) -> list[int]:
        """Of each agent at its end: what is not the system prompt."""
        return [sum(len(turn.ids) + turn.answer for turn in turns) for turns in self.agents]

    @property
    def least_prompt_tokens(self) -> int:
        """What an engine must compute that forgets nothing: each prompt token once, and each answer's last token."""
        added = sum(len(turn.ids) for turns in self.agents for turn in turns)
        return len(self.system) + added + sum(len(turns) - 1 for turns in self.agents)

    @property
    def stateless_prompt_tokens(self) -> int:
        """What a server computes that remembers nothing between requests."""
        total = 0
        for turns in self.agents:
            length = len(self.system)
            for turn in turns:
                total += length + len(turn.ids)
                length += len(turn.ids) + turn.answer
        return total

    @property
    def waits_s(self) -> list[float]:
        """What each agent waits for tools in all: nobody waits for the tool after the last turn."""
        return [sum(turn.wait_s for turn in turns[:-1]) for turns in self.agents]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()[:16]


class Size(NamedTuple):
    """How much KV an engine may hold, and for llama.cpp in how many slots."""

    name: str
    tokens: int
    slots: int


def sizes(work: Workload) -> dict[str, Size]:
    """The KV budgets, in tokens: the same for all engines.

    all      every agent's context at its longest, nothing shared: also an engine that shares no prefixes holds them all
    quarter  a quarter of that
    shared   the system prompt once and a quarter of the agents' own parts: a quarter of the agents for an engine that does
    """
    each = rounded(work.longest_tokens)
    count = len(work.agents)
    few = max(1, count // 4)
    least = max(each, rounded(len(work.system) + few * max(work.private_tokens)))
    return {
        "all": Size("all", count * each, count),
        "quarter": Size("quarter", few * each, few),
        "shared": Size("shared", least, least // each),
    }


def rounded(tokens: int) -> int:
    return math.ceil(tokens / CHUNK_TOKENS) * CHUNK_TOKENS


class Plan(NamedTuple):
    """What to draw.  scale: a tool's duration in the trace times this is the wait."""

    agents: int = 16
    turns: int = 10
    system_tokens: int = 2048
    scale: float = 0.5
    seed: int = 1


def draw(plan: Plan, encode: Encode, durations: Sequence[tuple[str, float]] = ()) -> Workload:
    """durations: (tool, seconds) of real calls; with none, those of BUILT_IN."""
    lengths, waits = random.Random(f"{plan.seed} lengths"), random.Random(f"{plan.seed} waits")
    system = ids(encode, _tools(random.Random(f"{plan.seed} system")), plan.system_tokens)
    agents = []
    for agent in range(plan.agents):
        turns = []
        for turn in range(plan.turns):
            tool, seconds = waits.choice(durations) if durations else _built_in(waits)
            count = lengths.randint(*RESULT_TOKENS)
            text = _result(random.Random(f"{plan.seed} {agent} {turn}"), agent, turn)
            answer = lengths.randint(*ANSWER_TOKENS)
            turns.append(Turn(ids(encode, text, count), answer, tool, round(seconds * plan.scale, 3)))
        agents.append(turns)
    return Workload(system, agents)


def ids(encode: Encode, text: Callable[[], str], count: int) -> list[int]:
    """The first `count` token ids of as many pieces of text as that takes."""
    made = list(encode(text()))
    while len(made) < count:
        made += encode(text())
    return made[:count]


def read_durations(path: str) -> list[tuple[str, float]]:
    """(tool, seconds) of every finished tool call in a trace.  Error: ValueError when it is none."""
    try:
        with gzip.open(path, "rt") as file:
            sessions: list[dict[str, Any]] = [json.loads(line) for line in file]
        calls = [tool for session in sessions for call in session["calls"] for tool in call[4]]
        found = [(str(name), duration / 1e3) for name, _, duration in calls if duration is not None]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is no trace with tool calls: {error}") from error
    if not found:
        raise ValueError(f"{path} has no finished tool call")
    return found


def _built_in(draws: random.Random) -> tuple[str, float]:
    tool, (median, sigma) = draws.choice(list(BUILT_IN.items()))
    return tool, median * math.exp(draws.gauss(0, sigma))


# -- text: real words, since engines that differ in the last bit agree on their likeliest continuation ------------------

VERBS: Final = ("read", "write", "list", "remove", "search", "compare", "copy", "open", "check", "send")
THINGS: Final = ("file", "folder", "process", "message", "table", "branch", "test", "report", "page", "image")
PARTS: Final = ("name", "path", "limit", "owner", "size", "pattern", "date", "line", "text", "number")
FILES: Final = ("main", "parser", "server", "client", "index", "config", "model", "cache", "router", "worker")


def _tools(words: random.Random) -> Callable[[], str]:
    first = ["You are an assistant that works with tools. Answer with one short step at a time. These are the tools.\n"]

    def one() -> str:
        if first:
            return first.pop()
        verb, thing = words.choice(VERBS), words.choice(THINGS)
        a, b = words.sample(PARTS, 2)
        return (
            f"Tool {verb}_{thing}: {verb} a {thing} by its {a}. The {b} is optional and at most {words.randint(2, 999)}. It "
            f"answers with the {words.choice(PARTS)} of the {thing}, or with an error when the {a} is not known.\n"
        )

    return one


def _result(words: random.Random, agent: int, turn: int) -> Callable[[], str]:
    word = (VERBS + THINGS)[agent % len(VERBS + THINGS)]  # so that agents have no more in common than the system prompt
    first = [f"{word} task {agent + 1}, tool result {turn + 1}:\n"]

    def one() -> str:
        if first:
            return first.pop()
        return (
            f"{words.choice(FILES)}.py line {words.randint(1, 900)}: the {words.choice(THINGS)} has no "
            f"{words.choice(PARTS)}\n"
        )

    return one
