"""The asynchronous client against a real daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from attnix.syscalls import AsyncClient, ConnectionLost, aconnect, exceptions

from .turnstile import Turnstile


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


def test_many_streams_at_once(serve: Any) -> None:
    """32 forks stream over one connection; each equals what the blocking client gets alone."""
    served = serve(frames=400)
    with served.connect() as blocking:
        ctx = blocking.alloc_context()
        ctx.append("a shared beginning")
        expected = [x.generate(10, seed=n, temperature=1.0).text for n, x in enumerate(ctx.fork(32))]

    async def main() -> None:
        async with aconnect(served.path) as os:
            ctx = await os.alloc_context()
            await ctx.append("a shared beginning")

            async def one(n: int, context: Any) -> str:
                stream = context.generate(10, seed=n, temperature=1.0)
                text = "".join([note.text async for note in stream])
                assert (await stream).text == text
                return text

            got = await asyncio.gather(*[one(n, x) for n, x in enumerate(await ctx.fork(32))])
            assert got == expected

    run(main())


def test_objects_and_errors(serve: Any) -> None:
    served = serve(pass_ms=25)

    async def main() -> None:
        async with AsyncClient(served.path) as os:
            async with await os.alloc_context() as ctx:
                assert (await ctx.append("abc")).tokens == 3
                assert len(await ctx.forward(4)) == 4
                assert len(await ctx.score([1, 2])) == 2
                stream = ctx.generate(200)
                async for _ in stream:
                    stream.cancel()
                    break
                assert (await stream).reason == "cancelled"
                child = await os.spawn("child", fork_of=ctx)
                assert child.context is not None and (await child.context.stat()).tokens >= 4
                await child.kill()
                assert (await child.wait()).reason == "killed"
                with pytest.raises(exceptions.BadHandle):
                    await os.truncate(12345, 0)
            with pytest.raises(exceptions.StaleHandle):
                await ctx.stat()
            assert (await os.uname()).system == "attnix"

    run(main())


def test_a_wait_given_up_harms_nobody(serve: Any, turnstile: Turnstile) -> None:
    """A cancelled await does not end the generation, and its late answer meets no other request."""
    served = serve(turnstile=turnstile.path)

    async def main() -> None:
        async with aconnect(served.path) as os:
            ctx = await os.alloc_context()
            await ctx.append("abc")
            stream = ctx.generate(30)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.result(), 0.01)
            turnstile.let_all()
            task = asyncio.ensure_future(os.wait())
            await asyncio.sleep(0)
            task.cancel()
            assert (await stream).reason == "length"
            assert (await os.uname()).system == "attnix"

    run(main())


def test_a_daemon_that_goes_away(serve: Any) -> None:
    served = serve(pass_ms=50, fit=False)

    async def main() -> None:
        async with aconnect(served.path) as os:
            ctx = await os.alloc_context()
            await ctx.append("abc")
            stream = ctx.generate(100)
            async for _ in stream:
                break
            served.process.kill()
            with pytest.raises(ConnectionLost):
                await stream
            with pytest.raises(ConnectionLost):
                await os.uname()
        with pytest.raises(ConnectionLost, match="attnix boot"):
            await aconnect(served.path + "x").start()

    run(main())


@pytest.mark.parametrize("seconds", [-0.5, float("nan"), float("inf")])
def test_an_eta_that_is_no_time_from_now_is_refused(serve: Any, seconds: float) -> None:
    """By both clients, before anything is sent."""
    served = serve()
    with served.connect() as blocking, pytest.raises(ValueError, match="seconds from now"):
        blocking.alloc_context().wait_tool("search", eta=seconds)

    async def main() -> None:
        async with aconnect(served.path) as system:
            context = await system.alloc_context()
            with pytest.raises(ValueError, match="seconds from now"):
                await context.wait_tool("search", deadline=seconds)

    run(main())


async def test_a_refusal_that_is_there_before_hello_was_sent(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon refuses another user's connection as it is made: whoever connects hears of it, whatever comes first."""
    served = serve(uid=4242, fit=False)
    loop = asyncio.get_running_loop()
    connected = loop.create_unix_connection

    async def refused_first(factory: Any, path: str) -> Any:
        made: Any = await connected(factory, path)
        while made[1].lost is None:
            await asyncio.sleep(0)
        return made

    monkeypatch.setattr(loop, "create_unix_connection", refused_first)
    with pytest.raises(ConnectionLost, match="you are uid 4242"):
        await asyncio.wait_for(aconnect(served.path).start(), 20)
