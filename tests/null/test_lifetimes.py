"""Processes, waits, cancels and ends: one reply per request on every path, and frames back at baseline."""

from __future__ import annotations

import pytest

from attnix.drivers.sim_model import SamplingChoice, reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.kernel.events import DriverDown, DriverGone, ExecDone, StopAt
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of


def small(**more: object) -> SimulatedSystem:
    return SimulatedSystem(core=Core, frames=32, block_tokens=4, **more)  # type: ignore[arg-type]


def test_wait_is_answered_when_the_child_ends_and_once() -> None:
    system = small()
    client = system.connect()
    child = client.call("spawn", "child")
    request = client.post("wait", child.pid)
    assert request not in client.replies
    client.call("exit", child.pid, 3)
    result = client.result(request)
    assert (result.pid, result.code, result.reason) == (child.pid, 3, "exited")
    with pytest.raises(Errno) as error:
        client.call("wait", child.pid)
    assert error.value.code is E.ENOENT


def test_wait_times_out_and_a_zombie_keeps_its_code() -> None:
    system = small()
    client = system.connect()
    child = client.call("spawn", "child")
    with pytest.raises(Errno) as error:
        client.call("wait", child.pid, 0)
    assert error.value.code is E.EAGAIN
    request = client.post("wait", child.pid, 50)
    system.advance(51_000_000)
    assert client.replies[request].code == E.ETIMEDOUT
    client.call("kill", child.pid, 9)
    assert [p.state for p in client.call("ps").processes if p.pid == child.pid] == ["zombie"]
    assert client.call("wait").code == 128 + 9
    assert client.call("ps").processes[-1].pid != child.pid


def test_a_running_process_is_told_to_continue() -> None:
    """SIGCONT without SIGSTOP once queued a context that was decoding: it stood twice in the next pass, which is a panic."""
    system = small()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.post("append", ctx, ints([1, 2, 3]))
    request = client.post("generate", ctx, 9)
    system.run(until=lambda: len(client.streamed.get(request, ())) > 2)
    client.call("kill", 0, 18)
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens([1, 2, 3], 9)


def test_stop_and_continue_change_nothing_but_time() -> None:
    system = small()
    client = system.connect()
    child = client.call("spawn", "child")
    ctx = client.call("alloc_context", child.pid).ctx
    client.post("append", ctx, ints([1, 2, 3]))
    request = client.post("generate", ctx, 9)
    system.tick()
    system.tick()
    client.call("kill", child.pid, 19)
    system.run()
    assert request not in client.replies
    assert [p.state for p in client.call("ps", child.pid).processes] == ["stopped"]
    client.call("kill", child.pid, 18)
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens([1, 2, 3], 9)


def test_one_owner_cannot_touch_another() -> None:
    system = small()
    mine, other = system.connect(1001), system.connect(1002)
    made = mine.call("alloc_context")
    pid = system.kernel.machine.contexts[made.cid].process.pid
    for name, args in (("kill", (pid, 9)), ("setpriority", (pid, 3)), ("getrusage", (pid,)), ("ps", (pid,))):
        with pytest.raises(Errno) as error:
            other.call(name, *args)
        assert error.value.code is E.EACCES, name
    for name in ("stat", "pagemap"):
        with pytest.raises(Errno) as error:
            other.call(name, 0, made.cid)
        assert error.value.code is E.ENOENT, name
        assert mine.call(name, 0, made.cid) is not None
    with pytest.raises(Errno) as error:
        other.call("stat", made.ctx)
    assert error.value.code is E.EBADF, "a handle means nothing on another connection"
    assert all(p.uid == 1002 for p in other.call("ps").processes)
    with pytest.raises(Errno) as error:
        other.call("shutdown")
    assert error.value.code is E.EACCES


def test_stale_and_forged_handles() -> None:
    system = small()
    client = system.connect()
    first = client.call("alloc_context").ctx
    client.call("release", first)
    second = client.call("alloc_context").ctx
    assert first & 0xFFFFFFFF == second & 0xFFFFFFFF, "the index is used again"
    for handle, code in (
        (first, E.ESTALE),
        (0, E.EBADF),
        (-5, E.EBADF),
        (second + 1, E.EBADF),
        (second + (7 << 32), E.EBADF),
    ):
        with pytest.raises(Errno) as error:
            client.call("stat", handle) if handle else client.call("append", handle, ints([1]))
        assert error.value.code is code, handle


