"""Stored frames as objects of a Redis-protocol store: transfers in, outcomes out, nothing waited for.

An object is named by what it holds, not by a frame number: `attnix:1:<identity>:<domain root>:<key>`, all hex.  The
root key depends on identity and domain, so domains never meet, and two machines share objects only when they derive the
same keys (the same secret, model and numerics).  A private block (a partial tail) is of one context and is refused.

Reads and writes go over a connection each, so that a read that somebody waits for is not behind a megabyte of write-back.
Only a read of an object that is still being written follows it on the writing connection, which keeps the order that
drivers promise.  Everything a transfer can meet becomes an errno of its items:

    ENOENT     no such object: never written, expired, evicted by the store
    ECORRUPT   not the content that the tag names (checked: header, tag, identity, every layer), or not its size
    ENOSPC     the store is out of memory
    ETIMEDOUT  no byte for the deadline, or not done within deadline + bytes / min_bytes_s
    EIO        no connection, a broken one, the breaker is open, or an error reply
    EINVAL     a private block, or a frame that does not exist
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from attnix.kernel.errors import E
from attnix.kernel.events import Transfer, TransferDone
from attnix.kernel.tag import GATE_FAILED, PRIVATE, Tag, unpack_tag

from ..stored import Gates, StoredFormat, errno_of
from .breaker import Breaker, BreakerState
from .config import Resolver, Settings
from .lane import Command, Lane
from .resp import Buffer, Kind, ProtocolError, Reply, request, set_request

NAME_VERSION: Final = 1
_FRAME_0: Final = struct.pack("<i", 0)
_RATE_OBJECTS: Final = 4  # a transfer of fewer says more about latency than about bandwidth
_TEST_BYTES: Final = 2 << 20  # written and read at the start to measure the store, at least one object
_TEST_PINGS: Final = 5
_TEST_TTL_MS: Final = 10_000


def object_name(identity: bytes, tag: Tag) -> bytes:
    """The name of a full block's object."""
    return b"attnix:%d:%b:%b:%b" % (
        NAME_VERSION, identity.hex().encode(), tag.root.hex().encode(), tag.key.hex().encode()
    )  # fmt: skip


class _Job:
    """One transfer or question in progress.

    left         items without an outcome
    has_lost     whether the connection was given up before every item was answered: the breaker hears of that elsewhere
    moved_bytes  of the items that succeeded
    """

    __slots__ = ("began_ns", "deadline_ns", "failed", "finish", "has_lost", "lane", "left", "moved_bytes", "verb")

    def __init__(self, verb: str, items: int, lane: Lane, finish: Callable[[_Job, int], None]) -> None:
        self.verb = verb
        self.left = items
        self.lane = lane
        self.finish = finish
        self.failed: list[tuple[int, int]] = []
        self.has_lost = False
        self.moved_bytes = 0
        self.began_ns = 0
        self.deadline_ns = 0


class Question(NamedTuple):
    """An `exists` that has been answered.  bitmap: bit i % 8 of byte i // 8 is item i."""

    number: int
    bitmap: bytes


