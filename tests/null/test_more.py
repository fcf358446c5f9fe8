"""`append` and `resume` with `more`: nothing is begun until the call that computes, which takes the tokens along in its pass."""

from __future__ import annotations

from typing import Any

import pytest

from attnix.drivers.sim_model import reference_distribution
from attnix.simulated import SimulatedClient, SimulatedSystem, ints
from attnix.syscalls.records import unpack_ids

from .small import PROMPT, small

ANSWER = [7, 11]


def passes(system: SimulatedSystem) -> int:
    return system.kernel.machine.counters.get("passes", 0)


def best(log: list[int], n: int) -> list[int]:
    said: list[int] = []
    for _ in range(n):
        said.append(reference_distribution([*log, *said]).tokens[0])
    return said


def generated(system: SimulatedSystem, client: SimulatedClient, ctx: int, n: int) -> list[int]:
    asked = client.post("generate", ctx, n)
    system.run()
    return list(unpack_ids(client.result(asked).tokens))


@pytest.mark.parametrize(("more", "ran", "computed"), [(True, 4, 9 + 3), (False, 5, 9 + 3 + 1)])
def test_a_prompt_and_its_answer_take_a_pass_less(more: bool, ran: int, computed: int) -> None:
    """Counted by hand: the prompt's pass samples the first of 4 tokens, three more follow; begun at once, the prompt has a
    pass of its own, and its last token another, which samples."""
    system = small()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    assert client.call("append", ctx, ints(PROMPT), "", (), more)[:2] == (9, 9)
    assert generated(system, client, ctx, 4) == best(PROMPT, 4)
    assert passes(system) == ran
    assert client.call("stat", ctx).usage.computed_tokens == computed


def test_a_tools_answer_and_what_is_said_to_it_take_one_pass() -> None:
    system = small()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(PROMPT))
    log = [*PROMPT, *generated(system, client, ctx, 2)]
    client.call("wait_tool", ctx, "grep", 1000, 5000)
    before = passes(system)
    assert client.call("resume", ctx, 0, ints(ANSWER), "", (), 0, True)[:2] == (len(log) + 2, 2)
    system.run()
    assert passes(system) == before, "nobody has asked for anything yet"
    assert generated(system, client, ctx, 1) == best([*log, *ANSWER], 1)
    assert passes(system) == before + 1


@pytest.mark.parametrize("name", ["forward", "score", "fork", "append", "wait_tool", "demote", "truncate", "release"])
def test_whatever_comes_next_finds_the_whole_log(name: str) -> None:
    system = small(dram=32)
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(PROMPT), "", (), True)
    log = list(PROMPT)
    rest: dict[str, tuple[Any, ...]] = {
        "append": (ints(ANSWER),),
        "wait_tool": ("grep",),
        "truncate": (5,),
        "score": (ints(ANSWER),),
    }
    asked = client.post(name, ctx, *rest.get(name, ()))
    system.run()
    result = client.result(asked)
    if name == "forward":
        assert list(unpack_ids(result.tokens))[:3] == reference_distribution(log).tokens[:3]
    elif name == "score":
        assert len(result.logprobs) // 4 == len(ANSWER)
    elif name == "fork":
        (other,) = result.ctxs
        assert generated(system, client, other, 3) == best(log, 3)
    elif name == "append":
        log += ANSWER
    elif name == "wait_tool":
        client.call("resume", ctx)
    elif name == "truncate":
        log = log[:5]
    if name == "release":
        assert system.available() == system.frames
    else:
        assert generated(system, client, ctx, 3) == best(log, 3)


def test_a_prompt_that_waits_for_more_joins_one_that_runs() -> None:
    """The first append begins a pass; what is added meanwhile is computed behind it, with `more` or without."""
    system = small()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(PROMPT))
    client.call("append", ctx, ints(ANSWER), "", (), True)
    assert generated(system, client, ctx, 3) == best([*PROMPT, *ANSWER], 3)
