"""Scheduling policies in the whole kernel, under a clock (timed.py).

Blocks have 4 tokens and passes 16 tokens of prompts unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnix.kernel.errors import E, Errno
from attnix.kernel.order import registry
from attnix.kernel.order.line import OVERTAKES
from attnix.kernel.order.protocol import Forecast, Key, OrderPolicy, Waiting
from attnix.simulated import SimulatedClient, ints

from .timed import MS, TimedSystem, fresh


def build(policy: str = "fcfs", step_tokens: int = 16, **options: int) -> TimedSystem:
    sysctl: dict[str, int | str] = {"sched.policy": policy, "sched.step_tokens": step_tokens, "evict.policy": "lru"}
    return TimedSystem(sysctl=sysctl, block_tokens=4, **options)


def computed(client: SimulatedClient) -> int:
    return int(client.call("getrusage").computed_tokens)


def first_ns(system: TimedSystem, client: SimulatedClient, request: int) -> int:
    return system.token_ns[client.conn, request][0]


# -- order matters: A, C, D, B where A and B begin alike and hbm holds one of them


def a_c_d_b(policy: str) -> tuple[int, list[str]]:
    """(prompt tokens computed, order of the answers)."""
    system = build(policy, frames=24)
    client = system.user()
    prefix = fresh(1, 64)
    prompts = {"A": [*prefix, 101, 102], "C": fresh(3, 66), "D": fresh(4, 66), "B": [*prefix, 201, 202]}
    asked = {name: system.ask(client, prompt, 4)[1] for name, prompt in prompts.items()}
    system.run()
    assert all(len(client.streamed[request]) == 4 for request in asked.values())
    # of the four tokens of an answer three are computed as well
    return computed(client) - 12, sorted(asked, key=lambda name: first_ns(system, client, asked[name]))


def test_the_cache_aware_order_computes_what_a_to_b_saves() -> None:
    assert a_c_d_b("fcfs") == (4 * 66, ["A", "C", "D", "B"])
    assert a_c_d_b("longest_prefix") == (4 * 66 - 64, ["A", "B", "C", "D"])
    # B has two tokens to compute as soon as A has published its own
    assert a_c_d_b("shortest_prefill") == (4 * 66 - 64, ["A", "B", "C", "D"])


@pytest.mark.parametrize("policy", registry.names())
def test_what_a_running_prefill_publishes_is_computed_once_and_holds_nobody_up(policy: str) -> None:
    system = build(policy, step_tokens=40)
    client = system.user()
    prefix = fresh(1, 64)
    contexts = [system.ask(client, prompt, 1)[0] for prompt in ([*prefix, 101], [*prefix, 102, 103], fresh(3, 30))]
    _, b, c = (client.call("stat", ctx).cid for ctx in contexts)
    system.run()
    assert computed(client) == 65 + 2 + 30
    begun: dict[int, int] = {}
    for number, (_, seqs) in enumerate(system.passes):
        for cid, _ in seqs:
            begun.setdefault(cid, number)
    assert begun[c] < begun[b]


@pytest.mark.parametrize("policy", ["longest_prefix", "shortest_prefill"])
def test_what_a_running_prefill_is_about_to_publish_counts_as_found(policy: str) -> None:
    """B comes last and has two tokens of its own behind what A has begun to compute: it answers in A's last pass."""
    system = build(policy)
    client = system.user()
    prefix = fresh(1, 64)
    a = system.ask(client, [*prefix, 101], 1)[1]
    system.tick()
    assert (client.conn, a) not in system.token_ns, "A takes several passes"
    c = system.ask(client, fresh(3, 40), 1)[1]
    b = system.ask(client, [*prefix, 102, 103], 1)[1]
    system.run()
    assert computed(client) == 65 + 2 + 40
    assert first_ns(system, client, a) == first_ns(system, client, b) < first_ns(system, client, c)


# -- the first that does not fit


