"""The dispatcher alone, with a kernel made up on the spot: many busy clients, and turns inside turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from attnix.kernel.calls import Empty, VmstatResult
from attnix.kernel.errors import E
from attnix.kernel.events import (
    AttachTier,
    Bug,
    DetachTier,
    Disconnect,
    Effect,
    Event,
    Exec,
    Journal,
    Pause,
    Reply,
    Resume,
    Syscall,
    Transfer,
)
from attnix.kernel.journal import DropRecord, JournalRecord
from attnix.kernel.traps_wait import TextArgs
from attnix.syscalls import abi
from attnix.syscalls.dispatch import BUSY_TIMES, REQUESTS_AT_ONCE, Client, Dispatcher
from attnix.syscalls.framing import Oversized
from attnix.syscalls.listen import Credentials
from attnix.syscalls.ports import Failure

pack: Any = msgpack.packb  # its stubs say that it may return None
N = {call.name: call.number for call in abi.CALLS}


class Peer:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.sent: list[list[Any]] = []
        self.writes = 0
        self.reading = True
        self.finished = False
        self.on_write: Callable[[], None] = lambda: None

    def write(self, data: bytes) -> None:
        self.writes += 1
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "little")
            self.sent.append(msgpack.unpackb(data[at + 4 : at + 4 + size], strict_map_key=False))
            at += 4 + size
        self.on_write()

    def set_reading(self, reading: bool) -> None:
        self.reading = reading

    def finish(self) -> None:
        self.finished = True


class Port:
    def __init__(self) -> None:
        self.asked: list[object] = []

    def exec(self, effect: Exec) -> None:
        raise AssertionError("no kernel here asks for it")

    def transfer(self, effect: Transfer) -> None:
        self.asked.append(effect)

    def attach(self, effect: AttachTier) -> None:
        self.asked.append(effect)

    def detach(self, device: int) -> None:
        self.asked.append(device)

    def sleep(self, device: int) -> None:
        self.asked.append(("sleep", device))

    def wake(self, device: int) -> None:
        self.asked.append(("wake", device))

    def restart(self, device: int, reason: str) -> None:
        raise AssertionError(reason)

    async def close(self) -> None:
        pass


class Kernel:
    """Answers vmstat at once, with how many calls it has seen; keeps `wait` until a cancel."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls = 0
        self.effects: list[Effect] = []  # what a Bug makes it want

    def tail(self, conn: int, args: TextArgs, count: int) -> tuple[int, bytes]:
        raise AssertionError

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        self.events.append(event)
        if isinstance(event, Bug):
            return self.effects
        if not isinstance(event, Syscall):
            return []
        self.calls += 1
        if event.name == "vmstat":
            return [Reply(event.conn, event.request, 0, VmstatResult({"calls": self.calls}))]
        if event.name == "cancel":
            (request,) = event.args
            assert isinstance(request, int)
            cancelled = Reply(event.conn, request, E.ECANCELED, {"message": "cancelled"})
            return [cancelled, Reply(event.conn, event.request, 0, Empty())]
        if event.name == "detach":
            return [Reply(event.conn, event.request, 0, Empty()), Journal((DropRecord(self.calls),))]
        return []


class RefusingJournal:
    """Its disk is full until `full` is False.  known: whoever asks is told."""

    def __init__(self, known: bool = True) -> None:
        self.full = True
        self.known = known
        self.unsaved: list[JournalRecord] = []
        self.saved: list[JournalRecord] = []

    @property
    def pending(self) -> bool:
        return bool(self.unsaved)

    @property
    def retry_ns(self) -> int:
        return 7 if self.unsaved else 0

    @property
    def written(self) -> bool:
        return not self.unsaved

    def refusal(self) -> Failure | None:
        return Failure(E.ENOSPC, {"message": "full", "file": "j"}) if self.full and self.known else None

    def add(self, records: tuple[JournalRecord, ...]) -> None:
        self.unsaved.extend(records)

    def commit(self) -> None:
        if not self.full:
            self.saved += self.unsaved
            self.unsaved = []

    def close(self) -> None:
        pass


