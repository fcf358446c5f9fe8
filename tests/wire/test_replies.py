"""One reply per request in every path (I9), order on a connection, and what the daemon does when the kernel is wrong."""

from __future__ import annotations

import subprocess
from typing import Any

import msgpack
import pytest

from attnix.kernel import calls as c
from attnix.kernel.errors import E
from attnix.syscalls import ConnectionLost, abi, connect, exceptions
from attnix.syscalls.session import Session

pack: Any = msgpack.packb  # its stubs say that it may return None

N = {call.name: call.number for call in abi.CALLS}


def test_pipelined_text_then_generate(serve: Any) -> None:
    """append(text), append(messages), generate, sent at once: each sees what came before it."""
    client = serve(text_ms=30).connect()
    ctx = client.alloc_context()
    first = client.submit("append", c.AppendArgs(ctx.handle, text="abc"), c.AppendResult)
    second = client.submit("append", c.AppendArgs(ctx.handle, messages=(c.Message("u", "hi"),)), c.AppendResult)
    third = client.submit("generate", c.GenerateArgs(ctx.handle, 4, stream=False), c.GenerateResult)
    fourth = client.submit("uname", c.Empty(), c.UnameResult)
    assert not fourth.done
    assert fourth.result().system == "attnix"
    assert first.done and second.done, "a request behind a text job waits for it"
    assert (first.result(), second.result()) == (c.AppendResult(3, 3), c.AppendResult(8, 5))
    assert third.result().tokens_total == 12


def test_case_44_a_reused_id_is_never_hit_by_a_late_abort(serve: Any) -> None:
    """Abort request X and at once send X again, 100 times; and X twice at once: its duplicate cannot be taken for its answer."""
    served = serve(frames=256, window_tokens=1024)
    raw, x = served.raw(), 7
    raw.call(1, N["hello"], ["t", 2])
    raw.read()
    raw.call(2, N["alloc_context"], [])
    ctx = raw.read()[2][0]
    raw.call(3, N["append"], [ctx, b"\1\0\0\0" * 3])
    raw.read()
    length, other, cancelled = 3, 100, 0
    for _ in range(100):
        long = [ctx, 500, *[0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 0, [], b"", True, False]]
        raw.send(pack([x, N["generate"], long]), pack([x, N["uname"], []]))  # the same id, still outstanding
        raw.call(other, N["cancel"], [x])
        raw.call(other + 1, N["cancel"], [x])  # late: X has ended by then, or ends once
        answers = [raw.read() for _ in range(4)]
        by_id = {answer[0]: answer for answer in answers}
        assert by_id[0][1] == E.EINVAL and by_id[0][2]["request"] == x
        assert by_id[x][1] == 0 and by_id[x][2][0] in ("cancelled", "length")
        cancelled += by_id[x][2][0] == "cancelled"
        assert by_id[other][1] == (0 if by_id[x][2][0] == "cancelled" else E.ENOENT)
        assert by_id[other + 1][1] in (0, E.ENOENT)
        assert by_id[x][2][4] == length + len(by_id[x][2][1]) // 4
        length = by_id[x][2][4]
        raw.call(x, N["generate"], [ctx, 1, *[0.0, 0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 0, [], b"", True, False]])
        answer = raw.read()
        assert (answer[0], answer[1], answer[2][0]) == (x, 0, "length"), "the new X is whole"
        length += 1
        other += 2
        if length > 800:
            raw.call(other, N["truncate"], [ctx, 3])
            raw.read()
            length, other = 3, other + 1
    assert cancelled > 50, "all but those before which the machine was held up"


def test_other_connections_do_not_wait_for_a_text_job(serve: Any) -> None:
    served = serve(text_ms=400)
    slow, quick = served.connect(), served.connect()
    job = slow.submit("append", c.AppendArgs(slow.alloc_context().handle, text="abc"), c.AppendResult)
    for _ in range(50):
        quick.uname()
    assert slow.uname() and job.done  # and behind it on its own connection one does
    assert job.result().appended == 3


def test_text_that_cannot_be_done_is_one_errno(serve: Any) -> None:
    client = serve().connect()
    with client.alloc_context() as ctx:
        with pytest.raises(exceptions.InvalidArgument, match="refuses"):
            ctx.append("!refuse")
        with pytest.raises(exceptions.InvalidArgument, match="exactly one") as caught:
            ctx.append("a", tokens=[1])
        assert caught.value.detail["field"] == "text"
        assert ctx.stat().tokens == 0, "nothing was done"
        ctx.append("x" * 200)
        with pytest.raises(exceptions.TooBig) as too_big:
            ctx.append("x" * 57)
        assert too_big.value.detail["wanted"] == 257 and too_big.value.detail["limit"] == 256
    with pytest.raises(exceptions.StaleHandle):
        ctx.append("late")


def test_text_while_generating_is_busy_at_once(serve: Any) -> None:
    client = serve(pass_ms=50, text_ms=300).connect()
    with client.alloc_context() as ctx:
        ctx.append(tokens=[1])
        stream = ctx.stream(100)
        next(iter(stream))
        with pytest.raises(exceptions.Busy):
            ctx.append("more")
        assert not stream.done
        stream.cancel()
        assert stream.result().reason == "cancelled"