def test_small_jobs_pass_the_first_that_does_not_fit_and_do_not_keep_it_waiting() -> None:
    """60 frames; R holds 30 and decodes, H needs 38 and waits for R.  A small job comes to 5 frames.  By the frames that are
    free six could run beside R; H's leave room for three at a time (6 + 1 for growth each, 39 for H)."""

    def run(smalls: int) -> tuple[int, int, int]:
        """(ns of R's last token, of H's first, smalls that had all of theirs before that)."""
        system = build("fcfs", step_tokens=512, frames=60)
        client = system.user()
        _, r = system.ask(client, fresh(1, 100), 20)
        system.tick()
        _, h = system.ask(client, fresh(2, 150), 4)
        asked = [system.ask(client, fresh(10 + i, 14), 6)[1] for i in range(smalls)]
        system.run(until=lambda: (client.conn, h) in system.token_ns)
        assert max(len(seqs) for _, seqs in system.passes[:-1]) == (4 if smalls else 1)
        early = sum(s in client.replies for s in asked)
        return system.token_ns[client.conn, r][-1], first_ns(system, client, h), early

    ended, began, early = run(0)
    # the pass after R's last one computes H: 10 ms and 150 tokens
    assert began - ended == pytest.approx(10 * MS + 150 * MS / 4, rel=0.01) and not early
    ended, began, early = run(20)
    assert early >= 4, "small jobs ran in the meantime"
    # H runs in the pass after R's last one all the same, beside those that have passed it and those that now fit
    assert began - ended <= 10 * MS + 150 * MS / 4 + 4 * 14 * MS / 4 + MS / 10


def test_nobody_passes_what_would_wait_for_them() -> None:
    """H needs nearly all that there is; a small job that lives long would keep it waiting after R has gone."""
    system = build("fcfs", step_tokens=512, frames=60)
    client = system.user()
    _, r = system.ask(client, fresh(1, 100), 20)
    system.tick()
    _, h = system.ask(client, fresh(2, 220), 4)
    _, s = system.ask(client, fresh(3, 14), 60)
    system.run()
    assert system.token_ns[client.conn, r][-1] < first_ns(system, client, h) <= first_ns(system, client, s)


# -- nobody starves


@pytest.mark.parametrize("policy", registry.names())
@pytest.mark.parametrize("frames", [2000, 60])
def test_a_long_prompt_gets_its_turn_while_short_ones_keep_coming(policy: str, frames: int) -> None:
    """The short ones bring more work than the device can do, and have what the policy looks at: a prefix that is in hbm, an
    older program, one that was served less, an earlier deadline.  The bound of line.py is on those that overtake."""
    system = build(policy, step_tokens=16, frames=frames, max_contexts=400)
    client = system.user()
    old, greedy = (client.call("spawn", name).pid for name in ("old", "greedy"))
    common = fresh(1, 16)
    system.ask(client, common, 1, old)
    if policy == "least_attained":
        for i in range(14):
            system.ask(client, fresh(400 + i, 160), 1, greedy)
    system.run()
    system.ask(client, fresh(3, 16), 1)  # so that something runs when the long one comes
    timed = policy == "deadline"
    _, long = system.ask(client, fresh(2, 160), 1, greedy, ttft_ms=8_000 if timed else 0)
    shorts: list[int] = []
    for i in range(300):
        prompt = [*common, *fresh(10 + i, 12)]
        system.ask_at(system.now_ns + i * 5 * MS, shorts, client, prompt, 1, old, ttft_ms=4_000 if timed else 0)
    system.run(until=lambda: (client.conn, long) in system.token_ns)
    before = sum((client.conn, s) in system.token_ns for s in shorts)
    assert before <= OVERTAKES
    if policy not in ("fcfs", "priority"):  # where only what came earlier, or is nicer, goes before it
        assert before >= OVERTAKES // 2, "it was not overtaken: the test shows nothing"
    system.run()
    assert all(client.replies[request].code == 0 for request in shorts)


