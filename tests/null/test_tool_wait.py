"""Contexts that wait for a tool: how a wait begins, what may be done meanwhile, and the ways in which it ends."""

from __future__ import annotations

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.errors import E
from attnix.kernel.events import Journal, Restored, Suspend
from attnix.kernel.journal import ToolRecord
from attnix.kernel.params import MAX_WAIT_MS
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of
from tests.null.small import PROMPT, refused, small

MS = 1_000_000


def waiting(system: SimulatedSystem, **wait: int) -> tuple[SimulatedClient, int, int]:
    """A context whose prompt is computed and that waits for a search: its client, its handle, the wait's number."""
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(PROMPT))
    system.run()
    return client, ctx, client.call("wait_tool", ctx, "search", wait.get("eta", -1), wait.get("deadline", -1)).wait


def states(client: SimulatedClient) -> list[tuple[str, list[str]]]:
    return [(p.state, [c.state for c in p.contexts]) for p in client.call("ps").processes]


def test_a_wait_answered_in_time_costs_no_token() -> None:
    system = small()
    client, ctx, wait = waiting(system, eta=500, deadline=2000)
    row = client.call("stat", ctx)
    assert (row.state, row.tool, row.wait, row.due_ms, row.deadline_ms) == ("tool_wait", "search", wait, 499, 1999)
    assert states(client) == [("tool_wait", ["tool_wait"])]
    system.advance(400 * MS)
    said = client.call("resume", ctx, wait, ints([7, 8]))
    assert (said.tokens, said.appended, said.waited_ms) == (11, 2, 400)
    assert client.call("stat", ctx).tool == "" and states(client)[0][0] == "ready"
    computed = system.kernel.machine.counters["computed_tokens"]
    assert tokens_of(client.call("generate", ctx, 9).tokens) == reference_tokens([*PROMPT, 7, 8], 9)
    assert system.kernel.machine.counters["computed_tokens"] == computed + 2 + 9, "what was there is not computed again"
    system.advance(5000 * MS)
    assert client.notices == [], "the deadline of a wait that is over says nothing"


@pytest.mark.parametrize("name, args", [
    ("append", (ints([1]),)), ("generate", (4,)), ("forward", (4,)), ("score", (ints([1]),)), ("wait_tool", ("x",)),
    ("inject", (ints([1]),)),
])  # fmt: skip
def test_what_a_waiting_context_refuses_names_tool_and_wait(name: str, args: tuple[object, ...]) -> None:
    system = small()
    client, ctx, wait = waiting(system)
    detail = refused(E.EBUSY, client, name, ctx, *args)
    assert (detail["tool"], detail["wait"]) == ("search", wait)
    assert "search" in detail["message"] and str(wait) in detail["message"]
    assert client.call("stat", ctx).wait == wait, "nothing was done"


def test_what_a_waiting_context_allows() -> None:
    system = small(dram=32)
    client, ctx, wait = waiting(system)
    fork = client.call("fork", ctx).ctxs[0]
    assert client.call("stat", fork).state == "idle", "a fork does not wait"
    assert len(client.call("generate", fork, 3).tokens) == 12
    child = client.call("spawn", "child", 0, ctx)
    assert client.call("stat", child.ctx).wait == 0
    client.call("demote", ctx, "dram")
    client.call("prefetch", ctx, "hbm")
    client.call("pagemap", ctx)
    assert client.call("truncate", ctx, 5).tokens == 5
    client.call("publish", ctx, "kept")
    assert client.call("stat", ctx).wait == wait
    assert client.call("resume", ctx, 0, ints([2])).tokens == 6
    client.call("wait_tool", ctx, "search")
    client.call("unlink", "kept")
    client.call("release", ctx)
    assert system.kernel.machine.lifetimes.waiting == 0


