"""Signals in every state of a process, and what becomes of children whose parent ends."""

from __future__ import annotations

import pytest

from attnix.drivers.sim_model import reference_tokens
from attnix.kernel import traps_process
from attnix.kernel.core import Core
from attnix.kernel.errors import E, Errno
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of

STATES = ("new", "ready", "running", "tool_wait", "stopped")
PROMPT = [3, 1, 4, 1, 5]


def in_state(system: SimulatedSystem, client: SimulatedClient, state: str) -> tuple[int, int]:
    """A child in that state, and the request that runs in it (0: none)."""
    pid: int = client.call("spawn", state).pid
    request = 0
    if state != "new":
        ctx = client.call("alloc_context", pid).ctx
        client.call("append", ctx, ints(PROMPT))
        system.run()
        if state == "tool_wait":
            client.call("wait_tool", ctx, "search", -1, 60_000)
        if state in ("running", "stopped"):
            request = client.post("generate", ctx, 30)
            system.run(until=lambda: len(client.streamed.get(request, [])) >= 2)
        if state == "stopped":
            client.call("kill", pid, 19)
    assert client.call("ps", pid).processes[0].state == state
    return pid, request


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("signal", [9, 15])
def test_a_process_is_ended_in_any_state(state: str, signal: int) -> None:
    system = SimulatedSystem(core=Core, frames=32)
    client = system.connect()
    pid, request = in_state(system, client, state)
    waiter = client.post("wait", pid)
    client.call("kill", pid, signal)
    system.run()
    said = client.result(waiter)
    assert (said.pid, said.code, said.reason) == (pid, 128 + signal, "killed")
    if request:
        result = client.result(request)
        assert result.reason == "killed"
        assert tokens_of(result.tokens) == reference_tokens(PROMPT, 30)[: len(result.tokens) // 4]
    assert system.kernel.machine.lifetimes.waiting == 0 and not system.kernel.machine.contexts
    assert system.available() == 32
    with pytest.raises(Errno) as error:
        client.call("kill", pid, signal)
    assert error.value.code is E.ENOENT


@pytest.mark.parametrize("state", STATES)
def test_stop_and_continue_in_any_state_and_twice(state: str) -> None:
    system = SimulatedSystem(core=Core, frames=32)
    client = system.connect()
    pid, request = in_state(system, client, state)
    for signal, said in ((19, "stopped"), (19, "stopped"), (18, ""), (18, "")):
        client.call("kill", pid, signal)
        system.tick()
        if said:
            assert client.call("ps", pid).processes[0].state == said
    if state != "running" and state != "stopped":
        assert client.call("ps", pid).processes[0].state == state
    system.run()
    if request:
        assert tokens_of(client.result(request).tokens) == reference_tokens(PROMPT, 30)


@pytest.mark.parametrize("who", ["opens it", "keeps it"])
def test_a_generation_that_comes_into_a_stopped_process_stops(who: str) -> None:
    """Its client has gone: it is kept by a process of its user, until another client of that opens it."""
    system = SimulatedSystem(core=Core, frames=32)
    client, other = system.connect(), system.connect()
    for c, name in ((other, "made a keeper"), (client, "long")):
        ctx = c.call("alloc_context").ctx
        c.call("append", ctx, ints(PROMPT))
        c.call("publish", ctx, name)
    cid = client.call("stat", ctx).cid
    system.run()
    other.call("release", other.call("open", "made a keeper").ctx)
    pids = {p.name: p.pid for p in other.call("ps").processes if p.parent == 0 and p.pid != 1}
    request = client.post("generate", ctx, 30)
    system.run(until=lambda: len(client.streamed.get(request, [])) >= 2)
    stopped = pids["kept" if who == "keeps it" else "test"]
    other.call("kill", stopped, 19)
    system.disconnect(client)
    if who == "opens it":
        other.call("open", "long")
    system.run()
    row = other.call("stat", 0, cid)
    assert (row.pid, row.state) == (stopped, "stopped") and row.tokens < len(PROMPT) + 30
    assert system.kernel.fsck() == []
    other.call("kill", stopped, 18)
    system.run()
    assert tokens_of(other.call("read", 0, cid).tokens) == PROMPT + reference_tokens(PROMPT, 30)


def test_a_zombie_takes_no_signal_and_is_reaped_once() -> None:
    system = SimulatedSystem(core=Core, frames=32)
    client = system.connect()
    pid, _ = in_state(system, client, "tool_wait")
    client.call("exit", pid, 3)
    assert client.call("ps", pid).processes[0].state == "zombie"
    for signal in (9, 15, 18, 19):
        with pytest.raises(Errno) as error:
            client.call("kill", pid, signal)
        assert error.value.code is E.ENOENT
    assert client.call("wait").code == 3
    with pytest.raises(Errno) as error:
        client.call("wait")
    assert error.value.code is E.ENOENT


def test_orphans_go_on_and_leave_no_zombie() -> None:
    """The first process of a connection ends: its children have nobody left to wait for them."""
    system = SimulatedSystem(core=Core, frames=64)
    client = system.connect()
    children = {state: in_state(system, client, state) for state in STATES}
    dead = client.call("spawn", "dead").pid
    client.call("exit", dead, 1)
    client.call("exit", 0, 0)
    alive = {p.pid: p for p in client.call("ps").processes}
    assert dead not in alive, "a zombie whose parent ends is let go"
    assert set(alive) == {pid for pid, _ in children.values()}
    assert {p.parent for p in alive.values()} == {0}
    client.call("kill", children["stopped"][0], 18)
    system.run()
    for state in ("running", "stopped"):
        assert tokens_of(client.result(children[state][1]).tokens) == reference_tokens(PROMPT, 30)
    for pid, _ in children.values():
        client.call("kill", pid, 15)
    assert client.call("ps").processes == (), "who ends without a parent leaves no zombie"
    system.run()
    assert system.available() == 64


def test_a_signal_reaches_processes_of_the_same_user_only() -> None:
    system = SimulatedSystem(core=Core, frames=32)
    client, friend, stranger = system.connect(), system.connect(), system.connect(1001)
    pid, _ = in_state(system, client, "tool_wait")
    for signal in (9, 15, 18, 19):
        with pytest.raises(Errno) as error:
            stranger.call("kill", pid, signal)
        assert error.value.code is E.EACCES
    friend.call("kill", pid, 19)
    friend.call("kill", pid, 15)
    assert client.call("wait", pid).code == 143
    with pytest.raises(Errno) as error:
        friend.call("kill", friend.call("ps").processes[0].pid, 7)
    assert error.value.code is E.EINVAL


def test_processes_of_one_user_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen at most.  One user has its first and seven more, which are as many as are left; those that have ended count until
    somebody has waited for them."""
    monkeypatch.setattr(traps_process, "MAX_PROCESSES", 16)
    system = SimulatedSystem(core=Core)
    hog = system.connect(1001)
    pids = [hog.call("spawn", "", 0, 0, f"uid:1001/{k % 2}").pid for k in range(7)]

    def full() -> None:
        with pytest.raises(Errno) as error:
            hog.call("spawn")
        assert (error.value.code, error.value.detail["limit"]) == (E.EAGAIN, 8) and error.value.detail["retry_after_ms"]

    full()
    hog.call("exit", pids[0])
    full()
    other = system.connect(1002)
    assert other.call("spawn").pid
    other.call("exit")
    hog.call("wait", pids[0])
    assert hog.call("spawn").pid
    full()