class Rig:
    def __init__(self, journal: RefusingJournal | None = None) -> None:
        self.timers: list[tuple[int, Callable[[], None]]] = []
        self.kernel = Kernel()
        self.port = Port()
        self.soon: list[Callable[[], None]] = []
        self.now_ns = 0
        self.panics: list[BaseException] = []
        self.dispatcher = Dispatcher(
            self.kernel,
            self.port,
            None,
            on_soon=self.soon.append,
            on_timer=lambda delay_ns, fire: self.timers.append((delay_ns, fire)),
            on_halt=lambda: None,
            on_panic=lambda error, event: self.panics.append(error),
            clock=lambda: self.now_ns,
            journal=journal,
        )

    def client(self) -> tuple[Client, Peer]:
        peer = Peer()
        return self.dispatcher.connect(peer, Credentials(1, 0, 0)), peer

    def crowd(self, size: int) -> list[tuple[Client, Peer]]:
        """Clients that have made the dispatcher gather."""
        clients = [self.client() for _ in range(size)]
        self.now_ns += 10**9
        for n in range(BUSY_TIMES + 1):
            self.dispatcher.receive(clients[n % size][0], [vmstat(1)])
        for _, peer in clients:
            peer.sent.clear()
        return clients


def vmstat(request: int) -> bytes:
    return bytes(pack([request, N["vmstat"], []]))


def test_what_the_kernel_wants_of_tiers_reaches_the_drivers() -> None:
    rig = Rig()
    move = Transfer(1, 2, "read", 0, b"\0" * 8, b"tag", -1, 0)
    attach = AttachTier(2, "nvme0", "nvme", 8, "{}")
    rig.kernel.effects = [move, attach, DetachTier(2)]
    rig.dispatcher.feed(Bug("info", ""))
    assert rig.port.asked == [move, attach, 2] and not rig.panics


def test_a_refused_record_is_written_later_though_nothing_else_is_for_the_journal() -> None:
    journal = RefusingJournal()
    rig = Rig(journal)
    record = DropRecord(1)
    rig.kernel.effects = [Journal((record,))]
    rig.dispatcher.feed(Bug("info", ""))
    rig.dispatcher.feed(Bug("info", ""))
    assert [delay for delay, _ in rig.timers] == [7], "one attempt to come, not one per record"
    rig.timers.pop()[1]()
    assert [delay for delay, _ in rig.timers] == [7], "still full: another one"
    journal.full = False
    rig.timers.pop()[1]()
    assert journal.saved == [record, record] and not rig.timers and not rig.panics


def detach(request: int) -> bytes:
    return bytes(pack([request, N["detach"], [7]]))


def test_what_could_not_last_is_refused_and_the_kernel_never_sees_it() -> None:
    journal = RefusingJournal()
    rig = Rig(journal)
    client, peer = rig.client()
    rig.dispatcher.receive(client, [detach(1)])
    assert peer.sent == [[1, E.ENOSPC, {"message": "detach: full", "file": "j"}]]
    assert rig.kernel.calls == 0 and not client.outstanding
    journal.full = False
    rig.dispatcher.receive(client, [detach(2)])
    assert peer.sent[1:] == [[2, 0, []]] and len(journal.saved) == 1


def test_an_answer_that_promises_waits_until_it_is_true_and_holds_up_nobody() -> None:
    """The disk is full, but only since it was asked."""
    journal = RefusingJournal(known=False)
    rig = Rig(journal)
    client, peer = rig.client()
    rig.dispatcher.receive(client, [detach(1)])
    rig.dispatcher.receive(client, [vmstat(2)])
    assert [request for request, _, _ in peer.sent] == [2] and list(client.outstanding) == [1]
    rig.timers.pop()[1]()
    assert [request for request, _, _ in peer.sent] == [2]
    journal.full = False
    rig.timers.pop()[1]()
    assert peer.sent[1:] == [[1, 0, []]] and not client.outstanding and not rig.panics


def test_going_down_answers_a_promise_that_could_not_be_kept() -> None:
    rig = Rig(RefusingJournal(known=False))
    client, peer = rig.client()
    rig.dispatcher.receive(client, [detach(1)])
    rig.dispatcher.abandon()
    assert [(request, errno) for request, errno, _ in peer.sent] == [(1, E.ECANCELED)]
    assert not client.outstanding and not any(isinstance(event, Bug) for event in rig.kernel.events)


def test_a_crowd_is_taken_together_and_in_order() -> None:
    rig = Rig()
    clients = rig.crowd(5)
    for client, _ in clients:
        rig.dispatcher.receive(client, [vmstat(1)])
        rig.dispatcher.receive(client, [vmstat(2), vmstat(3)])
    assert len(rig.soon) == 1 and not any(peer.sent for _, peer in clients), "gathered"
    before = rig.kernel.calls
    rig.soon.pop()()
    assert [[m[0] for m in peer.sent] for _, peer in clients] == [[1, 2, 3]] * 5
    assert rig.kernel.calls == before + 15
    seen = [m[2][0]["calls"] for _, peer in clients for m in peer.sent]
    assert sorted(seen) == list(range(before + 1, before + 16)), "each call once"