@pytest.mark.parametrize("demoted", [False, True])
def test_at_its_deadline_a_context_is_as_before_the_wait(demoted: bool) -> None:
    """Case 38: no answer within 1 s, an answer at 1.1 s, two answers; its KV in hbm, or in dram by then."""
    system = small(dram=32)
    client, ctx, wait = waiting(system, deadline=1000)
    if demoted:
        assert client.call("demote", ctx, "dram").resident_blocks == 3
        system.run()
        assert client.call("stat", ctx).blocks == 0
    system.advance(999 * MS)
    assert client.call("stat", ctx).state == "tool_wait" and states(client) == [("tool_wait", ["tool_wait"])]
    system.advance(1 * MS)
    row = client.call("stat", ctx)
    assert (row.state, row.tokens, row.wait) == ("idle", len(PROMPT), 0)
    assert states(client) == [("ready", ["idle"])]
    assert bool(row.blocks) is not demoted, "a deadline moves nothing"
    (notice,) = client.notices
    assert notice == ("wait", (ctx, row.cid, wait, "search", "deadline"))
    system.advance(100 * MS)
    for again in (wait, 0):
        detail = refused(E.ESTALE, client, "resume", ctx, again, ints([1]))
        assert f"wait {wait}" in detail["message"]
    assert client.call("stat", ctx).tokens == len(PROMPT), "a late answer appends nothing"
    computed = system.kernel.machine.counters["computed_tokens"]
    assert tokens_of(client.call("generate", ctx, 5).tokens) == reference_tokens(PROMPT, 5)
    assert system.kernel.machine.counters["computed_tokens"] == computed + 5, "its KV was intact"
    assert client.call("stat", ctx).usage.dram_tokens == (len(PROMPT) if demoted else 0)
    counts = client.call("vmstat").counters
    assert (counts["tool_waits"], counts["tool_waits_late"], counts["contexts_in_tool_wait"]) == (1, 1, 0)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("deadline, after", [(0, 0), (1000, 1100)])
def test_an_answer_that_is_late_is_stale_though_the_machine_has_not_seen_the_deadline(
    deadline: int, after: int, named: bool
) -> None:
    """The daemon was busy, or stopped: what the client has sent meanwhile comes before the timer."""
    system = small()
    client, ctx, wait = waiting(system, deadline=deadline)
    system.now_ns += after * MS
    detail = refused(E.ESTALE, client, "resume", ctx, wait if named else 0, ints([7]))
    assert detail["wait"] == wait and client.call("stat", ctx).tokens == len(PROMPT)
    system.advance(1)
    assert [note.reason for _, note in client.notices] == ["deadline"]
    assert client.call("append", ctx, ints([7])).tokens == len(PROMPT) + 1


def test_a_second_answer_and_one_for_another_wait_are_stale() -> None:
    system = small()
    client, ctx, first = waiting(system)
    client.call("resume", ctx, first, ints([1]))
    assert "over" in refused(E.ESTALE, client, "resume", ctx, first, ints([1]))["message"]
    second = client.call("wait_tool", ctx, "compiler").wait
    assert second > first
    assert refused(E.ESTALE, client, "resume", ctx, first, ints([1]))["current"] == second
    refused(E.EINVAL, client, "resume", ctx, second + 1, ints([1]))
    assert client.call("resume", ctx, second).tokens == len(PROMPT) + 1


def test_a_context_that_never_waited() -> None:
    system = small()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    refused(E.EINVAL, client, "resume", ctx, 0, ints([1]))
    refused(E.EINVAL, client, "resume", ctx, 1, ints([1]))
    assert client.call("wait_tool", ctx, "on an empty context").wait == 1
    assert client.call("resume", ctx, 0, ints([1])).tokens == 1


@pytest.mark.parametrize("args", [("",), ("a\nb",), ("x" * 129,), ("x", -2), ("x", 1, -2), ("x", 1 << 60)])
def test_bad_arguments(args: tuple[object, ...]) -> None:
    system = small()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    refused(E.EINVAL, client, "wait_tool", ctx, *args)
    assert client.call("stat", ctx).state == "idle"


