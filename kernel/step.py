"""The kernel: one event in, effects out.  This is the whole interface; start reading here.

    Kernel.step(event, now_ns) -> [Effect, ...]

A step handles its event, then lets every idle compute device begin its next pass.  It never waits, reads no clock and
draws no random number, so the same events at the same times give the same effects.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import fsck as fsck_module
from . import traps, traps_names, traps_wait
from .batch import FORWARD, SAMPLE, SCORE, Seq
from .calls import ForwardResult, InjectArgs, ScoreResult
from .config import KernelConfig
from .context import Context, JobKind
from .device import BLAME_AFTER_FAILURES, RESTART_AFTER_FAILURES, Device
from .errors import E, Errno
from .events import (
    Bug,
    Connect,
    Disconnect,
    DriverAsleep,
    DriverDown,
    DriverGone,
    DriverUp,
    Effect,
    Event,
    ExecDone,
    ExecFailed,
    Found,
    Pause,
    Plug,
    RestartDriver,
    Restored,
    Resume,
    SnapshotRead,
    SnapshotWritten,
    StopAt,
    Suspend,
    Syscall,
    Timer,
    Tokens,
    TransferDone,
    Unplug,
)
from .ids import Conn
from .machine import Machine
from .process import Connection
from .records import LENGTH, STOP
from .trap_table import TRAPS
from .traps_wait import TextArgs

if TYPE_CHECKING:
    from .coreapi import CoreApi

_REASON = {STOP: "stop", LENGTH: "length"}


class Kernel:
    """config and core belong to this kernel alone."""

    def __init__(self, config: KernelConfig, core: CoreApi) -> None:
        self.machine = Machine(config, core)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            Syscall: self._syscall,
            ExecDone: self._exec_done,
            ExecFailed: self._exec_failed,
            Connect: self._connect,
            Disconnect: self._disconnect,
            StopAt: self._stop_at,
            Pause: self._pause,
            Resume: self._resume,
            DriverUp: self._driver_up,
            DriverDown: self._driver_down,
            DriverGone: self._driver_gone,
            TransferDone: self.machine.movers.done,
            Found: self._found,
            DriverAsleep: lambda event: self.machine.errands.driver_asleep(),
            Timer: self._timer,
            Bug: self._bug,
            Restored: self._restored,
            Suspend: self._suspend,
            Plug: self._plug,
            Unplug: self._plug,
            SnapshotWritten: lambda event: traps_names.snapshot_written(self.machine, event),
            SnapshotRead: lambda event: traps_names.snapshot_read(self.machine, event),
        }

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle one event.  Panic: an invariant is broken, nothing after it can be trusted."""
        m = self.machine
        effects = m.begin_step(now_ns)
        self._handlers[type(event)](event)
        if m.errands.open:
            m.errands.run()
        if m.plugged:  # who computes, who waits and what is worth moving is decided once, for all that came together
            if m.names.changed:
                m.names.flush()
            return effects
        busy = m.psi.busy
        for scheduler in m.schedulers:
            if scheduler.queue or scheduler.decoding:
                scheduler.run()
                busy = True
        if m.errands.open:
            m.errands.run()  # a job that ended just now is what some wait for, and the next event may be hours away
        if m.tiers.exist:
            m.tiers.ahead()
        if busy:
            self._account()
        if m.names.changed:
            m.names.flush()
        if now_ns >= m.history.due_ns:
            m.history.look()
        return effects

    def _account(self) -> None:
        """Who waits for frames, and since when."""
        m = self.machine
        m.psi.busy = any(s.queue or s.decoding for s in m.schedulers)  # if not, this was the last look
        for scheduler in m.schedulers:
            scheduler.backlog.look()
            scheduler.oom.look()
        m.psi.look()

    def fsck(self) -> list[str]:
        """Every invariant of DESIGN.md §3 that does not hold, in words; empty when all is well."""
        return fsck_module.fsck(self.machine)

    def tail(self, conn: int, args: TextArgs, count: int) -> tuple[int, bytes]:
        """Length of a context's log and its last `count` tokens (int32), for text that continues it; changes nothing.

        args: of the call that brings the text.  Errno: as that call would say now.
        """
        connection = self.machine.connections.get(conn)
        if connection is None:
            raise Errno(E.EBADF, f"connection {conn} is gone", conn=conn)
        context = traps_wait.written(self.machine, connection, args)
        length = self.machine.core.slot_row(context.slot).tokens
        if context.parked and not isinstance(args, InjectArgs):
            log = traps.log_to_be(context, self.machine.core.read_log(context.slot, 0, length))
            return len(log) // 4, log[max(0, len(log) - 4 * count) :]
        return length, self.machine.core.read_log(context.slot, max(0, length - count), length)

    # -- clients --------------------------------------------------------------------------------------------------

    def _connect(self, event: Connect) -> None:
        self.machine.connections[event.conn] = Connection(Conn(event.conn), event.uid, event.session)

    def _disconnect(self, event: Disconnect) -> None:
        """Everything the connection held is released in this step, but for what is named or detached; what a pass still
        uses, when that pass is back."""
        m = self.machine
        connection = m.connections.get(event.conn)
        if connection is None:
            return
        m.names.disconnected(connection)
        m.psi.unsubscribe(event.conn)
        del m.connections[event.conn]
        for pid in sorted(connection.pids):
            process = m.processes.get(pid)
            if process is not None:
                m.end_process(process, 0, "killed")
                m.forget(process)

    def _syscall(self, event: Syscall) -> None:
        m = self.machine
        m.syscalls += 1
        connection = m.connections.get(event.conn)
        if connection is None:
            return
        try:
            result = TRAPS[event.name](m, connection, event, event.args)
        except Errno as error:
            m.reply(event.conn, event.request, error.code, error.detail)
            return
        if result is not None:
            m.reply(event.conn, event.request, 0, result)

    def _stop_at(self, event: StopAt) -> None:
        m = self.machine
        connection = m.connections.get(event.conn)
        context = connection.requests.get(event.request) if connection else m.names.orphan(event.conn, event.request)
        if context is not None and context.job is not None and not context.job.ending:
            context.keep = max(0, event.keep)
            m.finish(context, "stop")
            self._unpark(context)
        elif context is None:
            self._stop_late(connection, event)

    def _stop_late(self, connection: Connection | None, event: StopAt) -> None:
        """The generation ended by itself in the step that sampled the stop string: what follows the string goes now."""
        m = self.machine
        orphan = m.names.late(event.conn, event.request) if connection is None else None
        contexts = traps.contexts_of(m, connection) if connection else filter(None, (orphan,))
        for context in list(contexts):
            if context.last_request == (event.conn, event.request) and not m.core.in_flight(context.slot):
                context.last_request = (0, 0)
                m.cut(context, context.last_start, context.last_injected, max(0, event.keep))

    def _pause(self, event: Pause) -> None:
        m = self.machine
        connection = m.connections.get(event.conn)
        if connection is not None and not connection.paused:
            connection.paused = True
            for context in traps.contexts_of(m, connection):
                m.schedulers[context.device].hold(context)

    def _resume(self, event: Resume) -> None:
        m = self.machine
        connection = m.connections.get(event.conn)
        if connection is not None and connection.paused:
            connection.paused = False
            for context in traps.contexts_of(m, connection):
                traps.unhold(m, context)

    def _timer(self, event: Timer) -> None:
        m = self.machine
        for waiter in m.waiters.due(m.now_ns):
            m.answer(waiter, E.ETIMEDOUT, {"message": "no process has ended in time"})
        m.lifetimes.due()
        m.groups.rates.due()
        m.errands.due()

    def _restored(self, event: Restored) -> None:
        self.machine.names.restore(event)
        self.machine.lifetimes.restore(event)

    def _suspend(self, event: Suspend) -> None:
        self.machine.names.suspend()
        self.machine.lifetimes.suspend()

    def _plug(self, event: Plug | Unplug) -> None:
        self.machine.plugged = type(event) is Plug

    def _bug(self, event: Bug) -> None:
        self.machine.log(event.level, event.text)

    # -- drivers --------------------------------------------------------------------------------------------------

    def _driver_up(self, event: DriverUp) -> None:
        m = self.machine
        device = m.devices[event.device]
        if device.epoch and event.epoch > device.epoch:
            device.restarts += 1
        device.up = True
        device.gone = ""
        device.mute = 0
        if device.deaths and not device.deaths[-1][1]:
            device.deaths[-1] = (device.deaths[-1][0], m.now_ns)
        device.epoch = event.epoch
        device.driver_pid = event.driver_pid
        device.engine = event.engine
        device.direct = "direct" in event.capabilities
        device.layered = "layered" in event.capabilities
        for verb, bytes_s in (("read", event.read_bytes_s), ("write", event.write_bytes_s)):
            link = m.costs.link(device.index, verb)
            if bytes_s and not link.bytes_s:
                link.measured(float(bytes_s), float(event.latency_ns))
        for tokens, cached, elapsed_ns in event.prefill:
            m.costs.prefill[device.index].seen(tokens, tokens * (cached + tokens / 2), elapsed_ns)
        found = f", frames {event.arena}" if device.restarts else ""
        m.log("info", f"{device.name}: driver {event.driver_pid} is up, epoch {event.epoch}{found}")
        if device.tier != "hbm":
            m.tiers.tier_up(device, event.arena if device.restarts else "kept")
            return
        if event.arena == "lost" and device.restarts:
            for context in m.contexts_of(device.index):
                m.core.stop_running(context.slot)
            m.core.lose(device.index)
            m.prefetches.lost(device.index)
            scheduler = m.schedulers[device.index]
            for context in list(m.contexts_of(device.index)):
                context.admitted = False
                if context.job is not None and not m.held(context):
                    scheduler.add(context)
            scheduler.decoding.clear()

    def _found(self, event: Found) -> None:
        self.machine.devices[event.device].found += event.rows

    def _driver_down(self, event: DriverDown) -> None:
        m = self.machine
        device = m.devices[event.device]
        if event.epoch < device.epoch:
            return
        device.up = False  # if the kernel gave up on it (`_exec_failed`), only now is nothing under way any more
        device.deaths.append((m.now_ns, 0))
        device.why_down = event.reason
        m.count("driver_deaths")
        if device.tier != "hbm":
            m.log("warning", f"{device.name}: driver is down ({event.reason}); what it was moving comes from elsewhere")
            m.tiers.tier_down(device)
            return
        m.log("warning", f"{device.name}: driver is down ({event.reason}); its pass will be redone")
        m.tiers.tier_down(device)
        self._lose_pass(device)

    def _driver_gone(self, event: DriverGone) -> None:
        """Nobody will compute here: whoever waits for this device is told so, instead of hanging."""
        m = self.machine
        device = m.devices[event.device]
        device.up = False
        device.gone = event.reason or "it cannot be started"
        if device.tier != "hbm":
            m.log(
                "error",
                f"{device.name}: gone for good ({device.gone}); what it held is computed again when it is wanted",
            )
            m.tiers.tier_gone(device)
            m.errands.device_gone(device)
            return
        m.tiers.tier_down(device)
        m.errands.device_gone(device)
        self._lose_pass(device)
        for context in list(m.contexts_of(device.index)):
            if context.job is not None:
                m.fail(context, traps.host_down(device))

    def _lose_pass(self, device: Device) -> None:
        m = self.machine
        if device.flight is not None:
            m.count("passes_lost")
        device.flight = None
        m.core.rollback(device.index)
        m.interrupts.deliver()
        m.after_pass()
        self._settle()

    def _exec_failed(self, event: ExecFailed) -> None:
        """The pass is redone.  When that keeps failing the driver is restarted; when that does not help either, sequences run
        one at a time, and the job that fails alone gets EIO."""
        m = self.machine
        device = m.devices[event.device]
        if device.flight is None or event.seq != device.seq:
            m.count("late_completions")
            return
        m.count("exec_failed")
        m.log("warning", f"{device.name}: pass {event.seq} failed ({event.code}: {event.reason})")
        suspects = device.flight_seqs()
        # Behind gates most likely a load failed, which is no fault of the accel's: one of that shows without gates too.
        if device.flight.gates:
            m.count("gated_passes_failed")
            m.schedulers[device.index].gates_failed()
            self._lose_pass(device)
            return
        self._lose_pass(device)
        # Too long for a message, or for what the device has left: nothing is wrong with anybody, smaller passes will do.
        if event.code in (E.E2BIG, E.ENOMEM) and len(suspects) > 1:
            self._isolate(device)
            return
        device.failures += 1
        alone = m.by_slot.get(suspects[0].slot) if len(suspects) == 1 else None
        blame = 0
        if alone is not None and device.isolate:
            blame = device.blame[alone.cid] = device.blame.get(alone.cid, 0) + 1
        if alone is not None and (device.failures > RESTART_AFTER_FAILURES or blame >= BLAME_AFTER_FAILURES):
            device.failures = 0
            device.blame.pop(alone.cid, None)
            m.fail(alone, Errno(E.EIO, f"{device.name} cannot compute this context: {event.reason}"))
            self._unpark(alone)
            return
        if device.failures == RESTART_AFTER_FAILURES:
            device.up = False
            m.emit(RestartDriver(device.index, f"{device.failures} passes in a row failed"))
        if device.failures >= RESTART_AFTER_FAILURES or blame:
            self._isolate(device)

    def _isolate(self, device: Device) -> None:
        """Passes of one sequence, until each has had its turn; prompts and decoding take turns."""
        scheduler = self.machine.schedulers[device.index]
        device.isolate = 2 * (len(scheduler.queue) + len(scheduler.decoding)) + 2

    def _exec_done(self, event: ExecDone) -> None:
        m = self.machine
        device = m.devices[event.device]
        if device.flight is None or event.seq != device.seq:
            m.count("late_completions")
            return
        expected = 4 * device.samples
        if len(event.tokens) != expected or len(event.logprobs) != expected:
            self._exec_failed(
                ExecFailed(event.device, event.seq, E.EIO, f"{len(event.tokens) // 4} tokens for {device.samples}")
            )
            return
        low, high = m.core.token_range(event.tokens)
        if low < 0 or high >= m.config.vocab_tokens:
            self._exec_failed(ExecFailed(event.device, event.seq, E.EIO, f"sampled token {low if low < 0 else high}"))
            return
        scheduler = m.schedulers[device.index]
        rare = event.tops or event.scores or scheduler.queue or m.ending or m.unsettled or device.blame
        seqs = device.flight_seqs() if rare else None  # steady decoding costs no Python per context
        if (event.tops or event.scores) and not _fits(event, seqs or []):
            self._exec_failed(ExecFailed(event.device, event.seq, E.EIO, "log-probabilities do not fit the pass"))
            return
        if event.waited_ns == 0:
            scheduler.learn(device.flight, event.compute_ns)
        device.flight = None
        scheduler.gates_passed()
        device.failures = 0
        device.isolate = max(0, device.isolate - 1)
        commit = m.core.commit(device.index, event.tokens, event.logprobs)
        m.count("computed_tokens", event.computed_tokens)
        m.count("generated_tokens", len(commit.tokens) // 4)
        m.count("compute_ns", event.compute_ns)
        scheduler.guard.passed(scheduler, event.computed_tokens)
        if event.waited_ns:
            m.count("gate_wait_ns", event.waited_ns)
        tops = self._tops(event, seqs or [], commit.kept) if event.tops else None
        if commit.tokens:
            m.emit(Tokens(commit.streams, commit.tokens, commit.logprobs, tops))
        if seqs is not None:
            self._chunks_done(device, seqs, event)
            if device.blame:
                for q in seqs:
                    if q.slot in m.by_slot:
                        device.blame.pop(m.by_slot[q.slot].cid, None)
        if m.interrupts.pending:
            m.interrupts.deliver({slot for slot, _ in commit.finished})
        for slot, reason in commit.finished:
            context = m.by_slot[slot]
            m.finish(context, _REASON[reason])
        if m.groups.rates.limited:
            m.groups.rates.passed()
        m.after_pass()
        self._settle()

    def _tops(self, event: ExecDone, seqs: list[Seq], kept: bytes) -> tuple[tuple[bytes, bytes] | None, ...]:
        """Alternatives for each token that was kept; they also go into the job's own record."""
        per_sample: list[tuple[bytes, bytes] | None] = []
        owners: list[int] = []
        at = 0
        for q in seqs:
            top = None
            if q.has_top:
                top = event.tops[at]
                at += 1
            if q.flags & SAMPLE:
                per_sample.append(top)
                owners.append(q.slot)
        lps = array("f", event.logprobs)
        result = []
        for i in array("i", kept):
            top = per_sample[i]
            context = self.machine.by_slot.get(owners[i])
            if top is not None and context is not None and context.job is not None:
                context.job.logprobs.append((lps[i], *top))
            result.append(top)
        return tuple(result)

    def _chunks_done(self, device: Device, seqs: list[Seq], event: ExecDone) -> None:
        """Jobs that were still in their prompt: they decode now, have their answer, or go on."""
        m = self.machine
        scheduler = m.schedulers[device.index]
        tops, scores = iter(event.tops), iter(event.scores)
        for q in seqs:
            top = next(tops) if q.has_top else None
            score = next(scores) if q.flags & SCORE else None
            context = m.by_slot.get(q.slot)
            job = None if context is None or context.dying else context.job
            if context is None or job is None or job.ending:
                continue  # nobody waits for it any more
            if q.flags & FORWARD and job.kind is JobKind.FORWARD and top is not None:
                m.complete(context, job, ForwardResult(*top))
            elif q.flags & SCORE and job.kind is JobKind.SCORE and score is not None:
                job.scores.append(score)
                job.scored = q.start + q.ntokens
                if job.scored >= m.core.slot_row(context.slot).tokens:
                    m.complete(context, job, ScoreResult(b"".join(job.scores)))
            elif q.flags & SAMPLE:
                scheduler.sampled(context, job)

    def _settle(self) -> None:
        """After a pass: contexts that were stopped while it ran, and calls that waited for it."""
        m = self.machine
        unsettled, m.unsettled = m.unsettled, []
        for context in unsettled:
            if m.core.in_flight(context.slot) and m.by_slot.get(context.slot) is context:
                m.unsettled.append(context)
                continue
            if m.by_slot.get(context.slot) is not context:
                continue
            if context.job is not None and m.held(context):
                m.schedulers[context.device].hold(context)
            self._unpark(context)

    def _unpark(self, context: Context) -> None:
        while context.parked and not self.machine.core.in_flight(context.slot):
            context.unparking = True
            self._syscall(context.parked.popleft())
            context.unparking = False


def _fits(event: ExecDone, seqs: list[Seq]) -> bool:
    tops = sum(q.has_top for q in seqs)
    scores = [q.start + q.ntokens - max(q.score_from, q.start + 1) for q in seqs if q.flags & SCORE]
    return len(event.tops) == tops and [len(s) // 4 for s in event.scores] == scores