class RemoteStore:
    """The tier's engine.  `fileno` is readable when `turn` has something to do; `wake_ns` says when it has otherwise.

    arena  the dram arena: a writable buffer of stored frames; contents move between it and the sockets in place
    gates  where a transfer that names a gate reports its end, as layers or GATE_FAILED (content arrives object by object,
           so there is nothing to report before)
    done   what has ended, for the driver to take
    logs   (level, text), for the driver to take
    """

    def __init__(
        self, settings: Settings, arena: Any, gates: Gates | None = None, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.settings = settings
        self.format = StoredFormat(settings.frame_bytes, settings.layers, settings.block_tokens, settings.identity)
        self.breaker = Breaker(settings.breaker_failures, settings.backoff_ns, settings.backoff_cap_ns)
        self.done: deque[TransferDone | Question] = deque()
        self.logs: deque[tuple[str, str]] = deque()
        self.counts: Counter[str] = Counter()
        self.rates_bytes_s = {"read": 0, "write": 0}
        self.latency_ns = 0
        self._arena = memoryview(arena)
        fitting = len(self._arena) // self.format.stored_bytes
        self._frames = min(settings.dram_frames or fitting, fitting)
        self._gates = gates
        self._clock = clock
        self._resolver = Resolver(settings)
        self._reading = self._new_lane()
        self._writing = self._new_lane()
        self._lanes = (self._reading, self._writing)
        self._ended_ns = dict.fromkeys(self._lanes, 0)  # when the last job of each ended
        self._jobs: dict[_Job, None] = {}  # oldest first
        self._on_their_way: Counter[bytes] = Counter()  # objects being written
        self._filling: Counter[int] = Counter()  # frames of the arena that something is read into
        self._sending: Counter[int] = Counter()  # and those that something is written from
        self._held: deque[Transfer] = deque()
        self._is_probing = False
        self._reason = "it does not answer"  # why a connection was given up last
        self._is_down = False
        self._complaints: set[bytes] = set()
        self._poll = select.epoll()
        self._watched: dict[Lane, tuple[Any, int]] = {}  # (socket, events)

    # -- what the driver asks ------------------------------------------------------------------------------------

    def submit(self, transfer: Transfer) -> None:
        """Begin a transfer, or keep it until those before it that use the same frames of the arena have ended.

        Its TransferDone comes to `done`, perhaps before this returns.
        """
        if self._held or self._must_wait(transfer):
            self._held.append(transfer)
        else:
            self._start(transfer)

    def _must_wait(self, transfer: Transfer) -> bool:
        frames = set(memoryview(transfer.pairs).cast("i").tolist()[1::2])
        busy = self._filling if transfer.verb == "write" else self._filling + self._sending
        return any(frame in busy for frame in frames)

    def _start(self, transfer: Transfer) -> None:
        items = len(transfer.pairs) // 8
        pairs = memoryview(transfer.pairs).cast("i").tolist()
        tag_bytes, is_write = self.format.tag_bytes, transfer.verb == "write"
        is_possible = transfer.arena == self.settings.dram_device and len(transfer.tags) == items * tag_bytes
        refused: list[tuple[int, int]] = []
        valid: list[tuple[int, bytes, memoryview, bytes]] = []
        for item in range(items):
            tag = transfer.tags[item * tag_bytes : (item + 1) * tag_bytes]
            name = self._name(tag) if is_possible else None
            slot = self._slot(*pairs[2 * item : 2 * item + 2])
            if name is None or slot is None:
                refused.append((item, int(E.EINVAL)))
            elif is_write and (failures := self.format.verify(slot, _FRAME_0, tag)):
                refused.append((item, errno_of(failures[0].code)))  # it would be found out by others, later
            else:
                valid.append((item, name, slot, tag))

        users = self._sending if is_write else self._filling
        frames = Counter(pairs[2 * item + 1] for item, _, _, _ in valid)
        users.update(frames)

        def finish(job: _Job, elapsed_ns: int) -> None:
            for frame, count in frames.items():
                users[frame] -= count
                if not users[frame]:
                    del users[frame]
            self._finish(transfer, tuple(sorted(job.failed)), job.moved_bytes, elapsed_ns)

        lane = self._writing if is_write else self._lane_to_read([name for _, name, _, _ in valid])
        job = _Job(transfer.verb, items, lane, finish)
        if is_write:
            commands = [self._set(job, item, name, slot) for item, name, slot, _ in valid]
        else:
            commands = [self._get(job, item, name, slot, tag) for item, name, slot, tag in valid]
        self._begin(job, commands, refused, len(commands) * self.format.stored_bytes)

    def ask_exists(self, number: int, tags: bytes) -> None:
        """Begin to ask which blocks the store has, in their right size.  A Question comes to `done` within the deadline."""
        tag_bytes = self.format.tag_bytes
        names = [self._name(tags[at : at + tag_bytes]) for at in range(0, len(tags), tag_bytes)]
        found = bytearray(-(-len(names) // 8))

        def finish(job: _Job, elapsed_ns: int) -> None:
            self.done.append(Question(number, bytes(found)))

        valid = [(item, name) for item, name in enumerate(names) if name is not None]
        job = _Job("exists", len(names), self._lane_to_read([name for _, name in valid]), finish)
        commands = [self._strlen(job, item, name, found) for item, name in valid]
        self._begin(job, commands, [(item, int(E.EINVAL)) for item, name in enumerate(names) if name is None], 0)

    def fileno(self) -> int:
        return self._poll.fileno()

    def now_ns(self) -> int:
        """By the clock that `wake_ns` is of."""
        return self._clock()

    def wake_ns(self) -> int | None:
        """When `turn` must be called though nothing is readable; None: never."""
        times = [lane.stalls_at_ns for lane in self._lanes if lane.is_busy]
        times += [job.deadline_ns for job in self._jobs]
        if self._held and not self._must_wait(self._held[0]):
            times.append(self._clock())
        if self.breaker.state is BreakerState.OPEN and not self._is_probing:
            times.append(self.breaker.retry_at_ns)
        return min(times, default=None)

    def turn(self) -> None:
        """Serve the connections that are ready, then the clock.  In this order: when we were held up ourselves, what has
        arrived meanwhile still counts."""
        ready = {fd for fd, _ in self._poll.poll(0)}
        for lane, (sock, _) in list(self._watched.items()):
            if sock.fileno() in ready and lane.socket is sock:
                lane.service(self._clock())
        now_ns = self._clock()
        for lane in self._lanes:
            lane.check_stall(now_ns)
        for job in list(self._jobs):
            if job.left and now_ns >= job.deadline_ns:
                job.lane.give_up(int(E.ETIMEDOUT), f"a {job.verb} was not done in time")
        if self.breaker.can_probe(now_ns) and not self._is_probing:
            self._is_probing = True
            self._reading.submit([Command([request(b"PING")], self._on_probed)], now_ns)
        while self._held and not self._must_wait(self._held[0]):
            self._start(self._held.popleft())
        self._watch()

    def health(self) -> dict[str, int]:
        return {
            **{name: self.counts[name] for name in COUNTS},
            "connects": sum(lane.connects for lane in self._lanes),
            "breaker": self.breaker.state.value,
            "breaker_opened": self.breaker.opened,
            "in_flight": len(self._jobs) + len(self._held),
            "read_bytes_s": self.rates_bytes_s["read"],
            "write_bytes_s": self.rates_bytes_s["write"],
            "latency_ns": self.latency_ns,
        }

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._poll.close()

    # -- commands ------------------------------------------------------------------------------------------------

    def _get(self, job: _Job, item: int, name: bytes, slot: memoryview, tag: bytes) -> Command:
        def done(reply: Reply) -> None:
            if reply.kind is Kind.BULK:
                failures = self.format.verify(slot, _FRAME_0, tag)
                self._settle(job, item, errno_of(failures[0].code) if failures else 0)
            elif reply.kind is Kind.NIL:
                self._settle(job, item, int(E.ENOENT))
            elif reply.kind is Kind.MISFIT:
                self._settle(job, item, int(E.ECORRUPT))
            else:
                self._fail(job, item, reply)

        return Command([request(b"GET", name)], done, slot)

    def _set(self, job: _Job, item: int, name: bytes, slot: memoryview) -> Command:
        self._on_their_way[name] += 1

        def done(reply: Reply) -> None:
            self._on_their_way[name] -= 1
            if not self._on_their_way[name]:
                del self._on_their_way[name]
            if reply.kind is Kind.STATUS and reply.text == b"OK":
                self._settle(job, item, 0)
            else:
                self._fail(job, item, reply)

        return Command(set_request(name, slot, self.settings.ttl_ms), done)

    def _strlen(self, job: _Job, item: int, name: bytes, found: bytearray) -> Command:
        def done(reply: Reply) -> None:
            if reply.kind is Kind.INTEGER:
                if reply.number == self.format.stored_bytes:
                    found[item // 8] |= 1 << item % 8
                self._settle(job, item, 0)
            else:
                self._fail(job, item, reply)

        return Command([request(b"STRLEN", name)], done)

    def _fail(self, job: _Job, item: int, reply: Reply) -> None:
        """An item ends with an error reply, none at all, or one that makes no sense.  Error: ProtocolError for that."""
        if reply.kind is Kind.LOST:
            job.has_lost = True
            self._settle(job, item, reply.number)
            return
        self._settle(job, item, int(E.ENOSPC if reply.text.startswith(b"OOM ") else E.EIO))
        if reply.kind is not Kind.ERROR:
            raise ProtocolError(f"a {reply.kind.name.lower()} in answer to a {job.verb}")
        word = reply.text.split(b" ")[0]
        if word not in self._complaints and len(self._complaints) < 16:  # once each: it may say so for every object
            self._complaints.add(word)
            self._log("warning", f"answered a {job.verb} with {reply.text[:200].decode('ascii', 'replace')!r}")

    # -- jobs ----------------------------------------------------------------------------------------------------

    def _name(self, packed: bytes) -> bytes | None:
        """The object of a tag; None when there can be none."""
        try:
            tag = unpack_tag(packed, self.format.block_tokens)
        except ValueError:
            return None
        return None if tag.flags & PRIVATE else object_name(self.settings.identity, tag)

    def _slot(self, ours: int, theirs: int) -> memoryview | None:
        """The arena's frame `theirs`; None when it, or our own `ours`, does not exist."""
        if not (0 <= ours < self.settings.capacity_frames and 0 <= theirs < self._frames):
            return None
        return self._arena[theirs * self.format.stored_bytes : (theirs + 1) * self.format.stored_bytes]

    def _lane_to_read(self, names: Sequence[bytes]) -> Lane:
        """Behind the writes if one of them is of an object that is asked for."""
        return self._writing if any(name in self._on_their_way for name in names) else self._reading

    def _begin(
        self, job: _Job, commands: Sequence[Command], refused: Sequence[tuple[int, int]], content_bytes: int
    ) -> None:
        now_ns = self._clock()
        job.failed.extend(refused)
        job.left -= len(refused)
        self.counts["refused"] += len(refused)
        if not commands:
            job.finish(job, 0)
            return
        if not self.breaker.admit():
            self.counts["breaker_refused"] += len(commands)
            for command in commands:
                command.done(Reply(Kind.LOST, number=int(E.EIO)))
            return
        # The deadline is for moving the bytes of this job and of those before it on the same connection.
        ahead_ns = max((j.deadline_ns - self.settings.deadline_ns for j in self._jobs if j.lane is job.lane), default=0)
        own_ns = round(content_bytes / self.settings.min_bytes_s * 1e9)
        job.deadline_ns = max(now_ns, ahead_ns) + own_ns + self.settings.deadline_ns
        job.began_ns = now_ns
        self._jobs[job] = None
        job.lane.submit(commands, now_ns)
        self._watch()

    def _settle(self, job: _Job, item: int, code: int) -> None:
        """One item has its outcome: 0 or an errno."""
        job.left -= 1
        if code:
            job.failed.append((item, code))
            self.counts[_COUNT_OF.get(code, "errors")] += 1
        elif job.verb != "exists":
            job.moved_bytes += self.format.stored_bytes
            self.counts[f"{job.verb}s"] += 1
            self.counts[f"{job.verb}_bytes"] += self.format.stored_bytes
        if not job.left:
            self._end(job)

    def _end(self, job: _Job) -> None:
        now_ns = self._clock()
        was_sent = job in self._jobs
        self._jobs.pop(job, None)
        # On one connection jobs run one after the other: this one's first byte was not before the last one's end.
        elapsed_ns = now_ns - max(job.began_ns, self._ended_ns[job.lane]) if was_sent else 0
        self._ended_ns[job.lane] = now_ns
        if was_sent and not job.has_lost:
            self.breaker.succeed()
            if self._is_down and self.breaker.state is BreakerState.CLOSED:
                self._is_down = False
                self._log("info", "is back")
        if job.moved_bytes and not job.failed and elapsed_ns > 0:
            self._learn(job.verb, job.moved_bytes, elapsed_ns)
        job.finish(job, elapsed_ns)

    def _finish(
        self, transfer: Transfer, failed: tuple[tuple[int, int], ...], moved_bytes: int, elapsed_ns: int
    ) -> None:
        if transfer.gate >= 0 and self._gates is not None:
            self._gates.store(transfer.gate, transfer.ticket, GATE_FAILED if failed else self.format.layers)
        self.done.append(TransferDone(0, transfer.seq, failed, moved_bytes, elapsed_ns))

    def _learn(self, verb: str, moved_bytes: int, elapsed_ns: int) -> None:
        """From a transfer of several objects the bandwidth, from one of few what it takes beyond its bytes."""
        known = self.rates_bytes_s[verb]
        if not known or moved_bytes >= _RATE_OBJECTS * self.format.stored_bytes:
            seen = moved_bytes * 10**9 // elapsed_ns
            self.rates_bytes_s[verb] = (3 * known + seen) // 4 if known else seen
        else:
            beyond_ns = max(0, elapsed_ns - moved_bytes * 10**9 // known)
            self.latency_ns = (7 * self.latency_ns + beyond_ns) // 8 if self.latency_ns else beyond_ns

    # -- the store's health ----------------------------------------------------------------------------------------

    def _new_lane(self) -> Lane:
        settings = self.settings
        return Lane(
            self._resolver.addresses,
            settings.greeting,
            stall_ns=settings.deadline_ns,
            window_bytes=settings.window_bytes,
            longest_bytes=settings.max_object_bytes,
            failed=self._on_failed,
        )

    def _on_failed(self, code: int, reason: str) -> None:
        """A connection has been given up with something unanswered.  What was kept back fails with it: whoever waits for
        a store that stands still waits once."""
        while self._held:
            transfer = self._held.popleft()
            failed = tuple((item, code) for item in range(len(transfer.pairs) // 8))
            self.counts[_COUNT_OF.get(code, "errors")] += len(failed)
            self._finish(transfer, failed, 0, 0)
        self._resolver.refresh()
        self.counts["connection_failures"] += 1
        self.breaker.fail(self._clock())
        self._reason = reason
        if self.breaker.state is BreakerState.OPEN:
            self._say_down()

    def _say_down(self) -> None:
        if not self._is_down:
            self._is_down = True
            self._log("warning", f"{self._reason}; all of it is a miss until it answers again")

    def _on_probed(self, reply: Reply) -> None:
        self._is_probing = False
        if reply.kind is Kind.LOST:
            self.breaker.probe_failed(self._clock())
        else:
            self.breaker.probe_succeeded()

    def _log(self, level: str, text: str) -> None:
        self.logs.append((level, f"{self.settings.address_text}: {text}"))

    def _watch(self) -> None:
        """Have `fileno` follow the connections' sockets, which come and go."""
        for lane in self._lanes:
            events, watched = lane.wanted_events(), self._watched.get(lane)
            if lane.socket is None:
                self._watched.pop(lane, None)  # a closed descriptor leaves the epoll set by itself
            elif watched is None or watched[0] is not lane.socket:
                self._poll.register(lane.socket, events)
                self._watched[lane] = (lane.socket, events)
            elif watched[1] != events:
                self._poll.modify(lane.socket, events)
                self._watched[lane] = (lane.socket, events)

    # -- the test at the start -------------------------------------------------------------------------------------

    def self_test(self) -> None:
        """Measure latency and bandwidth with a few objects of our size that nobody else can meet.

        A store that does not answer costs one deadline; the numbers stay 0 and are learnt from the first transfers.
        """
        self._resolver.wait(self.settings.deadline_ns / 1e9)
        times: list[int] = []
        for _ in range(1 + _TEST_PINGS):  # the first one connects
            began_ns = self._clock()
            if not self._ask(self._reading, [([request(b"PING")], None)], Kind.STATUS):
                self._say_down()  # whoever has just written its address wants to know, not after some failed transfers
                return
            times.append(self._clock() - began_ns)
        self.latency_ns = min(times)
        size = self.format.stored_bytes
        count = max(1, _TEST_BYTES // size)
        memory = memoryview(bytearray(os.urandom(4096)).ljust(count * size, b"\xa5"))
        slots = [memory[at : at + size] for at in range(0, count * size, size)]
        test = os.urandom(8).hex().encode()
        names = [b"attnix:%d:test:%b:%d" % (NAME_VERSION, test, index) for index in range(count)]
        writes = [(set_request(name, slot, _TEST_TTL_MS), None) for name, slot in zip(names, slots, strict=True)]
        reads = [([request(b"GET", name)], slot) for name, slot in zip(names, slots, strict=True)]
        removals = [([request(b"DEL", name)], None) for name in names]
        if self._ask(self._writing, [([request(b"PING")], None)], Kind.STATUS):
            for lane, verb, parts, kind in (
                (self._writing, "write", writes, Kind.STATUS),
                (self._reading, "read", reads, Kind.BULK),
            ):
                began_ns = self._clock()
                if not self._ask(lane, parts, kind):
                    break
                self._learn(verb, count * size, max(1, self._clock() - began_ns))
            self._ask(self._writing, removals, Kind.INTEGER)

    def _ask(self, lane: Lane, what: Sequence[tuple[Sequence[Buffer], memoryview | None]], kind: Kind) -> bool:
        """Send and wait, up to a deadline; whether all replies are of the kind."""
        replies: list[Reply] = []
        asked_bytes = sum(len(part) for parts, _ in what for part in parts) + sum(len(slot or b"") for _, slot in what)
        now_ns = self._clock()
        until_ns = now_ns + self.settings.deadline_ns + round(asked_bytes / self.settings.min_bytes_s * 1e9)
        lane.submit([Command(parts, replies.append, slot) for parts, slot in what], now_ns)
        self._watch()
        while len(replies) < len(what):
            self._poll.poll(max(0.0, (min(until_ns, lane.stalls_at_ns) - self._clock()) / 1e9))
            self.turn()
            if self._clock() >= until_ns:
                lane.give_up(int(E.ETIMEDOUT), "the test at the start was not done in time")
        return all(reply.kind is kind for reply in replies)


COUNTS: Final = (
    "reads", "writes", "read_bytes", "write_bytes", "misses", "corrupt", "full", "timeouts", "errors", "refused",
    "breaker_refused", "connection_failures",
)  # fmt: skip
_COUNT_OF: Final = {
    int(E.ENOENT): "misses", int(E.ECORRUPT): "corrupt", int(E.ENOSPC): "full", int(E.ETIMEDOUT): "timeouts"
}  # fmt: skip
