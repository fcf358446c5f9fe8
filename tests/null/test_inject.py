"""Tokens injected into a running generation: where they stand, what has seen them, and what the result says."""

from __future__ import annotations

import pytest

from attnix.drivers.sim_model import SamplingChoice, reference_scores, reference_tokens
from attnix.kernel import injected
from attnix.kernel.errors import E
from attnix.kernel.events import Pause, Resume, StopAt
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of
from tests.null.small import PROMPT, refused, small


def naive(prompt: list[int], want: int, put: dict[int, list[int]], seed: int = 0, temperature: float = 0.0) -> tuple[
    list[int], list[int]
]:  # fmt: skip
    """(sampled tokens, whole log): what the model says when put[k] stands behind its first k tokens."""
    log, sampled = list(prompt), []
    choice = SamplingChoice(temperature=temperature, seed=seed)
    for k in range(want + 1):
        log += put.get(k, [])
        if k < want:
            sampled += (token := reference_tokens(log, 1, choice=choice))
            log += token
    return sampled, log


def generating(system: SimulatedSystem, want: int, *args: object, after: int = 3) -> tuple[SimulatedClient, int, int]:
    """A generation that has streamed `after` tokens: its client, context and request."""
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(PROMPT))
    request = client.post("generate", ctx, want, *args)
    system.run(until=lambda: len(client.streamed.get(request, [])) >= after)
    return client, ctx, request


def log_of(system: SimulatedSystem, client: SimulatedClient, ctx: int) -> list[int]:
    cid = client.call("stat", ctx).cid
    slot = system.kernel.machine.contexts[cid].slot
    return tokens_of(system.core.read_log(slot, 0, system.core.slot_row(slot).tokens))


# -- where they stand (pure) ------------------------------------------------------------------------------------------


def test_positions_by_hand() -> None:
    """Sampled a b c d, injected x y behind b and z at the end: the log is a b x y c d z."""
    ranges = injected.add(injected.add((), 2, 2), 4, 1)
    assert ranges == ((2, 2), (4, 1)) and injected.count(ranges) == 3
    assert [injected.extent(ranges, k) for k in range(5)] == [0, 1, 2, 5, 6]
    tail = ints([1, 2, 91, 92, 3, 4, 93])
    assert injected.split(tail, ranges) == (ints([1, 2, 3, 4]), ints([91, 92, 93]))
    assert injected.add(ranges, 4, 5) == ((2, 2), (4, 6)), "several at one place are one range"
    assert injected.cut(ranges, 3) == ((2, 2), (3, 1)), "what stood further back is at the end"
    assert injected.cut(ranges, 1) == ((1, 3),) and injected.cut(ranges, 4) == ranges
    assert injected.split(tail, ()) == (tail, b"")


# -- delivery ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed, temperature", [(0, 0.0), (7, 0.9)])
@pytest.mark.parametrize("after", [1, 3, 5])
def test_everything_sampled_afterwards_has_seen_it(after: int, seed: int, temperature: float) -> None:
    system = small()
    client, ctx, request = generating(system, 12, temperature, 0, 1.0, 0.0, seed, after=after)
    interrupt = client.post("inject", ctx, ints([8, 9]))
    assert interrupt not in client.replies, "the token of the pass in flight comes first"
    system.run()
    at = after + 1
    sampled, log = naive(PROMPT, 12, {at: [8, 9]}, seed, temperature)
    result = client.result(request)
    assert tokens_of(result.tokens) == sampled == client.streamed[request], "max_tokens counts what was sampled"
    assert (result.reason, result.injected, result.tokens_total) == ("length", ((at, 2),), len(log))
    assert log_of(system, client, ctx) == log
    said = client.result(interrupt)
    assert (said.tokens, said.appended) == (len(PROMPT) + at + 2, 2)
    plain, _ = naive(PROMPT, 12, {}, seed, temperature)
    assert plain != sampled, "control: without the interrupt it says something else"