def test_a_lone_client_is_answered_at_once_again() -> None:
    rig = Rig()
    (client, peer), *_ = rig.crowd(3)
    for n in range(1, 2 * BUSY_TIMES):
        rig.now_ns += 10**6
        rig.dispatcher.receive(client, [vmstat(n)])
        while rig.soon:
            rig.soon.pop()()
        assert peer.sent[-1][0] == n
    rig.dispatcher.receive(client, [vmstat(99)])
    assert peer.sent[-1][0] == 99 and not rig.soon


def test_one_client_alone_never_waits_for_others() -> None:
    rig = Rig()
    client, peer = rig.client()
    for n in range(1, 100):
        rig.dispatcher.receive(client, [vmstat(n)])
        assert peer.sent[-1][0] == n
    assert not rig.soon


def test_leaving_while_gathered() -> None:
    """One is gone, one has only ended its requests: the first gets nothing, the second its answer and then leave."""
    rig = Rig()
    (gone, gone_peer), (ended, ended_peer), (other, other_peer) = rig.crowd(3)
    for client in (gone, ended, other):
        rig.dispatcher.receive(client, [vmstat(7)])
    rig.dispatcher.disconnect(gone)
    rig.dispatcher.end_of_requests(ended, 0, 0)
    assert not ended_peer.finished
    rig.soon.pop()()
    assert gone_peer.sent == [] and Disconnect(gone.conn) in rig.kernel.events
    assert [m[0] for m in ended_peer.sent] == [7] and ended_peer.finished
    assert [m[0] for m in other_peer.sent] == [7] and not other_peer.finished


def test_a_long_batch_is_written_in_parts() -> None:
    """What a turn holds in memory is bounded, and a client that leaves too much unread stops it between the parts."""
    rig = Rig()
    client, peer = rig.client()
    count = 3 * REQUESTS_AT_ONCE
    rig.dispatcher.receive(client, [vmstat(n + 1) for n in range(count)])
    assert [m[0] for m in peer.sent] == list(range(1, count + 1)) and peer.writes == 3
    peer.sent.clear()

    def full() -> None:
        peer.on_write = lambda: None
        rig.dispatcher.set_unread(client, True)

    peer.on_write = full
    rig.dispatcher.receive(client, [vmstat(n + 1) for n in range(count)])
    assert len(peer.sent) == REQUESTS_AT_ONCE and not peer.reading
    assert rig.kernel.events[-1] == Pause(client.conn)
    rig.dispatcher.set_unread(client, False)
    assert [m[0] for m in peer.sent] == list(range(1, count + 1)) and peer.reading
    assert Resume(client.conn) in rig.kernel.events


def test_an_answer_out_of_turn_and_the_requests_own() -> None:
    rig = Rig()
    client, peer = rig.client()
    rig.dispatcher.receive(client, [pack([5, N["wait"], []])])
    assert peer.sent == [] and rig.dispatcher.outstanding == 1
    rig.dispatcher.receive(client, [pack([6, N["cancel"], [5]])])
    assert [m[:2] for m in peer.sent] == [[5, E.ECANCELED], [6, 0]] and rig.dispatcher.outstanding == 0


def test_going_down_answers_everything_once() -> None:
    rig = Rig()
    client, peer = rig.client()
    rig.dispatcher.receive(client, [pack([5, N["wait"], []]), pack([6, N["wait"], []])])
    rig.dispatcher.cancel_all()
    assert sorted(m[:2] for m in peer.sent) == [[5, E.ECANCELED], [6, E.ECANCELED]]
    rig.dispatcher.receive(client, [vmstat(7)])
    assert peer.sent[-1][:2] == [7, E.ECANCELED]
    rig.dispatcher.abandon()
    assert len(peer.sent) == 3


def test_lost_framing_ends_the_connection_even_with_work_outstanding() -> None:
    rig = Rig()
    client, peer = rig.client()
    rig.dispatcher.receive(client, [pack([5, N["wait"], []]), Oversized(2**31, lost=True), vmstat(6)])
    assert [m[:2] for m in peer.sent] == [[0, E.EINVAL]] and peer.finished


def test_an_error_of_the_kernel_is_the_end() -> None:
    rig = Rig()
    client, peer = rig.client()

    def broken(event: Event, now_ns: int) -> list[Effect]:
        raise RuntimeError("a bug in the kernel")

    rig.kernel.step = broken  # type: ignore[method-assign]
    rig.dispatcher.receive(client, [vmstat(1), vmstat(2)])
    assert [str(error) for error in rig.panics] == ["a bug in the kernel"] and peer.sent == []
    rig.dispatcher.receive(client, [vmstat(3)])
    assert len(rig.panics) == 1
    rig.dispatcher.abandon()
    assert sorted(m[:2] for m in peer.sent) == [[n, E.ECANCELED] for n in (1, 2, 3)]
