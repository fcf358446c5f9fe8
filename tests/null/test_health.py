"""`health`: the numbers that a diagnosis needs, and who may see which."""

from __future__ import annotations

from itertools import pairwise

from attnix.kernel.calls import HealthResult
from attnix.kernel.cost import Link
from attnix.kernel.errors import Errno
from attnix.kernel.params import HEAD_TOKENS, HEADS, LINK_SETTLES, SAMPLE_NS, SAMPLES
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of

MS = 1_000_000


def ask(client: SimulatedClient, prompt: list[int], answer: int = 4) -> int:
    """A context that has answered: its handle."""
    ctx = int(client.call("alloc_context").ctx)
    client.call("append", ctx, ints(prompt))
    client.call("generate", ctx, answer)
    return ctx


def health(client: SimulatedClient) -> HealthResult:
    found = client.call("health")
    assert isinstance(found, HealthResult)
    return found


def test_heads_of_live_and_of_released_contexts_are_the_prompts_without_the_answers() -> None:
    system = SimulatedSystem(frames=20)
    client = system.connect()
    first = ask(client, [1, 2, 3, 4, 5])
    ask(client, [1, 2, 3, 9])
    client.call("release", first)
    rows = health(client).heads
    assert [(tokens_of(r.head), r.prompt_tokens, r.tokens, r.live) for r in rows] == [
        ([1, 2, 3, 4, 5], 5, 9, False),
        ([1, 2, 3, 9], 4, 8, True),
    ]
    assert {r.domain for r in rows} == {"uid:1000"}


def test_forks_and_contexts_that_nobody_asked_are_not_prompts() -> None:
    system = SimulatedSystem(frames=20)
    client = system.connect()
    ctx = ask(client, [1, 2, 3])
    (child,) = client.call("fork", ctx, 1).ctxs
    client.call("generate", child, 2)
    unasked = client.call("alloc_context").ctx
    client.call("append", unasked, ints([7, 7, 7]))
    assert [tokens_of(r.head) for r in health(client).heads] == [[1, 2, 3]]


