"""Eviction policies against naive caches written from their papers, over flat objects; and what prefixes add."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnix import plugins, policy_lab
from attnix.kernel.evict import registry
from attnix.kernel.evict.learned import Learned
from attnix.kernel.evict.protocol import KIND_NONE, KIND_TOOL, KIND_TURN, EvictionPolicy, Fact
from attnix.kernel.evict.reuse import Reuse
from attnix.kernel.order import registry as order_registry
from attnix.policy_lab import BLIND, ETA, KINDS, Cache, Tape, optimum, run
from attnix.traces import TOOL, TURN, UNKNOWN, Request, load

SECOND_NS = 1_000_000_000
REAL = Path(__file__).resolve().parents[3] / "shared" / "traces"


def request(blocks: Sequence[int], time_ms: float = 0.0, block_tokens: int = 1, **more: object) -> Request:
    plain = Request(
        time_ms, -1, 0, list(blocks), len(blocks) * block_tokens, 1, 0.0, UNKNOWN, UNKNOWN, "", -1.0, -1.0, 0
    )
    return plain._replace(**more)  # type: ignore[arg-type]


def tape_of(paths: Iterable[Sequence[int]]) -> Tape:
    return Tape((request(path, 1000.0 * i) for i, path in enumerate(paths)), 1)


def served(policy: EvictionPolicy, paths: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Blocks found by each request."""
    tape = tape_of(paths)
    cache = Cache(tape, policy, capacity)
    found = []
    for i, path in enumerate(tape.paths):
        found.append(cache.serve(path, i * SECOND_NS, i * SECOND_NS, KIND_NONE, 0, 0))
        assert cache.count == int(cache.resident.sum()) <= capacity
        assert all(tape.parent[b] < 0 or cache.resident[tape.parent[b]] for b in np.flatnonzero(cache.resident)), (
            "a child outlived its parent"
        )
    return found


# -- the papers' caches over single objects, the slow and obvious way: an object's place in a list is its place in the queue


def naive_fifo(keys: Sequence[int], capacity: int) -> list[int]:
    cache: list[int] = []
    hits = []
    for key in keys:
        hits.append(int(key in cache))
        if key not in cache:
            cache = [*cache, key][-capacity:]
    return hits


def naive_lru(keys: Sequence[int], capacity: int) -> list[int]:
    cache: list[int] = []
    hits = []
    for key in keys:
        hits.append(int(key in cache))
        cache = [*(k for k in cache if k != key), key][-capacity:]
    return hits


def naive_lfu(keys: Sequence[int], capacity: int) -> list[int]:
    cache: dict[int, tuple[int, int]] = {}  # key: (uses, when)
    hits = []
    for now, key in enumerate(keys):
        hits.append(int(key in cache))
        if key in cache:
            cache[key] = (min(15, cache[key][0] + 1), now)
        else:
            if len(cache) == capacity:
                del cache[min(cache, key=lambda k: cache[k])]
            cache[key] = (0, now)
    return hits


def naive_slru(keys: Sequence[int], capacity: int) -> list[int]:
    probation: list[int] = []
    protected: list[int] = []
    hits = []
    for key in keys:
        hits.append(int(key in probation or key in protected))
        if hits[-1]:
            probation = [k for k in probation if k != key]
            protected = [*(k for k in protected if k != key), key]
            while len(protected) > max(1, int(0.8 * capacity)):
                probation.append(protected.pop(0))
        else:
            if len(probation) + len(protected) == capacity:
                (probation or protected).pop(0)
            probation.append(key)
    return hits


def naive_s3fifo(keys: Sequence[int], capacity: int) -> list[int]:
    small: list[int] = []
    main: list[int] = []
    ghost: list[int] = []
    uses: dict[int, int] = {}
    small_target = max(1, int(0.1 * capacity))
    hits = []

    def evict() -> None:
        if len(small) >= small_target or not main:
            while small:
                key = small.pop(0)
                if uses[key] > 1:
                    uses[key] = 0
                    main.append(key)
                else:
                    ghost.append(key)
                    return
        while True:
            key = main.pop(0)
            if uses[key] == 0:
                return
            uses[key] -= 1
            main.append(key)

    for key in keys:
        hits.append(int(key in small or key in main))
        if hits[-1]:
            uses[key] = min(3, uses[key] + 1)
            continue
        if len(small) + len(main) == capacity:
            evict()
            del ghost[: max(0, len(ghost) - (capacity - small_target))]
        uses[key] = 0
        if key in ghost:
            ghost.remove(key)
            main.append(key)
        else:
            small.append(key)
    return hits