@pytest.mark.parametrize("policy", registry.names())
def test_nice_means_something_under_each(policy: str) -> None:
    """Of jobs that are alike, the nicer ones' first tokens come later."""
    system = build(policy)
    client = system.user()
    pids = [client.call("spawn", f"n{nice}", nice).pid for nice in (10, 0, -10)]
    target = {"ttft_ms": 60_000} if policy == "deadline" else {}
    system.ask(client, fresh(1, 32), 1)
    asked = [system.ask(client, fresh(10 + i, 40), 1, pids[i % 3], **target)[1] for i in range(9)]
    system.run()
    times = [first_ns(system, client, request) for request in asked]
    assert max(times[2::3]) < min(times[1::3]) and max(times[1::3]) < min(times[0::3])


# -- by program


def test_an_old_program_comes_back_before_younger_ones() -> None:
    orders = {}
    for policy in ("fcfs", "program_fcfs"):
        system = build(policy)
        client = system.user()
        old, young = (client.call("spawn", name).pid for name in ("old", "young"))
        system.ask(client, fresh(1, 16), 1, old)
        system.run()
        asked = [system.ask(client, fresh(10 + i, 40), 1, young)[1] for i in range(3)]
        asked.append(system.ask(client, fresh(20, 40), 1, old)[1])
        system.run()
        times = [first_ns(system, client, request) for request in asked]
        orders[policy] = sorted(range(4), key=times.__getitem__)
    assert orders == {"fcfs": [0, 1, 2, 3], "program_fcfs": [3, 0, 1, 2]}


def test_a_program_that_has_had_little_goes_first() -> None:
    system = build("least_attained", step_tokens=512, frames=1000)
    client = system.user()
    greedy, small = (client.call("spawn", name).pid for name in ("greedy", "small"))
    for i in range(3):
        system.ask(client, fresh(1 + i, 900), 1, greedy)
    system.run()  # 2,700 tokens: past the first queue, which ends at 2,048
    system.ask(client, fresh(9, 500), 1, small)
    asked = [system.ask(client, fresh(10 + i, 300), 1, pid)[1] for i, pid in enumerate((greedy, greedy, small))]
    system.run()
    times = [first_ns(system, client, request) for request in asked]
    assert times[2] < min(times[:2])


# -- deadlines


def test_a_target_that_would_be_missed_is_refused_before_anything_is_done() -> None:
    system = build("deadline", step_tokens=100)
    client = system.user()
    for i in range(4):  # what costs are learnt from
        system.ask(client, fresh(1 + i, 20 + 20 * i), 4)
        system.run()
    for i in range(6):
        system.ask(client, fresh(10 + i, 200), 4, ttft_ms=10_000)
    ctx = client.result(client.post("alloc_context")).ctx
    client.post("append", ctx, ints(fresh(90, 100)))
    rest = (0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 0, (), b"", True, True)
    # 6 prompts of 200 tokens are due later, so only its own 100 tokens count: 35 ms
    request = client.post("generate", ctx, 4, *rest, 30)
    with pytest.raises(Errno) as error:
        client.result(request)
    assert error.value.code is E.EAGAIN
    assert 1 <= int(error.value.detail["retry_after_ms"]) <= 20
    assert client.result(client.post("stat", ctx)).state in (
        "waiting",
        "prefill",
    )  # as before: what was appended is computed
    # behind those that are due earlier: 1,200 tokens and 12 passes are 420 ms, and its own come to it
    request = client.post("generate", ctx, 4, *rest, 11_000)
    assert request not in client.replies
    other = client.result(client.post("alloc_context")).ctx
    client.post("append", other, ints(fresh(91, 100)))
    refused = client.post("generate", other, 4, *rest, 1, 5)  # 5 ms per token, when a pass takes 10
    with pytest.raises(Errno) as error:
        client.result(refused)
    assert error.value.code is E.EAGAIN
    # What it could have is said, and is given: behind all that is due it is 13 passes and 1,400 tokens, 480 ms.
    ttft_ms, tpot_ms = (int(error.value.detail[name]) for name in ("ttft_ms", "tpot_ms"))
    assert 300 <= ttft_ms <= 600 and 10 <= tpot_ms <= 20
    assert client.replies[client.post("generate", other, 4, *rest, ttft_ms, tpot_ms - 1)].code == E.EAGAIN
    accepted = client.post("generate", other, 4, *rest, ttft_ms, tpot_ms)
    assert accepted not in client.replies
    system.run()
    assert len(client.result(request).tokens) == len(client.result(accepted).tokens) == 16