def test_the_longest_eta_of_a_caller_whose_etas_were_always_too_short() -> None:
    """What is foretold of it, 60 times as long, is beyond any clock of 64 bits."""
    system = small(dram=8)
    client, ctx, wait = waiting(system)
    client.call("resume", ctx, wait)
    for _ in range(9):
        wait = client.call("wait_tool", ctx, "slow", 1).wait
        system.advance(60 * MS)
        client.call("resume", ctx, wait)
    said = client.call("wait_tool", ctx, "slow", MAX_WAIT_MS)
    assert said.expected_ms == MAX_WAIT_MS
    client.call("demote", ctx)
    assert client.call("resume", ctx, said.wait, ints([1])).tokens == len(PROMPT) + 1


def test_an_answer_that_does_not_fit_leaves_the_wait() -> None:
    system = small(window_tokens=16)
    client, ctx, wait = waiting(system)
    assert refused(E.E2BIG, client, "resume", ctx, wait, ints([1] * 8))["limit"] == 16
    refused(E.EINVAL, client, "resume", ctx, wait, ints([999]))
    client.call("truncate", ctx, 8)
    assert client.call("resume", ctx, wait, ints([1] * 8)).tokens == 16


def test_a_wait_ends_a_prefill_that_nobody_waits_for() -> None:
    system = small(sysctl={"sched.step_tokens": 4})
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.post("append", ctx, ints(PROMPT))
    client.call("wait_tool", ctx, "search")
    system.run()
    assert system.devices[0].computed_tokens <= 4, "one chunk was on its way"
    client.call("resume", ctx, 0, ints([1]))
    assert tokens_of(client.call("generate", ctx, 6).tokens) == reference_tokens([*PROMPT, 1], 6)


def test_behind_a_call_that_waits_for_a_pass() -> None:
    system = small(sysctl={"sched.step_tokens": 4})
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.post("append", ctx, ints(PROMPT))
    cut = client.post("truncate", ctx, 6)
    wait = client.post("wait_tool", ctx, "search")
    answer = client.post("resume", ctx, 0, ints([1]))
    assert not client.replies.keys() & {cut, wait}
    assert client.replies[answer].code == E.EINVAL, "as long as the wait has not begun there is nothing to answer"
    system.run()
    assert client.result(cut).tokens == 6 and client.result(wait).wait == 1


def test_waiting_contexts_take_no_place() -> None:
    """Case 38: max_running 4, four contexts wait, a fifth runs."""
    system = small(sysctl={"sched.max_running": 4}, frames=16)
    client = system.connect()
    for k in range(4):
        ctx = client.call("alloc_context").ctx
        client.call("append", ctx, ints([k, *PROMPT]))
        client.call("generate", ctx, 2)
        client.call("wait_tool", ctx, "search")
    fifth = client.call("alloc_context").ctx
    client.call("append", fifth, ints(PROMPT))
    passes = system.kernel.machine.counters["passes"]
    request = client.post("generate", fifth, 8)
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(PROMPT, 8)
    assert system.kernel.machine.counters["passes"] - passes <= 9
    assert client.call("vmstat").counters["contexts_in_tool_wait"] == 4


def test_a_retry_after_a_client_timeout_starts_from_what_is_done() -> None:
    """Case 38: a client that gives up before its prefill is done, and tries five times."""
    system = small(frames=64, window_tokens=128, sysctl={"sched.step_tokens": 8})
    prompt = [n % 7 for n in range(80)]
    computed = []
    for _ in range(6):
        client = system.connect()
        ctx = client.call("alloc_context").ctx
        client.post("append", ctx, ints(prompt))
        request = client.post("generate", ctx, 1)
        before = system.devices[0].computed_tokens
        for _ in range(3):  # its patience: three passes of eight tokens
            system.tick()
        computed.append(system.devices[0].computed_tokens - before)
        answered = request in client.replies
        system.disconnect(client)
        system.run()
    assert answered, "the last of them found its prompt there"
    assert sum(computed) <= 80 + 6 * 8, "no block is computed twice"