def test_heads_are_cut_and_the_oldest_go_first() -> None:
    long = list(range(200)) * (HEAD_TOKENS // 200 + 1)
    system = SimulatedSystem(frames=400, window_tokens=2048, max_contexts=32, check=False)
    client = system.connect()
    ask(client, long)
    (row,) = health(client).heads
    assert (len(row.head), row.prompt_tokens) == (4 * HEAD_TOKENS, len(long))
    for number in range(HEADS):
        client.call("release", ask(client, [number, 1], 1))
    client.call("release", ask(client, [HEADS, 1], 1))
    *gone, live = health(client).heads
    assert [tokens_of(r.head)[0] for r in gone] == list(range(1, HEADS + 1))
    assert len(tokens_of(live.head)) == HEAD_TOKENS
    assert [tokens_of(r.head)[0] for r in client.call("health", 1).heads] == [HEADS, 0]
    assert client.call("health", 0).heads == ()


def test_a_prompt_is_told_to_its_own_uid_only_and_the_machines_numbers_to_its_administrator() -> None:
    system = SimulatedSystem(frames=20)  # its owner is uid 1000
    owner, other = system.connect(), system.connect(uid=2000)
    ask(owner, [1, 2, 3])
    ask(other, [4, 5, 6, 7])
    seen = health(owner)
    assert [(tokens_of(r.head), r.prompt_tokens) for r in seen.heads] == [([1, 2, 3], 3), ([], 4)]
    assert seen.samples and seen.holdings
    theirs = health(other)
    assert [tokens_of(r.head) for r in theirs.heads] == [[4, 5, 6, 7]]
    assert (theirs.samples, theirs.links, theirs.tools, theirs.holdings) == ((), (), (), ())
    root = health(system.connect(uid=0))
    assert [tokens_of(r.head) for r in root.heads] == [[], []]


def test_samples_are_a_second_apart_and_the_last_is_of_now() -> None:
    system = SimulatedSystem(frames=20)
    client = system.connect()
    before = len(health(client).samples)
    ask(client, [1, 2, 3], 5)
    assert len(health(client).samples) == before  # no second has passed
    system.advance(SAMPLE_NS)
    client.call("vmstat")  # a sample is taken at the end of a step
    assert len(health(client).samples) == before + 1
    samples = health(client).samples
    assert (samples[-1].computed_tokens, samples[-1].generated_tokens) == (
        8,
        5,
    )  # the prompt, its last token again, 4 more
    assert samples[-1].free_frames + samples[-1].reclaimable_frames == 20 - 2  # 7 tokens in blocks of 4
    for _ in range(SAMPLES + 5):
        system.advance(SAMPLE_NS)
        client.call("vmstat")
    assert len(health(client).samples) == SAMPLES + 1
    times = [s.at_ns for s in health(client).samples[:-1]]
    assert min(b - a for a, b in pairwise(times)) >= SAMPLE_NS


def test_a_link_is_compared_with_what_its_driver_measured() -> None:
    link = Link()
    link.measured(1e9, 0.0)  # a byte per ns
    for _ in range(40):
        link.seen(1000, 4000, 2)  # a quarter of that
    assert link.first_bytes_s == 1e9
    assert round(link.bytes_s / 1e6) == 250
    assert link.late_ns == 40 * 3000


def test_a_link_that_nobody_measured_is_compared_with_its_first_transfers() -> None:
    link = Link()
    for _ in range(LINK_SETTLES):
        assert link.first_bytes_s == 0
        link.seen(1000, 1000, 2)
    assert link.first_bytes_s == 1e9
    link.seen(1000, 1500, 2)
    assert link.late_ns == 500


def test_links_of_which_something_is_known_are_listed_with_their_device() -> None:
    system = SimulatedSystem(frames=6, dram=20, nvme=20)
    link = system.kernel.machine.costs.link(2, "read")
    link.measured(5e9, 1000.0)
    link.seen(4000, 2000, 2)  # 0.8 us at that speed, and 1 us before it begins
    (row,) = health(system.connect()).links
    assert (row.device, row.verb, row.first_bytes_s, row.moves, row.late_ns) == ("nvme0", "read", 5 * 10**9, 1, 200)


def test_holdings_add_up_to_the_device() -> None:
    system = SimulatedSystem(frames=20)
    client = system.connect()
    idle, waiting, pinned, gone = (ask(client, [n, *range(7)], 1) for n in range(4))  # 8 tokens in hbm: 2 frames each
    client.call("wait_tool", waiting, "search")
    client.call("pin", pinned, 10_000)
    client.call("release", gone)
    client.call("stat", idle)
    (row,) = health(client).holdings
    assert (row.idle_frames, row.tool_frames, row.pinned_frames, row.cache_frames, row.running_frames) == (
        4,
        2,
        2,
        2,
        0,
    )
    assert row.free_frames == 20 - 8
    running = client.call("alloc_context").ctx
    client.call("append", running, ints([9] * 8))
    client.post("generate", running, 30)
    system.tick()
    (row,) = health(client).holdings
    assert row.running_frames >= 2
    held = (
        row.free_frames + row.cache_frames + row.running_frames + row.waiting_frames + row.idle_frames + row.tool_frames
    )
    assert held == row.capacity_frames == 20


def test_tools_tell_how_wrong_their_etas_were() -> None:
    system = SimulatedSystem(frames=20)
    client = system.connect()
    ctx = ask(client, [1, 2, 3])
    for took_ms in (
        200,
        300,
        300,
        400,
        400,
        400,
        800,
        100 * 100,
    ):  # said to be 100 ms; the last is wrong beyond all measure
        wait = client.call("wait_tool", ctx, "build", 100).wait
        system.advance(took_ms * MS)
        client.call("resume", ctx, wait, ints([5]))
    (tool,) = health(client).tools
    assert (tool.tool, tool.calls, tool.etas, tool.absurd, tool.absent) == ("build", 8, 7, 1, 0)
    quartiles = (tool.ratio_p25_permille, tool.ratio_p50_permille, tool.ratio_p75_permille)
    assert [round(q / 1000) for q in quartiles] == [3, 4, 4]


def test_an_answer_that_finds_no_frame_is_counted_with_its_tool() -> None:
    system = SimulatedSystem(frames=8)
    client = system.connect()
    ctx = ask(client, [1, 2, 3, 4])
    wait = client.call("wait_tool", ctx, "build").wait
    client.call("evict", ctx)
    client.call("resume", ctx, wait, ints([5]))
    (tool,) = health(client).tools
    assert tool.absent == 1


def test_max_admitted_limits_how_many_contexts_run_at_once() -> None:
    for most, expected in ((0, 4), (2, 2)):
        system = SimulatedSystem(frames=60, sysctl={"sched.max_admitted": most})
        client = system.connect()
        asked = []
        for number in range(4):
            ctx = client.call("alloc_context").ctx
            client.post("append", ctx, ints([number, 1, 2]))
            asked.append(client.post("generate", ctx, 12))
        widest = 0
        while not all(request in client.replies for request in asked):
            scheduler = system.kernel.machine.schedulers[0]
            widest = max(widest, scheduler.active())
            assert system.tick()
        assert widest == expected
        assert all(len(tokens_of(client.result(request).tokens)) == 12 for request in asked)


def test_max_admitted_has_bounds() -> None:
    client = SimulatedSystem().connect()
    try:
        client.call("sysctl", "sched.max_admitted", -1)
    except Errno as error:
        assert error.code.name == "EINVAL"
    else:
        raise AssertionError("a negative number was taken")
