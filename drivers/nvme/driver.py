"""The file tier as a backend of the driver protocol: many transfers under way, answered in any order.

Transfers that touch the same slot or arena frame run one after the other, in the order of their messages; the rest share
the device's queue.  Reads go first, since somebody waits for them, and writes keep a part of the queue so that they are
never starved.

What can happen to the file is looked for before each transfer and after each failure: deleted, it is made anew, empty;
cut, it gets its size back.  The blocks that it lost are reported (ENOENT) one by one as they are asked for.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from attnix.kernel.errors import E
from attnix.kernel.events import Transfer, TransferDone
from attnix.kernel.tag import GATE_FAILED, HEADER_BYTES

from ..memfd import map_shared
from ..protocol import PROTOCOL_VERSION, Probe
from ..serve import ConfigError, DriverArguments
from ..stored import Gates
from .config import NvmeConfig
from .engine import Engine, Operation, Region, ThreadEngine, Verb, new_region
from .inventory import measure, scan
from .jobs import DirectRead, Job, Scrub, StoredRead, StoredWrite, group_layers, landing_bytes
from .rates import Rates
from .ring_engine import RingEngine, RingUnavailable
from .slot_file import FileState, SlotFile

INVENTORY_BYTES: Final = 4 << 20  # of one message
_REGISTER_SOON_MS: Final = 20  # between two pieces
_REGISTER_LATER_MS: Final = 500  # between two looks at memory whose pages are not there yet
_READS_IN_A_ROW: Final = 3  # for one write, while both are waiting
_NOTICE_EVERY: Final = 8  # results between two looks for room in the queue


def say(text: str) -> None:
    """A line for the daemon's log."""
    print(text, file=sys.stderr, flush=True)