def naive_sieve(keys: Sequence[int], capacity: int) -> list[int]:
    """The pseudocode of the paper: newest first in the list, the hand is an object."""
    queue: list[int] = []
    visited: dict[int, bool] = {}
    hand: int | None = None
    hits = []
    for key in keys:
        hits.append(int(key in queue))
        if hits[-1]:
            visited[key] = True
            continue
        if len(queue) == capacity:
            at = queue.index(hand) if hand is not None else len(queue) - 1
            while visited[queue[at]]:
                visited[queue[at]] = False
                at = at - 1 if at > 0 else len(queue) - 1
            hand = queue[at - 1] if at > 0 else None
            del queue[at]
        queue.insert(0, key)
        visited[key] = False
    return hits


def naive_arc(keys: Sequence[int], capacity: int) -> list[int]:
    """Figure 4 of the paper, except that room is made before p moves."""
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    p = 0.0
    hits = []
    for key in keys:
        hits.append(int(key in t1 or key in t2))
        if hits[-1]:
            t1, t2 = [k for k in t1 if k != key], [*(k for k in t2 if k != key), key]
            continue
        if len(t1) + len(t2) == capacity:
            if t1 and (len(t1) > int(p) or not t2):
                b1.append(t1.pop(0))
            else:
                b2.append(t2.pop(0))
        if key in b1:
            p = min(capacity, p + max(1.0, len(b2) / len(b1)))
            b1.remove(key)
            t2.append(key)
        elif key in b2:
            p = max(0.0, p - max(1.0, len(b1) / len(b2)))
            b2.remove(key)
            t2.append(key)
        else:
            t1.append(key)
        del b1[: max(0, len(t1) + len(b1) - capacity)]
        del b2[: max(0, len(t1) + len(t2) + len(b1) + len(b2) - 2 * capacity)]
    return hits


NAIVE: dict[str, Callable[[Sequence[int], int], list[int]]] = {
    "fifo": naive_fifo,
    "lru": naive_lru,
    "lfu": naive_lfu,
    "slru": naive_slru,
    "s3fifo": naive_s3fifo,
    "sieve": naive_sieve,
    "arc": naive_arc,
}


@pytest.mark.parametrize("name", NAIVE)
@given(keys=st.lists(st.integers(0, 24), min_size=1, max_size=200), capacity=st.integers(2, 20))
def test_flat_objects_are_evicted_as_in_the_paper(name: str, keys: list[int], capacity: int) -> None:
    assert served(registry.make(name), [[key] for key in keys], capacity) == NAIVE[name](keys, capacity)


def test_the_naive_caches_differ_so_the_comparison_can_fail() -> None:
    draw = np.random.default_rng(3)
    keys = (draw.zipf(1.2, 2000) % 40).tolist()
    assert len({tuple(naive(keys, 10)) for naive in NAIVE.values()}) == len(NAIVE)


def test_ttl_keeps_the_promise_of_an_eta_and_otherwise_expires_the_oldest() -> None:
    tape = tape_of([[0], [1], [2], [3]])
    cache = Cache(tape, registry.make("ttl"), 3)
    cache.serve(tape.paths[0], 0, 0, KIND_TOOL, 1, 1000 * SECOND_NS)
    cache.serve(tape.paths[1], 1, 1, KIND_TURN, 1, 0)
    cache.serve(tape.paths[2], 2, 2, KIND_TURN, 1, 0)
    cache.serve(tape.paths[3], 3, 3, KIND_TURN, 1, 0)
    assert cache.resident.tolist() == [True, False, True, True]


class Advised(Cache):
    """A cache whose facts have a priority per block and whose deep blocks cost more."""

    priority: dict[int, int]

    def facts(self, blocks: Sequence[int]) -> Sequence[Fact]:
        rows = super().facts(blocks)
        return [fact._replace(priority=self.priority.get(b, 50)) for b, fact in zip(blocks, rows, strict=True)]

    def rebuild_ns(self, depth: int) -> int:
        return 1_000_000 + 100_000 * depth


@pytest.mark.parametrize("name", ["priority", "learned"])
def test_the_least_priority_goes_first_and_among_equals_the_least_recent(name: str) -> None:
    tape = tape_of([[0], [1], [2], [3], [4], [5]])
    cache = Advised(tape, registry.make(name), 3)
    cache.priority = {0: 90, 1: 20}
    gone = []
    for i, path in enumerate(tape.paths):
        cache.serve(path, i * SECOND_NS, i * SECOND_NS, KIND_NONE, 0, 0)
        gone.append([b for b in range(i) if not cache.resident[b]])
    assert gone[3:] == [[1], [1, 2], [1, 2, 3]]


