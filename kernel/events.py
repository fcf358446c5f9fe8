"""What goes into `Kernel.step` and what comes out.  The daemon performs effects and feeds results back as events.

Same events at the same times give the same effects, to the byte: that is what makes the kernel replayable.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from .calls import GenerateArgs
from .errors import Detail, E
from .journal import JournalRecord, RestoredContext, ToolRecord
from .snapshot import SnapshotEntry

# -- events -------------------------------------------------------------------------------------------------------


class Connect(NamedTuple):
    """A client connected.  uid and gid come from SO_PEERCRED, never from a message.

    session  an unguessable token, drawn by the daemon (the kernel has no randomness); "": no session can be resumed
    """

    conn: int  # never reused
    uid: int
    gid: int
    peer_pid: int
    session: str = ""


class Disconnect(NamedTuple):
    conn: int


class Syscall(NamedTuple):
    """A decoded request: `args` is the record of kernel/calls.py that belongs to `name`; text is already tokens."""

    conn: int
    request: int
    name: str
    args: tuple[object, ...]


class StopAt(NamedTuple):
    """The daemon found a stop string: generation `request` of `conn` keeps its first `keep` sampled tokens and ends."""

    conn: int
    request: int
    keep: int


class Pause(NamedTuple):
    """A client leaves too much unread: its contexts get no more passes until Resume."""

    conn: int


class Resume(NamedTuple):
    conn: int


class DriverUp(NamedTuple):
    """A driver answered its probe.  `arena` is "kept" when frames written before survived, else "lost".

    engine        how it does its work, for people
    capabilities  of the driver protocol: "direct" means that its transfers may name an hbm as their arena, "layered" that an accel
                  loads from dram beside its passes, which may follow layer by layer
    read_bytes_s, write_bytes_s, latency_ns  what it measured of itself at its start; 0: nothing yet
    prefill       passes that it timed before: (tokens computed, tokens cached before them, ns)
    """

    device: int
    epoch: int
    driver_pid: int
    arena: str
    engine: str = ""
    capabilities: tuple[str, ...] = ()
    read_bytes_s: int = 0
    write_bytes_s: int = 0
    latency_ns: int = 0
    prefill: tuple[tuple[int, int, int], ...] = ()


class DriverDown(NamedTuple):
    """The driver's process is reaped (hung is not dead): nothing it submitted can still land."""

    device: int
    epoch: int
    reason: str


class DriverGone(NamedTuple):
    """The driver is down and will not be started again by itself.  A later DriverUp revives the device."""

    device: int
    reason: str


class ExecDone(NamedTuple):
    """A forward completed.

    tokens    int32, one per SAMPLE sequence, in batch order
    logprobs  float32, the log-probability of each of them
    tops      one (ids int32, logprobs float32) per sequence that is FORWARD, or SAMPLE with logprobs > 0, in batch order
    scores    one float32 array per SCORE sequence, in batch order
    """

    device: int
    seq: int
    tokens: bytes
    logprobs: bytes
    tops: tuple[tuple[bytes, bytes], ...]
    scores: tuple[bytes, ...]
    computed_tokens: int
    compute_ns: int
    waited_ns: int = 0  # of compute_ns, spent waiting at gates


class ExecFailed(NamedTuple):
    """The driver is alive but could not run the pass; the kernel redoes it."""

    device: int
    seq: int
    code: int
    reason: str


class TransferDone(NamedTuple):
    """A transfer ended; every item of it that is not in `failed` is complete and verified.

    failed       (index of the item, errno): ECORRUPT wrong content, ENOSPC full, EIO, ENOENT gone, ETIMEDOUT
    moved_bytes  of the items that succeeded
    elapsed_ns   from the driver's first to its last byte: with moved_bytes its bandwidth
    """

    device: int
    seq: int
    failed: tuple[tuple[int, int], ...]
    moved_bytes: int
    elapsed_ns: int


class DriverAsleep(NamedTuple):
    """Its process has ended and its memory is given back (SleepDriver)."""

    device: int


class Found(NamedTuple):
    """What a tier's driver found in its slots when it started: `rows` is (frame int32, tag) per valid slot.

    Comes before DriverUp of the same epoch.
    """

    device: int
    epoch: int
    rows: bytes


class Timer(NamedTuple):
    timer: int


class Restored(NamedTuple):
    """What the journal holds; once, before any client connects.  From then on the kernel keeps a journal.

    pid, cid  high-water marks: every id from now on is larger
    boots     how often this state directory was booted before
    tools     what was learnt about tools
    """

    pid: int
    cid: int
    boots: int
    contexts: tuple[RestoredContext, ...]
    tools: tuple[ToolRecord, ...] = ()


class Suspend(NamedTuple):
    """The system goes down: generations on named and detached contexts stop where they are, to go on after a restart."""


class Plug(NamedTuple):
    """Several requests came together: no pass begins before Unplug, so that those that can share one do.  (Linux plugs its block
    queues so: Axboe, "Explicit block device plugging", 2011.)"""


class Unplug(NamedTuple):
    """That was all of them.  The daemon sends both within one turn; nothing else happens in between but these requests."""


class SnapshotWritten(NamedTuple):
    """Answers WriteSnapshot.  code: 0, or an errno with its detail."""

    conn: int
    request: int
    code: E | int
    detail: Detail
    file_bytes: int = 0


class SnapshotRead(NamedTuple):
    """Answers ReadSnapshot.  identity: of the system that wrote it."""

    conn: int
    request: int
    code: E | int
    detail: Detail
    identity: tuple[tuple[str, str], ...] = ()
    entries: tuple[SnapshotEntry, ...] = ()