class NvmeDriver:
    """One file, one engine, one dram arena and any number of hbm arenas.

    hbm    hbm arenas by device number
    gates  where direct reads report their progress
    Error at construction: ConfigError.
    """

    def __init__(self, config: NvmeConfig, dram: Region, hbm: Mapping[int, Region], gates: Gates | None) -> None:
        self._config = config
        self._format = config.format()
        self._dram = dram
        self._depth = config.depth
        self._heads = new_region(self._depth * HEADER_BYTES)
        self._free_places = list(range(self._depth))  # of heads and landing
        self._zeros = new_region(HEADER_BYTES)
        self._file = SlotFile(
            config.path,
            self._format,
            config.capacity_frames,
            allow_shrink=config.allow_shrink,
            lock_wait_s=config.lock_wait_ms / 1000,
            log=say,
        )
        can_go_direct = self._file.direct and gates is not None and group_layers(self._format) > 0
        self._hbm = dict(hbm) if can_go_direct else {}
        self._landing = new_region(self._depth * landing_bytes(self._format)) if self._hbm else new_region(HEADER_BYTES)
        self._gates = gates
        self._engine = self._open_engine()
        self._engine.use(self._file.fd)
        found = scan(self._engine, self._file, self._heads, self._depth)
        self._inventory = found.slots
        self._generation = found.highest_generation + 1
        self._rates = Rates(measure(self._engine, self._file, found, self._depth))

        self._waiting: deque[Job] = deque()  # for a slot or frame that an earlier one uses
        self._busy: set[int] = set()  # slots and frames of started jobs
        self._reads: deque[Job] = deque()  # started, with operations to hand out
        self._writes: deque[Job] = deque()
        self._reads_in_a_row = 0
        self._under_way = 0
        self._writes_under_way = 0
        self._syncs: deque[Operation] = deque()
        self._finished: list[Job] = []  # all results in, not looked at yet
        self._ended: list[TransferDone] = []  # answers not sent yet
        self._mending_failed = False
        self._counters = dict.fromkeys(
            (
                "transfers", "items", "failed_items", "corrupt_items", "read_frames", "written_frames", "direct_frames",
                "read_bytes", "written_bytes", "dropped_frames", "operations", "deepest_queue", "recreated",
            ),
            0,
        )  # fmt: skip

    def _open_engine(self) -> Engine:
        """The engine that the configuration asks for.  Error: ConfigError when it insists on one that is not there."""
        self._registered_pieces = 0
        self._registering: RingEngine | None = None  # with memory that is not registered yet
        if self._config.engine != "threads":
            try:
                ring = RingEngine(self._heads, self._depth)
            except RingUnavailable as error:
                if self._config.engine == "uring":
                    raise ConfigError(f"engine uring: {error}") from error
                say(f"no io_uring: {error}; reading and writing with threads")
            else:
                refusal = ring.offer([self._landing, self._dram])
                if refusal:
                    self._say_unregistered(refusal)
                else:
                    self._registering = ring
                    self._register_memory()
                return ring
        return ThreadEngine(self._heads, self._depth)

    def _register_memory(self) -> None:
        """Register a piece of memory whose pages exist."""
        ring = self._registering
        if ring is None:
            return
        region = ring.next_region
        if region is None:
            self._registering = None
        elif region.is_populated():
            refusal = ring.register_next()
            if refusal:
                self._say_unregistered(refusal)
                self._registering = None
            else:
                self._registered_pieces += 1

    def _say_unregistered(self, reason: str) -> None:
        say(f"memory is not registered with io_uring ({reason}); it works without, a little slower")

    # -- Driver ---------------------------------------------------------------------------------------------------

    def probe(self) -> Probe:
        way = "direct" if self._file.direct else "buffered"
        measured = self._rates.measured
        return Probe(
            protocol=PROTOCOL_VERSION,
            kind="nvme",
            pid=os.getpid(),
            fingerprint=self._format.identity.hex(),
            capabilities=("read", "write", "drop", *(("direct",) if self._hbm else ())),
            capacity_frames=self._file.capacity_frames,
            frame_bytes=self._format.frame_bytes,
            alignment_bytes=HEADER_BYTES,
            vocab_tokens=0,
            numerics="invariant",
            engine=f"{self._engine.name}/{way}",
            model=f"{self._file.file_system} {self._config.path}",
            stored_bytes=self._format.stored_bytes,
            read_bytes_s=measured.read_bytes_s,
            write_bytes_s=measured.write_bytes_s,
            latency_ns=measured.latency_ns,
        )

    def inventory(self) -> Iterable[bytes]:
        rows: list[bytes] = []
        per_message = max(1, INVENTORY_BYTES // (4 + self._format.tag_bytes))
        for slot, tag in self._inventory.items():
            rows.append(slot.to_bytes(4, "little") + tag)
            if len(rows) == per_message:
                yield b"".join(rows)
                rows.clear()
        if rows:
            yield b"".join(rows)
        self._inventory = {}

    def health(self) -> dict[str, int]:
        return {
            **self._counters,
            "read_bytes_s": self._rates.measured.read_bytes_s,
            "write_bytes_s": self._rates.measured.write_bytes_s,
            "latency_ns": self._rates.measured.latency_ns,
            "queue_depth": self._depth,
            "under_way": self._under_way,
            "waiting_transfers": len(self._waiting),
            "direct_io": int(self._file.direct),
            "uring": int(self._engine.name == "uring"),
            "registered_buffers": self._registered_pieces,
        }

    def drop(self, frames: Sequence[int]) -> None:
        """Empty these slots; what was sent before and uses them ends first.  Error: ValueError, OSError."""
        if any(not 0 <= frame < self._file.capacity_frames for frame in frames):
            raise ValueError(f"a frame outside 0..{self._file.capacity_frames - 1}")
        if not frames or not self._mend_file():
            return  # a file that is gone has nothing in it
        scrub = Scrub(frames, self._file, self._zeros)
        self._waiting.append(scrub)
        while not scrub.ended:
            self._advance()
            if not scrub.ended:
                self._take(self._engine.wait())
        if any(scrub.codes):
            raise OSError(max(scrub.codes), "a slot could not be emptied")
        self._counters["dropped_frames"] += len(frames)

    # -- Mover ----------------------------------------------------------------------------------------------------

    def transfer(self, effect: Transfer) -> TransferDone | None:
        self._counters["transfers"] += 1
        self._counters["items"] += len(effect.pairs) // 8
        direct = effect.arena != self._config.dram_device
        arena = self._hbm.get(effect.arena) if direct else self._dram
        if len(effect.tags) != len(effect.pairs) // 8 * self._format.tag_bytes or arena is None:
            return self._refuse(effect, E.EINVAL)
        if direct and effect.verb != "read":
            return self._refuse(effect, E.EINVAL)
        if not self._mend_file():
            return self._refuse(effect, E.ENOENT)
        job: Job
        if direct:
            job = DirectRead(effect, self._file, arena, self._landing, self._gates)
        elif effect.verb == "read":
            job = StoredRead(effect, self._file, arena)
        else:
            job = StoredWrite(effect, self._file, arena, self._heads, self._generation)
            job.sync_wanted = self._config.fsync == "batch"
            self._generation += len(job.slots)
        self._refuse_bad_pairs(
            job, arena.n_bytes // (self._format.frame_bytes if direct else self._format.stored_bytes)
        )
        self._waiting.append(job)
        return None

    def fileno(self) -> int:
        return self._engine.fileno()

    def timeout_ms(self) -> int:
        region = None if self._registering is None else self._registering.next_region
        return -1 if region is None else _REGISTER_SOON_MS if region.is_populated() else _REGISTER_LATER_MS

    def completed(self) -> list[TransferDone]:
        self._take(self._engine.reap())
        self._advance()
        if self._under_way == 0 and not self._ended:
            self._register_memory()
        ended, self._ended = self._ended, []
        return ended

    # -- the queue ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Start what may start and fill the queue, until neither changes anything."""
        while True:
            self._start_waiting()
            self._fill_queue()
            if not self._settle():
                return

    def _start_waiting(self) -> None:
        """Start the transfers whose slots and frames no earlier transfer uses or waits for."""
        if not self._waiting:
            return
        claimed = set(self._busy)
        still: deque[Job] = deque()
        for job in self._waiting:
            wanted = _places(job)
            if claimed.isdisjoint(wanted):
                self._busy |= wanted
                (self._writes if job.verb is Verb.WRITE else self._reads).append(job)
            else:
                still.append(job)
            claimed |= wanted
        self._waiting = still

    def _fill_queue(self) -> None:
        batch: list[Operation] = []
        while self._under_way + len(batch) < self._depth:
            operation = self._next_operation()
            if operation is None:
                break
            batch.append(operation)
        if batch:
            self._engine.submit(batch)
            if self._under_way == 0:
                self._rates.begin()
            self._under_way += len(batch)
            self._counters["operations"] += len(batch)
            self._counters["deepest_queue"] = max(self._counters["deepest_queue"], self._under_way)

    def _next_operation(self) -> Operation | None:
        if self._syncs:
            self._writes_under_way += 1
            return self._syncs.popleft()
        for _ in range(2):  # a queue may turn out to be empty
            may_write = bool(self._writes) and self._writes_under_way < self._write_depth()
            if self._reads and not (may_write and self._reads_in_a_row >= _READS_IN_A_ROW):
                self._reads_in_a_row += 1
                operation = self._from(self._reads)
            elif may_write:
                self._reads_in_a_row = 0
                operation = self._from(self._writes)
            else:
                return None
            if operation is not None:
                return operation
        return None

    def _write_depth(self) -> int:
        """How many writes may be under way: what a device's queue is good for, less while reads want to get through."""
        reading = self._reads or self._under_way > self._writes_under_way
        return max(1, self._depth // (4 if reading else 2))

    def _from(self, jobs: deque[Job]) -> Operation | None:
        """The next operation of the first job that has one; jobs that have handed out everything leave the queue."""
        while jobs:
            operation = jobs[0].next()
            if operation is None:
                self._exhausted(jobs.popleft())
                continue
            if operation.verb is not Verb.READ:
                self._writes_under_way += 1
            if operation.staged:
                operation.place = self._free_places.pop()
                jobs[0].stage(operation, operation.place)
            return operation
        return None

    def _exhausted(self, job: Job) -> None:
        if job.ended:
            self._finished.append(job)

    def _take(self, results: Sequence[tuple[Operation, int]]) -> None:
        """Results are in.  Verifying takes time, so the queue is filled again in between."""
        self._rates.note(results, is_idle=self._under_way == len(results))
        for n, (operation, result) in enumerate(results, start=1):
            self._under_way -= 1
            if operation.verb is not Verb.READ:
                self._writes_under_way -= 1
            job: Job = operation.owner
            job.result(operation, result)
            if operation.place >= 0:
                self._free_places.append(operation.place)
            if job.ended:
                self._finished.append(job)
            if n % _NOTICE_EVERY == 0:
                self._fill_queue()

    def _settle(self) -> bool:
        """See to the jobs whose operations have all ended; whether there were any."""
        if not self._finished:
            return False
        finished, self._finished = self._finished, []
        for job in finished:
            if job.sync_wanted and not all(job.codes):
                self._syncs.append(job.sync())
            else:
                self._conclude(job)
        return True

    def _conclude(self, job: Job) -> None:
        self._busy -= _places(job)
        if isinstance(job, Scrub):
            return
        wrote = job.verb is Verb.WRITE and not all(job.codes)
        if wrote or int(E.EIO) in job.codes:
            self._blame_file(job)
        job.report(self._gates)
        done = job.done()
        self._count(job, done)
        self._ended.append(done)

    def _count(self, job: Job, done: TransferDone) -> None:
        counters = self._counters
        frames = len(job.codes) - len(done.failed)
        counters["failed_items"] += len(done.failed)
        counters["corrupt_items"] += sum(code == E.ECORRUPT for _, code in done.failed)
        if job.verb is Verb.WRITE:
            counters["written_frames"] += frames
            counters["written_bytes"] += done.moved_bytes
        else:
            counters["direct_frames" if isinstance(job, DirectRead) else "read_frames"] += frames
            counters["read_bytes"] += done.moved_bytes

    # -- what can be wrong ----------------------------------------------------------------------------------------

    def _refuse(self, effect: Transfer, code: E) -> TransferDone:
        """Nothing of it is done."""
        items = len(effect.pairs) // 8
        self._counters["failed_items"] += items
        if self._gates is not None and effect.gate >= 0:
            self._gates.store(effect.gate, effect.ticket, GATE_FAILED)
        return TransferDone(0, effect.seq, tuple((item, int(code)) for item in range(items)), 0, 0)

    def _refuse_bad_pairs(self, job: Job, arena_frames: int) -> None:
        """Items outside file or arena fail, and so do those that would land where an earlier item does."""
        taken: set[int] = set()
        for item, (slot, frame) in enumerate(zip(job.slots, job.frames, strict=True)):
            target = slot if job.verb is Verb.WRITE else frame
            if slot >= self._file.capacity_frames or frame >= arena_frames or target in taken:
                job.fail(item, E.EINVAL)
            taken.add(target)

    def _mend_file(self) -> bool:
        """See that the file is there with all its bytes; False when it is not and cannot be made."""
        state = self._file.state()
        if state is FileState.INTACT:
            self._mending_failed = False
            return True
        while state is FileState.GONE and (self._waiting or self._busy):
            self._advance()  # what is under way ends in the file that has no name any more
            if self._under_way:
                self._take(self._engine.wait())
        try:
            if state is FileState.GONE:
                self._file.recreate()
                self._engine.use(self._file.fd)
            else:
                self._file.extend()
        except (OSError, ConfigError) as error:
            if not self._mending_failed:
                say(f"{self._config.path}: {state.value}, and it cannot be mended: {error}")
            self._mending_failed = True
            return False
        self._mending_failed = False
        self._counters["recreated"] += 1
        say(f"{self._config.path}: {state.value} behind our back; made anew, what was in it is lost")
        return True

    def _blame_file(self, job: Job) -> None:
        """When the file is gone, what was written to it is too; when it was cut, reads beyond its end found nothing."""
        state = self._file.state()
        if state is FileState.INTACT:
            return
        for item, code in enumerate(job.codes):
            is_lost = code == 0 and job.verb is Verb.WRITE and state is FileState.GONE
            if is_lost or code == E.EIO:
                job.codes[item] = int(E.ENOENT)


def _places(job: Job) -> set[int]:
    """What a job must have for itself: its slots, and its arena's frames as numbers beyond any slot's."""
    places = set(job.slots)
    if not isinstance(job, Scrub):
        base = (job.effect.arena + 1) << 32
        places.update(base + frame for frame in job.frames)
    return places


def make_backend(arguments: DriverArguments) -> NvmeDriver:
    """Build the backend that a driver's command line describes.  Error: ConfigError."""
    config = NvmeConfig.from_json(arguments.config)
    dram = Region(map_shared(arguments.arena_fd), arguments.arena_fd)
    hbm = {int(device): Region(map_shared(fd)) for device, fd in config.hbm_fds.items()}
    gates = Gates(map_shared(config.gates_fd)) if config.gates_fd >= 0 else None
    return NvmeDriver(config, dram, hbm, gates)
