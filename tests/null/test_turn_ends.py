"""Between the end of a turn and `wait_tool`: nobody takes a context's frames before its client can have said that it waits.

12 frames of 4 tokens, and no tier below unless it says so.  A has 16 tokens (4 frames), C 4 and decodes 8 more (3), and B comes with 28 (7): they are
there only when A has lost its own.
"""

from __future__ import annotations

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.lifetimes import MS
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of

GRACE_MS = 100


def system(grace_ms: int = GRACE_MS, dram: int = 0) -> SimulatedSystem:
    settings: dict[str, int | str] = {
        "sched.watermark_permille": 0, "sched.growth_permille": 0, "evict.policy": "lru", "wait.policy": "ttl",
        "wait.ttl_ms": 60_000, "wait.grace_ms": grace_ms,
    }  # fmt: skip
    return SimulatedSystem(core=Core, frames=12, dram=dram, block_tokens=4, window_tokens=48, sysctl=settings)


def prompt(k: int, tokens: int) -> list[int]:
    return [(k * 37 + 11 * i) % 200 for i in range(tokens)]


def resting(client: SimulatedClient, k: int, tokens: int) -> int:
    ctx: int = client.call("alloc_context", 0).ctx
    client.call("append", ctx, ints(prompt(k, tokens)))
    client.system.run()
    return ctx


def frames_of(client: SimulatedClient, ctx: int) -> int:
    return client.system.core.slot_row(client.system.kernel.machine.contexts[client.call("stat", ctx).cid].slot).entries


def waits_once(client: SimulatedClient) -> None:
    """From now on the kernel knows that this user's clients say when they wait."""
    ctx = resting(client, 8, 2)
    client.call("wait_tool", ctx, "search")
    client.call("release", ctx)
    client.system.run()


def queued_behind(client: SimulatedClient, runs: bool = True) -> tuple[int, int, int]:
    """A generates its one token, C beside it where anything else runs, and B waits for frames: A, and the requests of A and B."""
    made = client.system
    a, c, b = resting(client, 1, 16), resting(client, 3, 4), client.call("alloc_context", 0).ctx
    if runs:
        client.post("generate", c, 8)
    else:
        client.call("release", c)
    asked = client.post("generate", a, 1)
    client.post("append", b, ints(prompt(2, 28 if runs else 36)))
    wanted = client.post("generate", b, 2)
    made.run(lambda: asked in client.replies)
    return a, asked, wanted


@pytest.mark.parametrize("grace_ms, stays", [(GRACE_MS, True), (0, False)])
def test_frames_stay_until_the_client_can_have_said_that_it_waits(grace_ms: int, stays: bool) -> None:
    made = system(grace_ms=grace_ms)
    client = made.connect()
    waits_once(client)
    a, asked, wanted = queued_behind(client)
    first = tokens_of(client.result(asked).tokens)
    assert first == reference_tokens(prompt(1, 16), 1)
    assert (frames_of(client, a) > 0) is stays, "B has been waiting for them, and the turn ended in this very step"
    client.call("wait_tool", a, "search")
    assert (frames_of(client, a) > 0) is stays, "and a keep that begins now has something to keep, or has not"
    answer = ints([7])
    client.call("resume", a, 0, answer)
    again = client.call("generate", a, 2)
    assert tokens_of(again.tokens) == reference_tokens([*prompt(1, 16), *first, 7], 2)
    assert again.usage.recomputed_tokens == (0 if stays else 8), "B and C leave two frames of its four"
    made.advance(GRACE_MS * MS)
    made.run()
    assert tokens_of(client.result(wanted).tokens) == reference_tokens(prompt(2, 28), 2)


def test_who_says_nothing_lets_go_when_its_time_is_over() -> None:
    """Nothing else runs, and B wants 9 of 12 frames (36 tokens) while A has 4: the device is idle for 100 ms, and no longer."""
    made = system()
    client = made.connect()
    waits_once(client)
    a, _, wanted = queued_behind(client, runs=False)
    ended_ns = made.now_ns
    made.run()
    assert frames_of(client, a) > 0 and wanted not in client.replies
    made.advance(ended_ns + GRACE_MS * MS - 2 * MS - made.now_ns)
    made.run()
    assert frames_of(client, a) > 0 and wanted not in client.replies
    made.advance(2 * MS)
    made.run()
    assert tokens_of(client.result(wanted).tokens) == reference_tokens(prompt(2, 36), 2)
    assert frames_of(client, a) == 0


def test_a_shorter_time_counts_at_once() -> None:
    """For those whose turn has ended already, too: the device would be idle for the whole of the longer one."""
    made = system(grace_ms=60_000)
    client = made.connect()
    waits_once(client)
    a, _, wanted = queued_behind(client, runs=False)
    made.run()
    assert frames_of(client, a) > 0 and wanted not in client.replies, "B waits"
    client.call("sysctl", "wait.grace_ms", GRACE_MS)
    made.advance((GRACE_MS + 1) * MS)
    made.run()
    assert frames_of(client, a) == 0 and tokens_of(client.result(wanted).tokens) == reference_tokens(prompt(2, 36), 2)


def test_clients_that_never_wait_keep_nobody_waiting() -> None:
    made = system()
    client = made.connect()
    a, _, wanted = queued_behind(client, runs=False)
    made.run()
    assert wanted in client.replies and frames_of(client, a) == 0


@pytest.mark.parametrize("compute_ms, stays", [(1.0, False), (0.25, True)])
def test_what_is_loaded_sooner_than_computed_does_not_stay(compute_ms: float, stays: bool) -> None:
    """A's four frames come back from dram in 8 ms and take 16 or 4 ms to compute."""
    made = system(dram=40)
    client = made.connect()
    machine = made.kernel.machine
    for verb, ms in (("read", 1), ("write", 2)):
        machine.costs.link(0, verb).bytes_s = machine.costs.frame_bytes * 1000 / ms
    for n, c in ((4, 0), (8, 16), (16, 32), (32, 0), (2, 50)) * 100:
        machine.costs.prefill[0].seen(n, n * (c + n / 2), int(compute_ms * MS * n))
    waits_once(client)
    a, _, _ = queued_behind(client, runs=False)
    made.run()
    assert (frames_of(client, a) > 0) is stays


def test_nobody_who_runs_is_preempted_for_it() -> None:
    """A's turn has just ended and it holds 4 frames; C (4 tokens) and D (12) grow by 15 tokens each, to 5 frames and 7."""
    made = system()
    client = made.connect()
    waits_once(client)
    a, c, d = resting(client, 1, 16), resting(client, 3, 4), resting(client, 4, 12)
    client.call("generate", a, 1)
    requests = [(k, n, client.post("generate", ctx, 15)) for k, n, ctx in ((3, 4, c), (4, 12, d))]
    made.run()
    for k, n, request in requests:
        assert tokens_of(client.result(request).tokens) == reference_tokens(prompt(k, n), 15)
    assert made.kernel.machine.counters["preemptions_running"] == 0 and frames_of(client, a) == 0