def test_several_at_once_and_one_after_another() -> None:
    system = small()
    client, ctx, request = generating(system, 10, after=2)
    first = [client.post("inject", ctx, ints([k])) for k in (8, 9)]
    system.run(until=lambda: len(client.streamed[request]) >= 6)
    client.post("inject", ctx, ints([7]))
    system.run()
    sampled, log = naive(PROMPT, 10, {3: [8, 9], 7: [7]})
    assert tokens_of(client.result(request).tokens) == sampled
    assert client.result(request).injected == ((3, 2), (7, 1))
    assert [client.result(r).tokens for r in first] == [len(PROMPT) + 4, len(PROMPT) + 5]
    assert log_of(system, client, ctx) == log


def test_into_a_prompt_that_is_still_computed() -> None:
    system = small(sysctl={"sched.step_tokens": 4})
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.post("append", ctx, ints(PROMPT))
    request = client.post("generate", ctx, 5)
    interrupt = client.post("inject", ctx, ints([8, 9]))
    system.run()
    sampled, _ = naive([*PROMPT, 8, 9], 5, {})
    assert tokens_of(client.result(request).tokens) == sampled
    assert client.result(request).injected == ((0, 2),)
    assert client.result(interrupt).tokens == 11


def test_while_stopped_paused_and_preempted() -> None:
    system = small(frames=8, window_tokens=32, sysctl={"sched.watermark_permille": 0})
    client, ctx, request = generating(system, 12)
    cid = client.call("stat", ctx).cid
    pid = system.kernel.machine.contexts[cid].process.pid
    client.call("kill", pid, 19)
    system.run()  # the pass in flight comes back: what it sampled is kept
    k = len(client.streamed[request])
    assert client.call("inject", ctx, ints([8])).tokens == len(PROMPT) + k + 1
    system.kernel.machine.schedulers[0].pager.forget(system.kernel.machine.contexts[cid])
    client.call("inject", ctx, ints([9]))
    system.step(Pause(client.conn))
    client.call("kill", pid, 18)
    client.call("inject", ctx, ints([7]))
    assert request not in client.replies
    system.step(Resume(client.conn))
    system.run()
    sampled, log = naive(PROMPT, 12, {k: [8, 9, 7]})
    assert tokens_of(client.result(request).tokens) == sampled and log_of(system, client, ctx) == log


def test_a_context_that_is_idle_takes_it_like_an_append() -> None:
    system = small()
    client, ctx, request = generating(system, 3)
    system.run()
    assert client.call("inject", ctx, ints([8])).appended == 1
    sampled, log = naive(PROMPT, 3, {3: [8]})
    assert log_of(system, client, ctx) == log and tokens_of(client.result(request).tokens) == sampled
    assert tokens_of(client.call("generate", ctx, 2).tokens) == reference_tokens(log, 2)


def test_forward_and_score_take_nothing() -> None:
    system = small()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(PROMPT))
    request = client.post("forward", ctx, 3)
    refused(E.EBUSY, client, "inject", ctx, ints([1]))
    system.run()
    assert client.replies[request].code == 0


def test_by_cid_from_another_connection_of_the_uid() -> None:
    system = small()
    client, ctx, request = generating(system, 8)
    cid = client.call("stat", ctx).cid
    friend, stranger = system.connect(), system.connect(1001)
    refused(E.ENOENT, stranger, "inject", 0, ints([8]), "", cid)
    interrupt = friend.post("inject", 0, ints([8]), "", cid)
    gone = friend.post("inject", 0, ints([9]), "", cid)
    friend.call("cancel", gone)
    assert friend.replies[gone].code == E.ECANCELED
    leaver = system.connect()
    leaver.post("inject", 0, ints([7]), "", cid)
    system.disconnect(leaver)
    system.run()
    k = client.result(request).injected[0][0]
    assert client.result(request).injected == ((k, 2),)
    assert friend.result(interrupt).appended == 1


def test_what_does_not_fit_is_refused_before_anything_is_done() -> None:
    system = small(window_tokens=20)
    client, ctx, request = generating(system, 50)
    length = client.call("stat", ctx).tokens
    detail = refused(E.E2BIG, client, "inject", ctx, ints([1] * (20 - length)))
    assert detail["limit"] == 20
    refused(E.EINVAL, client, "inject", ctx, ints([999]))
    fits = client.post("inject", ctx, ints([1] * (20 - length - 2)))
    late = client.post("inject", ctx, ints([1]))  # with the one before it and the token in flight that is the window
    system.run()
    assert client.result(fits).tokens == 19 and client.result(late).tokens == 20
    result = client.result(request)
    assert (result.reason, result.tokens_total) == ("length", 20), "no token is sampled past the window"
    k = len(result.tokens) // 4
    assert result.injected == ((k, 20 - len(PROMPT) - k),)