def test_a_kernel_that_answers_twice_is_answered_for_once(serve: Any) -> None:
    served = serve(misbehave="reply twice", fit=False)
    client = served.raw()
    client.send(*[pack([n, N["fsck"], []]) for n in range(1, 6)], pack([9, N["uname"], []]))
    assert [client.read()[0] for _ in range(6)] == [1, 2, 3, 4, 5, 9]
    assert len(served.complaints()) == 5 and "second reply" in served.complaints()[0]


def test_an_undeclared_errno_is_complained_of(serve: Any) -> None:
    """This is what makes every test of this folder an errno walk: `fit` finds such lines."""
    served = serve(misbehave="undeclared errno", fit=False)
    client = served.raw()
    client.call(3, N["fsck"], [])
    assert client.read() == [3, E.ENOSPC, {"message": "made up"}]
    assert served.complaints() == ["fsck returned errno 28, which its ABI entry does not declare"]


def test_a_panic_stops_the_daemon_and_everybody_is_told(tmp_path: Any, serve: Any, capfd: Any) -> None:
    served = serve(misbehave="panic", pass_ms=50, fit=False)
    other = served.connect()
    ctx = other.alloc_context()
    ctx.append(tokens=[1])
    stream = ctx.stream(100)
    seen = next(iter(stream)).text
    client = served.raw()
    client.call(3, N["fsck"], [])
    assert client.read()[:2] == [3, E.ECANCELED]
    assert client.read() is None
    result = stream.result()
    assert result.reason == "killed" and result.tokens
    assert result.text == seen + "".join(note.text for note in stream)
    assert served.process.wait(20) == 70
    said = capfd.readouterr().err
    assert "panic" in said and "made up" in said and "fsck" in said
    with pytest.raises(ConnectionLost):
        other.uname()


def test_errors_carry_their_detail(serve: Any) -> None:
    served = serve()
    client, stranger = served.connect(), served.connect()
    ctx = client.alloc_context()
    with pytest.raises(exceptions.BadHandle) as bad:
        stranger.fork(ctx.handle)
    assert bad.value.errno == E.EBADF and bad.value.detail["ctx"] == ctx.handle and bad.value.call == "fork"
    with pytest.raises(exceptions.AlreadyExists):
        client.hello("again", 1)
    with pytest.raises(exceptions.InvalidArgument):
        client.hello("old", 99)
    with pytest.raises(exceptions.NotFound):
        client.cancel(12345)
    assert stranger.stat(cid=ctx.cid).cid == ctx.cid, "looking is by cid, within one uid"


def test_too_large_to_send_is_refused_by_the_client(serve: Any) -> None:
    client = serve().connect()
    with client.alloc_context() as ctx:
        with pytest.raises(exceptions.TooBig):
            ctx.append(tokens=bytes(17 << 20))
        assert client.uname()


def test_processes(serve: Any) -> None:
    client = serve().connect()
    ctx = client.alloc_context()
    ctx.append("shared prompt")
    child = client.spawn("worker", nice=3, fork_of=ctx)
    assert child.context is not None
    assert child.context.generate(3).tokens_total == 16
    pending = client.submit("wait", c.WaitArgs(child.pid), c.WaitResult)
    child.exit(7)
    ended = pending.result()
    assert (ended.pid, ended.code, ended.reason) == (child.pid, 7, "exited")
    assert ended.usage.generated_tokens == 3
    with pytest.raises(exceptions.StaleHandle):
        child.context.stat()
    with pytest.raises(exceptions.TryAgain):
        client.spawn("other")
        client.wait(timeout_ms=0)
    with pytest.raises(exceptions.TimedOut):
        client.wait(timeout_ms=20)


def test_the_readme_lines(serve: Any) -> None:
    """Ten lines of Python that fork a running context."""
    served = serve()
    with served.connect() as os:
        ctx = os.alloc_context()
        ctx.append(text="The capital of France is")
        a, b = ctx.fork(2)
        text = a.generate(max_tokens=20).text
        streamed = "".join(note.text for note in b.stream(max_tokens=20))
        assert text == streamed
        shared = ctx.stat().shared_blocks
        assert shared == 6


def test_a_client_without_a_daemon(tmp_path: Any) -> None:
    with pytest.raises(ConnectionLost, match=r"no attnix at .*attnix boot"):
        connect(str(tmp_path / "nothing"))


def test_a_client_whose_daemon_dies(serve: Any) -> None:
    served = serve(fit=False, pass_ms=50)
    client = served.connect()
    ctx = client.alloc_context()
    ctx.append(tokens=[1])
    stream = ctx.stream(200)
    next(iter(stream))
    served.process.kill()
    with pytest.raises(ConnectionLost):
        stream.result()
    with pytest.raises(ConnectionLost):
        client.uname()
    assert subprocess.Popen.wait(served.process, 20) == -9


@pytest.mark.parametrize(
    "args", [c.AppendArgs(1, b"", "caf\udce9"), c.AppendArgs(1 << 64, b"", "x")], ids=["text", "number"]
)
def test_what_cannot_travel_is_an_errno(args: c.AppendArgs) -> None:
    """Text of a file in another encoding, read as Python reads arguments, was a traceback of every command."""
    session = Session()
    with pytest.raises(exceptions.InvalidArgument, match=r"no character|64 bits"):
        session.request("append", args)
    assert session.request("append", c.AppendArgs(1, b"", "ok"))[0] == 2, "and the connection goes on"