class Bug(NamedTuple):
    """Something outside the kernel wants a line in dmesg."""

    level: str
    text: str


Event: TypeAlias = (
    Connect
    | Disconnect
    | Syscall
    | StopAt
    | Pause
    | Resume
    | DriverUp
    | DriverDown
    | DriverGone
    | ExecDone
    | ExecFailed
    | TransferDone
    | DriverAsleep
    | Found
    | Timer
    | Bug
    | Restored
    | Suspend
    | Plug
    | Unplug
    | SnapshotWritten
    | SnapshotRead
)

# -- effects ------------------------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """Answer `request` of `conn`: `result` is the record of kernel/calls.py, or the detail fields when code is not 0."""

    conn: int
    request: int
    code: E | int
    result: tuple[object, ...] | Detail


class Exec(NamedTuple):
    """Run one forward on `device` (see kernel/batch.py).  Answered by ExecDone or ExecFailed with the same `seq`."""

    device: int
    seq: int
    seqs: bytes
    tokens: bytes
    copies: bytes
    histories: tuple[bytes, ...]
    gates: bytes = b""  # int64 pairs (gate, ticket) of the loads that the pass must not overtake, layer by layer
    allowed: tuple[bytes, ...] = ()  # in batch order, of sequences with ALLOWED: a bit per token id, lowest bit first


class Transfer(NamedTuple):
    """Move block contents between the frames of `device` and the arena of another one.  Answered by TransferDone with the
    same `seq`, or by DriverDown.  A device runs transfers and passes in the order in which they are sent, or so that
    nobody can tell.

    verb    "read": out of `device`'s frames into the arena of `arena`; "write": out of that arena into `device`'s frames
    arena   device number of the other end: a dram, or, for a driver with capability "direct", an hbm
    pairs   int32 pairs (frame of `device`, frame of `arena`), one per item
    tags    one packed Tag per item (kernel/tag.py): written into headers, compared when reading
    gate    index of the gate to report progress through, or -1; `ticket` goes with it
    """

    device: int
    seq: int
    verb: str
    arena: int
    pairs: bytes
    tags: bytes
    gate: int
    ticket: int


class AttachTier(NamedTuple):
    """Start the driver of a new tier: DriverUp or DriverGone of `device` answers.  settings: JSON, as attach_tier had it."""

    device: int
    name: str
    kind: str
    capacity_frames: int
    settings: str


class DetachTier(NamedTuple):
    """The tier is drained: stop its driver for good and forget it.  Nothing answers."""

    device: int


class SleepDriver(NamedTuple):
    """Stop the driver of a compute device and give the memory of its frames back.  Answered by DriverAsleep."""

    device: int


class WakeDriver(NamedTuple):
    """Start it again.  Answered by DriverUp or DriverGone."""

    device: int


class Tokens(NamedTuple):
    """Tokens sampled by one completed pass, for all generations at once.

    streams   int64 pairs (conn, request), one per token
    tokens    int32
    logprobs  float32
    tops      None, or one entry per token: None or (ids, logprobs)
    """

    streams: bytes
    tokens: bytes
    logprobs: bytes
    tops: tuple[tuple[bytes, bytes] | None, ...] | None


class Notify(NamedTuple):
    """A notification to a connection, other than tokens: `kind` and `record` as in syscalls/abi.py NOTIFICATIONS."""

    conn: int
    kind: str
    record: tuple[object, ...]


class Trace(NamedTuple):
    """From now on tell `conn` of the calls of connection `target`, as those of process `pid`; what "none": no more of them."""

    conn: int
    target: int
    pid: int
    what: str


class Prime(NamedTuple):
    """Generation `request` of `conn` goes on with tokens that it had before: under a client that came back, or under none.

    was       (conn, request) under which the daemon knew it until now
    args      as it was asked for; `args.stream` as the client wants it now
    tokens    all it has so far, int32; of them the client knows the first `told`
    logprobs  of those tokens, as far as they are known
    orphan    no client: only its stop strings are to be looked for
    """

    conn: int
    request: int
    was: tuple[int, int]
    args: GenerateArgs
    tokens: bytes
    told: int
    logprobs: tuple[tuple[float, bytes, bytes], ...]
    orphan: bool


class Journal(NamedTuple):
    """Write these down, in order, before anything that this turn answers is sent.  Nothing answers."""

    records: tuple[JournalRecord, ...]


class WriteSnapshot(NamedTuple):
    """Write a snapshot file of `uid`, whole or not at all.  Answered by SnapshotWritten."""

    conn: int
    request: int
    uid: int
    name: str
    identity: tuple[tuple[str, str], ...]
    token_bytes: int
    entries: tuple[SnapshotEntry, ...]


class ReadSnapshot(NamedTuple):
    """Read one.  Answered by SnapshotRead."""

    conn: int
    request: int
    uid: int
    name: str


class SetTimer(NamedTuple):
    """Feed Timer(timer) back at `at_ns` (the clock that `now_ns` comes from).  A timer cannot be unset: late ones are ignored."""

    timer: int
    at_ns: int


class RestartDriver(NamedTuple):
    """The kernel gave up on a driver that is alive but does not answer rightly: kill it, reap it, start it again."""

    device: int
    reason: str


class Halt(NamedTuple):
    """A `shutdown` was accepted: close the socket, stop the drivers, exit."""


Effect: TypeAlias = (
    Reply
    | Exec
    | Transfer
    | AttachTier
    | DetachTier
    | SleepDriver
    | WakeDriver
    | Tokens
    | Notify
    | Trace
    | Prime
    | Journal
    | WriteSnapshot
    | ReadSnapshot
    | SetTimer
    | RestartDriver
    | Halt
)
