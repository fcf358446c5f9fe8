"""The state of the whole kernel, and the few operations that end something: every path to an end goes through here.

finish   a job ends in a result or a reason: its reply is sent, its context is idle again
fail     a job ends in an errno
release  a context goes: by call, exit, kill or disconnect, at once or when its pass is back
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import injected
from .calls import (
    ForwardResult,
    GenerateResult,
    LostPlaceRow,
    ScoreResult,
    SnapshotResult,
    UnameResult,
    Usage,
    WaitResult,
)
from .config import KernelConfig, encode_identity
from .context import Context, Job, JobKind
from .device import Device
from .domain import Domains
from .errands import Errands
from .errors import Detail, E, Errno
from .events import Effect, Reply, SetTimer
from .evict.protocol import KIND_CANCELLED, KIND_CLOSED, KIND_LENGTH, KIND_TURN
from .group import Group, Groups
from .growth import Lengths
from .heads import Heads
from .history import History
from .ids import Cid, Pid, Slot
from .injected import Injected
from .interrupts import Interrupts
from .lifetimes import Lifetimes
from .log import Dmesg
from .names import Names
from .prefetches import Prefetches
from .process import Connection, Process
from .psi import Psi
from .sched import Scheduler
from .sysctl import Sysctl
from .tiers import Tiers
from .waiting import Waiter, Waiters

if TYPE_CHECKING:
    from .coreapi import CoreApi
    from .cost import Costs
    from .evict.view import KernelView
    from .evictor import Evictor
    from .movers import Movers

SIGKILL, SIGTERM, SIGCONT, SIGSTOP = 9, 15, 18, 19
_KIND = {"stop": KIND_TURN, "length": KIND_LENGTH, "cancelled": KIND_CANCELLED}


class Machine:
    """Errno: of a limit in the configuration that cannot be."""

    def __init__(self, config: KernelConfig, core: CoreApi) -> None:
        self.config = config
        self.core = core
        self.now_ns = 0
        self.devices = [Device(i, d) for i, d in enumerate(config.devices)]
        self.sysctl = Sysctl()
        for name, value in config.sysctl.items():
            self.sysctl.set(name, value)
        self.costs: Costs
        self.view: KernelView
        self.movers: Movers
        self.tiers = Tiers(self)
        self.groups = Groups(self)
        self.domains = Domains(self)
        self.prefetches = Prefetches(self)
        self.contexts: dict[Cid, Context] = {}
        self.by_slot: dict[int, Context] = {}
        self.working: dict[Cid, Context] = {}  # those with a job; few, where most wait for a tool
        self.pins: dict[Cid, Context] = {}  # those that are pinned, and some that were
        self.processes: dict[Pid, Process] = {}
        self.uids: set[int] = set()  # of every process since boot
        self.connections: dict[int, Connection] = {}  # by Conn
        self.waiters = Waiters(self.set_timer)
        self.names = Names(self)
        self.lifetimes = Lifetimes(self)
        self.interrupts = Interrupts(self)
        self.snapshots: dict[tuple[int, int], SnapshotResult] = {}  # being written, by (conn, request)
        self.dmesg = Dmesg()
        self.counters: Counter[str] = Counter()
        self.syscalls = 0  # counted apart: once per call
        self.lengths = Lengths()
        self.psi = Psi(self)
        self.heads = Heads(self)
        self.history = History(self)
        self.schedulers = [Scheduler(self, d.index) for d in self.devices if d.tier == "hbm"]
        self.ending: list[Context] = []  # their job ends, or they go, when their pass is back
        self.unsettled: list[Context] = []  # held, or called, while a pass of theirs was in flight
        self.plugged = False  # between Plug and Unplug
        self.asleep = False  # hbm is given back, or being given back
        self.uname: UnameResult | None = None
        self._effects: list[Effect] = []
        self._next_pid = self._next_cid = self._next_order = self._next_timer = self._born = 0
        self.tiers.begin()
        self.errands = Errands(self)
        for name, resource, soft, hard in config.limits:
            self.groups.set_limit(self.groups.named(name), resource, soft, hard)
            self.log("info", f"group {name}: {resource} soft {soft} hard {hard}, from boot on")

    # -- small things ---------------------------------------------------------------------------------------------

    def begin_step(self, now_ns: int) -> list[Effect]:
        """The list that this step's effects go into."""
        self.now_ns = now_ns
        self.core.now_ns = now_ns
        self._effects = []
        return self._effects

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] += by

    def log(self, level: str, text: str) -> None:
        self.dmesg.add(self.now_ns, level, text)

    def next_order(self) -> int:
        self._next_order += 1
        return self._next_order

    def set_timer(self, at_ns: int) -> int:
        self._next_timer += 1
        self.emit(SetTimer(self._next_timer, at_ns))
        return self._next_timer

    def domain_of(self, process: Process, name: str = "") -> tuple[int, bytes]:
        """The domain a new context of this process shares prefixes in: the process's, or another that it may."""
        return self.domain_for(name or process.domain, self._next_cid + 1)

    def domain_for(self, name: str, cid: int) -> tuple[int, bytes]:
        if self.config.sharing == "none":
            number, alone = 0x40000000 + cid % 0x3FFFFFFF, f"context:{cid}"
            root = self.core.hash(encode_identity(self.config.identity, alone))
            self.tiers.know_domain(number, alone, root)
            return number, root
        return self.domains.of(name)

    def last_ids(self) -> tuple[int, int]:
        """The largest pid and cid given so far."""
        return self._next_pid, self._next_cid

    def raise_ids(self, pid: int, cid: int) -> None:
        """Every id from now on is larger."""
        self._next_pid, self._next_cid = max(self._next_pid, pid), max(self._next_cid, cid)

    def lost_places(self) -> list[LostPlaceRow]:
        """Third parties' policies that have failed, with those that decide in their places."""
        devices = [d for d in self.devices if not d.removed]
        places: list[tuple[Device, str, Evictor | Scheduler]] = [
            *((d, f"evict.{d.tier}", self.tiers.evictors[d.index]) for d in devices),
            *((d, "sched.policy", self.schedulers[d.index]) for d in devices if d.tier == "hbm"),
        ]
        return [LostPlaceRow(d.name, name, p.fault, p.policy.name) for d, name, p in places if p.fault]

    def contexts_of(self, device: int) -> Iterator[Context]:
        return (c for c in self.contexts.values() if c.device == device)

    def held_back(self, device: int) -> list[Context]:
        """Those with a job of one device that are held, the newest first."""
        found = (c for c in self.working.values() if c.device == device and self.held(c))
        return sorted(found, key=lambda c: -c.born)

    def pinned(self, device: int) -> list[Context]:
        """The pinned contexts of one device, the newest first."""
        self.pins = {cid: c for cid, c in self.pins.items() if self.tiers.pinned(c)}
        return sorted((c for c in self.pins.values() if c.device == device), key=lambda c: -c.born)

    def held(self, context: Context) -> bool:
        """Its process is stopped, or its client reads too slowly, or its group computes too much, or the system sleeps."""
        process = context.process
        connection = self.connections.get(process.conn)
        return self.asleep or process.stopped or process.group.held or (connection is not None and connection.paused)

    def reply(self, conn: int, request: int, code: E | int, result: tuple[object, ...] | Detail) -> None:
        """The one place where an outstanding request is answered.  A connection that is gone gets nothing."""
        connection = self.connections.get(conn)
        if connection is not None:
            connection.requests.pop(request, None)
            # The shortest way to make a record: this line runs once per system call.
            self._effects.append(tuple.__new__(Reply, (conn, request, code, result)))

    # -- processes ------------------------------------------------------------------------------------------------

    def new_process(
        self, connection: Connection, parent: Pid, name: str, nice: int, group: Group | None = None, domain: str = ""
    ) -> Process:
        """group, domain: those of its parent when they are not given, and without a parent those of the uid."""
        above = self.processes.get(parent)
        if group is None:
            group = above.group if above is not None else self.groups.of_uid(connection.uid)
        domain = domain or (above.domain if above is not None else f"uid:{connection.uid}")
        name = "".join(c if c.isprintable() else "?" for c in name)  # it will be shown on terminals
        self._next_pid += 1
        if self._next_pid > self.names.pid_mark:
            self.names.reserve()
        pid = Pid(self._next_pid)
        process = Process(pid, parent, connection.uid, connection.conn, name, nice, self.now_ns, group, domain)
        group.processes += 1
        self.processes[pid] = process
        self.uids.add(connection.uid)
        if parent:
            self.processes[parent].children[pid] = process
        connection.pids.add(pid)
        return process

    def end_process(self, process: Process, code: int, reason: str) -> None:
        """Release everything it holds.  It stays a zombie until its parent has waited for it, if it has a parent."""
        if process.zombie:
            return
        for context in list(process.contexts.values()):
            if not self.names.stays(context, "killed"):
                self.release(context, "killed")
        process.zombie = True
        process.code = code
        process.reason = reason
        for waiter in [w for same in process.waiters.values() for w in same]:
            self.answer(waiter, E.ECANCELED, {"message": "the process that waited has ended"})
        for child in list(process.children.values()):
            child.parent = Pid(0)
            if child.zombie:
                self.forget(child)
        process.children.clear()
        process.ended.clear()
        parent = self.processes.get(process.parent)
        if parent is None or parent.zombie:
            self.forget(process)
        else:
            parent.ended[process.pid] = process
            waiting = parent.waiters.get(process.pid) or parent.waiters.get(Pid(0))
            if waiting:
                first = waiting[0]
                self.waiters.drop(first)
                self.reply(first.conn, first.request, 0, self.reap(parent, process))

    def reap(self, parent: Process, process: Process) -> WaitResult:
        """Somebody takes an ended child; those who have nobody left to wait for are told."""
        result = WaitResult(process.pid, process.code, process.reason, self.usage_of(process))
        self.forget(process)
        alone = parent.waiters.get(process.pid, [])
        if not parent.children:
            alone = [w for same in parent.waiters.values() for w in same]
        for waiter in alone[:]:
            self.answer(waiter, E.ENOENT, {"message": "another call has waited for the process", "pid": process.pid})
        return result

    def answer(self, waiter: Waiter, code: E, result: Detail) -> None:
        """A `wait` ends in an errno."""
        self.waiters.drop(waiter)
        self.reply(waiter.conn, waiter.request, code, result)

    def forget(self, process: Process) -> None:
        if self.processes.pop(process.pid, None) is not None:
            process.group.processes -= 1
        parent = self.processes.get(process.parent)
        if parent is not None:
            parent.children.pop(process.pid, None)
            parent.ended.pop(process.pid, None)
        connection = self.connections.get(process.conn)
        if connection is not None:
            connection.pids.discard(process.pid)

    # -- contexts -------------------------------------------------------------------------------------------------

    def new_context(
        self,
        process: Process,
        slot: Slot,
        device: int,
        parent: Cid,
        cid: Cid = Cid(0),  # noqa: B008
        domain: str = "",
    ) -> Context:
        """cid: the one that it had before a restart; 0: a new one.  domain: when it is not its process's."""
        if not cid:
            self._next_cid += 1
            if self._next_cid > self.names.cid_mark:
                self.names.reserve()
        context = Context(cid or Cid(self._next_cid), slot, device, process, parent, domain or process.domain)
        self._born += 1
        context.born = self._born
        self.groups.joined(context, process.group)
        self.contexts[context.cid] = context
        self.by_slot[slot] = context
        process.contexts[context.cid] = context
        self.schedulers[device].rest(context)
        return context

    def release(self, context: Context, reason: str = "cancelled") -> None:
        """The context goes; a job on it ends with `reason`.  Its frames return now, or when its pass is back."""
        if context.dying:
            return
        context.dying = True
        if context.job is not None:
            self.finish(context, reason, at_once=True)
        self.names.forget(context)
        self.lifetimes.forget(context)
        self.interrupts.forget(context)
        for call in context.parked:
            detail: Detail = {"message": "the context was released meanwhile", "cid": context.cid}
            self.reply(call.conn, call.request, E.ESTALE, detail)
        context.parked.clear()
        connection = self.connections.get(context.process.conn)
        if connection is not None and context.handle:
            connection.remove(context.handle)
        if self.core.in_flight(context.slot):
            self.ending.append(context)
        else:
            self._close(context)

    def _close(self, context: Context) -> None:
        process = context.process
        process.past = _add(process.past, self.usage(context))
        self.errands.gone(context)
        self.heads.left(context)
        self.core.close_slot(context.slot)
        self.movers.abandon(context.cid)
        self.schedulers[context.device].wake(context)
        self.devices[context.device].blame.pop(context.cid, None)
        self.groups.left(process.group)
        self.pins.pop(context.cid, None)
        del self.contexts[context.cid]
        del self.by_slot[context.slot]
        del process.contexts[context.cid]

    def after_pass(self) -> None:
        """What had to wait for a pass: releases, ends of jobs, truncations.  Parked calls are the caller's."""
        ending, self.ending = self.ending, []
        for context in ending:
            if self.contexts.get(context.cid) is not context:
                continue  # listed twice: its job ended, then it went
            if self.core.in_flight(context.slot):
                self.ending.append(context)
            elif context.dying:
                self._close(context)
            elif context.job is not None and context.job.ending:
                self.finish(context, context.job.ending)

    # -- jobs -----------------------------------------------------------------------------------------------------

    def start(self, context: Context, job: Job) -> None:
        context.job = job
        self.working[context.cid] = context
        self.errands.turned(context)
        if job.since_ns < 0:
            job.since_ns = self.now_ns
        if job.args.ttft_ms and not job.due_ns:
            job.due_ns = self.now_ns + job.args.ttft_ms * 1_000_000
        context.process.birth = context.process.birth or job.order
        self.schedulers[context.device].wake(context)
        context.admitted = False  # its last token may have no frame yet
        context.last_request = (0, 0)
        if not self.held(context):
            self.schedulers[context.device].add(context)

    def finish(self, context: Context, reason: str, at_once: bool = False) -> None:
        """The job ends: its client gets the result.  With a pass in flight that waits, unless the context goes (at_once)."""
        job = context.job
        if job is None:
            return
        in_flight = self.core.in_flight(context.slot)
        if in_flight and not at_once and job.kind is not JobKind.PREFILL:
            self.schedulers[context.device].remove(context)
            if not job.ending:
                job.ending = reason
                self.ending.append(context)
            return
        self._rest(context)
        if context.keep >= 0 and not in_flight:
            job.injected = self.cut(context, job.start, job.injected, context.keep)
            context.keep = -1
        if job.kind is JobKind.GENERATE:
            row = self.core.slot_row(context.slot)
            total = self.usage(context)
            usage, context.mark = _subtract(total, context.mark), total
            tokens, _ = injected.split(self.core.read_log(context.slot, job.start, row.tokens), job.injected)
            logprobs = tuple(job.logprobs[: len(tokens) // 4])
            context.last_request = (job.conn, job.request)
            context.last_start, context.last_injected = job.start, job.injected
            if tokens:
                self.lengths.seen(len(tokens) // 4, reason != "stop")
            result = GenerateResult(reason, tokens, "", usage, row.tokens, logprobs, job.injected)
            self.names.ended(context, job, result)
            if not in_flight and not context.dying:
                self.tiers.turn_ended(context, _KIND.get(reason, KIND_CLOSED))
            self.lifetimes.turn_ended(context)
            self.reply(job.conn, job.request, 0, result)
        elif job.kind is not JobKind.PREFILL:
            self.reply(job.conn, job.request, E.ECANCELED, {"message": f"the context was {reason}"})
            self._drop_scratch(context, job)
        elif reason == "done" and not context.dying:
            self.tiers.keep_up(context)

    def cut(self, context: Context, start: int, ranges: Injected, keep: int) -> Injected:
        """Only the first `keep` sampled tokens of the generation at `start` stay, and all that was injected into it, which is
        computed when the context is used again; where it stands now.  Requires: no pass in flight."""
        length = start + injected.extent(ranges, keep)
        _, behind = injected.split(
            self.core.read_log(context.slot, length, self.core.slot_row(context.slot).tokens),
            tuple((max(0, index - keep), n) for index, n in ranges if index >= keep),
        )
        self.core.truncate(context.slot, length)
        self.names.trimmed(context, length)
        if behind:
            self.core.append(context.slot, behind)
        return injected.cut(ranges, keep)

    def complete(self, context: Context, job: Job, result: ForwardResult | ScoreResult) -> None:
        """FORWARD or SCORE has its answer."""
        self._rest(context)
        self.reply(job.conn, job.request, 0, result)
        self._drop_scratch(context, job)
        if not context.dying:
            self.tiers.keep_up(context)

    def fail(self, context: Context, error: Errno) -> None:
        """The job ends in an errno; one that has sent a token ends in a reason instead (DESIGN.md §10.16)."""
        job = context.job
        if job is None:
            return
        if job.kind is JobKind.GENERATE and job.begun:
            self.log("error", f"context {context.cid}: {error}")
            self.finish(context, "killed")
            return
        self._rest(context)
        if job.kind is not JobKind.PREFILL:
            self.reply(job.conn, job.request, error.code, error.detail)
        self.names.failed(context, job, error)
        self._drop_scratch(context, job)

    def _rest(self, context: Context) -> None:
        """It has no job any more."""
        scheduler = self.schedulers[context.device]
        scheduler.remove(context)
        context.job = None
        self.working.pop(context.cid, None)
        self.errands.turned(context)
        context.lost_tokens = 0
        scheduler.rest(context)

    def _drop_scratch(self, context: Context, job: Job) -> None:
        if job.kind is JobKind.SCORE and not context.dying:
            self.release(context)

    # -- accounting -----------------------------------------------------------------------------------------------

    def usage(self, context: Context) -> Usage:
        row = self.core.slot_row(context.slot)
        hits = context.tier_hits
        return Usage(
            row.computed_total, row.hit_total, row.recomputed_total, row.generated_total, context.preemptions,
            hits.get("dram", 0), hits.get("nvme", 0), hits.get("remote", 0),
        )  # fmt: skip

    def served_tokens(self, process: Process) -> int:
        """Tokens computed for it: that part of `usage_of`, which is read for every job that waits."""
        core = self.core
        contexts = process.contexts.values()
        return process.past.computed_tokens + sum(core.slot_row(c.slot).computed_total for c in contexts)

    def usage_of(self, process: Process) -> Usage:
        total = process.past
        for context in process.contexts.values():
            total = _add(total, self.usage(context))
        return total


def _add(a: Usage, b: Usage) -> Usage:
    return Usage(*(x + y for x, y in zip(a, b, strict=True)))


def _subtract(a: Usage, b: Usage) -> Usage:
    return Usage(*(x - y for x, y in zip(a, b, strict=True)))