def test_deadlines_order_the_queue() -> None:
    system = build("deadline")
    client = system.user()
    system.ask(client, fresh(1, 32), 1)
    asked = [system.ask(client, fresh(10 + i, 40), 1, ttft_ms=ttft)[1] for i, ttft in enumerate((0, 9000, 5000, 7000))]
    system.run()
    times = [first_ns(system, client, request) for request in asked]
    assert sorted(range(4), key=times.__getitem__) == [2, 3, 1, 0]


# -- while it runs


def test_the_policy_changes_while_jobs_wait() -> None:
    system = build("fcfs")
    client = system.user()
    system.ask(client, fresh(1, 64), 1)
    asked = [system.ask(client, fresh(10 + i, length), 1)[1] for i, length in enumerate((90, 60, 30))]
    client.result(client.post("sysctl", "sched.policy", "shortest_prefill"))
    system.run()
    times = [first_ns(system, client, request) for request in asked]
    assert times[2] < times[1] < times[0]
    with pytest.raises(Errno, match="deadline, fcfs"):
        client.call("sysctl", "sched.policy", "nobody")
    (row,) = client.call("sysctl", "sched.policy").rows
    assert row.value == "shortest_prefill"


# -- a third party's policy


class Arrival(OrderPolicy):
    name = "arrival"
    refuses = True

    def key(self, job: Waiting) -> Key:
        return (job.order,)


class KeyRaises(Arrival):
    def key(self, job: Waiting) -> Key:
        raise RuntimeError("boo")


class KeyIsText(Arrival):
    def key(self, job: Waiting) -> Key:
        return ("first",)  # type: ignore[return-value]


class LateRaises(Arrival):
    def late_ns(self, job: Waiting, forecast: Forecast) -> int:
        raise RuntimeError("boo")


class HalfWritten:
    """Somebody forgot the rest."""


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (Arrival, ""),
        (KeyRaises, "failed in key (RuntimeError: boo)"),
        (KeyIsText, "failed in key (TypeError: ('first',) is no tuple of numbers"),
        (LateRaises, "failed in late_ns (RuntimeError: boo)"),
        (HalfWritten, "failed when it was made (AttributeError: "),
    ],
)
def test_a_fault_costs_the_policy_its_place_and_nobody_an_answer(
    factory: Callable[[], OrderPolicy], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", {"mine": factory})
    system = build("mine", step_tokens=100, frames=100)
    client = system.user()
    for i in range(4):  # late_ns is asked once costs are known
        system.ask(client, fresh(1 + i, 20 + 20 * i), 4)
        system.run()
    asked = [system.ask(client, fresh(10 + i, 40), 2, ttft_ms=60_000)[1] for i in range(4)]
    system.run()
    assert [len(client.streamed[request]) for request in asked] == [2] * 4
    assert sorted(asked, key=lambda request: first_ns(system, client, request)) == asked, "by arrival"
    errors = [row.text for row in client.call("dmesg").rows if row.level == "error"]
    assert len(errors) == (1 if says else 0)
    assert all(
        e.startswith(f"hbm0: scheduling policy mine {says}") and e.endswith("fcfs takes its place") for e in errors
    )
