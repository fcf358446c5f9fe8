"""Prefix sharing, counted where the work is done: at the simulated driver."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of


def new_context(client: SimulatedClient, prompt: list[int]) -> int:
    ctx: int = client.call("alloc_context").ctx
    client.call("append", ctx, ints(prompt))
    return ctx


def test_classroom_hits_misses_and_evictions_counted_by_hand() -> None:
    """A pool of 12 blocks of 4; four prompts share an 8-token system prompt; released; a flood; the shared prompt again.

    By hand.  Each prompt is 8 shared + 4 own tokens: 3 blocks.  First prompt: 3 misses.  The others: 2 hits, 1 miss.
    So 6 blocks are cached (2 shared + 4 own), after 6 misses and 6 hits.  The flood: 5 prompts of 8 unrelated tokens, 2 blocks each, released one by one.
    The first three take the 6 free frames (no eviction).  The 4th and 5th need 2 frames each: 4 evictions, least
    recently released first.  Release order was prompt 0..3, each deepest first, and a shared block is released only by
    its last holder, prompt 3.  So the ring holds own0, own1, own2, own3, shared1, shared0, then the flood's: the own
    blocks of all four prompts go, the shared ones stay.  The shared prompt again: 2 hits.
    """
    system = SimulatedSystem(
        core=Core, frames=12, block_tokens=4, window_tokens=64, sysctl={"sched.watermark_permille": 0}
    )
    client = system.connect()
    shared = [7, 1, 4, 1, 5, 9, 2, 6]
    contexts = []
    for own in range(4):
        contexts.append(new_context(client, [*shared, 100 + own, 1, 2, 3]))
        system.run()
    counts = system.core.counters()
    assert (counts.lookup_hits, counts.lookup_misses, counts.evictions) == (6, 6, 0)
    assert sum(n for _, _, n in system.devices[0].computed) == 12 + 3 * 4
    for ctx in contexts:
        client.call("release", ctx)
    assert system.core.free_frames(0) == 6 and system.core.reclaimable_frames(0) == 6
    for flood in range(5):
        ctx = new_context(client, [200 + flood, 9, 9, 9, 8, 8, 8, 8])
        system.run()
        client.call("release", ctx)
    assert system.core.counters().evictions == 4
    before = system.core.counters()
    again = new_context(client, shared)
    system.run()
    after = system.core.counters()
    assert after.lookup_hits - before.lookup_hits == 2
    assert after.evictions == 4
    assert client.call("stat", again).usage.hit_tokens == 8
    system.disconnect(client)
    assert system.available() == 12


def test_a_hundred_identical_prompts_cost_one_prefill() -> None:
    system = SimulatedSystem(core=Core, frames=512, block_tokens=4, window_tokens=128, max_contexts=128, check=False)
    client = system.connect()
    prompt = [n % 251 for n in range(66)]  # 16 full blocks and 2 tokens in a private tail
    contexts = [client.call("alloc_context").ctx for _ in range(100)]
    requests = []
    for ctx in contexts:
        client.post("append", ctx, ints(prompt))
        requests.append(client.post("generate", ctx, 3))
    system.run()
    expected = reference_tokens(prompt, 3)
    for request in requests:
        assert tokens_of(client.result(request).tokens) == expected
    prefill = [(c, start, n) for c, start, n in system.devices[0].computed if start < 64]
    assert sum(min(n, 64 - start) for _, start, n in prefill) == 64, "full blocks are computed once, by one context"
    # everything else: two tail tokens and two decoded ones per context; and the first context's prompt was on its way
    # before its generate arrived, so its last token runs once more for its logits
    assert system.devices[0].computed_tokens == 64 + 100 * (2 + 2) + 1
    assert not system.kernel.fsck()


def test_a_waiting_twin_takes_over_when_the_filler_is_killed() -> None:
    system = SimulatedSystem(core=Core, frames=32, block_tokens=4, sysctl={"sched.step_tokens": 8})
    client = system.connect()
    child = client.call("spawn", "filler")
    first = client.call("alloc_context", child.pid).ctx
    prompt = list(range(40))
    client.post("append", first, ints(prompt))
    second = client.call("alloc_context").ctx
    client.post("append", second, ints(prompt))
    request = client.post("generate", second, 4)
    system.tick()
    client.call("kill", child.pid, 9)
    system.run()
    assert tokens_of(client.result(request).tokens) == reference_tokens(prompt, 4)
    assert system.devices[0].computed_tokens <= 40 + 4 + 8


@pytest.mark.parametrize("hash_bits", [0, 3, 128])
def test_a_broken_key_function_is_caught_and_serves_nothing_wrong(hash_bits: int) -> None:
    system = SimulatedSystem(core=Core, frames=64, block_tokens=4, hash_bits=hash_bits)
    client = system.connect()
    for n in range(12):
        prompt = [n] * 9
        ctx = new_context(client, prompt)
        assert tokens_of(client.call("generate", ctx, 5).tokens) == reference_tokens(prompt, 5)
        client.call("release", ctx)
    caught = system.core.counters().collisions
    assert caught > 0 if hash_bits < 128 else caught == 0


def test_tenants_share_nothing_and_each_hits_itself() -> None:
    system = SimulatedSystem(core=Core, frames=64, block_tokens=4)
    prompt = list(range(16))
    for uid in (1001, 1002):
        client = system.connect(uid)
        for expected_hits in (0, 16):
            ctx = new_context(client, prompt)
            client.call("generate", ctx, 1)
            assert client.call("stat", ctx).usage.hit_tokens == expected_hits, f"uid {uid}"
            client.call("release", ctx)


def test_case_6_double_release_is_an_error_and_frees_once() -> None:
    system = SimulatedSystem(core=Core, frames=12, block_tokens=4)
    client = system.connect()
    ctx = new_context(client, list(range(9)))
    system.run()
    twin = client.call("fork", ctx).ctxs[0]  # names the same frames
    client.call("release", ctx)
    with pytest.raises(Errno) as error:
        client.call("release", ctx)
    assert error.value.code is E.ESTALE and "no such context" in str(error.value)
    client.call("release", twin)
    assert system.available() == 12
    everything = new_context(client, list(range(100, 148)))
    system.run()
    frames = array("i", client.call("pagemap", everything).frames)
    assert sorted(frames) == list(range(12)), "all frames distinct, none lost"


def test_case_8_side_by_side_prefills_then_a_flood() -> None:
    """A and B prefill the same blocks side by side; A is released; C fills every frame it can get; B must not notice."""
    system = SimulatedSystem(core=Core, frames=8, block_tokens=4, sysctl={"sched.watermark_permille": 0})
    client = system.connect()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    a, b = client.call("alloc_context").ctx, client.call("alloc_context").ctx
    for ctx in (a, b):
        client.post("append", ctx, ints(prompt))
    system.run()
    client.call("release", a)
    c = new_context(client, [77] * 20)
    request = client.post("generate", b, 8)
    system.run()
    mapped = set(array("i", client.call("pagemap", b).frames))
    assert not mapped & set(array("i", client.call("pagemap", c).frames)) - {-1}
    assert tokens_of(client.result(request).tokens) == reference_tokens(prompt, 8)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 48])
def test_prompt_lengths_around_block_edges_and_the_whole_pool(length: int) -> None:
    """48 tokens are exactly the pool; one token can still be sampled, since it needs no frame."""
    system = SimulatedSystem(core=Core, frames=12, block_tokens=4, window_tokens=64)
    client = system.connect()
    prompt = [(5 * n) % 256 for n in range(length)]
    ctx = new_context(client, prompt)
    result = client.call("generate", ctx, 5)
    room = 48 + 1 - length
    assert tokens_of(result.tokens) == reference_tokens(prompt, min(5, room))
    assert result.reason == "length"
    warm = new_context(client, prompt)
    assert tokens_of(client.call("generate", warm, min(5, room)).tokens) == reference_tokens(prompt, min(5, room))


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    system = SimulatedSystem(core=Core, frames=12, block_tokens=4, window_tokens=64)
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    with pytest.raises(Errno) as error:
        client.call("append", ctx, ints([1] * 49))
    assert error.value.code is E.E2BIG
    assert (error.value.detail["wanted"], error.value.detail["limit"]) == (49, 48)
    with pytest.raises(Errno) as error:
        client.call("append", ctx, ints([1] * 65))
    assert (error.value.detail["wanted"], error.value.detail["limit"]) == (65, 64)
    with pytest.raises(Errno) as error:
        client.call("generate", ctx, 4)
    assert error.value.code is E.EINVAL, "nothing was appended: the context is still empty"


@given(
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=30),
    chunk=st.integers(1, 40),
    others=st.integers(0, 4),
    fork_at=st.integers(0, 29),
    squeeze=st.booleans(),
)
def test_same_tokens_cold_cached_forked_chunked_batched_preempted(
    prompt: list[int], chunk: int, others: int, fork_at: int, squeeze: bool
) -> None:
    frames = 9 if squeeze else 64
    system = SimulatedSystem(
        core=Core, frames=frames, block_tokens=4, window_tokens=36, sysctl={"sched.step_tokens": chunk}, check=False
    )
    client = system.connect()
    expected = reference_tokens(prompt, 6)
    base = client.call("alloc_context").ctx
    client.post("append", base, ints(prompt[:fork_at]))
    forked = client.call("fork", base).ctxs[0]
    streams = [(forked, prompt[fork_at:])]
    for n in range(others):
        streams.append((client.call("alloc_context").ctx, prompt if n % 2 else [n, *prompt[1:]]))
    requests = []
    for ctx, rest in streams:
        client.post("append", ctx, ints(rest))
        requests.append((client.post("generate", ctx, 6), ctx))
    system.run()
    assert tokens_of(client.result(requests[0][0]).tokens) == expected
    for n, (request, _) in enumerate(requests[1:]):
        want = expected if n % 2 else reference_tokens([n, *prompt[1:]], 6)
        assert tokens_of(client.result(request).tokens) == want
    assert not system.kernel.fsck()


def test_control_altering_any_mapped_block_changes_the_stream() -> None:
    """Without this, "same tokens" would pass on a model that ignores its KV."""
    prompt = list(range(20, 33))
    expected = reference_tokens(prompt, 4)
    for entry in range(4):
        system = SimulatedSystem(core=Core, frames=12, block_tokens=4)
        client = system.connect()
        ctx = new_context(client, prompt)
        system.run()
        frame = array("i", client.call("pagemap", ctx).frames)[entry]
        system.devices[0].frame(frame)[0] ^= 1
        assert tokens_of(client.call("generate", ctx, 4).tokens) != expected, f"entry {entry} is not read"


def test_a_context_as_large_as_the_pool_whose_tail_must_be_copied_first() -> None:
    """Truncated into an indexed block, then grown to exactly the pool: the copy would need a tenth frame of nine."""
    system = SimulatedSystem(core=Core, frames=9, block_tokens=4, window_tokens=64)
    client = system.connect()
    prompt = list(range(28))
    ctx = new_context(client, prompt)
    system.run()
    client.call("truncate", ctx, 25)
    more = list(range(100, 111))
    client.call("append", ctx, ints(more))
    assert tokens_of(client.call("generate", ctx, 1).tokens) == reference_tokens(prompt[:25] + more, 1)
