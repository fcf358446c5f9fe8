"""Whose frames go while they wait, and that contexts are back before their answers are due.

Time is simulated and moves only when told to; what transfers and passes cost is told to the cost model, so that its
decisions can be calculated by hand.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.context import Context
from attnix.kernel.core import Core
from attnix.kernel.lifetimes import MS
from attnix.kernel.returning import MOST_FETCHES
from attnix.kernel.twin import TwinCore
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of

S = 1000 * MS
LOAD_MS = 2  # a frame, from dram


def system(sysctl: dict[str, int | str] | None = None, **more: Any) -> SimulatedSystem:
    """12 frames of 4 tokens over a dram; a frame takes 1 ms down and 2 ms up."""
    options = {"core": Core, "frames": 12, "dram": 40, "block_tokens": 4, "window_tokens": 48, **more}
    set_to: dict[str, int | str] = {"sched.watermark_permille": 0, "evict.policy": "lru", **(sysctl or {})}
    made = SimulatedSystem(**options, sysctl=set_to)
    machine = made.kernel.machine
    for verb, ms in (("read", 1), ("write", LOAD_MS)):
        machine.costs.link(0, verb).bytes_s = machine.costs.frame_bytes * 1000 / ms
    return made


def prompt(k: int, tokens: int = 16) -> list[int]:
    return [(k * 37 + 11 * i) % 200 for i in range(tokens)]


def resting(client: SimulatedClient, k: int, tokens: int = 16, pid: int = 0) -> int:
    """A context of its own tokens (four frames), computed and idle."""
    ctx: int = client.call("alloc_context", pid).ctx
    client.call("append", ctx, ints(prompt(k, tokens)))
    client.system.run()
    return ctx


def of(client: SimulatedClient, ctx: int) -> Context:
    return client.system.kernel.machine.contexts[client.call("stat", ctx).cid]


def has_frames(client: SimulatedClient, ctx: int) -> bool:
    return bool(client.call("stat", ctx).blocks)


def push_out(client: SimulatedClient, k: int = 9, tokens: int = 32) -> None:
    """Somebody needs that many frames, and is gone again."""
    ctx = resting(client, k, tokens)
    client.call("release", ctx)
    client.system.run()


def to(made: SimulatedSystem, at_ns: int) -> None:
    """Let time pass in small steps, devices working as they can."""
    while made.now_ns < at_ns:
        made.advance(min(MS // 2, at_ns - made.now_ns))
        made.run()


# -- who lets go ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy, loser", [("cost", "late"), ("lru", "first")])
def test_the_context_that_is_due_last_lets_go_first(policy: str, loser: str) -> None:
    made = system(sysctl={"wait.policy": policy})
    client = made.connect()
    first, late = resting(client, 1), resting(client, 2)
    client.call("wait_tool", first, "search", 1000)
    client.call("wait_tool", late, "search", 60_000)
    push_out(client, tokens=20)
    assert (has_frames(client, first), has_frames(client, late)) == (loser != "first", loser != "late")


def test_dear_frames_outlast_cheap_ones_that_are_due_as_late() -> None:
    """Without a tier below frames are computed again, and those deep in a context cost more: a*n + b*n*(c + n/2)."""
    made = system(dram=0, frames=20, window_tokens=80)
    client = made.connect()
    deep, shallow = resting(client, 1, 40), resting(client, 2, 16)
    fit = made.kernel.machine.costs.prefill[0]
    for n, c in ((4, 0), (8, 16), (16, 32), (32, 0), (2, 50)) * 100:
        fit.seen(n, n * (c + n / 2), int(1e4 * n + 1e6 * n * (c + n / 2)))
    client.call("wait_tool", deep, "search", 60_000)
    client.call("wait_tool", shallow, "search", 60_000)
    push_out(client, tokens=32)
    assert has_frames(client, deep) and not has_frames(client, shallow)


def test_a_chat_that_has_paused_for_long_goes_before_an_agent_that_is_due_soon() -> None:
    made = system()
    client = made.connect()
    agent, chat = resting(client, 1), resting(client, 2)
    client.call("generate", chat, 1)
    made.advance(3600 * S)
    client.call("wait_tool", agent, "search", 2000)
    push_out(client, tokens=20)
    assert has_frames(client, agent) and not has_frames(client, chat)


def costs(made: SimulatedSystem, ns_per_token: float) -> None:
    """What computing is believed to take: so much a token, wherever it stands."""
    fit = made.kernel.machine.costs.prefill[0]
    for n, c in ((4, 0), (8, 16), (16, 32), (32, 0), (2, 50)) * 100:
        fit.seen(n, n * (c + n / 2), int(ns_per_token * n))


@pytest.mark.parametrize("policy, dram, compute_ms, decision, goes, copied", [
    ("lru", 40, 100, "keep", "first", 0),
    ("cachettl", 40, 100, "demote", "waits", 4),
    ("cachettl", 0, 1, "drop", "waits", 0),
    ("cost", 40, 100, "demote", "waits", 4),  # moving its four frames takes 12 ms, computing them 1.6 s
    ("cost", 40, 0.01, "drop", "waits", 0),  # 0.16 ms
])  # fmt: skip
def test_each_decision_does_what_it_says(
    policy: str, dram: int, compute_ms: float, decision: str, goes: str, copied: int
) -> None:
    """Three contexts fill hbm, and the one that waits was used last.  Nothing was ever observed of its tool and getting its
    frames back takes far less than a second, so a keep gains nothing (test_wait_policies.py has the formula)."""
    made = system(dram=dram, sysctl={"wait.policy": policy, "wait.ttl_ms": 0})
    client = made.connect()
    contexts = {name: resting(client, k) for k, name in enumerate(("first", "second", "waits"))}
    costs(made, compute_ms * MS)
    said = client.call("wait_tool", contexts["waits"], "search")
    assert (said.decision, said.keep_ms) == (decision, 0)
    made.run()
    counters = made.kernel.machine.counters
    assert counters["wait_copied_blocks"] == copied
    assert all(has_frames(client, ctx) for ctx in contexts.values()), "nobody wants its frames yet"
    resting(client, 8)
    assert [name for name, ctx in contexts.items() if not has_frames(client, ctx)] == [goes]
    if copied:
        assert counters["demoted_blocks"] == 0, "its frames could go at once"
    client.call("resume", contexts["waits"], 0, ints([7]))
    assert tokens_of(client.call("generate", contexts["waits"], 5).tokens) == reference_tokens([*prompt(2), 7], 5)


def test_what_is_to_be_demoted_is_copied_down_when_its_keep_time_is_over() -> None:
    made = system(sysctl={"wait.ttl_ms": 500})
    client = made.connect()
    first, second, waits = (resting(client, k) for k in range(3))
    costs(made, 100 * MS)
    said = client.call("wait_tool", waits, "search")
    assert (said.decision, said.keep_ms) == ("demote", 500)
    to(made, made.now_ns + 499 * MS)
    assert made.kernel.machine.counters["wait_copied_blocks"] == 0
    to(made, made.now_ns + 2 * MS)
    assert made.kernel.machine.counters["wait_copied_blocks"] == 4 == made.available(1) - made.core.free_frames(1)
    resting(client, 8)
    assert [has_frames(client, ctx) for ctx in (first, second, waits)] == [True, True, False]


def test_within_its_keep_time_a_context_goes_last() -> None:
    made = system(sysctl={"wait.policy": "ttl", "wait.ttl_ms": 500})
    client = made.connect()
    kept, used_later = resting(client, 1), resting(client, 2)
    said = client.call("wait_tool", kept, "search")
    assert (said.decision, said.keep_ms, said.expected_ms) == ("keep", 500, -1)
    client.call("generate", used_later, 1)
    push_out(client, tokens=20)
    assert has_frames(client, kept) and not has_frames(client, used_later)
    resting(client, 5, 20)
    to(made, made.now_ns + 501 * MS)
    push_out(client, 6, tokens=16)
    assert not has_frames(client, kept), "its time is over, and it was used least recently"


def test_keeps_do_not_stop_the_oldest_job() -> None:
    """Case 14: every frame is kept for somebody, and one job comes that needs them."""
    made = system(dram=0, sysctl={"wait.policy": "ttl", "wait.ttl_ms": 60_000})
    client = made.connect()
    waiters = [resting(client, k) for k in range(3)]
    for ctx in waiters:
        client.call("wait_tool", ctx, "search")
    job = client.call("alloc_context").ctx
    client.call("append", job, ints(prompt(7, 24)))
    assert tokens_of(client.call("generate", job, 4).tokens) == reference_tokens(prompt(7, 24), 4)
    counts = client.call("vmstat").counters
    assert counts["keeps_broken"] >= 1
    assert sum(has_frames(client, ctx) for ctx in waiters) == 1, "no more than were needed"
    for k, ctx in enumerate(waiters):
        client.call("resume", ctx, 0, ints([k]))
        assert tokens_of(client.call("generate", ctx, 3).tokens) == reference_tokens([*prompt(k), k], 3)


def test_a_keep_is_broken_before_somebody_who_runs_is_preempted() -> None:
    made = system(dram=0, sysctl={"wait.policy": "ttl", "wait.ttl_ms": 60_000})
    client = made.connect()
    waiter = resting(client, 1)
    client.call("wait_tool", waiter, "search")
    runners = [(k, resting(client, k)) for k in (2, 3)]
    requests = [(k, client.post("generate", ctx, 8)) for k, ctx in runners]
    made.run()
    for k, request in requests:
        assert tokens_of(client.result(request).tokens) == reference_tokens(prompt(k), 8)
    assert made.kernel.machine.counters["preemptions_running"] == 0
    assert made.kernel.machine.counters["preemptions_kept"] == 1


@pytest.mark.parametrize("first", ["a", "b", "neither"])
@pytest.mark.parametrize("ahead", ["nobody", "one that fits nowhere at present"])
def test_case_14_whole(first: str, ahead: str) -> None:
    """Pool 7; A has 4 frames in dram and needs one more to run, B 3 and one more.  Both are demoted, both come back in the
    same step; then a request that fits nowhere at present stands before them; then with priorities, one process each."""
    made = system(frames=7, window_tokens=28)
    client = made.connect()
    lengths = {"a": 16, "b": 12}
    pids = {name: client.call("spawn", name, -5 if name == first else 0).pid for name in lengths}
    contexts = {name: resting(client, k, lengths[name], pids[name]) for k, name in enumerate(lengths)}
    for ctx in contexts.values():
        client.call("demote", ctx, "dram")
        client.call("wait_tool", ctx, "search")
    extra = 0
    if ahead != "nobody":
        ctx = client.call("alloc_context").ctx
        client.post("append", ctx, ints(prompt(3, 27)))
        extra = client.post("generate", ctx, 1)
    requests = {}
    for k, (name, ctx) in enumerate(contexts.items()):
        client.post("resume", ctx, 0, ints([k]))
        requests[name] = client.post("generate", ctx, 3)
    order: list[str] = []
    steps = 0
    while made.tick(0) or made.tick(1):
        order += [name for name, request in requests.items() if request in client.streamed and name not in order]
        steps += 1
        assert steps < 400
    for k, (name, request) in enumerate(requests.items()):
        said = tokens_of(client.result(request).tokens)
        assert said == reference_tokens([*prompt(k, lengths[name]), k], 3), name
    assert sorted(order) == ["a", "b"]
    if extra:
        assert client.result(extra).reason == "length"
        assert first == "neither" or order[0] == first, "both were in line when there was room for one"


# -- back in time -----------------------------------------------------------------------------------------------------


def test_a_context_is_back_when_its_answer_is_due_and_not_much_before() -> None:
    made = system()
    client = made.connect()
    ctx = resting(client, 1)
    begun = made.now_ns
    client.call("wait_tool", ctx, "search", 1000)
    push_out(client, tokens=48)
    assert not has_frames(client, ctx)
    computed = made.kernel.machine.counters["computed_tokens"]
    # Four frames take 8 ms; 1 ms for the pass that runs then, and an eighth of the load in case.
    start = begun + 1000 * MS - 8 * MS - 1 * MS - 1 * MS
    to(made, start - 2 * MS)
    assert not has_frames(client, ctx), "as long as it is not needed its frames are anybody's"
    to(made, start + 2 * MS)
    assert client.call("stat", ctx).cached_tokens == 16
    to(made, begun + 1000 * MS)
    client.call("resume", ctx, 0, ints([7]))
    counts = client.call("vmstat").counters
    assert counts["wait_prefetches"] == 1 and counts["tool_answers_resident"] == 1
    assert counts["prefetch_in_time_blocks"] == 4 == counts["prefetched_blocks"]
    assert tokens_of(client.call("generate", ctx, 5).tokens) == reference_tokens([*prompt(1), 7], 5)
    assert made.kernel.machine.counters["computed_tokens"] == computed + 1 + 5, "nothing is computed again"


def test_several_that_are_due_at_once_begin_one_before_the_other() -> None:
    made = system({"wait.ttl_ms": 0}, frames=16)  # an eta of a second would keep their frames
    client = made.connect()
    contexts = [resting(client, k) for k in range(3)]
    for ctx in contexts:
        client.call("wait_tool", ctx, "search", 1000)
    push_out(client, tokens=48)
    push_out(client, 10, tokens=48)
    starts = sorted(of(client, ctx).wait.fetch_ns for ctx in contexts)  # type: ignore[union-attr]
    assert all(starts) and [b - a for a, b in pairwise(starts)] == [4 * LOAD_MS * MS] * 2
    to(made, made.now_ns + 1200 * MS)
    assert all(has_frames(client, ctx) for ctx in contexts)


def test_a_late_answer_is_waited_for_and_then_let_go_a_few_times_at_most() -> None:
    made = system()
    client = made.connect()
    ctx = resting(client, 1)
    client.call("wait_tool", ctx, "search", 100)
    push_out(client, tokens=48)
    to(made, made.now_ns + 101 * MS)
    assert has_frames(client, ctx)
    wait = of(client, ctx).wait
    assert wait is not None and 0 < wait.keep_until_ns - made.now_ns <= 4 * 8 * MS
    for k in range(20):
        to(made, made.now_ns + 200 * MS)
        push_out(client, 20 + k, tokens=48)
    assert made.kernel.machine.counters["wait_prefetches"] == MOST_FETCHES
    client.call("resume", ctx, 0, ints([7]))
    assert tokens_of(client.call("generate", ctx, 5).tokens) == reference_tokens([*prompt(1), 7], 5)


def test_it_takes_no_frame_of_those_that_run_or_are_due_earlier() -> None:
    made = system()
    made.devices[0].ns_per_token = MS  # dear: what is lost is worth a load
    client = made.connect()
    for k in range(4):
        push_out(client, 30 + k, tokens=8 + k)
    ctx = resting(client, 1)
    client.call("wait_tool", ctx, "search", 1000)
    push_out(client, tokens=48)
    earlier = resting(client, 2, 20)
    client.call("wait_tool", earlier, "search", 996)
    runs = client.call("alloc_context").ctx
    client.call("append", runs, ints(prompt(3, 20)))
    made.run()
    request = client.post("generate", runs, 20)
    to_ns = made.now_ns + 995 * MS
    while made.now_ns < to_ns and not made.kernel.machine.counters["wait_prefetches"]:
        made.advance(MS)
    made.tick()  # the pass that was running ends, and the next one is planned
    assert made.kernel.machine.counters["wait_prefetches"] == 1
    assert made.kernel.machine.counters["wait_prefetches_no_room"] >= 1
    assert not has_frames(client, ctx) and has_frames(client, earlier)
    made.run()
    assert len(client.result(request).tokens) == 80
    client.call("resume", ctx, 0, ints([7]))
    assert tokens_of(client.call("generate", ctx, 5).tokens) == reference_tokens([*prompt(1), 7], 5)


def test_an_answer_that_comes_during_the_prefetch() -> None:
    made = system()
    client = made.connect()
    ctx = resting(client, 1)
    client.call("wait_tool", ctx, "search", 100)
    push_out(client, tokens=48)
    for _ in range(400):
        if of(client, ctx).job is not None:
            break
        made.advance(MS // 2)
    assert of(client, ctx).job is not None
    client.call("resume", ctx, 0, ints([7]))
    assert tokens_of(client.call("generate", ctx, 5).tokens) == reference_tokens([*prompt(1), 7], 5)
    assert not made.kernel.machine.errands.open


def test_when_nothing_is_known_of_a_tool_it_is_learnt() -> None:
    made = system()
    client = made.connect()
    ctx = resting(client, 1)
    for k in range(4):
        said = client.call("wait_tool", ctx, "compiler")
        assert said.expected_ms == (-1 if k == 0 else 300)
        made.advance(300 * MS)
        client.call("resume", ctx)
    client.call("wait_tool", ctx, "compiler")
    push_out(client, tokens=48)
    to(made, made.now_ns + 300 * MS)
    assert has_frames(client, ctx), "the fourth call is brought back in time without any eta"


def test_stopped_asleep_and_released_contexts_are_not_brought_back() -> None:
    made = system()
    client = made.connect()
    child = client.call("spawn", "child")
    ctx = client.call("alloc_context", child.pid).ctx
    client.call("append", ctx, ints(prompt(1)))
    made.run()
    client.call("wait_tool", ctx, "search", 100)
    push_out(client, tokens=48)
    client.call("kill", child.pid, 19)
    to(made, made.now_ns + 150 * MS)
    assert not has_frames(client, ctx)
    client.call("kill", child.pid, 9)
    to(made, made.now_ns + 500 * MS)
    assert made.kernel.machine.lifetimes.waiting == 0 and made.kernel.fsck() == []


# -- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["cost", "cachettl", "ttl", "lru"])
@pytest.mark.parametrize("dram", [0, 40])
def test_agents_say_the_same_with_and_without_waits(policy: str, dram: int) -> None:
    made = system(dram=dram, frames=10, sysctl={"wait.policy": policy})
    client = made.connect()
    agents = [client.call("alloc_context").ctx for _ in range(6)]
    logs = [prompt(k, 8) for k in range(6)]
    for k, ctx in enumerate(agents):
        client.call("append", ctx, ints(logs[k]))
    for turn in range(3):
        for k, ctx in enumerate(agents):
            said = tokens_of(client.call("generate", ctx, 3).tokens)
            assert said == reference_tokens(logs[k], 3)
            logs[k] += said
            client.call("wait_tool", ctx, f"tool{k % 2}", 10 * (k + 1) if k % 3 else -1)
        for k, ctx in enumerate(agents):
            to(made, made.now_ns + 4 * MS)
            client.call("resume", ctx, 0, ints([turn, k]))
            logs[k] += [turn, k]
    system_free = made.available()
    for ctx in agents:
        client.call("release", ctx)
    made.run()
    assert made.available() == 10 >= system_free


@pytest.mark.parametrize("core", [TwinCore, Core])
def test_what_is_brought_back_for_nobody_yet_takes_no_turns_with_a_job(core: Any) -> None:
    """Both found frames that had to be copied out first; the one mapped what it had in the cache, the other took that away
    again, and so on until the kernel gave up."""
    options: dict[str, int | str] = {"evict.policy": "lru", "sched.watermark_permille": 0}
    system = SimulatedSystem(core=core, frames=9, dram=12, block_tokens=4, sysctl=options)
    client, other = system.connect(), system.connect(1001)
    waits = client.call("alloc_context").ctx
    client.call("append", waits, ints(range(12)))
    system.run()
    client.call("wait_tool", waits, "search", 50)
    large = other.call("alloc_context").ctx
    other.call("append", large, ints(range(100, 128)))
    system.run()
    other.call("release", large)
    client.post("prefetch", waits, "hbm")
    job = other.call("alloc_context").ctx
    prompt = list(range(200, 236))
    other.post("append", job, ints(prompt))
    request = other.post("generate", job, 1)
    system.run()
    assert tokens_of(other.result(request).tokens) == reference_tokens(prompt, 1)
