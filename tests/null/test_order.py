"""Calls that one client sends without waiting for answers take effect in the order in which it sent them.

A truncate has to wait while a pass of its context is in flight; what comes after it on that context must not overtake it.
"""

from __future__ import annotations

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel.calls import AppendArgs
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of


@pytest.fixture
def system() -> SimulatedSystem:
    return SimulatedSystem(core=Core, frames=32, block_tokens=4)


def busy(system: SimulatedSystem) -> tuple[SimulatedClient, int]:
    """A client and a context of six tokens with its prefill in flight."""
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.post("append", ctx, ints([1, 2, 3, 4, 5, 6]))
    assert system.sequences_pending == 1
    return client, ctx


def test_an_append_does_not_overtake_a_truncate(system: SimulatedSystem) -> None:
    client, ctx = busy(system)
    cut, added = client.post("truncate", ctx, 2), client.post("append", ctx, ints([7, 8]))
    last = client.post("append", ctx, ints([9]))
    system.run()
    assert client.result(cut).tokens == 2
    assert (client.result(added).tokens, client.result(last).tokens) == (4, 5)
    assert client.call("stat", ctx).tokens == 5
    assert tokens_of(client.call("generate", ctx, 5).tokens) == reference_tokens([1, 2, 7, 8, 9], 5)


def test_a_generation_does_not_overtake_a_truncate(system: SimulatedSystem) -> None:
    client, ctx = busy(system)
    cut, request = client.post("truncate", ctx, 3), client.post("generate", ctx, 4)
    refused = client.post("append", ctx, ints([1]))
    system.run()
    assert client.result(cut).tokens == 3
    assert tokens_of(client.result(request).tokens) == reference_tokens([1, 2, 3], 4)
    assert client.replies[refused].code == E.EBUSY, "by its turn the generation runs"


def test_forks_scores_and_forwards_see_what_was_cut_before_them(system: SimulatedSystem) -> None:
    client, ctx = busy(system)
    client.post("truncate", ctx, 3)
    forked, spawned = client.post("fork", ctx, 2), client.post("spawn", "child", 0, ctx)
    scored, asked = client.post("score", ctx, ints([9, 9])), client.post("forward", ctx, 3)
    system.run()
    made = (*client.result(forked).ctxs, client.result(spawned).ctx)
    assert [client.call("stat", child).tokens for child in made] == [3, 3, 3]
    assert len(client.result(scored).logprobs) == 8
    assert tokens_of(client.result(asked).tokens)[0] == reference_tokens([1, 2, 3], 1)[0]


def test_calls_that_wait_can_be_cancelled_and_die_with_their_context(system: SimulatedSystem) -> None:
    client, ctx = busy(system)
    cut, request = client.post("truncate", ctx, 3), client.post("generate", ctx, 4)
    client.post("cancel", request)
    assert client.replies[request].code == E.ECANCELED
    system.run()
    assert client.result(cut).tokens == 3 and client.call("stat", ctx).tokens == 3
    client.post("append", ctx, ints([4] * 9))
    cut, request = client.post("truncate", ctx, 3), client.post("generate", ctx, 4)
    client.call("release", ctx)
    assert client.replies[cut].code == client.replies[request].code == E.ESTALE
    system.run()
    assert not system.double_replies and system.available() == 32


def test_a_lost_pass_lets_them_go_on(system: SimulatedSystem) -> None:
    client, ctx = busy(system)
    cut, request = client.post("truncate", ctx, 3), client.post("generate", ctx, 4)
    system.kill_driver()
    system.run()
    assert client.result(cut).tokens == 3
    assert tokens_of(client.result(request).tokens) == reference_tokens([1, 2, 3], 4)


def test_a_disconnect_with_calls_that_wait(system: SimulatedSystem) -> None:
    client, ctx = busy(system)
    client.post("truncate", ctx, 3)
    client.post("generate", ctx, 4)
    system.disconnect(client)
    system.run()
    assert system.available() == 32 and not system.kernel.machine.contexts


def test_text_continues_the_log_as_it_will_be(system: SimulatedSystem) -> None:
    """`tail` is asked before the tokens of a text exist; it must not show what a waiting truncate takes away."""
    client, ctx = busy(system)
    assert system.kernel.tail(client.conn, AppendArgs(ctx), 2) == (6, ints([5, 6]))
    client.post("truncate", ctx, 3)
    assert system.kernel.tail(client.conn, AppendArgs(ctx), 2) == (3, ints([2, 3]))
    client.post("append", ctx, ints([7]))
    assert system.kernel.tail(client.conn, AppendArgs(ctx), 3) == (4, ints([2, 3, 7]))
    client.post("generate", ctx, 1)
    with pytest.raises(Errno) as error:
        system.kernel.tail(client.conn, AppendArgs(ctx), 2)
    assert error.value.code is E.EBUSY
    system.run()


def test_a_cancel_of_something_else_touches_no_call_that_runs(system: SimulatedSystem) -> None:
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.post("append", ctx, ints([1, 2, 3]))
    request = client.post("generate", ctx, 4)
    with pytest.raises(Errno) as error:
        client.call("cancel", request + 1000)
    assert error.value.code is E.ENOENT
    system.run()
    assert client.result(request).reason == "length"