def test_reuse_puts_a_class_that_returns_above_one_that_does_not() -> None:
    """Blocks of tool turns were used again each time, those of ended turns never."""
    trained = [path for i in range(10) for path in ([i], [i], [100 + i])]
    tape = tape_of([*trained, [200], [201], [202]])
    policy = Reuse()
    cache = Cache(tape, policy, 3)
    kinds = [*([KIND_TOOL, KIND_TOOL, KIND_TURN] * 10), KIND_TOOL, KIND_TURN, KIND_TURN]
    for i, (path, kind) in enumerate(zip(tape.paths, kinds, strict=True)):
        cache.serve(path, i, i, kind, 1, 0)
    tool, turn = (Fact(0, 0, 0, 0, kind, 1, 0, 0, 50) for kind in (KIND_TOOL, KIND_TURN))
    assert policy.probability(tool) == pytest.approx(11 / 12)  # ten uses, no removal: (10 + 1) / (10 + 0 + 2)
    assert policy.probability(turn) < 1 / 6
    oldest, *others = (int(path[0]) for path in tape.paths[-3:])
    assert cache.resident[oldest] and cache.kind[oldest] == KIND_TOOL
    assert policy.victims(cache, 0, 1)[0] in {*range(20), *others} - {oldest}


def test_cost_keeps_what_is_dear_to_rebuild() -> None:
    """Two contexts, used equally; the tail of the long one costs more (100 us a token of depth)."""
    tape = tape_of([list(range(40)), list(range(100, 110)), [200], [201]])
    cache = Advised(tape, registry.make("cost"), 51)
    cache.priority = {}
    for i, path in enumerate(tape.paths):
        cache.serve(path, i, i, KIND_NONE, 0, 0)
    assert cache.resident[:40].all()
    assert not cache.resident[40:50].all() or not cache.resident[50]


# -- prefixes


def flood(policy: EvictionPolicy) -> Cache:
    """40 chats of 8 blocks on one system prompt of 32, one a second; then 2,560 blocks of one-use prompts on 256 frames."""
    hot = list(range(32))
    chats = [hot + [1000 + 10 * i + j for j in range(8)] for i in range(40)]
    once = [[100_000 + 100 * i + j for j in range(64)] for i in range(40)]
    tape = tape_of(chats + once)
    cache = Cache(tape, policy, 256)
    for i, path in enumerate(tape.paths):
        cache.serve(path, i * SECOND_NS, i * SECOND_NS, KIND_TURN, 1, 0)
    return cache


def test_a_flood_of_one_use_prompts_leaves_the_hot_system_prompt_under_learned() -> None:
    assert flood(Learned()).resident[:32].all()


@pytest.mark.parametrize("name", ["fifo", "lru"])
def test_the_same_flood_washes_it_out_under_fifo_and_lru(name: str) -> None:
    assert not flood(registry.make(name)).resident[:32].any()


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_same_calls_same_victims_and_no_child_outlives_its_parent(name: str) -> None:
    draw = np.random.default_rng(5)
    paths = []
    for _ in range(150):  # a tree of three shared levels of 4 blocks, then a tail of its own
        a, b = draw.integers(0, 4, 2).tolist()
        tail = draw.integers(0, 60)
        paths.append([*range(4), *range(100 * (a + 1), 100 * (a + 1) + 4), *range(1000 * (a + 1) + 10 * b, 1000 * (a + 1) + 10 * b + 4),
                      *range(10**5 * (a + 1) + 10**4 * b + 10 * tail, 10**5 * (a + 1) + 10**4 * b + 10 * tail + 6)])  # fmt: skip
    assert served(registry.make(name), paths, 60) == served(registry.make(name), paths, 60)


def test_a_hint_of_when_keeps_the_context_that_is_wanted_soon() -> None:
    """Twelve agents on frames for six; half of them wait 5 s, half 60 s, and say so."""
    requests = []
    for agent in range(12):
        every = 5_000.0 if agent % 2 else 60_000.0
        times = np.arange(agent * 100.0, 300_000.0, every).tolist()
        for turn, at in enumerate(times, 1):
            requests.append(
                request(range(agent * 50, agent * 50 + 10), at, turn=turn, ends=TOOL, tool_ms=every, session=agent)
            )
    tape = Tape(sorted(requests, key=lambda r: r.time_ms), 1)
    best = optimum(tape, [60])[0]
    lru = run(tape, registry.make("lru"), 60).hit_ratio
    told = run(tape, Learned(), 60, ETA).hit_ratio
    assert lru < best
    assert told >= lru + 0.6 * (best - lru)


