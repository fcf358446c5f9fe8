"""`attnix bench agents`: the workload, the runs and what is made of them, the peers' client against a server that says what we
tell it, and attnix itself on the simulated device.  Expected numbers are counted by hand."""

from __future__ import annotations

import gzip
import json
import math
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from attnix.userland.bench import agents, agents_engines, agents_resumption
from attnix.userland.bench.agents import Options, Runs, measure, quantile, rows
from attnix.userland.bench.agents_engines import (
    Answer,
    Engine,
    LlamaAgent,
    Outcome,
    Room,
    Weights,
    attnix,
    llama,
    together,
)
from attnix.userland.bench.agents_workload import BUILT_IN, Plan, Turn, Workload, draw, read_durations, sizes
from attnix.userland.bench.decode_engines import BenchError, PeerMissing

WEIGHTS = Weights("sim", "", "", 256)
SMALL = Workload(
    [1, 2, 3, 4, 5, 6, 7, 8],
    [
        [Turn([9, 10, 11], 4, "Bash", 0.0), Turn([12], 2, "Read", 0.5)],
        [Turn([13, 14], 1, "Read", 0.0), Turn([15, 16], 3, "Bash", 0.25)],
    ],
)


def letters(text: str) -> list[int]:
    return list(text.encode())


# -- the workload -------------------------------------------------------------------------------------------------------


def test_a_workload_is_drawn_from_its_seed_alone() -> None:
    plan = Plan(agents=3, turns=2, system_tokens=100, scale=0.5, seed=7)
    work = draw(plan, letters, [("Bash", 8.0), ("Read", 2.0)])
    assert work == draw(plan, letters, [("Bash", 8.0), ("Read", 2.0)])
    assert work.digest == draw(plan, letters, [("Bash", 8.0), ("Read", 2.0)]).digest
    assert work.digest != draw(plan._replace(seed=8), letters, [("Bash", 8.0), ("Read", 2.0)]).digest
    assert len(work.system) == 100
    assert [len(turns) for turns in work.agents] == [2, 2, 2]
    for turn in [turn for turns in work.agents for turn in turns]:
        assert (turn.tool, turn.wait_s) in {("Bash", 4.0), ("Read", 1.0)}  # scaled, and each tool with its own
        assert 20 <= len(turn.ids) <= 52
        assert 24 <= turn.answer <= 40
    heads = {tuple(turns[0].ids[:4]) for turns in work.agents}
    assert len(heads) == 3, "beyond the system prompt agents share nothing"


def test_what_must_be_computed_is_counted() -> None:
    # system 8; results 3 + 1 + 2 + 2; the last token of the first answer of each agent is computed with the next result
    assert SMALL.least_prompt_tokens == 8 + 8 + 2
    # agent 1: 8 + 3, then 8 + 3 + 4 + 1; agent 2: 8 + 2, then 8 + 2 + 1 + 2
    assert SMALL.stateless_prompt_tokens == 11 + 16 + 10 + 13
    assert SMALL.private_tokens == [3 + 4 + 1 + 2, 2 + 1 + 2 + 3]
    assert SMALL.longest_tokens == 18
    assert SMALL.waits_s == [0.0, 0.0], "nobody waits for the tool after the last turn"


def test_kv_budgets() -> None:
    turns = [Turn([1] * 40, 32, "Bash", 0.0)] * 10
    work = Workload([1] * 2048, [turns] * 16)  # 2,768 tokens each, rounded up to 2,816; private 720
    every = sizes(work)
    assert every["all"][1:] == (16 * 2816, 16)
    assert every["quarter"][1:] == (4 * 2816, 4)
    assert every["shared"][1:] == (5120, 1)  # 2,048 + 4 * 720 = 4,928, rounded up
    assert sizes(SMALL)["shared"].slots == 1, "at least one context fits"


def test_tool_durations_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "tools.jsonl.gz"
    sessions = [
        {"calls": [[0, 10, 2, 0, [["Bash", 0, 1500], ["Read", 0, None]]], [5, 20, 2, 0, []]]},
        {"calls": [[0, 10, 2, 0, [["Grep", 0, 20]]]]},
    ]
    with gzip.open(path, "wt") as file:
        file.write("\n".join(map(json.dumps, sessions)))
    assert read_durations(str(path)) == [("Bash", 1.5), ("Grep", 0.02)]
    for text in ("", "not json", '{"calls": [[1]]}'):
        with gzip.open(path, "wt") as file:
            file.write(text)
        with pytest.raises(ValueError, match=r"tools\.jsonl\.gz"):
            read_durations(str(path))
    with pytest.raises(ValueError, match="absent"):
        read_durations(str(tmp_path / "absent"))


