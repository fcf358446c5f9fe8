"""Requests that come in one piece share the first pass that they start, and nothing about them can leave the device idle."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from attnix.kernel.calls import AppendArgs, AppendResult, ForwardArgs, ForwardResult
from attnix.syscalls import abi, aconnect
from attnix.syscalls.client import Client
from attnix.syscalls.exceptions import InvalidArgument
from attnix.syscalls.records import pack_ids, unpack_ids

packb: Any = msgpack.packb  # its stubs say that it may return None

PROMPTS = [[number, 3, 1, 4, 1, 5] for number in range(8)]


def pack(*message: Any) -> bytes:
    return bytes(packb(list(message)))


def passes(client: Client) -> int:
    return client.vmstat().counters.get("passes", 0)


def alone(client: Client) -> list[list[int]]:
    """What is likeliest after each prompt, asked for one by one."""
    answers = []
    for prompt in PROMPTS:
        context = client.alloc_context()
        context.append(tokens=prompt)
        answers.append([token for token, _ in context.forward(3)])
        context.release()
    return answers


def test_a_round_of_requests_is_one_pass(serve: Any) -> None:
    client = serve(pass_ms=5).connect()
    contexts = [client.alloc_context() for _ in PROMPTS]
    before = passes(client)
    asked = [ForwardArgs(c.handle, 3, tokens=pack_ids(prompt)) for c, prompt in zip(contexts, PROMPTS, strict=True)]
    answers = [one.result() for one in client.submit_all("forward", asked, ForwardResult)]
    assert passes(client) == before + 1
    for context in contexts:
        context.release()
    assert [list(unpack_ids(answer.tokens)) for answer in answers] == alone(client)


@pytest.mark.parametrize("behind", ["nothing", "no message", "a wrong call", "text", "the end", "a truncated one"])
def test_whatever_comes_behind_them_they_are_computed(serve: Any, behind: str) -> None:
    served = serve(text_ms=20)
    raw = served.raw()
    raw.call(1, abi.BY_NAME["hello"].number, ["raw", 1])
    raw.read()
    number = {name: abi.BY_NAME[name].number for name in ("alloc_context", "append", "generate")}
    raw.call(2, number["alloc_context"], [])
    ctx = raw.read()[2][0]
    raw.call(3, number["alloc_context"], [])
    other = raw.read()[2][0]
    bodies = [pack(4, number["append"], [ctx, pack_ids(PROMPTS[1])]), pack(5, number["generate"], [ctx, 4])]
    if behind == "no message":
        bodies.append(b"\xc1")
    elif behind == "a wrong call":
        bodies.append(pack(6, 9999, []))
    elif behind == "text":
        bodies += [pack(6, number["append"], [other, b"", "some text"]), pack(7, number["generate"], [other, 2])]
    framed = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    if behind == "a truncated one":
        framed += (100).to_bytes(4, "little") + b"\x94"
    raw.socket.sendall(framed)
    if behind in ("the end", "a truncated one"):
        raw.socket.shutdown(1)
    answers: dict[int, Any] = {}
    wanted = {4, 5, 7} if behind == "text" else {4, 5}
    while not wanted <= answers.keys():
        message = raw.read()
        assert message is not None, answers
        answers[message[0]] = message
    assert answers[4][1] == answers[5][1] == 0
    assert len(unpack_ids(answers[5][2][1])) == 4
    raw.close()


def test_what_the_asynchronous_client_asks_in_one_turn_comes_in_one_piece(serve: Any) -> None:
    served = serve(pass_ms=5)
    with served.connect() as client:
        expected = alone(client)

    async def main() -> None:
        async with aconnect(served.path) as system:
            contexts = [await system.alloc_context() for _ in PROMPTS]
            before = (await system.vmstat()).counters["passes"]
            asked = [c.forward(3, tokens=prompt) for c, prompt in zip(contexts, PROMPTS, strict=True)]
            answers = await asyncio.gather(*asked)
            assert (await system.vmstat()).counters["passes"] == before + 1
            assert [[token for token, _ in answer] for answer in answers] == expected

    asyncio.run(asyncio.wait_for(main(), 30))


def test_nothing_that_was_asked_is_lost_when_the_client_closes_at_once(serve: Any) -> None:
    """As before it asked in pieces: a call that was sent is done, though nobody waits for its answer."""
    served = serve()

    async def main() -> None:
        async with aconnect(served.path) as system:
            context = await system.alloc_context()
            await context.publish("kept")
            asked = asyncio.ensure_future(system.append(context.handle, pack_ids([1, 2, 3])))
            await asyncio.sleep(0)  # it has begun, and what it sends is not on its way yet
        with pytest.raises(Exception, match="closed"):
            await asked

    asyncio.run(asyncio.wait_for(main(), 30))
    with served.connect() as client:
        context = client.open("kept")
        assert context.stat().tokens == 3
        client.unlink("kept")
        context.release()


def test_when_one_cannot_travel_none_is_sent(serve: Any) -> None:
    client = serve().connect()
    ctx = client.alloc_context().handle
    asked = [AppendArgs(ctx, pack_ids([1, 2])), AppendArgs(1 << 70, pack_ids([3]))]
    with pytest.raises(InvalidArgument):
        client.submit_all("append", asked, AppendResult)
    assert not client._pending, "nobody waits for what was never asked"
    assert client.stat(ctx).tokens == 0