def test_disconnect_in_the_middle_of_a_prefill_stops_within_one_chunk() -> None:
    system = SimulatedSystem(
        core=Core, frames=600, block_tokens=4, window_tokens=2048, sysctl={"sched.step_tokens": 64}
    )
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    prompt = [n % 256 for n in range(2000)]
    client.post("append", ctx, ints(prompt))
    client.post("generate", ctx, 5)
    for _ in range(10):
        system.tick()
    done = system.devices[0].computed_tokens
    system.disconnect(client)
    system.run()
    assert system.devices[0].computed_tokens <= done + 64
    assert system.available() == 600 and not system.kernel.machine.contexts
    retry = system.connect()
    ctx = retry.call("alloc_context").ctx
    retry.call("append", ctx, ints(prompt))
    result = retry.call("generate", ctx, 5)
    assert tokens_of(result.tokens) == reference_tokens(prompt, 5)
    assert result.usage.hit_tokens >= 640, "the retry goes on from the finished blocks"


def test_a_short_request_starts_beside_a_long_prefill() -> None:
    """Case 32: it is not stuck behind the 2,000-token prompt once that is cancelled."""
    system = SimulatedSystem(
        core=Core, frames=600, block_tokens=4, window_tokens=2048, sysctl={"sched.step_tokens": 64}
    )
    client = system.connect()
    long = client.call("alloc_context").ctx
    client.post("append", long, ints([n % 256 for n in range(2000)]))
    request = client.post("generate", long, 5)
    system.tick()
    client.call("cancel", request)
    short = client.call("alloc_context").ctx
    client.post("append", short, ints([1, 2, 3, 4, 5]))
    answer = client.post("generate", short, 1)
    passes = system.run(until=lambda: answer in client.replies)
    assert passes <= 2
    assert client.result(request).reason == "cancelled"


def test_a_stop_found_after_the_end_still_trims_the_context() -> None:
    """The daemon sees the text only after the step that also hit max_tokens."""
    system = small()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.post("append", ctx, ints([9, 9]))
    request = client.post("generate", ctx, 6)
    system.run()
    assert client.result(request).reason == "length"
    system.step(StopAt(client.conn, request, 4))
    assert client.call("stat", ctx).tokens == 2 + 4
    system.step(StopAt(client.conn, request, 1))
    assert client.call("stat", ctx).tokens == 2 + 4, "only once"


def test_window_ends_a_generation_with_length() -> None:
    """Case 28: a model that never stops, and a prompt that is too long."""
    system = SimulatedSystem(core=Core, frames=64, block_tokens=4, window_tokens=64)
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints([5] * 60))
    result = client.call("generate", ctx, 1000)
    assert (result.reason, result.tokens_total, len(result.tokens) // 4) == ("length", 64, 4)
    again = client.call("generate", ctx, 10)
    assert (again.reason, again.tokens) == ("length", b"")
    with pytest.raises(Errno) as error:
        client.call("append", ctx, ints([1]))
    assert (error.value.detail["wanted"], error.value.detail["limit"]) == (65, 64)


def test_a_driver_that_lies_is_restarted_and_nobody_sees_it() -> None:
    """Completions that do not fit the pass: too few tokens, tokens outside the vocabulary."""
    system = small()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.post("append", ctx, ints([1, 2, 3]))
    request = client.post("generate", ctx, 4)
    for bad in (ints([1, 2]), ints([100_000]), ints([-1])):
        effect = system.pending[0].popleft()
        lps = bytes(len(bad))
        system.step(ExecDone(0, effect.seq, bad, lps, (), (), 0, 0))
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens([1, 2, 3], 4)
    assert client.call("vmstat").counters["exec_failed"] == 3


def test_same_events_same_effects_to_the_byte() -> None:
    def play() -> list[object]:
        system = SimulatedSystem(core=Core, frames=8, block_tokens=4, record=True, sysctl={"sched.step_tokens": 7})
        client = system.connect()
        contexts = [client.call("alloc_context").ctx for _ in range(3)]
        for n, ctx in enumerate(contexts):
            client.post("append", ctx, ints([n, 1, 2, 3, 4, 5]))
            client.post("generate", ctx, 12, 0.7, 0, 1.0, 0.0, 11)
        system.tick()
        system.kill_driver()
        system.run()
        system.disconnect(client)
        return list(system.log)

    assert play() == play()


def test_a_driver_that_is_gone_for_good_leaves_nobody_hanging() -> None:
    system = small()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints([1, 2, 3]))
    fresh = client.post("generate", ctx, 9)
    other = client.call("fork", ctx).ctxs[0]
    begun = client.post("generate", other, 9)
    system.run(until=lambda: len(client.streamed.get(begun, [])) > 2 and len(client.streamed.get(fresh, [])) > 2)
    asked = client.call("fork", ctx).ctxs[0]
    forward = client.post("forward", asked, 3)
    waiting = client.call("fork", ctx).ctxs[0]
    client.post("wait_tool", waiting, "tool")
    system.pending[0].clear()
    system.step(DriverDown(0, 1, "killed"))
    system.step(DriverGone(0, "no such model file"))
    assert client.result(begun).reason == "killed", "what has begun ends in a reason"
    assert client.replies[forward].code == E.EHOSTDOWN
    length = client.call("stat", ctx).tokens
    calls: list[tuple[str, tuple[object, ...]]] = [
        ("generate", (ctx, 3)),
        ("append", (ctx, ints([4]))),
        ("append", (ctx, ints([4]), "", (), True)),
        ("resume", (waiting, 0, ints([4]))),
    ]
    for name, arguments in calls:
        with pytest.raises(Errno) as error:
            client.call(name, *arguments)
        assert error.value.code is E.EHOSTDOWN and "no such model file" in str(error.value), name
    system.driver_up(0)
    assert client.call("stat", ctx).tokens == length and client.call("resume", waiting, 0, ints([4])).appended == 1
    assert len(tokens_of(client.call("generate", ctx, 3).tokens)) == 3