def test_built_in_durations_have_the_medians_that_the_help_says() -> None:
    work = draw(Plan(agents=40, turns=100, system_tokens=1, scale=1.0), letters)
    for tool, (median, sigma) in BUILT_IN.items():
        drawn = [math.log(t.wait_s) for turns in work.agents for t in turns if t.tool == tool and t.wait_s]
        assert len(drawn) > 1500
        assert statistics.median(drawn) == pytest.approx(math.log(median), abs=5 * sigma / math.sqrt(len(drawn)) + 0.02)
        assert statistics.stdev(drawn) == pytest.approx(sigma, rel=0.1)


# -- agents at once -----------------------------------------------------------------------------------------------------


class Parrot:
    """Generates the last id that it was given; notes what it was given and what it waited for."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.left: list[str] = []

    def turn(self, turn: Turn, ids: list[int]) -> Answer:
        self.given.append(ids)
        return Answer(0.0, [ids[-1]] * turn.answer)

    def leave(self, turn: Turn) -> None:
        self.left.append(turn.tool)


def test_each_agent_gets_the_system_prompt_once_and_its_turns_in_order() -> None:
    parrots = [Parrot(), Parrot()]
    timed = together(SMALL, parrots, 60.0)
    assert parrots[0].given == [[*range(1, 9), 9, 10, 11], [12]]
    assert parrots[1].given == [[*range(1, 9), 13, 14], [15, 16]]
    assert [parrot.left for parrot in parrots] == [["Bash"], ["Read"]]
    assert timed.tokens == [[[11] * 4, [12] * 2], [[14], [16] * 3]]
    assert len(timed.jobs) == len(timed.burst) == len(timed.returns) == 2


def test_agents_that_take_too_long_or_answer_too_little() -> None:
    never = threading.Event()

    class Deaf(Parrot):
        def turn(self, turn: Turn, ids: list[int]) -> Answer:
            never.wait()
            return Answer(0.0, [])

    with pytest.raises(TimeoutError):
        together(SMALL, [Parrot(), Deaf()], 0.0)
    never.set()

    class Mute(Parrot):
        def turn(self, turn: Turn, ids: list[int]) -> Answer:
            return Answer(0.0, [])

    with pytest.raises(BenchError, match="agent 1 got 0 tokens, not 1"):
        together(SMALL, [Parrot(), Mute()], 60.0)


# -- runs and rows ------------------------------------------------------------------------------------------------------


def outcome(jobs: Sequence[float], prompt_tokens: int = 100, token: int = 1) -> Outcome:
    tokens = [[[token] * turn.answer for turn in turns] for turns in SMALL.agents]
    return Outcome("fake 1", list(jobs), [0.5, 1.0], [0.010, 0.020], prompt_tokens, tokens, {})


def fake(outcomes: list[Outcome | PeerMissing], asked: list[Room]) -> Engine:
    def run(work: Workload, room: Room, weights: Weights, limit_s: float) -> Outcome:
        assert work == SMALL
        asked.append(room)
        made = outcomes.pop(0)
        if isinstance(made, PeerMissing):
            raise made
        return made

    return run


def test_engines_take_turns_and_a_peer_that_fails_once_is_missing(tmp_path: Path) -> None:
    asked: dict[str, list[Room]] = {"attnix": [], "good": [], "bad": [], "absent": []}
    known = {
        "attnix": fake([outcome([2.0, 4.0]), outcome([4.0, 4.0]), outcome([3.0, 3.0])], asked["attnix"]),
        "good": fake([outcome([6.0, 6.0], 200), outcome([8.0, 10.0], 400), outcome([9.0, 9.0], 300)], asked["good"]),
        "bad": fake([outcome([1.0, 1.0]), PeerMissing("it broke")], asked["bad"]),
        "absent": fake([PeerMissing("no such program")], asked["absent"]),
    }
    results = str(tmp_path / "runs")
    options = Options(engines=("attnix", "good", "bad", "absent"), sizes=("all",), runs=3, results=results)
    said: list[str] = []
    found = measure(options, SMALL, 10, WEIGHTS, known, said.append)
    assert found["all", "bad"] == Runs([], "it broke"), "half a measurement is none"
    assert [len(rooms) for rooms in asked.values()] == [3, 3, 2, 1]
    assert asked["good"][0] == asked["attnix"][0] == Room(2 * 256 * 10, agents.SPILL_BYTES, 2, 512)
    assert any("absent, all: missing: no such program" in line for line in said)

    table = {(row.case, row.peer): row for row in rows(found, options, SMALL)}
    mean = table["job completion, mean, all", "good"]
    assert (mean.ours, mean.theirs, mean.ratio, mean.n) == (3.0, 9.0, 3.0, 3)  # medians of 3, 4, 3 and 6, 9, 9
    tokens = table["prompt tokens computed, all", "good"]
    assert (tokens.ours, tokens.theirs, tokens.limit, tokens.of_limit) == (100.0, 300.0, 18.0, 0.18)
    after = table["first token after a tool, p95, all", "good"]
    assert (after.ours, after.theirs, after.unit) == (20.0, 20.0, "ms")
    for name in ("bad (missing: it broke)", "absent (missing: no such program)"):
        row = table["all jobs, all", name]
        assert row.theirs is None
        assert row.ratio is None


def test_a_run_that_is_kept_is_not_repeated(tmp_path: Path) -> None:
    results = str(tmp_path / "runs")
    options = Options(engines=("attnix",), sizes=("all",), runs=1, results=results)
    asked: list[Room] = []
    first = measure(options, SMALL, 10, WEIGHTS, {"attnix": fake([outcome([2.0, 4.0])], asked)}, print)
    again = measure(options, SMALL, 10, WEIGHTS, {"attnix": fake([], asked)}, print)
    assert again == first
    known = {"attnix": fake([outcome([5.0, 5.0])], asked), "late": fake([outcome([1.0, 1.0])] * 2, asked)}
    more = measure(options._replace(engines=("attnix", "late"), runs=2), SMALL, 10, WEIGHTS, known, print)
    assert [one.jobs for one in more["all", "attnix"].done] == [[2.0, 4.0], [5.0, 5.0]]
    assert len(more["all", "late"].done) == 2
    other = SMALL._replace(system=[9])
    assert agents._Results(results, other.digest).of("all", "attnix") == [], "another workload's runs are no runs"


def test_tokens_that_part_are_said() -> None:
    found = {("all", "attnix"): Runs([outcome([1.0])], ""), ("all", "peer"): Runs([outcome([1.0])], "")}
    found["all", "peer"].done[0].tokens[0][0][2] = 99  # agent 1 generates 4 tokens in its first turn, agent 2 one
    said: list[str] = []
    agents.compare(found, Options(), said.append)
    turns, first = said[1].split("; ")
    assert turns == "peer, all: 3 of 4 turns are token for token those of attnix"
    assert (
        first == "of the first turn the first token of 2 of 2 agents, and 2 tokens in the median"
    )  # of 2 and 1, rounded
    found["all", "peer"].done[0].tokens[1][0][0] = 99
    agents.compare(found, Options(), said.append)
    assert "first token of 1 of 2 agents" in said[3]


def test_the_first_engine_of_ours_is_compared_and_without_one_nothing_is() -> None:
    found = {("all", "attnix-no-wait"): Runs([outcome([4.0])], ""), ("all", "peer"): Runs([outcome([2.0])], "")}
    options = Options(engines=("peer", "attnix-no-wait"), sizes=("all",))
    made = rows(found, options, SMALL)
    assert {(row.peer, row.ratio) for row in made if row.case.startswith("job")} == {("peer", 0.5)}
    assert rows(found, options._replace(engines=("peer",)), SMALL) == []
    alone = rows(found, options._replace(engines=("attnix-no-wait",)), SMALL)
    assert {(row.peer, row.theirs) for row in alone} == {("none", None)}


def test_what_an_engine_has_to_do_with_is_a_job_without_its_tool_waits() -> None:
    (first, *rest), second = SMALL.agents
    work = SMALL._replace(agents=[[first._replace(wait_s=3.0), *rest], second])  # 3 s and none: 1.5 in the mean
    found = {("all", "attnix"): Runs([outcome([4.0, 2.0])], ""), ("all", "peer"): Runs([outcome([8.0, 4.0])], "")}
    made = rows(found, Options(engines=("attnix", "peer"), sizes=("all",)), work)
    (row,) = [row for row in made if row.case == "job less its tool waits, mean, all"]
    assert (row.ours, row.theirs, row.ratio) == (1.5, 4.5, 3.0)


def test_unknown_names_are_refused() -> None:
    for options in (Options(engines=("exllama",)), Options(engines=(), sizes=("half",))):
        with pytest.raises(BenchError, match=r"is called (exllama|half); there are"):
            measure(options, SMALL, 1, WEIGHTS, {}, print)


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.95, 4.0), (0.75, 3.0), (0.25, 1.0), (1.0, 4.0)])
def test_quantile(share: float, expected: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_resumption_is_told_beside_what_stayed() -> None:
    made = agents_resumption.rows({agents_resumption.STAYED: [0.040, 0.050, 0.060], "no eta": [0.1, 0.1, 0.2]}, 2048)
    assert [(row.ours, row.theirs, row.ratio) for row in made] == [(50.0, None, None), (100.0, 50.0, 0.5)]


# -- llama.cpp's server, played ------------------------------------------------------------------------------------------

Played = Callable[[list[dict[str, Any]], int], int]


@pytest.fixture
def played() -> Iterator[Played]:
    """played(events, status) -> port of a server that answers every completion with these events."""
    servers: list[ThreadingHTTPServer] = []

    def start(events: list[dict[str, Any]], status: int) -> int:
        class Answering(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(status)
                self.end_headers()
                for event in events:
                    answer = {**event, "tokens": request["prompt"][-1:]} if event.get("tokens") == "echo" else event
                    self.wfile.write(f"data: {json.dumps(answer)}\n\n".encode())

            def log_message(self, format: str, *args: object) -> None:
                return

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        return int(server.server_address[1])

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_llama_servers_answers_are_read(played: Played) -> None:
    end = {"stop": True, "tokens": [], "timings": {"prompt_n": 11, "cache_n": 5}}
    port = played([{"stop": False, "tokens": "echo"}, {"stop": False, "tokens": [7, 8]}, end], 200)
    agent = LlamaAgent(port, -1, 10.0)
    assert agent.turn(Turn([], 3, "", 0.0), [1, 2]).tokens == [2, 7, 8]
    answer = agent.turn(Turn([], 3, "", 0.0), [3])  # the conversation goes on behind what was generated
    assert answer.tokens == [3, 7, 8]
    assert answer.first > 0
    assert agent._log == [1, 2, 2, 7, 8, 3, 3, 7, 8]
    assert (agent.prompt_tokens, agent.cached_tokens) == (22, 10)
    agent.close()


def test_llama_servers_errors_make_it_missing(played: Played) -> None:
    for events, status, why in (
        ([{"error": {"message": "the context is full"}}], 200, "the context is full"),
        ([{"error": "loading"}], 503, "answered 503"),
    ):
        agent = LlamaAgent(played(events, status), -1, 10.0)
        with pytest.raises(PeerMissing, match=why):
            agent.turn(Turn([], 1, "", 0.0), [1])
        agent.close()


def test_a_server_that_is_not_there_is_missing(tmp_path: Path) -> None:
    python = tmp_path / "python"
    room = Room(1 << 20, 1 << 20, 2, 512)
    with pytest.raises(PeerMissing, match=r"there is no .*llama-server; `make peers` builds it"):
        llama(str(python), unified=False)(SMALL, room, WEIGHTS, 10.0)
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    binary.chmod(0o755)
    with pytest.raises(PeerMissing, match=r"did not start: no such option"):
        llama(str(python), unified=True)(SMALL, room, WEIGHTS, 10.0)
    with pytest.raises(PeerMissing, match=r"make peers"):
        agents_engines.vllm(str(python), tmp_path, 128)(SMALL, room, WEIGHTS, 10.0)


# -- attnix on the simulated device --------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_attnix_computes_what_must_be_computed_and_answers_as_a_plain_client() -> None:
    work = draw(Plan(agents=4, turns=3, system_tokens=64, scale=0.001), letters, [("Bash", 1.0), ("Read", 2.0)])
    told = attnix("")(work, Room(8 << 20, 8 << 20, 4, 512), WEIGHTS, 60.0)
    # Agents whose words begin alike share a part of a block.  `append` starts computing before `generate` is there, and then
    # the last token runs twice: at most once a turn.
    needed = work.least_prompt_tokens - told.notes.get("partial_tokens", 0)
    assert needed <= told.prompt_tokens <= needed + sum(map(len, work.agents))
    assert len(told.jobs) == len(told.burst) == 4
    assert len(told.returns) == 4 * 2
    assert all(first > 0 for first in told.burst + told.returns)
    assert [[len(answer) for answer in one] for one in told.tokens] == [[t.answer for t in a] for a in work.agents]
    assert told.notes["refused"] == 0