def test_contexts_that_grow_outlive_prompts_that_nobody_continues_though_both_are_used_at_the_same_rate() -> None:
    """20 chats of 30 blocks that get one more every 40 s, and a new prompt of 100 blocks every 4 s, on frames for 400."""
    requests = []
    for chat in range(20):
        for turn in range(40):
            blocks = range(chat * 1000, chat * 1000 + 30 + turn)
            requests.append(request(blocks, 40_000.0 * turn + 2_000.0 * chat))
    requests += [request(range(100_000 + 100 * i, 100_100 + 100 * i), 1_000.0 + 4_000.0 * i) for i in range(400)]
    tape = Tape(sorted(requests, key=lambda r: r.time_ms), 1)
    best = optimum(tape, [400])[0]
    lru = run(tape, registry.make("lru"), 400, BLIND).hit_ratio
    learned = run(tape, Learned(), 400, BLIND).hit_ratio
    assert lru < 0.05 < 0.15 < best
    assert learned >= lru + 0.25 * (best - lru)


# -- the bound


def exhaustive(paths: Sequence[Sequence[int]], capacity: int) -> int:
    """Most blocks any cache could find, trying every set it might keep after each request."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    from itertools import combinations

    for path in paths:
        after: dict[frozenset[int], int] = {}
        for state, score in states.items():
            found = 0
            while found < len(path) and path[found] in state:
                found += 1
            have = state | set(path)
            for kept in combinations(sorted(have), min(capacity, len(have))):
                key = frozenset(kept)
                after[key] = max(after.get(key, 0), score + found)
        states = after
    return max(states.values())


@given(
    paths=st.lists(st.sampled_from([[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [5], [5, 6]]), min_size=2, max_size=9),
    capacity=st.integers(1, 4),
)
def test_the_optimum_is_what_an_exhaustive_search_finds(paths: list[list[int]], capacity: int) -> None:
    tape = tape_of(paths)
    assert optimum(tape, [capacity])[0] * tape.input_tokens == pytest.approx(exhaustive(paths, capacity))


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_no_policy_beats_the_optimum(name: str) -> None:
    draw = np.random.default_rng(9)
    paths = [[k, 100 + k, 1000 + k] for k in (draw.zipf(1.3, 600) % 50).tolist()]
    tape = tape_of(paths)
    for capacity in (5, 20, 60):
        assert run(tape, registry.make(name), capacity).hit_ratio <= optimum(tape, [capacity])[0] + 1e-12


# -- the registry


def test_third_parties_register_by_name_and_cannot_take_ours() -> None:
    class Mine(Learned):
        name = "mine-for-test"

    registry.register("mine-for-test", Mine)
    try:
        assert isinstance(registry.make("mine-for-test"), Mine)
        assert "mine-for-test" in registry.names()
        for taken in ("mine-for-test", "lru"):
            with pytest.raises(ValueError, match="already"):
                registry.register(taken, Mine)
    finally:
        del registry._registered["mine-for-test"]
    with pytest.raises(KeyError, match="mine-for-test"):
        registry.make("mine-for-test")
    assert [registry.make(name).name for name in registry.BUILT_IN] == list(registry.BUILT_IN)


def test_entry_points_become_policies_and_a_broken_one_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("learned-too-for-test", "attnix.kernel.evict.learned:Learned", "attnix.eviction"),
        EntryPoint("broken-for-test", "no_such_package:Nothing", "attnix.eviction"),
        EntryPoint("lru", "attnix.kernel.evict.fifo:Fifo", "attnix.eviction"),
    ]
    orders = [
        EntryPoint("oldest-for-test", "attnix.kernel.order.fcfs:Fcfs", "attnix.scheduling"),
        EntryPoint("fcfs", "attnix.kernel.order.deadline:Deadline", "attnix.scheduling"),
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == plugins.GROUP else orders)
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(order_registry, "_registered", {})
    for _ in range(2):
        complaints = plugins.register_policies()
        assert [c.split()[2] for c in complaints] == ["broken-for-test", "lru", "fcfs"]
        assert isinstance(registry.make("learned-too-for-test"), Learned)
        assert registry.make("lru").name == "lru"
        assert order_registry.make("oldest-for-test").name == order_registry.make("fcfs").name == "fcfs"


# -- traces, in fixtures of the same formats


def written(path: Path, lines: Sequence[object]) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_mooncake_leaves_out_the_partial_block(tmp_path: Path) -> None:
    rows = [{"timestamp_ms": 7, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]}]
    trace = load(written(tmp_path / "m.jsonl.gz", rows))
    (one,) = trace.requests()
    assert (trace.block_tokens, list(one.blocks or ()), one.time_ms, one.output_tokens) == (512, [0, 1], 7.0, 9)


def test_azure_has_lengths_only(tmp_path: Path) -> None:
    trace = load(written(tmp_path / "a.csv", ["timestamp_ms,input_length,output_length", "0.5,100,3"]))
    (one,) = trace.requests()
    assert (one.blocks, one.time_ms, one.input_tokens, one.session) == (None, 0.5, 100, -1)


def test_weka_sessions_keep_their_order_ids_stay_their_own_and_sub_agents_start_inside(tmp_path: Path) -> None:
    head = {"model": "m", "block_size": 64, "tool_tokens": 0, "system_tokens": 0}
    lists = [[0, 192, 5, 1000, 0, "t", "u", 0, [1, 3]], [9000, 256, 5, 500, 8000, "e", "t", 2, [7, 2]]]
    sub = {"type": "x", "requests": [[4000, 64, 1, None, None, "?", "u", 0, [90, 1]]]}
    rows = [
        {"session": "a", **head, "requests": lists, "subagents": [sub]},
        {"session": "b", **head, "requests": lists},
    ]
    got = list(load(written(tmp_path / "w.jsonl.gz", rows), concurrency=2).requests())
    assert [r.time_ms for r in got] == sorted(r.time_ms for r in got)
    by = {s: [r for r in got if r.session == s] for s in {r.session for r in got}}
    assert sorted(len(rs) for rs in by.values()) == [1, 2, 2]
    for mine in by.values():
        if len(mine) == 2:
            first, second = (list(r.blocks or ()) for r in mine)
            assert first[:2] == second[:2] and len(second) == 4 and not set(second[2:]) & set(first)
            assert [(r.ends, r.after, r.tool_ms, r.last, r.turn) for r in mine] == [
                (TOOL, UNKNOWN, 8000.0, 0, 1),
                (TURN, TOOL, -1.0, 1, 2),
            ]
            assert mine[1].time_ms - mine[0].time_ms == pytest.approx(9000)
    ids = [set(r.blocks or ()) for rs in by.values() for r in rs[:1]]
    assert not set.intersection(*ids)
    alone = next(rs[0] for rs in by.values() if len(rs) == 1)
    assert any(alone.time_ms - rs[0].time_ms == pytest.approx(4000) for rs in by.values() if len(rs) == 2)
    assert got == list(load(tmp_path / "w.jsonl.gz", concurrency=2).requests())


def test_agentcgroup_contexts_grow_and_shrink_to_what_was_cached(tmp_path: Path) -> None:
    calls = [[0, 200, 2, 0, [["Bash", 10, 3000]]], [9000, 330, 2, 199, [["Read", 9000, None]]], [9500, 150, 2, 80, []]]
    rows = [{"session": "s", "task": "t", "set": "x", "model": "m", "calls": calls}]
    got = list(load(written(tmp_path / "g.jsonl", rows), block_tokens=50).requests())
    assert [list(r.blocks or ()) for r in got] == [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 6, 7]]
    assert [(r.tool, r.tool_ms, r.ends) for r in got] == [
        ("Bash", 3010.0, TOOL),
        ("Read", -1.0, TOOL),
        ("", -1.0, TURN),
    ]


@pytest.mark.parametrize("text", ["", "{}", "a,b\n1,2"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ValueError, match="not a trace"):
        load(tmp_path / "x.jsonl")


@pytest.mark.skipif(not (REAL / "mooncake_conversation.jsonl.gz").exists(), reason="the real traces are not here")
def test_the_issue_s_numbers_on_mooncake() -> None:
    """LRU 19.8% at 5% of the distinct blocks and 5.3% at 1%, optimum 37.3% at 5%, found independently of this code."""
    trace = load(REAL / "mooncake_conversation.jsonl.gz")
    tape = Tape(trace.requests(), trace.block_tokens)
    five = policy_lab.capacity_of("5%", tape.distinct)
    assert optimum(tape, [five])[0] == pytest.approx(0.373, abs=0.001)
    assert run(tape, registry.make("lru"), five, KINDS).hit_ratio == pytest.approx(0.198, abs=0.002)
