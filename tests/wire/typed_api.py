"""What a type checker must know of the clients.  Checked, not run: test_typed_api.py, and `make check`."""

from __future__ import annotations

from typing import assert_type

import attnix.syscalls as attnix
from attnix.syscalls import types as t


def blocking() -> None:
    with attnix.connect() as os:
        assert_type(os, attnix.Client)
        ctx = os.alloc_context()
        assert_type(ctx, attnix.Context)
        assert_type(ctx.append("text"), t.AppendResult)
        ctx.append(tokens=[1, 2, 3])
        ctx.append(messages=[("user", "hello"), {"role": "assistant", "content": "hi"}, t.Message("user", "more")])
        a, b = ctx.fork(2)
        assert_type(a, attnix.Context)
        assert_type(a.generate(max_tokens=20, temperature=0.5, stop="x"), t.GenerateResult)
        assert_type(a.generate(20, stop=("x", "y")).text, str)
        stream = b.stream(20, seed=3)
        assert_type(stream, attnix.Stream)
        for note in stream:
            assert_type(note, t.TokensNote)
        assert_type(stream.result(), t.GenerateResult)
        assert_type(ctx.forward(), list[tuple[int, float]])
        assert_type(ctx.score([1]), list[float])
        assert_type(os.uname().devices, tuple[str, ...])
        assert_type(os.ps().processes[0].contexts[0], t.ContextRow)
        assert_type(os.kill(3), None)
        assert_type(os.spawn("child", fork_of=ctx).context, attnix.Context | None)
        assert_type(os.sys.alloc_context(), t.AllocContextResult)
        assert_type(os.open("name", fork=True), attnix.Context)
        assert_type(os.names().rows, tuple[t.NameRow, ...])
        assert_type(os.snapshot("s", [ctx, a]), t.SnapshotResult)
        assert_type(os.restore("s"), list[attnix.Context])
        assert_type(ctx.publish("name"), None)
        assert_type(ctx.reattach([1, 2]), attnix.Stream)
        assert_type(os.prefetch(ctx.handle, "hbm"), t.MovedResult)
        assert_type(os.server.contexts, tuple[t.KeptRow, ...])
        assert_type(os.submit("uname", t.Empty(), t.UnameResult), attnix.Pending[t.UnameResult])


async def asynchronous() -> None:
    async with attnix.aconnect() as os:
        assert_type(os, attnix.AsyncClient)
        ctx = await os.alloc_context()
        assert_type(ctx, attnix.AsyncContext)
        (a,) = await ctx.fork()
        stream = a.generate(20, top_k=3)
        assert_type(stream, attnix.AsyncStream)
        async for note in stream:
            assert_type(note, t.TokensNote)
        assert_type(await stream, t.GenerateResult)
        assert_type(await ctx.append("x"), t.AppendResult)
        assert_type(await os.sys.spawn(), t.SpawnResult)
        assert_type(await os.open("name"), attnix.AsyncContext)
        assert_type(await os.restore("s"), list[attnix.AsyncContext])
        assert_type(ctx.reattach(), attnix.AsyncStream)
        assert_type((await os.tiers()).tiers, tuple[t.TierRow, ...])
        assert_type(await os.kill(3), None)


def errors() -> None:
    try:
        blocking()
    except attnix.SyscallError as error:
        assert_type(error.errno, int)
        assert_type(error.detail, dict[str, object])
