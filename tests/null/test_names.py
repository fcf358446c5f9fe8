"""Named and detached contexts, sessions, and generations that outlive their client: the kernel alone, under simulated time.

The journal here is a plain dictionary that is given the kernel's Journal effects, and a "crash" is a new system that is fed
what that dictionary holds: what SQLite adds is tested in tests/wire.
"""

from __future__ import annotations

from typing import Any

import pytest

from attnix.drivers.sim_model import SamplingChoice, reference_tokens
from attnix.kernel.errors import E
from attnix.kernel.events import Connect, Effect, Event, Journal, Pause, Prime, Restored, StopAt, Suspend
from attnix.kernel.journal import ContextRecord, DropRecord, LogRecord, MarkRecord, RestoredContext
from attnix.simulated import SimulatedClient, SimulatedSystem, ints, tokens_of
from tests.null.small import refused

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


class Disk:
    """What a journal file would hold."""

    def __init__(self) -> None:
        self.records: dict[int, ContextRecord] = {}
        self.logs: dict[int, bytes] = {}
        self.pid = self.cid = self.boots = 0
        self.written = 0

    def write(self, effect: Journal) -> None:
        for record in effect.records:
            self.written += 1
            if isinstance(record, ContextRecord):
                self.records[record.cid] = record
            elif isinstance(record, LogRecord):
                before = self.logs.get(record.cid, b"")
                assert len(before) >= 4 * record.at, "no hole in a log"
                self.logs[record.cid] = before[: 4 * record.at] + record.tokens
            elif isinstance(record, DropRecord):
                self.records.pop(record.cid, None)
                self.logs.pop(record.cid, None)
            elif isinstance(record, MarkRecord):
                self.pid, self.cid = record.pid, record.cid

    def restored(self) -> Restored:
        contexts = tuple(RestoredContext(record, self.logs[cid]) for cid, record in sorted(self.records.items()))
        self.boots += 1
        return Restored(self.pid, self.cid, self.boots - 1, contexts)


class Durable(SimulatedSystem):
    """A simulated system with a journal and session tokens."""

    def __init__(self, disk: Disk | None = None, **options: Any) -> None:
        self.disk = disk or Disk()
        self.primed: list[Prime] = []
        super().__init__(**{"frames": 64, "window_tokens": 128, **options})
        self.step(self.disk.restored())

    def step(self, event: Event) -> list[Effect]:
        effects = super().step(event)
        for effect in effects:
            if isinstance(effect, Journal):
                self.disk.write(effect)
            elif isinstance(effect, Prime):
                self.primed.append(effect)
        return effects

    def join(self, session: str = "", uid: int = 1000) -> tuple[SimulatedClient, Any]:
        """A connection with a token of its own, and what `hello` said."""
        self._next_conn += 1
        client = SimulatedClient(self, self._next_conn, uid)
        self.clients[client.conn] = client
        self.step(Connect(client.conn, uid, uid, 1, f"token-{self.disk.boots}-{client.conn}"))
        return client, client.call("hello", "test", 2, session)


def named(client: SimulatedClient, name: str = "n", prompt: list[int] = PROMPT) -> int:
    ctx: int = client.call("alloc_context").ctx
    client.call("append", ctx, ints(prompt))
    client.call("publish", ctx, name)
    return ctx


def test_a_name_outlives_its_connection_and_everything_else_does_not() -> None:
    system = Durable()
    client, _ = system.join()
    named(client)
    client.call("append", client.call("alloc_context").ctx, ints([7] * 9))
    system.run()
    system.disconnect(client)
    assert len(system.kernel.machine.contexts) == 1
    other, _ = system.join()
    row = other.call("names").rows[0]
    assert (row.name, row.held, row.tokens) == ("n", False, len(PROMPT))
    ctx = other.call("open", "n").ctx
    computed = system.devices[0].computed_tokens
    assert tokens_of(other.call("generate", ctx, 5).tokens) == reference_tokens(PROMPT, 5)
    assert system.devices[0].computed_tokens - computed == 5, "its KV was still there: the last token and four sampled"