# -- case 12: several choices of one prompt --------------------------------------------------------------------------

SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def choices(client: SimulatedClient, n: int) -> list[int]:
    """Handles of n forks of a context that has computed its prompt, which goes."""
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(SHARED))
    client.system.run()
    forks = list(client.call("fork", ctx, n).ctxs)
    client.call("release", ctx)
    return forks


@pytest.mark.parametrize("generating", [False, True])
def test_a_client_that_goes_takes_all_of_its_choices_along_in_that_step(generating: bool) -> None:
    """Its frames too, but for those of the pass that is running: those come back with it."""
    system = small()
    other, client = system.connect(), system.connect()

    def shown() -> list[int]:
        """Contexts in ps, by process; asked without a pass."""
        return [len(process.contexts) for process in other.result(other.post("ps")).processes]

    before = shown()
    for k, ctx in enumerate(choices(client, 4)):
        client.post("generate", ctx, 4096, 1.0, 0, 1.0, 0.0, k)
    for _ in range(3):
        system.tick()
    assert sum(shown()) == 4 and system.sequences_pending == 4
    if not generating:
        client.result(client.post("kill", 0, 19))
        system.run()
    assert system.available() < 32
    system.disconnect(client)
    assert shown() == before[:1], "neither a choice nor the process that had them"
    if generating:
        assert system.tick() and not any(system.pending), "one pass was running, and no other one begins"
    assert system.available() == 32 and not system.kernel.machine.contexts


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("passes", range(4))
def test_two_clients_want_four_choices_each_and_there_is_room_for_one_of_them(first: int, passes: int) -> None:
    """Both ask while their prompts are being computed.  Whoever asks first gets all four, the other none of them, and all four
    when the first has gone."""
    system = small(max_contexts=7, sysctl={"sched.step_tokens": 4})
    clients = [system.connect(), system.connect()]
    sources = [client.call("alloc_context").ctx for client in clients]
    for client, ctx in zip(clients, sources, strict=True):
        client.post("append", ctx, ints(SHARED))
    for _ in range(passes):
        system.tick()
    winner, loser = clients[first], clients[1 - first]
    won = winner.post("fork", sources[first], 4)
    lost = loser.post("fork", sources[1 - first], 4)
    assert len(winner.result(won).ctxs) == 4 and loser.replies[lost].code == E.ENOMEM
    assert len(system.kernel.machine.contexts) == 2 + 4, "all or none"
    system.run()
    system.disconnect(winner)
    ctxs = loser.call("fork", sources[1 - first], 4).ctxs
    requests = [loser.post("generate", ctx, 5) for ctx in ctxs]
    system.run()
    assert [tokens_of(loser.result(r).tokens) for r in requests] == [reference_tokens(SHARED, 5)] * 4


@pytest.mark.parametrize("frames", [32, 7])
def test_choices_that_end_early_take_nothing_from_those_that_go_on(frames: int) -> None:
    """One ends and is released, one is released in the middle; with frames for all, and for two of them only."""
    system = SimulatedSystem(core=Core, frames=frames, block_tokens=4, window_tokens=28)
    client, other = system.connect(), system.connect()
    ctxs = choices(client, 4)
    wants = (2, 12, 12, 12)
    requests = [
        client.post("generate", ctx, n, 1.0, 0, 1.0, 0.0, k) for k, (ctx, n) in enumerate(zip(ctxs, wants, strict=True))
    ]
    system.run(until=lambda: requests[0] in client.replies and len(client.streamed.get(requests[1], ())) > 2)
    client.result(client.post("release", ctxs[0]))
    client.result(client.post("release", ctxs[1]))
    # Whoever takes a frame that is wrongly free writes over it.
    filler = other.call("alloc_context").ctx
    other.post("append", filler, ints(range(200, 212)))
    system.run()
    for k in (2, 3):
        want = reference_tokens(SHARED, wants[k], choice=SamplingChoice(temperature=1.0, seed=k))
        assert client.streamed[requests[k]] == tokens_of(client.result(requests[k]).tokens) == want
    assert not system.double_replies