@pytest.mark.parametrize(
    "state",
    ["empty", "idle", "prefill", "tool_wait", "never finished a step", "stopped", "in dram", "loading", "preempted"],
)
def test_truncate_works_from_any_state(state: str) -> None:
    """Case 38: trim works from any state.  What is left is what was there, and what is said after it is right."""
    system = small(dram=32, frames=8, sysctl={"sched.step_tokens": 4})
    client = system.connect()
    pid = client.call("spawn", "agent").pid
    ctx = client.call("alloc_context", pid).ctx
    if state != "empty":
        client.post("append", ctx, ints(PROMPT))
    if state not in ("empty", "prefill", "never finished a step"):
        system.run()
    if state in ("tool_wait", "never finished a step"):
        client.post("wait_tool", ctx, "search")
    elif state == "stopped":
        client.post("append", ctx, ints([1, 2]))
        client.call("kill", pid, 19)
    elif state in ("in dram", "loading"):
        client.call("demote", ctx, "dram")
        if state == "loading":
            client.post("prefetch", ctx, "hbm")
            assert any(system.pending), "on its way"
    elif state == "preempted":
        other = client.call("alloc_context").ctx
        client.call("append", other, ints(range(100, 132)))
        assert client.call("stat", ctx).blocks == 0
    keep = 0 if state == "empty" else 3
    cut = client.post("truncate", ctx, keep)
    system.run()
    assert client.result(cut).tokens == keep == client.call("stat", ctx).tokens
    if state == "stopped":
        client.call("kill", pid, 18)
    if client.call("stat", ctx).wait:
        client.call("resume", ctx)
    client.call("append", ctx, ints([4, 4]))
    log = [*PROMPT[:keep], 4, 4]
    assert tokens_of(client.call("generate", ctx, 6).tokens) == reference_tokens(log, 6)


def test_truncate_while_it_generates_names_what_to_cancel_and_works_after_that() -> None:
    system = small()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.post("append", ctx, ints(PROMPT))
    request = client.post("generate", ctx, 20)
    system.run(until=lambda: len(client.streamed.get(request, ())) > 2)
    assert refused(E.EBUSY, client, "truncate", ctx, 3)["request"] == request
    assert len(client.streamed[request]) < 20, "nothing was done"
    client.post("cancel", request)
    system.run(until=lambda: request in client.replies)
    assert client.result(request).reason == "cancelled"
    assert client.call("truncate", ctx, 3).tokens == 3
    assert tokens_of(client.call("generate", ctx, 4).tokens) == reference_tokens(PROMPT[:3], 4)


def test_stop_and_continue_around_a_wait() -> None:
    system = small()
    client = system.connect()
    child = client.call("spawn", "child")
    ctx = client.call("alloc_context", child.pid).ctx
    client.call("append", ctx, ints(PROMPT))
    client.call("wait_tool", ctx, "search", -1, 1000)
    client.call("kill", child.pid, 19)
    assert client.call("ps", child.pid).processes[0].state == "stopped"
    client.call("resume", ctx, 0, ints([1]))
    request = client.post("generate", ctx, 5)
    system.run()
    assert request not in client.replies
    client.call("kill", child.pid, 18)
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens([*PROMPT, 1], 5)


def test_the_deadline_comes_for_a_stopped_process_too() -> None:
    system = small()
    client = system.connect()
    child = client.call("spawn", "child")
    ctx = client.call("alloc_context", child.pid).ctx
    client.call("wait_tool", ctx, "search", -1, 1000)
    client.call("kill", child.pid, 19)
    system.advance(1001 * MS)
    assert [kind for kind, _ in client.notices] == ["wait"]
    client.call("kill", child.pid, 9)
    assert client.call("wait", child.pid).code == 137