def test_opening_what_another_holds_is_busy_and_a_fork_is_private() -> None:
    system = Durable()
    a, _ = system.join()
    ctx = named(a)
    b, _ = system.join()
    assert "fork" in refused(E.EBUSY, b, "open", "n")["message"]
    copy = b.call("open", "n", True).ctx
    b.call("append", copy, ints([8]))
    assert a.call("stat", ctx).tokens == len(PROMPT)
    assert a.call("open", "n").ctx == ctx, "who holds it gets the handle that it has"
    system.disconnect(b)
    assert [row.name for row in a.call("names").rows] == ["n"]


def test_names_of_two_uids_are_separate() -> None:
    system = Durable()
    a, _ = system.join(uid=1000)
    b, _ = system.join(uid=1001)
    mine = named(a)
    assert mine and b.call("names").rows == ()
    refused(E.ENOENT, b, "open", "n")
    refused(E.ENOENT, b, "unlink", "n")
    cid = a.call("names").rows[0].cid
    refused(E.ENOENT, b, "open", "", False, cid)
    named(b, "n", [2, 2])
    assert b.call("names").rows[0].tokens == 2 and a.call("names").rows[0].tokens == len(PROMPT)


def test_replacing_renaming_and_unlinking() -> None:
    system = Durable()
    client, _ = system.join()
    first = named(client, "a")
    second = named(client, "b", [1, 1])
    refused(E.EEXIST, client, "publish", second, "a")
    client.call("publish", second, "a", True)
    assert [(r.name, r.tokens) for r in client.call("names").rows] == [("a", 2)]
    client.call("publish", second, "c")
    assert [r.name for r in client.call("names").rows] == ["c"]
    assert client.call("stat", first).tokens == len(PROMPT), "it is held, though nobody names it any more"
    client.call("unlink", "c")
    system.disconnect(client)
    system.run()
    assert not system.kernel.machine.contexts and not system.disk.records
    assert system.available() == 64


def test_the_last_name_of_an_unheld_context_takes_it_along() -> None:
    system = Durable()
    client, _ = system.join()
    named(client)
    system.run()
    system.disconnect(client)
    other, _ = system.join()
    other.call("unlink", "n")
    assert not system.kernel.machine.contexts and not system.disk.logs
    refused(E.ENOENT, other, "open", "n")


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "x" * 129, "\n", "\u20ac" * 100, "a\0b"])
def test_bad_names(name: str) -> None:
    system = Durable()
    client, _ = system.join()
    ctx = client.call("alloc_context").ctx
    assert refused(E.EINVAL, client, "publish", ctx, name)["field"] == "name"


def test_release_and_kill_leave_a_named_context_under_its_name() -> None:
    system = Durable()
    client, _ = system.join()
    ctx = named(client)
    client.call("release", ctx)
    refused(E.ESTALE, client, "stat", ctx)
    child = client.call("spawn", "child", 0, client.call("open", "n").ctx)
    client.call("publish", child.ctx, "m")
    request = client.post("generate", child.ctx, 50)
    system.run(until=lambda: len(client.streamed.get(request, [])) > 3)
    client.call("kill", child.pid, 9)
    system.run()
    assert client.result(request).reason == "killed"
    ctx = client.call("open", "m").ctx
    assert client.call("stat", ctx).tokens == len(PROMPT) + len(client.streamed[request])


def test_a_session_takes_over_what_it_kept_and_a_forged_token_nothing() -> None:
    system = Durable()
    client, hello = system.join()
    ctx = named(client)
    loose = client.call("alloc_context")
    client.call("append", loose.ctx, ints([5, 5]))
    client.call("detach", loose.ctx)
    client.call("alloc_context")
    stranger, _ = system.join()
    assert refused(E.EBUSY, SimulatedClientBeforeHello(system), "hello", "x", 2, hello.session)
    system.disconnect(client)
    refused(E.EACCES, SimulatedClientBeforeHello(system), "hello", "x", 2, "token-1-99")
    refused(E.EACCES, SimulatedClientBeforeHello(system, 1001), "hello", "x", 2, hello.session)
    again, said = system.join(hello.session)
    assert said.session == hello.session
    assert sorted((row.name, row.tokens) for row in said.contexts) == [("", 2), ("n", len(PROMPT))]
    refused(E.ESTALE, again, "stat", ctx)
    for row in said.contexts:
        assert again.call("stat", row.ctx).cid == row.cid
    assert stranger.call("names").rows[0].held


def SimulatedClientBeforeHello(system: Durable, uid: int = 1000) -> SimulatedClient:
    return system.connect(uid, hello=False)


