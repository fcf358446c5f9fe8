"""`trace` tells of another client's calls, to its own uid alone and at nobody else's cost; `read` gives a log back."""

from __future__ import annotations

from array import array
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from attnix.kernel.calls import ReadResult, SyscallNote
from attnix.kernel.errors import E, Errno
from attnix.kernel.events import Trace
from attnix.simulated import SimulatedSystem
from attnix.syscalls.dispatch import Client, Dispatcher
from attnix.syscalls.exceptions import BadHandle, InvalidArgument, NotFound
from attnix.syscalls.listen import Credentials
from attnix.syscalls.tracing import Tracing
from attnix.syscalls.wire import reply

pack = msgspec.msgpack.encode


def notes_of(client: Any, answers: int) -> list[SyscallNote]:
    """Until so many calls were answered, or the traced client has gone."""
    found: list[SyscallNote] = []
    while sum(note.took_ns >= 0 or not note.name for note in found) < answers:
        found.append(client.notice(timeout=20.0).payload)
    return found


def test_calls_are_told_with_their_answers(serve: Any) -> None:
    served = serve(script=list(b"answer"))
    traced, tracer = served.connect(), served.connect()
    tracer.trace(traced.server.pid)
    context = traced.alloc_context()
    context.append("hello there")
    context.generate(3, stop="zz")
    with pytest.raises(BadHandle):
        traced.stat(12345)
    told = notes_of(tracer, 4)
    answered = [note for note in told if note.took_ns >= 0]
    assert [note.name for note in answered] == ["alloc_context", "append", "generate", "stat"]
    assert [note.errno for note in answered] == [0, 0, 0, 9]  # EBADF
    assert {note.pid for note in told} == {traced.server.pid}
    assert answered[0].args == "" and f"cid={context.cid}" in answered[0].result
    assert 'text="hello there"' in answered[1].args and answered[1].result == "tokens=11, appended=11"
    assert "max_tokens=3" in answered[2].args and 'stop=["zz"]' in answered[2].args
    assert 'reason="length"' in answered[2].result and "tokens=<3 tokens>" in answered[2].result
    assert "12345 is not a context handle" in answered[3].result
    assert sorted(note.name for note in told if note.took_ns < 0) == [
        "append",
        "generate",
    ]  # what was not answered at once
    tracer.trace(traced.server.pid, "none")
    traced.uname()
    assert not tracer.notices and tracer.uname()


def test_a_tracer_may_leave_and_a_traced_client_too(serve: Any) -> None:
    served = serve()
    traced, first, second = served.connect(), served.connect(), served.connect()
    for each in (first, second, traced):  # it may even watch itself
        each.trace(traced.server.pid)
    first.close()
    traced.uname()
    told = [note for note in notes_of(second, 2) if note.name == "uname"]  # traced watches itself: that call too
    assert len(told) == 1 and notes_of(traced, 2)[-1].name == "uname"
    traced.close()
    gone = notes_of(second, 1)[0]
    assert (gone.pid, gone.name) == (traced.server.pid, "")
    with pytest.raises(NotFound):
        second.trace(traced.server.pid)


def test_a_tracer_that_does_not_read_is_not_waited_for() -> None:
    """It loses notifications, and is told how many."""
    told: list[SyscallNote] = []
    sent = Client(2, Sink())  # type: ignore[arg-type]
    traced = Client(1, Sink())  # type: ignore[arg-type]
    tracing = Tracing(
        {1: traced, 2: sent}, lambda client, body: b"", lambda client, data: told.append(_note(data)), lambda: 5
    )
    tracing.change(Trace(2, 1, 7, "syscalls"))

    def call(request: int) -> None:
        tracing.request(traced, pack([request, 80, []]))
        traced.write(reply(request, 3, {"message": "no"}))

    sent.unread = True
    call(1)
    call(2)
    assert told == []
    sent.unread = False
    call(3)
    call(4)
    assert [(note.request, note.lost, note.errno, note.result) for note in told] == [(3, 2, 3, "no"), (4, 0, 3, "no")]
    tracing.change(Trace(2, 1, 7, "none"))
    assert not tracing.active and traced.write == traced.peer.write


class Sink:
    def write(self, data: bytes) -> None:
        pass


def _note(data: bytes) -> SyscallNote:
    return SyscallNote(*msgspec.msgpack.decode(data[4:])[2])


def test_nobody_is_traced_at_no_cost() -> None:
    """Not an assertion on time: requests go straight to the function that takes them before a trace and after it."""
    nothing = Mock()
    dispatcher = Dispatcher(
        SimulatedSystem().kernel, nothing, None, on_soon=nothing, on_timer=nothing, on_halt=nothing, on_panic=nothing
    )
    client = dispatcher.connect(Sink(), Credentials(1, 0, 0))  # type: ignore[arg-type]
    straight = dispatcher._request
    assert dispatcher._take_request == straight
    dispatcher.receive(client, [pack([1, 1, ["x", 4]])])
    dispatcher.receive(client, [pack([2, 84, [1]])])
    assert dispatcher._take_request != straight
    dispatcher.disconnect(client)
    assert dispatcher._take_request == straight


def test_what_trace_refuses(serve: Any) -> None:
    client = serve().connect()
    for pid, what, error in ((999, "syscalls", NotFound), (0, "everything", InvalidArgument)):
        with pytest.raises(error):
            client.trace(pid, what)


def test_nobody_traces_or_reads_another_user() -> None:
    """Root may."""
    system = SimulatedSystem()
    victim, other, root = (system.connect(uid=uid) for uid in (1001, 1002, 0))
    pid = victim.call("ps").processes[0].pid
    cid = victim.call("alloc_context").cid
    with pytest.raises(Errno) as refused:
        other.call("trace", pid)
    assert refused.value.code is E.EACCES
    with pytest.raises(Errno) as refused:
        other.call("read", 0, cid)
    assert refused.value.code is E.ENOENT  # nor learns that it exists
    root.call("trace", pid)
    assert root.call("read", 0, cid).cid == cid


def test_pagemap_says_how_long_ago_a_block_was_wanted() -> None:
    """A full block is wanted when it is sealed and when a prompt finds it again; of a tail that changes nobody knows."""
    system = SimulatedSystem()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, array("i", range(10)).tobytes())
    system.run()
    before = array("i", client.call("pagemap", ctx).ages).tolist()
    system.now_ns += 3_000_000_000
    after = array("i", client.call("pagemap", ctx).ages).tolist()
    assert [b - a for a, b in zip(before[:2], after[:2], strict=True)] == [3000, 3000]
    assert before[2] == after[2] == -1


def test_read_gives_tokens_and_their_bytes(serve: Any) -> None:
    served = serve()
    owner, other = served.connect(), served.connect()
    context = owner.alloc_context()
    context.append("näh")  # one token per byte in this rig
    assert other.read(0, context.cid) == ReadResult(
        context.cid, 0, array("i", list("näh".encode())).tobytes(), "näh".encode(), array("i", [1, 2, 3, 4]).tobytes()
    )
    part = other.read(0, context.cid, 1, 3)
    assert (part.start, part.text) == (1, "ä".encode())
    assert other.read(0, context.cid, 9).tokens == b""
    with pytest.raises(InvalidArgument):
        other.read(0, context.cid, 3, 1)


def test_read_without_a_tokenizer_is_tokens_alone(serve: Any) -> None:
    owner = serve(pieces=None).connect()
    context = owner.alloc_context()
    context.append(tokens=[1, 2, 3])
    assert owner.read(context.handle) == ReadResult(context.cid, 0, array("i", [1, 2, 3]).tobytes())