def test_a_disconnect_releases_waits_but_for_named_and_detached_contexts() -> None:
    system = small()
    client, ctx, wait = waiting(system, deadline=1000)
    client.call("detach", ctx)
    cid = client.call("stat", ctx).cid
    other = client.call("alloc_context").ctx
    client.call("wait_tool", other, "search", -1, 1000)
    system.disconnect(client)
    assert system.kernel.machine.lifetimes.waiting == 1
    stranger, friend = system.connect(1001), system.connect()
    refused(E.ENOENT, stranger, "resume", 0, wait, ints([1]), "", (), cid)
    assert friend.call("resume", 0, wait, ints([1]), "", (), cid).tokens == len(PROMPT) + 1
    ctx = friend.call("open", "", False, cid).ctx
    assert tokens_of(friend.call("generate", ctx, 4).tokens) == reference_tokens([*PROMPT, 1], 4)
    friend.call("wait_tool", ctx, "search", -1, 1000)
    system.disconnect(friend)
    system.advance(2000 * MS)
    assert system.kernel.machine.lifetimes.waiting == 0, "a deadline needs no client"


def test_after_a_restart_no_wait_is_the_one_that_an_old_number_names() -> None:
    system = small()
    system.step(Restored(0, 0, 3, ()))
    client, ctx, wait = waiting(system)
    assert wait > 3 * (1 << 40)
    for old in (1, 2 * (1 << 40) + 1):
        refused(E.ESTALE, client, "resume", ctx, old)


def test_ten_thousand_waits_have_one_timer() -> None:
    system = small(max_contexts=10_100, check=False)
    client = system.connect()
    for k in range(10_000):
        ctx = client.call("alloc_context").ctx
        client.call("wait_tool", ctx, f"tool{k % 5}", 100, 1000 + k)
    assert len(system.timers) <= 2
    system.advance(1_000 * MS)
    for _ in range(200):
        system.advance(100 * MS)
        assert len(system.timers) <= 2
    assert system.kernel.machine.lifetimes.waiting == 0
    assert len(client.notices) == 10_000
    assert system.kernel.fsck() == []


def test_waits_that_are_over_leave_nothing_behind() -> None:
    """However long their contexts would have been kept, and their deadline would have been."""
    system = small(sysctl={"wait.ttl_ms": 86_400_000})
    client, ctx, wait = waiting(system)
    client.call("resume", ctx, wait)
    for _ in range(300):
        wait = client.call("wait_tool", ctx, "search", -1, MAX_WAIT_MS).wait
        client.call("resume", ctx, wait)
    lifetimes, idle = system.kernel.machine.lifetimes, system.kernel.machine.schedulers[0].idle
    assert max(len(idle._ends), len(idle._late), len(lifetimes._keeps), len(lifetimes._deadlines)) < 100
    assert len(system.timers) < 10


def test_what_was_learnt_outlives_a_restart() -> None:
    system = small()
    system.record = True
    system.step(Restored(0, 0, 0, ()))
    client, ctx, _ = waiting(system)
    for k in range(40):
        system.advance(300 * MS)
        client.call("resume", ctx)
        client.call("wait_tool", ctx, "search" if k < 39 else "other")
    system.step(Suspend())
    effects = [e for _, _, effects in system.log for e in effects if isinstance(e, Journal)]
    records = [r for e in effects for r in e.records if isinstance(r, ToolRecord)]
    assert len(records) < 15, "not with every wait"
    assert records[-1].tool == "search" and len(records[-1].durations) == 8 * 40
    again = small()
    again.step(Restored(0, 0, 1, (), (records[-1],)))
    other = again.connect()
    ctx = other.call("alloc_context").ctx
    assert other.call("wait_tool", ctx, "search").expected_ms == 300