def test_a_session_that_kept_nothing_is_gone() -> None:
    system = Durable()
    client, hello = system.join()
    client.call("alloc_context")
    system.disconnect(client)
    refused(E.EACCES, SimulatedClientBeforeHello(system), "hello", "x", 2, hello.session)


def test_old_handles_never_name_new_contexts_of_a_session() -> None:
    """Case 44: a handle of the earlier connection, tried on the later one."""
    system = Durable()
    client, hello = system.join()
    old = [client.call("alloc_context").ctx for _ in range(5)]
    old.append(named(client))
    for _ in range(4):
        system.disconnect(client)
        client, _ = system.join(hello.session)
        fresh = [client.call("alloc_context").ctx for _ in range(5)]
        for handle in old:
            assert refused(E.ESTALE, client, "stat", handle) if handle not in fresh else False
        old += fresh


# -- generations without their client -------------------------------------------------------------------------------

SAMPLED = SamplingChoice(temperature=1.0, seed=7)


def begin(client: SimulatedClient, system: Durable, ctx: int, n: int, seen: int) -> int:
    request = client.post("generate", ctx, n, 1.0, 0, 1.0, 0.0, 7)
    system.run(until=lambda: len(client.streamed.get(request, [])) >= seen)
    return request


def test_a_generation_goes_on_without_its_client_and_is_joined_again() -> None:
    system = Durable()
    client, hello = system.join()
    ctx = named(client)
    request = begin(client, system, ctx, 30, 5)
    seen = client.streamed[request][:4]  # the fifth was sent, and was on its way when the connection broke
    system.disconnect(client)
    assert system.primed[-1].orphan
    for _ in range(6):
        system.tick()
    again, said = system.join(hello.session)
    assert said.contexts[0].generation == "running"
    request = again.post("reattach", said.contexts[0].ctx, ints(seen))
    prime = system.primed[-1]
    assert prime.told == 4 and not prime.orphan
    had = tokens_of(prime.tokens)
    assert len(had) > 5
    system.run()
    expected = reference_tokens(PROMPT, 30, choice=SAMPLED)
    assert had + again.streamed[request] == expected, "nothing lost, nothing doubled"
    assert tokens_of(again.result(request).tokens) == expected


def test_an_orphan_that_ends_keeps_its_result_until_something_else_is_done() -> None:
    system = Durable()
    client, hello = system.join()
    begin(client, system, named(client), 12, 3)
    system.disconnect(client)
    system.run()
    again, said = system.join(hello.session)
    ctx = said.contexts[0].ctx
    assert said.contexts[0].generation == "ended"
    expected = reference_tokens(PROMPT, 12, choice=SAMPLED)
    for told in (0, 3, 12):
        result = again.call("reattach", ctx, ints(expected[:told]))
        assert (tokens_of(result.tokens), result.reason) == (expected, "length")
    assert refused(E.EINVAL, again, "reattach", ctx, ints([*expected[:2], expected[2] ^ 1]))["at"] == 2
    assert refused(E.EINVAL, again, "reattach", ctx, ints([*expected, 1]))["at"] == 12
    again.call("append", ctx, ints([1]))
    refused(E.ENOENT, again, "reattach", ctx)


def test_a_generation_with_a_client_is_not_taken_from_it() -> None:
    system = Durable()
    client, _ = system.join()
    ctx = named(client)
    begin(client, system, ctx, 30, 2)
    refused(E.EBUSY, client, "reattach", ctx)
    refused(E.ENOENT, client, "reattach", client.call("alloc_context").ctx)


def test_a_paused_client_leaves_and_its_generation_goes_on() -> None:
    system = Durable()
    client, hello = system.join()
    begin(client, system, named(client), 12, 3)
    system.step(Pause(client.conn))
    system.run()
    system.disconnect(client)
    system.run()
    _, said = system.join(hello.session)
    assert said.contexts[0].generation == "ended"