def test_log_probabilities_are_those_of_the_sampled_tokens() -> None:
    system = small()
    client, ctx, request = generating(system, 8, 0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 3)
    client.post("inject", ctx, ints([8, 9]))
    system.run()
    result = client.result(request)
    log = log_of(system, client, ctx)
    (at, n) = result.injected[0]
    scores = reference_scores(log, len(PROMPT))
    del scores[at : at + n]
    assert [entry[0] for entry in result.logprobs] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("keep", [1, 4, 6])
def test_a_stop_string_takes_back_what_was_sampled_and_nothing_that_was_injected(keep: int) -> None:
    system = small()
    client, ctx, request = generating(system, 20)
    client.post("inject", ctx, ints([8, 9]))
    system.run(until=lambda: len(client.streamed[request]) >= 6)
    system.step(StopAt(client.conn, request, keep))
    system.run()
    result = client.result(request)
    sampled, _ = naive(PROMPT, 20, {4: [8, 9]})
    assert tokens_of(result.tokens) == sampled[:keep] and result.reason == "stop"
    assert result.injected == ((min(4, keep), 2),)
    want = [*PROMPT, *sampled[: min(4, keep)], 8, 9, *sampled[4:keep]]
    assert log_of(system, client, ctx) == want and result.tokens_total == len(want)
    assert tokens_of(client.call("generate", ctx, 3).tokens) == reference_tokens(want, 3)


def test_one_that_comes_with_the_last_token() -> None:
    """The pass in flight ends the generation: the tokens stand behind it, and a stop string found late still cuts."""
    system = small()
    client, ctx, request = generating(system, 4)
    interrupt = client.post("inject", ctx, ints([8]))
    system.run()
    sampled, log = naive(PROMPT, 4, {4: [8]})
    result = client.result(request)
    assert tokens_of(result.tokens) == sampled and result.injected == ((4, 1),)
    assert client.result(interrupt).tokens == len(log) == result.tokens_total
    assert tokens_of(client.call("generate", ctx, 3).tokens) == reference_tokens(log, 3)


def test_a_stop_string_found_in_the_step_that_ended_it() -> None:
    system = small()
    client, ctx, request = generating(system, 4)
    client.post("inject", ctx, ints([8]))
    system.tick()
    assert request in client.replies
    system.step(StopAt(client.conn, request, 2))
    system.run()
    sampled, _ = naive(PROMPT, 4, {})
    assert log_of(system, client, ctx) == [*PROMPT, *sampled[:2], 8]


def test_failed_passes_and_dead_drivers_change_nothing() -> None:
    system = small()
    client, ctx, request = generating(system, 10, after=2)
    client.post("inject", ctx, ints([8, 9]))
    system.fail()
    k = len(client.streamed[request])
    sampled, log = naive(PROMPT, 10, {k: [8, 9]})
    system.run(until=lambda: len(client.streamed[request]) >= 6)
    system.kill_driver(0, arena="lost")
    system.run()
    assert tokens_of(client.result(request).tokens) == sampled and log_of(system, client, ctx) == log


def test_killed_and_released_with_an_interrupt_on_its_way() -> None:
    system = small()
    for name in ("release", "kill"):
        client, ctx, request = generating(system, 10)
        cid = client.call("stat", ctx).cid
        friend = system.connect()
        interrupt = friend.post("inject", 0, ints([8]), "", cid)
        pid = system.kernel.machine.contexts[cid].process.pid
        client.call(name, *((ctx,) if name == "release" else (pid, 9)))
        system.run()
        assert friend.replies[interrupt].code == E.ESTALE, name
        assert client.result(request).reason in ("cancelled", "killed")
        system.disconnect(client)
        system.disconnect(friend)
    system.run()
    assert system.available() == 32
