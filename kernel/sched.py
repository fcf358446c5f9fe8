"""The scheduler: what the next forward pass of each compute device contains.

Continuous batching (Orca, OSDI'22; Sarathi-Serve, OSDI'24): a pass is one token of every context that decodes plus
chunks of prefill, under one token budget.  The decode set lives in the core and costs no Python per context; here are
only the contexts that wait for frames or still have a prompt to compute.

Order is first come first served; a step of nice is worth a number of arrivals, so that later jobs may overtake an
earlier one, but not for ever.  A job keeps its place when it is preempted, so the oldest is never the newest again: it
can always finish, which rules out live-lock.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from .batch import FORWARD, HISTORY, SAMPLE, SCORE, unpack_seqs
from .context import Context, Job, JobKind
from .errors import Panic
from .events import Exec
from .pager import Pager
from .records import BLOCKED_BY_LOAD, EVICT, NOROOM, OK, PREFILL
from .resting import Resting
from .tag import GATE

if TYPE_CHECKING:
    from .machine import Machine
    from .movers import Move

_FINAL_FLAG = {JobKind.PREFILL: 0, JobKind.GENERATE: SAMPLE, JobKind.FORWARD: FORWARD, JobKind.SCORE: SCORE}


class Scheduler:
    """Queues of one compute device."""

    def __init__(self, machine: Machine, device: int) -> None:
        self._m = machine
        self._core = machine.core
        self._device = machine.devices[device]
        self.device = device
        self.pager = Pager(machine, device, self)
        self.queue: list[Context] = []  # jobs with something to compute before they decode, oldest first
        self.decoding: dict[int, Context] = {}  # by slot
        self.idle = Resting(machine)  # without a job and perhaps with frames
        self._gates: list[Move] = []  # of the pass that is being planned, or in flight
        self._waits = False  # no pass could be planned before a transfer has ended
        self.moves = 0  # changes of who is queued or holds frames

    # -- membership -----------------------------------------------------------------------------------------------

    def add(self, context: Context) -> None:
        """A job with tokens to compute."""
        if not context.queued:
            context.queued = True
            insort(self.queue, context, key=Context.place)
            self.moves += 1

    def _unqueue(self, context: Context) -> None:
        if context.queued:
            context.queued = False
            self.queue.remove(context)
            self.moves += 1

    def rest(self, context: Context) -> None:
        """It has no job: its frames may be taken (resting.py says in which order)."""
        self.idle.add(context)

    def wake(self, context: Context) -> None:
        """It has a job, or no frames, or goes."""
        self.idle.remove(context)

    def reorder(self) -> None:
        """A nice value changed."""
        self.queue.sort(key=Context.place)

    def remove(self, context: Context) -> None:
        """The job is over or held; its token in flight, if any, is not wanted."""
        self._unqueue(context)
        self._core.stop_running(context.slot)
        self.decoding.pop(context.slot, None)
        self._core.discard(context.slot)

    def hold(self, context: Context) -> None:
        """STOPPED or paused: no more passes, but a token in flight is kept."""
        self._core.stop_running(context.slot)
        self.decoding.pop(context.slot, None)
        self._unqueue(context)
        context.admitted = False
        if self._core.in_flight(context.slot):
            self._m.unsettled.append(context)

    def active(self) -> int:
        """Contexts that own frames and will give them back without being asked."""
        return len(self.decoding) + sum(1 for c in self.queue if c.admitted)

    # -- one pass -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """If the device is free and there is work, send it the next pass."""
        device = self._device
        rounds = 0
        while device.up and device.flight is None and (self.queue or self.decoding):
            before = self.moves
            self._admit()
            if self._send() or self._waits or self.moves == before:
                return
            # Prompts that turned out to be computed already have left the queue, or somebody lost its frames: others may
            # be admitted now.  Each round ends a job or serves the oldest, so there cannot be many.
            rounds += 1
            if rounds > 1000 + 2 * len(self.queue):
                raise Panic(f"{device.name}: no pass can be planned for {len(self.queue)} waiting contexts")

    def _send(self) -> bool:
        """Plan the next pass and emit it.  False: nothing can run."""
        device = self._device
        self._waits = False
        while True:
            self._gates = []
            chunks = self._chunks()
            limit = 1 if device.isolate else self._m.sysctl.max_running
            plan = self._core.plan(device.index, limit, b"".join(chunks))
            if plan.status == OK:
                break
            if plan.status == EVICT:
                self._waits = not self.pager.evict(plan.shortage_frames)
            elif plan.status == NOROOM:
                self._waits = not self._find_room(plan.shortage_frames)
            if self._waits:
                return False  # who was preempted for this must not be admitted again before that
        if not plan.sequences:
            return False
        device.seq += 1
        device.samples = plan.samples
        histories = self._histories(plan.seqs) if plan.histories else ()
        gates = b"".join(GATE.pack(move.gate, move.ticket) for move in self._gates)
        device.flight = Exec(device.index, device.seq, plan.seqs, plan.tokens, plan.copies, histories, gates)
        self._m.count("passes")
        self._m.emit(device.flight)
        return True

    def _find_room(self, shortage_frames: int) -> bool:
        """False: not yet, a transfer is to end."""
        pager = self.pager
        return (
            pager.make_room(shortage_frames)
            or (not pager.waits and pager.break_keeps(shortage_frames))
            or (not pager.waits and pager.preempt(shortage_frames))
        )

    def gates_passed(self) -> None:
        """The pass in flight has ended well: what it followed has landed, though its driver may not have said so yet."""
        for move in self._gates:
            move.proven = True
        self._gates = []

    def gates_failed(self) -> None:
        """The pass in flight has failed behind gates: none follows the same loads again.  A gate says that its load failed
        before the driver has said how it ended, and until then another pass would only fail in the same way."""
        for move in self._gates:
            move.broken = True
        self._gates = []

    def _histories(self, seqs: bytes) -> tuple[bytes, ...]:
        return tuple(
            self._core.read_log(q.slot, 0, q.start + q.ntokens) for q in unpack_seqs(seqs) if q.flags & HISTORY
        )

    def _admit(self) -> None:
        """Give frames to those that wait, oldest first, until one does not fit: then nobody overtakes it."""
        active = -1
        no_room: list[Context] = []
        for context in self.queue:
            if context.admitted or self._core.in_flight(context.slot):
                continue
            if active < 0:
                active = self.active()
            if not self.pager.admit(context, active):
                if context.wait is None:
                    break
                no_room.append(context)  # nobody waits for it yet, so nobody waits behind it
                continue
            active += 1
        for context in no_room:
            self._m.lifetimes.no_room(context)

    def _chunks(self) -> list[bytes]:
        """PREFILL records for the budget that decoding leaves."""
        sysctl = self._m.sysctl
        one = bool(self._device.isolate)
        room = 1 if one else sysctl.max_running
        decode = min(len(self.decoding), room)
        if room == 1 and self.decoding and (not self.queue or self._device.seq % 2):
            return []  # one place in a pass: decoding and prompts take turns
        if room > 1:
            room -= min(decode, room // 2)  # prompts that keep coming leave half of the places
        budget = max(sysctl.step_tokens - decode, sysctl.step_tokens // 4, 1)
        chunks: list[bytes] = []
        for context in list(self.queue):
            if budget <= 0 or len(chunks) >= room:
                break
            if not context.admitted:
                continue
            job = context.job
            if job is None:
                raise Panic(f"context {context.cid} is queued without a job")
            if context.gates and not self._gates_hold(context):
                continue  # even when nothing is left to compute but its last token: that reads what is still arriving
            choose = self._score_chunk if job.kind is JobKind.SCORE else self._chunk
            record = choose(context, job, budget)
            if record is None:
                continue
            chunks.append(PREFILL.pack(*record))
            budget -= record[2]
        return chunks

    def _advance(self, context: Context) -> tuple[int, int]:
        """(computed, ready) of a queued context; a block that nobody is filling any more is taken over."""
        while True:
            at = self._core.advance(context.slot)
            if at.blocked_by == BLOCKED_BY_LOAD:
                if not self._through_gates(context):
                    return at.computed, 0
                continue
            if at.blocked_by < 0:
                return at.computed, at.ready
            filler = self._m.by_slot.get(at.blocked_by)
            if filler is not None and ((filler.queued and filler.admitted) or self._core.in_flight(at.blocked_by)):
                return at.computed, 0
            self._core.steal(context.slot)

    def _gates_hold(self, context: Context) -> bool:
        """A context that has gone past loads that have not landed (`_through_gates`) may only run behind their gates."""
        context.gates = [move for move in context.gates if not move.over]
        if not context.gates or not context.gated:
            context.gated = context.gated and bool(context.gates)
            return True
        if any(move.broken for move in context.gates):
            return False
        if self._gates is not context.gates and (self._gates or not self._alone()):
            return False
        self._gates = context.gates
        return True

    def _through_gates(self, context: Context) -> bool:
        """Let the pass that is being planned begin before the context's loads have landed: it waits for them layer by
        layer.  Only when that holds nobody else up, and every load of the context reports its progress."""
        moves = context.gates
        if not moves or self._gates or not self._alone():
            return False
        if any(not move.seq or move.broken for move in moves):
            return False  # not sent yet: a driver that is busy for long must not keep the compute device waiting
        if sum(len(move.items) for move in moves) < self._core.loading(context.slot):
            return False
        self._core.skip_loading(context.slot)
        context.gated = True
        self._gates = moves
        self._m.count("gated_passes")
        return True

    def _alone(self) -> bool:
        return not self.decoding and sum(1 for c in self.queue if c.admitted) <= 1

    def _chunk(self, context: Context, job: Job, budget: int) -> tuple[int, int, int, int, int, int] | None:
        total = self._core.slot_row(context.slot).tokens
        computed, ready = self._advance(context)
        if computed == total:
            if job.kind is JobKind.PREFILL:
                self._m.finish(context, "done")
                return None
            return (context.slot, total - 1, 1, _FINAL_FLAG[job.kind], -1, 0)
        count = min(ready, budget)
        if count <= 0:
            return None
        left = total - computed - count
        return (context.slot, computed, count, 0 if left else _FINAL_FLAG[job.kind], -1, left)

    def _score_chunk(self, context: Context, job: Job, budget: int) -> tuple[int, int, int, int, int, int] | None:
        """Positions below job.start - 1 as usual; from there on every pass begins with the last token of the one before."""
        total = self._core.slot_row(context.slot).tokens
        computed, ready = self._advance(context)
        first = job.scored - 1  # its logits say how likely the token at job.scored is
        if computed < first:
            count = min(ready, budget, first - computed)
            return (context.slot, computed, count, 0, -1, total - computed - count) if count > 0 else None
        count = min(computed + ready, total, first + budget + 1) - first
        if count < 2:
            return None
        return (context.slot, first, count, SCORE, job.start, total - first - count)

    def sampled(self, context: Context, job: Job) -> None:
        """A generation's prompt is computed and its next token drawn: it decodes from now on."""
        job.begun = True
        if context.queued:
            self._unqueue(context)
            if self._core.is_running(context.slot):
                context.admitted = True
                self.decoding[context.slot] = context