def test_a_stop_string_ends_an_orphan() -> None:
    system = Durable()
    client, hello = system.join()
    request = begin(client, system, named(client), 40, 3)
    system.disconnect(client)
    system.tick()
    system.step(StopAt(client.conn, request, 2))
    system.run()
    again, said = system.join(hello.session)
    result = again.call("reattach", said.contexts[0].ctx)
    assert (result.reason, len(result.tokens) // 4) == ("stop", 2)
    assert said.contexts[0].tokens == len(PROMPT) + 2


def test_a_stop_string_found_late_trims_an_orphan() -> None:
    system = Durable()
    client, hello = system.join()
    request = begin(client, system, named(client), 6, 3)
    system.disconnect(client)
    system.run()
    system.step(StopAt(client.conn, request, 4))
    _, said = system.join(hello.session)
    assert said.contexts[0].tokens == len(PROMPT) + 4
    assert len(system.disk.logs[said.contexts[0].cid]) // 4 == len(PROMPT) + 4


# -- the journal ----------------------------------------------------------------------------------------------------


def crash(system: Durable, **options: Any) -> Durable:
    """The daemon is killed: frames, queues and handles are gone, the journal is there."""
    return Durable(system.disk, **options)


@pytest.mark.parametrize("seen", range(13))
def test_a_stream_goes_on_after_a_crash(seen: int) -> None:
    """Case 22 and §10.9: the client brings the tokens that it has, and the rest is the same as without a crash."""
    system = Durable()
    client, hello = system.join()
    ctx = named(client)
    request = (
        begin(client, system, ctx, 12, min(seen, 12)) if seen else client.post("generate", ctx, 12, 1.0, 0, 1.0, 0.0, 7)
    )
    tokens = client.streamed.get(request, [])[:seen]
    system = crash(system)
    again, said = system.join(hello.session)
    assert said.contexts[0].generation == ("suspended" if seen < 12 else "ended")
    request = again.post("reattach", said.contexts[0].ctx, ints(tokens))
    system.run()
    expected = reference_tokens(PROMPT, 12, choice=SAMPLED)
    result = again.result(request)
    assert (tokens_of(result.tokens), result.reason) == (expected, "length")
    if seen < 12:
        assert tokens + again.streamed.get(request, []) == expected, "nothing lost, nothing doubled"


def test_control_another_seed_would_have_been_noticed() -> None:
    assert reference_tokens(PROMPT, 12, choice=SAMPLED) != reference_tokens(
        PROMPT, 12, choice=SamplingChoice(1.0, seed=8)
    )


def test_penalties_and_max_tokens_count_the_forced_tokens() -> None:
    choice = SamplingChoice(
        temperature=1.0, seed=7, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5
    )
    expected = reference_tokens(PROMPT, 10, choice=choice)
    system = Durable()
    client, hello = system.join()
    ctx = named(client)
    request = client.post("generate", ctx, 10, 1.0, 0, 1.0, 0.0, 7, 1.5, 1.0, 0.5)
    system.run(until=lambda: len(client.streamed.get(request, [])) >= 6)
    tokens = client.streamed[request][:6]
    system = crash(system)
    again, said = system.join(hello.session)
    assert tokens_of(again.call("reattach", said.contexts[0].ctx, ints(tokens)).tokens) == expected


def test_suspend_puts_down_what_a_generation_has() -> None:
    system = Durable()
    client, hello = system.join()
    ctx = named(client)
    request = begin(client, system, ctx, 12, 5)
    other = client.call("alloc_context").ctx
    client.call("append", other, ints([1, 2]))
    plain = client.post("generate", other, 12)
    system.step(Suspend())
    result = client.result(request)
    assert result.reason == "suspended" and tokens_of(result.tokens) == client.streamed[request]
    assert plain not in client.replies, "a context that nobody keeps is not the journal's business"
    cid = client.call("names").rows[0].cid
    assert len(system.disk.logs[cid]) // 4 == len(PROMPT) + len(client.streamed[request])
    system = crash(system)
    again, said = system.join(hello.session)
    had = client.streamed[request]
    result = again.call("reattach", said.contexts[0].ctx, ints(had[:3]))
    assert tokens_of(result.tokens) == reference_tokens(PROMPT, 12, choice=SAMPLED)
    assert tokens_of(system.primed[-1].tokens)[: len(had)] == had


def test_nothing_is_written_per_token() -> None:
    system = Durable()
    client, _ = system.join()
    ctx = named(client)
    request = begin(client, system, ctx, 40, 1)
    written = system.disk.written
    system.run(until=lambda: len(client.streamed[request]) > 30)
    assert system.disk.written == written
    system.run()
    assert system.disk.written == written + 2, "the context and the end of its log, once"


def test_the_journal_follows_every_change_of_a_log() -> None:
    system = Durable()
    client, _ = system.join()
    ctx = named(client)
    cid = client.call("stat", ctx).cid

    def same() -> None:
        system.run()
        log = system.core.read_log(system.kernel.machine.contexts[cid].slot, 0, client.call("stat", ctx).tokens)
        assert system.disk.logs[cid] == log

    same()
    client.call("append", ctx, ints([1, 2, 3]))
    same()
    client.call("truncate", ctx, 5)
    same()
    client.call("append", ctx, ints([9, 9]))
    client.call("truncate", ctx, 6)
    client.call("append", ctx, ints([8]))
    same()
    client.call("generate", ctx, 6)
    same()
    request = client.post("generate", ctx, 20)
    system.tick()
    system.tick()
    client.call("publish", ctx, "again")  # in the middle of it
    client.call("cancel", request)
    same()


def test_ids_are_never_used_twice() -> None:
    """Case 44, over restarts."""
    disk, pids, cids = Disk(), set(), set()
    for _ in range(4):
        system = Durable(disk)
        for _ in range(3):
            client, hello = system.join()
            made = client.call("alloc_context")
            assert hello.pid not in pids and made.cid not in cids
            pids.add(hello.pid)
            cids.add(made.cid)


def test_handles_from_before_a_crash_are_stale() -> None:
    system = Durable()
    client, hello = system.join()
    old = [client.call("alloc_context").ctx for _ in range(3)] + [named(client)]
    system = crash(system)
    again, _ = system.join(hello.session)
    for _ in range(4):
        again.call("alloc_context")
    for handle in old:
        assert refused(E.ESTALE, again, "stat", handle)


def test_what_does_not_fit_stays_in_the_journal() -> None:
    system = Durable()
    client, _ = system.join()
    for n in range(4):
        named(client, f"n{n}", [n + 1] * 10)
    small = crash(system, max_contexts=2)
    other, _ = small.join()
    assert len(other.call("names").rows) == 2
    assert len(small.disk.records) == 4
    assert any("stay in the journal" in row.text for row in other.call("dmesg").rows)
    large = crash(small)
    other, _ = large.join()
    assert [row.name for row in other.call("names").rows] == ["n0", "n1", "n2", "n3"]


@pytest.mark.parametrize("way", ["publish", "unlink", "detached"])
def test_the_name_of_what_does_not_fit_is_taken(way: str) -> None:
    """Given to another it would be back with both at the next boot, and who was told that it is theirs would have lost it."""
    system = Durable()
    client, _ = system.join()
    long = named(client, "long", [1] * 100)
    if way == "detached":
        client.call("detach", long)
    small = crash(system, window_tokens=32)
    other, _ = small.join()
    assert refused(E.ENOENT, other, "open", "long")["cid"] == 1
    ctx = other.call("alloc_context").ctx
    other.call("append", ctx, ints([2] * 10))
    refused(E.EEXIST, other, "publish", ctx, "long")
    if way == "publish":
        other.call("publish", ctx, "long", True)
    else:
        other.call("unlink", "long")
        other.call("publish", ctx, "long")
    refused(E.ENOENT, other, "open", "longer")
    large = crash(small)
    other, _ = large.join()
    rows = [(row.name, row.tokens) for row in other.call("names").rows]
    assert rows == ([("", 100)] if way == "detached" else []) + [("long", 10)]


def test_a_restored_context_is_computed_again_and_says_the_same() -> None:
    system = Durable()
    client, _ = system.join()
    named(client)
    system.run()
    system = crash(system)
    other, _ = system.join()
    ctx = other.call("open", "n").ctx
    result = other.call("generate", ctx, 6)
    assert tokens_of(result.tokens) == reference_tokens(PROMPT, 6)
    assert system.devices[0].computed_tokens == len(PROMPT) + 5


def test_a_context_without_a_journal_is_named_all_the_same() -> None:
    system = SimulatedSystem()
    client = system.connect()
    ctx = client.call("alloc_context").ctx
    client.call("append", ctx, ints(PROMPT))
    client.call("publish", ctx, "n")
    system.run()
    system.disconnect(client)
    other = system.connect()
    assert tokens_of(other.call("generate", other.call("open", "n").ctx, 3).tokens) == reference_tokens(PROMPT, 3)


# -- generations with tokens injected into them ---------------------------------------------------------------------


def test_an_orphan_with_injected_tokens_is_reattached_with_what_it_sampled() -> None:
    system = Durable()
    client, _ = system.join()
    ctx = named(client)
    request = client.post("generate", ctx, 12)
    system.run(until=lambda: len(client.streamed.get(request, [])) >= 3)
    interrupt = client.post("inject", ctx, ints([8, 9]))
    system.run(until=lambda: interrupt in client.replies)
    had = list(client.streamed[request])
    system.disconnect(client)
    other, _ = system.join()
    system.tick()
    (cid,) = system.kernel.machine.contexts
    friend = other.post("inject", 0, ints([7]), "", cid)
    ctx = other.call("open", "n").ctx
    request = other.post("reattach", ctx, ints(had))
    system.run()
    result = other.result(request)
    (first, second) = result.injected
    assert first == (4, 2) and other.result(friend).appended == 1
    log = list(PROMPT)
    for k in range(13):
        log += {4: [8, 9], second[0]: [7]}.get(k, [])
        if k < 12:
            log += reference_tokens(log, 1)
    assert result.tokens_total == len(log) and len(result.tokens) == 4 * 12
    assert tokens_of(result.tokens)[:4] == had[:4]
    slot = next(iter(system.kernel.machine.contexts.values())).slot
    assert tokens_of(system.core.read_log(slot, 0, 100)) == log
    assert all(tokens_of(p.tokens) == tokens_of(result.tokens)[: len(p.tokens) // 4] for p in system.primed)


@pytest.mark.parametrize("ahead", [0, 2])
def test_after_a_crash_a_generation_goes_on_with_what_was_injected(ahead: int) -> None:
    """The client has `ahead` more tokens than were on record when it was injected."""
    system = Durable()
    client, hello = system.join()
    ctx = named(client)
    request = client.post("generate", ctx, 12, 0.9, 0, 1.0, 0.0, 5)
    system.run(until=lambda: len(client.streamed.get(request, [])) >= 3)
    interrupt = client.post("inject", ctx, ints([8, 9]))
    system.run(until=lambda: interrupt in client.replies)
    system.run(until=lambda: len(client.streamed[request]) >= 4 + ahead)
    had = list(client.streamed[request])
    whole = Durable()
    twin, _ = whole.join()
    uninterrupted = named(twin)
    same = twin.post("generate", uninterrupted, 12, 0.9, 0, 1.0, 0.0, 5)
    whole.run(until=lambda: len(twin.streamed.get(same, [])) >= 3)
    twin.post("inject", uninterrupted, ints([8, 9]))
    whole.run()

    again = Durable(system.disk)
    client, said = again.join(hello.session)
    (row,) = said.contexts
    assert row.generation == "suspended"
    request = client.post("reattach", row.ctx, ints(had))
    again.run()
    result = client.result(request)
    assert result.tokens == twin.result(same).tokens and result.injected == ((4, 2),)
    assert result.tokens_total == len(PROMPT) + 12 + 2
    assert again.disk.records[row.cid].result == result._replace(logprobs=())


def test_group_and_domain_of_a_kept_context_come_back_with_it() -> None:
    """After a crash it waits in its sub-group, and shares with the contexts of its domain only."""
    system = Durable()
    client, _ = system.join()
    pid = client.call("spawn", "", 0, 0, "uid:1000/batch", "uid:1000/x").pid
    ctx = client.call("alloc_context", pid).ctx
    client.call("append", ctx, ints(PROMPT))
    client.call("publish", ctx, "n")
    system.run()
    system = crash(system)
    other, _ = system.join()
    assert {row.name: row.limits[3].used for row in other.call("groups").rows} == {"uid:1000": 1, "uid:1000/batch": 1}
    ctx = other.call("open", "n").ctx  # it is of the process that holds it from now on
    assert other.call("groups", "uid:1000/batch").rows[0].limits[3].used == 0
    other.call("generate", ctx, 1)
    block = system.kernel.machine.config.block_tokens
    whole = (len(PROMPT) - 1) // block * block
    assert whole > 0
    for domain, hits in (("", 0), ("uid:1000/x", whole)):
        again = other.call("alloc_context", 0, "", domain).ctx
        other.call("append", again, ints(PROMPT))
        system.run()
        assert other.call("stat", again).usage.hit_tokens == hits
