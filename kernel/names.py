"""Contexts that outlive their connection: named, detached, or both, and the sessions that take them over.

A *kept* context has a `Kept` beside it.  While a connection holds it, it lives in that connection's process like any
other.  When the connection ends, or the process does, it moves into the process `kept` of its group, and a generation on it
goes on without its client (an *orphan*).  A later connection takes it from there: by its session's token, by name, or by
cid.

A session is the digest of a token that only its client and the daemon know.  It is live while a connection has it.

What changes here is put down in the journal at the end of the step (`flush`), when there is a journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import injected
from .calls import GenerateArgs, GenerateResult, KeptRow
from .context import Context, Job, JobKind
from .errors import Detail, E, Errno
from .events import Journal, Prime, Reply, Restored
from .ids import Cid, Conn, Pid, Slot
from .injected import Injected
from .journal import ContextRecord, DropRecord, Generation, JournalRecord, LogRecord, MarkRecord
from .process import Connection, Process

if TYPE_CHECKING:
    from .group import Group
    from .machine import Machine

MARK_STEP = 4096  # ids that are promised to the journal at once
ATTACH_GENERATIONS = 1024  # handle generations between two connections of a session: no old handle names a new context
ATTACHES_PER_BOOT = 256  # connections that take over sessions before their generations may meet those of the next boot
NEVER = 1 << 62


class Kept:
    """What a kept context has beside it.

    session     digest, of the session that holds it or held it last
    logged      tokens of its log, from the first on, that the journal has as they are
    generation  one that has begun and not ended: it runs, or is suspended since a restart
    result      of the generation that ended last, as long as nothing came after it
    """

    __slots__ = ("asked", "context", "detached", "generation", "logged", "name", "result", "session")

    def __init__(self, context: Context, session: str) -> None:
        self.context = context
        self.session = session
        self.name = ""
        self.detached = False
        self.logged = 0
        self.generation: Generation | None = None
        self.result: GenerateResult | None = None
        self.asked: GenerateArgs | None = None  # what `result` is of

    @property
    def phase(self) -> str:
        """running | suspended | ended | "" """
        job = self.context.job
        if self.generation is not None:
            return "running" if job is not None and job.kind is JobKind.GENERATE else "suspended"
        return "ended" if self.result is not None else ""


def sampled(m: Machine, context: Context, start: int, ranges: Injected) -> bytes:
    """The tokens that a generation at `start` has sampled, int32."""
    return injected.split(m.core.read_log(context.slot, start, m.core.slot_row(context.slot).tokens), ranges)[0]


class Names:
    """All kept contexts, by what they are found by."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._names: dict[tuple[int, str], Context] = {}  # (uid, name)
        self._absent: dict[
            tuple[int, str], ContextRecord
        ] = {}  # the same, of what stays in the journal: it does not fit
        self._sessions: dict[str, dict[Cid, Context]] = {}  # kept contexts of each session
        self._live: dict[str, Conn] = {}  # sessions that have a connection
        self._orphans: dict[tuple[int, int], Context] = {}  # (conn, request) of a generation without its client
        self._keepers: dict[str, Process] = {}  # by name of their group
        self._dropped: list[DropRecord] = []
        self._attaches = 0
        self._journal = False
        self.changed: dict[Cid, Context] = {}  # to be written at the end of the step
        self.pid_mark = self.cid_mark = NEVER  # ids from here on have to be promised first

    # -- finding --------------------------------------------------------------------------------------------------

    def named(self, uid: int, name: str) -> Context:
        """ENOENT."""
        context = self._names.get((uid, name))
        if context is None and (absent := self.absent(uid, name)):
            text = f"{name!r} names context {absent}, which does not fit (slots or window) and waits in the journal"
            raise Errno(E.ENOENT, f"{text}: boot with more, or unlink it", name=name, cid=absent)
        if context is None:
            raise Errno(E.ENOENT, f"nothing is named {name!r}; `names` lists what is", name=name)
        return context

    def absent(self, uid: int, name: str) -> int:
        """Cid of the context of this name that stays in the journal; 0: there is none."""
        record = self._absent.get((uid, name))
        return record.cid if record is not None else 0

    def of_uid(self, uid: int) -> list[Context]:
        found = {c.cid: c for c in self._m.contexts.values() if c.kept is not None and uid in (0, c.process.uid)}
        return sorted(found.values(), key=lambda c: (c.kept.name if c.kept else "", c.cid))

    def orphan(self, conn: int, request: int) -> Context | None:
        """The context of a generation that goes on without its client."""
        return self._orphans.get((conn, request))

    def held(self, context: Context) -> bool:
        """A live connection has it."""
        return context.process.conn in self._m.connections

    # -- becoming and ceasing to be kept --------------------------------------------------------------------------

    def keep(self, context: Context) -> Kept:
        kept = context.kept
        if kept is None:
            connection = self._m.connections.get(context.process.conn)
            kept = context.kept = Kept(context, connection.session if connection else "")
            self._sessions.setdefault(kept.session, {})[context.cid] = context
            job = context.job
            if job is not None and job.kind is JobKind.GENERATE and not job.ending:
                kept.generation = Generation(job.args, job.start, job.injected)
        self._touch(context)
        return kept

    def publish(self, context: Context, name: str) -> None:
        """Requires: the name is free within the context's uid, or its own."""
        kept = self.keep(context)
        self._names.pop((context.process.uid, kept.name), None)
        kept.name = name
        self._names[context.process.uid, name] = context

    def unlink(self, context: Context) -> None:
        """It has no name any more; it goes when nobody holds it, unless it is detached too."""
        kept = self.keep(context)
        self._names.pop((context.process.uid, kept.name), None)
        kept.name = ""
        if kept.detached:
            return
        if self.held(context):
            self._unkeep(context)
        else:
            self._m.release(context)

    def unlink_absent(self, uid: int, name: str) -> None:
        """The same of one that stays in the journal.  Requires: `absent`."""
        record = self._absent.pop((uid, name))
        self._m.emit(Journal((record._replace(name="") if record.detached else DropRecord(record.cid),)))

    def _unkeep(self, context: Context) -> None:
        """A context like any other from now on.  Its orphan, if it has one, is let go with its client's request."""
        kept = context.kept
        if kept is None:
            return
        self._names.pop((context.process.uid, kept.name), None)
        session = self._sessions.get(kept.session, {})
        session.pop(context.cid, None)
        if not session:
            self._sessions.pop(kept.session, None)
        context.kept = None
        self.changed.pop(context.cid, None)
        if self._journal:
            self._dropped.append(DropRecord(context.cid))
            self.changed[context.cid] = context

    def forget(self, context: Context) -> None:
        """It is being released."""
        if context.kept is not None:
            self._unkeep(context)
            for key in [key for key, other in self._orphans.items() if other is context]:
                del self._orphans[key]

    # -- what calls and passes change -----------------------------------------------------------------------------

    def _touch(self, context: Context) -> None:
        if self._journal:
            self.changed[context.cid] = context

    def rewritten(self, context: Context, at: int) -> None:
        """The log is another from token `at` on, by a call: an earlier generation cannot be gone on with."""
        kept = context.kept
        if kept is not None:
            kept.logged = min(kept.logged, at)
            kept.generation = kept.result = None
            self._touch(context)

    def trimmed(self, context: Context, length: int) -> None:
        """The log was cut behind a stop string; the generation that it belongs to stays as it is."""
        if context.kept is not None:
            context.kept.logged = min(context.kept.logged, length)
            self._touch(context)

    def began(self, context: Context, args: GenerateArgs, start: int) -> None:
        kept = context.kept
        if kept is not None:
            kept.generation, kept.result = Generation(args, start), None
            self._touch(context)

    def injected(self, context: Context, job: Job) -> None:
        """Tokens were injected into its generation: they cannot be sampled again, so they and what is before them are put down
        now."""
        kept = context.kept
        if kept is not None and kept.generation is not None:
            kept.generation = kept.generation._replace(injected=job.injected)
            self._touch(context)

    def resumed(self, context: Context, at: int) -> None:
        """A suspended generation goes on; tokens from `at` on came from its client."""
        self.trimmed(context, at)

    def ended(self, context: Context, job: Job, result: GenerateResult) -> None:
        """A generation has its result."""
        kept = context.kept
        if kept is None:
            return
        if result.reason != "suspended":
            kept.generation, kept.result, kept.asked = None, result, job.args
        self.trimmed(context, result.tokens_total)
        self._bury(job, result)

    def failed(self, context: Context, job: Job, error: Errno) -> None:
        """It ended in an errno, before its first token."""
        kept = context.kept
        if kept is not None and job.kind is JobKind.GENERATE:
            kept.generation = None
            self._touch(context)
            key = (job.conn, job.request)
            if self._orphans.pop(key, None) is not None:
                self._m.emit(Reply(*key, error.code, error.detail))

    def _bury(self, job: Job, result: GenerateResult) -> None:
        """Nobody reads the answer of an orphan, but the daemon stops to look for its stop strings."""
        key = (job.conn, job.request)
        if self._orphans.pop(key, None) is not None:
            self._m.emit(Reply(*key, 0, result))

    def late(self, conn: int, request: int) -> Context | None:
        """The context whose last generation was that orphan."""
        for context in self._m.contexts.values():
            if context.kept is not None and context.last_request == (conn, request):
                return context
        return None

    # -- leaving and coming back ----------------------------------------------------------------------------------

    def stays(self, context: Context, reason: str) -> bool:
        """A named context whose holder lets it go: what runs on it ends, and it waits under its name."""
        if context.kept is None or not context.kept.name or context.dying:
            return False
        process = context.process
        if self._keepers.get(process.group.name) is process:  # the keeper itself is being ended
            del self._keepers[process.group.name]
        self._m.finish(context, reason)
        self._leave(context)
        return True

    def disconnected(self, connection: Connection) -> None:
        """Kept contexts leave, with what they generate; call it before the connection's processes end."""
        self._live.pop(connection.session, None)
        for pid in sorted(connection.pids):
            for context in list(self._m.processes[pid].contexts.values()):
                if context.kept is not None and not context.dying:
                    job = context.job
                    if job is not None and job.kind is JobKind.GENERATE and not job.ending:
                        self._orphan(context, job)
                    elif job is not None and job.kind is not JobKind.PREFILL:
                        self._m.finish(context, "cancelled")
                    self._leave(context)

    def _orphan(self, context: Context, job: Job) -> None:
        key = (job.conn, job.request)
        self._orphans[key] = context
        tokens = sampled(self._m, context, job.start, job.injected)
        self._m.emit(Prime(*key, key, job.args, tokens, len(tokens) // 4, (), True))

    def _leave(self, context: Context) -> None:
        """Into the keeper's process.  Calls that waited for their turn were never done."""
        for call in context.parked:
            detail: Detail = {"message": "the context was given back meanwhile", "cid": context.cid}
            self._m.reply(call.conn, call.request, E.ESTALE, detail)
        context.parked.clear()
        self._move(context, self._keeper(context.process.group))

    def _keeper(self, group: Group) -> Process:
        keeper = self._keepers.get(group.name)
        if keeper is None or keeper.zombie:
            nobody = Connection(Conn(0), group.uid)
            keeper = self._keepers[group.name] = self._m.new_process(nobody, Pid(0), "kept", 0, group)
        return keeper

    def _move(self, context: Context, process: Process) -> None:
        m, old = self._m, context.process
        was_held = m.held(context)
        holder = m.connections.get(old.conn)
        if holder is not None and context.handle:
            holder.remove(context.handle)
        context.handle = 0
        if old is not process:
            del old.contexts[context.cid]
            process.contexts[context.cid] = context
            context.process = process
            if process.group is not old.group:
                m.groups.left(old.group)
                m.groups.joined(context, process.group)
                self._touch(context)
            if self._keepers.get(old.group.name) is old and not old.contexts:
                del self._keepers[old.group.name]
                m.forget(old)
        scheduler = m.schedulers[context.device]
        if context.job is not None and not context.job.ending:
            if was_held and not m.held(context):
                scheduler.add(context)
            elif m.held(context) and not was_held:
                scheduler.hold(context)
        scheduler.reorder()

    def take(self, connection: Connection, process: Process, context: Context) -> int:
        """Into a process of this connection; its handle there.  Requires: kept, and nobody live holds it."""
        kept = self.keep(context)
        self._move(context, process)
        if kept.session != connection.session:
            former = self._sessions.get(kept.session, {})
            former.pop(context.cid, None)
            if not former:
                self._sessions.pop(kept.session, None)
            kept.session = connection.session
            self._sessions.setdefault(kept.session, {})[context.cid] = context
        return connection.add(context)

    def session(self, connection: Connection, token: str) -> str:
        """The digest of the session that a `hello` with `token` gets.  EACCES: not one of this uid.  EBUSY: it is live."""
        if not token:
            return self._digest(connection.token)
        digest = self._digest(token)
        contexts = self._sessions.get(digest, {})
        if not contexts or any(c.process.uid != connection.uid for c in contexts.values()):
            raise Errno(E.EACCES, "no session of this user has that token and keeps anything", field="session")
        if digest in self._live:
            raise Errno(E.EBUSY, "that session's connection still lives: close it first", conn=int(self._live[digest]))
        return digest

    def _digest(self, token: str) -> str:
        return self._m.core.hash(b"session\0" + token.encode()).hex() if token else ""

    def join(self, connection: Connection, token: str, digest: str, process: Process) -> tuple[KeptRow, ...]:
        """The connection has this session now, and with it what the session kept."""
        connection.session = digest
        connection.token = token or connection.token
        if digest:
            self._live[digest] = connection.conn
        if not token:
            return ()
        self._attaches += 1
        connection.floor = ATTACH_GENERATIONS * (self._attaches % (1 << 21))
        rows = []
        for context in list(self._sessions.get(digest, {}).values()):
            if not self.held(context) and context.kept is not None:
                handle = self.take(connection, process, context)
                length = self._m.core.slot_row(context.slot).tokens
                rows.append(KeptRow(handle, context.cid, context.kept.name, length, context.kept.phase))
        return tuple(rows)

    # -- generations that go on -----------------------------------------------------------------------------------

    def adopt(self, context: Context, job: Job, connection: Connection, request: int) -> tuple[int, int]:
        """An orphan's answer and tokens go to this request from now on; what it was known under.  EBUSY: it is none."""
        was = (job.conn, job.request)
        if self._orphans.pop(was, None) is None:
            text = "another request waits for this generation: cancel that, or wait for it"
            raise Errno(E.EBUSY, text, cid=context.cid, request=job.request)
        job.conn, job.request = connection.conn, request
        connection.requests[request] = context
        return was

    def suspend(self) -> None:
        """The system goes down: generations on kept contexts stop, and are on record with the tokens they have."""
        for context in list(self._m.contexts.values()):
            if context.kept is not None and context.kept.phase == "running":
                self._m.finish(context, "suspended", at_once=True)  # a pass in flight may take longer than there is

    def problems(self) -> list[str]:
        """What fsck finds wrong here."""
        m = self._m
        found = [
            f"the name {name!r} is of a context that is gone" for (_, name), c in self._names.items() if not c.kept
        ]
        for context in m.contexts.values():
            kept, cid = context.kept, context.cid
            if kept is None or context.dying:
                continue
            if kept.name and self._names.get((context.process.uid, kept.name)) is not context:
                found.append(f"context {cid} is not found by its name {kept.name!r}")
            if self._sessions.get(kept.session, {}).get(cid) is not context:
                found.append(f"context {cid} is not in the session that holds it")
            holder = m.connections.get(context.process.conn)
            if (holder is None) == bool(context.handle) or (holder is not None and holder.session != kept.session):
                found.append(f"context {cid} is held by another connection than its session's")
            job = context.job
            alone = holder is None and job is not None and job.request and not job.ending
            if alone and job is not None and self._orphans.get((job.conn, job.request)) is not context:
                found.append(f"I9: nobody listens to request {job.request} on context {cid}, and it is no orphan")
            if kept.logged > m.core.slot_row(context.slot).tokens:
                found.append(f"the journal holds {kept.logged} tokens of context {cid}, which has fewer")
        if len(self._names) != sum(1 for c in m.contexts.values() if c.kept is not None and c.kept.name):
            found.append(f"{len(self._names)} names do not match the contexts that have one")
        return found

    # -- the journal ----------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Ids are about to reach what the journal knows of: promise more."""
        pid, cid = self._m.last_ids()
        self.pid_mark, self.cid_mark = pid + MARK_STEP, cid + MARK_STEP
        self._m.emit(Journal((MarkRecord(self.pid_mark, self.cid_mark),)))

    def flush(self) -> None:
        """Put down what changed in this step."""
        records: list[JournalRecord] = list(self._dropped)
        self._dropped.clear()
        for context in self.changed.values():
            kept = context.kept
            if kept is None or context.dying:
                continue
            length = self._m.core.slot_row(context.slot).tokens
            result = kept.result
            if result is not None and result.logprobs:
                result = result._replace(logprobs=())
            generation = kept.generation
            if result is not None and kept.asked is not None:
                generation = Generation(kept.asked, length)
            uid, group = context.process.uid, context.process.group.name
            records.append(
                ContextRecord(
                    context.cid, uid, kept.name, kept.detached, kept.session, generation, result, group, context.domain
                )
            )
            records.append(
                LogRecord(context.cid, kept.logged, self._m.core.read_log(context.slot, kept.logged, length))
            )
            kept.logged = length
        self.changed.clear()
        if records:
            self._m.emit(Journal(tuple(records)))

    def restore(self, event: Restored) -> None:
        """Everything that the journal holds is there again, idle.  What does not fit stays in the journal."""
        m = self._m
        self._journal = True
        self._attaches = event.boots * ATTACHES_PER_BOOT
        m.raise_ids(event.pid, event.cid)
        self.reserve()
        left = 0
        for record, log in event.contexts:
            slot = self._open(record, log)
            if slot < 0:
                left += 1
                if record.name:
                    self._absent[record.uid, record.name] = record
                continue
            device = m.core.slot_device(slot)
            keeper = self._keeper(m.groups.named(record.group or f"uid:{record.uid}"))
            context = m.new_context(keeper, Slot(slot), device, Cid(0), Cid(record.cid), _domain(record))
            kept = context.kept = Kept(context, record.session)
            kept.logged = len(log) // 4
            kept.result = record.result
            if kept.result is None:
                kept.generation = record.generation
            elif record.generation is not None:
                kept.asked = record.generation.args
            kept.detached = record.detached or not record.name
            if record.name and (record.uid, record.name) not in self._names:
                kept.name = record.name
                self._names[record.uid, record.name] = context
            else:
                kept.detached = True  # the name was given again while this context was not there
            self._sessions.setdefault(kept.session, {})[context.cid] = context
        if event.contexts:
            m.log("info", f"{len(event.contexts) - left} kept contexts are back")
        if left:
            m.log("warning", f"{left} kept contexts do not fit (slots or window) and stay in the journal")

    def _open(self, record: ContextRecord, log: bytes) -> int:
        """A slot with this log on the compute device with the most room, or -1."""
        m = self._m
        if len(log) // 4 > m.config.window_tokens:
            return -1
        device = max(m.schedulers, key=lambda s: (m.core.free_frames(s.device) - len(s.idle), -s.device)).device
        slot = m.core.open_slot(device, *m.domain_for(_domain(record), record.cid))
        if slot >= 0 and log:
            m.core.append(slot, log)
        return slot


def _domain(record: ContextRecord) -> str:
    """Journals of before 0.4 have none: then every context was in its uid's."""
    return record.domain or f"uid:{record.uid}"
