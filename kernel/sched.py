"""The scheduler: what the next forward pass of each compute device contains.

Continuous batching (Orca, OSDI'22; Sarathi-Serve, OSDI'24): a pass is one token of every context that decodes plus
chunks of prefill, under one token budget.  The decode set lives in the core and costs no Python per context; here are
only the contexts that wait for frames or still have a prompt to compute.

The order of service is that of a policy (order/): who gets frames next, and whose prompt goes into the next pass.  A job
that was overtaken often enough goes first (order/line.py), and groups share by weight (order/turns.py).  The first job that
does not fit is passed only by jobs that will not keep it waiting for longer.

A job also has a place, arrival shifted by nice, which it keeps when it is preempted.  Whoever needs frames takes them by
place, newest first, whatever the policy: the oldest of those that hold frames is never the newest again, so it can always
finish, which rules out live-lock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .backlog import Backlog
from .batch import ALLOWED, FORWARD, HISTORY, SAMPLE, SCORE, SEQ_BYTES, unpack_seqs
from .calls import GenerateArgs
from .context import Context, Job, JobKind
from .errors import Panic
from .events import Exec
from .injected import count
from .load import Growth, Guard
from .oom import Oom
from .order import registry
from .order.facts import facts
from .order.line import LOOK, OVERTAKES, arranged, rank
from .order.protocol import Forecast, OrderPolicy, Waiting
from .order.turns import LEARN_EVERY, TOKEN_NS, Turns, decode_part_ns
from .pager import Pager
from .params import MAX_TARGET_MS
from .records import BLOCKED_BY_LOAD, OK, PREFILL
from .resting import Resting
from .tag import GATE

if TYPE_CHECKING:
    from .machine import Machine
    from .movers import Move

ROUNDS = 16  # rounds of planning, beside two for each job, after which the end of a transfer is waited for
PASSERS = 4  # jobs that are tried in the place of the first that does not fit, per pass
_SEQ_WORDS, _SEQ_START = SEQ_BYTES // 4, 2  # of `seqs` as int32: length of a record, and where its `start` is
_FINAL_FLAG = {JobKind.PREFILL: 0, JobKind.GENERATE: SAMPLE, JobKind.FORWARD: FORWARD, JobKind.SCORE: SCORE}


class Late(NamedTuple):
    """Targets that would be missed.  after_ns: when to try again.  first_ns, token_ns: targets that would be kept now, behind all
    that is due; 0: that is not known."""

    after_ns: int
    first_ns: int
    token_ns: int


class Scheduler:
    """Queues of one compute device."""

    def __init__(self, machine: Machine, device: int) -> None:
        self._m = machine
        self._core = machine.core
        self._device = machine.devices[device]
        self.device = device
        self.pager = Pager(machine, device, self)
        self.growth = Growth(machine, device, machine.lengths)
        self.guard = Guard(machine, device)
        self.backlog = Backlog(machine, device)
        self.oom = Oom(machine, device)
        self.queue: list[Context] = []  # jobs with something to compute before they decode, oldest first
        self.decoding: dict[int, Context] = {}  # by slot
        self.idle = Resting(machine)  # without a job and perhaps with frames
        self._masked = False  # a chunk of it carries ALLOWED
        self._gates: list[Move] = []  # of the pass that is being planned, or in flight
        self._waits = False  # no pass could be planned before a transfer has ended
        self.moves = 0  # changes of who is queued or holds frames
        self.widest = 0  # most contexts that were admitted at once since somebody looked (history.py)
        self.fault = ""  # of a third party's policy that lost its place, in words
        self.policy = self._made(machine.sysctl.order)
        self.turns = Turns(machine, device)
        self._line: list[Context] = []  # the queue in the order of service, when the round began
        self._passers: list[Context] = []  # those that were given frames before ...
        self._first = -1  # ... the job of this order, which did not fit
        self.short: Context | None = None  # was refused frames, or lost them, when they were asked for last
        self._loading: list[
            Context
        ] = []  # had nothing to compute in the last pass planned: their loads have not landed

    # -- membership -----------------------------------------------------------------------------------------------

    @property
    def benched(self) -> set[int]:
        """Slots that decode, but not in the next pass."""
        return self.turns.benched

    def use(self, policy: str) -> None:
        """From the next pass on.  KeyError: nobody knows it."""
        self.policy = self._made(policy)

    def _made(self, policy: str) -> OrderPolicy:
        self.fault = ""
        made = registry.make_guarded(policy, self._failed)
        return self.policy if self.fault else made

    def _failed(self, policy: str, when: str, error: Exception) -> None:
        """A third party's policy is at fault: arrival takes its place, which asks for nothing."""
        self.policy = registry.make("fcfs")
        self.fault = f"scheduling policy {policy} failed {when} ({type(error).__name__}: {error})"
        self._m.log("error", f"{self._device.name}: {self.fault}: fcfs takes its place")

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
        if self.decoding.pop(context.slot, None) is not None:
            self.moves += 1  # what it has may go to those that wait
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

    def first_short(self) -> Context | None:
        """The first that waits for frames: to be admitted, or, when no pass can be planned for want of any, to grow."""
        short = self.short
        if short is not None and short.queued and not short.admitted and not self._m.held(short):
            return short
        return min(self.decoding.values(), key=Context.place) if self._waits and self.decoding else None

    def stalled(self) -> bool:
        """Somebody with work waits for frames, or for what is being loaded into them."""
        return next(self.stalled_contexts(), None) is not None

    def stalled_contexts(self) -> Iterator[Context]:
        """Those that do, and those that are not admitted because the first is not."""
        if not self._device.up:
            return
        short = self.first_short()
        if short is not None:
            yield short
            yield from (c for c in self.queue if not c.admitted and c.wait is None)
        yield from (c for c in self._loading if c.queued and self._core.loading(c.slot))

    # -- one pass -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """If the device is free and there is work, send it the next pass."""
        device = self._device
        rounds = 0
        while device.up and device.flight is None and (self.queue or self.decoding):
            before = self.moves
            # The frames that a pass waits for are copied away for it.  Whoever was admitted meanwhile would take them, be preempted
            # for the pass, and be admitted again, with loads that go ahead of the copies: no pass would ever be planned.
            spoken_for = self._waits and self._m.movers.moving()
            self.turns.meet(self.queue, self.decoding)
            self._line = self._in_order()
            if not spoken_for:
                self._admit()
            if self._send() or self._waits or (self.moves == before and not spoken_for):
                return
            # Prompts that turned out to be computed already have left the queue, or somebody lost its frames: others may
            # be admitted now.  Each round ends a job or serves the oldest, so there cannot be many.
            rounds += 1
            if rounds > ROUNDS + 2 * len(self.queue) and self._m.movers.moving():
                return  # frames only change hands until a transfer has ended
            if rounds > 1000 + 2 * len(self.queue):
                raise Panic(f"{device.name}: no pass can be planned for {len(self.queue)} waiting contexts")

    def _send(self) -> bool:
        """Plan the next pass and emit it.  False: nothing can run."""
        device = self._device
        self._waits = False
        while True:
            self._gates = []
            self._masked = False
            chunks = self._chunks()
            limit = 1 if device.isolate else self._m.sysctl.max_running
            plan = self._core.plan(device.index, limit, b"".join(chunks))
            if plan.status == OK:
                break
            self._waits = not self.pager.grow(plan)
            if self._waits:
                return False  # who was preempted for this must not be admitted again before that
        if not plan.sequences:
            return False
        device.seq += 1
        device.samples = plan.samples
        histories = self._histories(plan.seqs) if plan.histories else ()
        gates = b"".join(GATE.pack(move.gate, move.ticket) for move in self._gates)
        allowed = self._allowed(plan.seqs) if self._masked else ()
        device.flight = Exec(device.index, device.seq, plan.seqs, plan.tokens, plan.copies, histories, gates, allowed)
        self._went(chunks)
        self._m.count("passes")
        self._m.emit(device.flight)
        return True

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

    def _allowed(self, seqs: bytes) -> tuple[bytes, ...]:
        return tuple(self._job(self._m.by_slot[q.slot]).allowed for q in unpack_seqs(seqs) if q.flags & ALLOWED)

    def _final_flags(self, job: Job) -> int:
        """What is wanted of the last position of its prompt."""
        if not job.allowed:
            return _FINAL_FLAG[job.kind]
        self._masked = True
        return _FINAL_FLAG[job.kind] | ALLOWED

    # -- who is next ----------------------------------------------------------------------------------------------

    def _in_order(self) -> list[Context]:
        """The queue in the order of service.  Of each group, the first LOOK jobs by place are ordered."""
        queue, m = self.queue, self._m
        if len(queue) < 2 or (self.policy.plain and not self.turns.sharing):
            return queue[:]
        looked: dict[str, list[Context]] = {}
        rest: list[Context] = []
        for context in queue:
            mine = looked.setdefault(context.process.group.name if self.turns.sharing else "", [])
            (mine if len(mine) < LOOK else rest).append(context)
        for name, mine in looked.items():
            if not self.policy.plain and len(mine) > 1:
                found = facts(m, [(c, self._job(c)) for c in mine], self.policy.looks, self.policy.attains)
                looked[name] = [mine[i] for i in arranged(self.policy, found)]
        if len(looked) == 1:
            (line,) = looked.values()
            return line + rest
        jobs = {name: [(c.slot, self._left_ns(c)) for c in mine] for name, mine in looked.items()}
        return [m.by_slot[slot] for slot in self.turns.line(jobs)] + rest

    def _left_ns(self, context: Context) -> float:
        """What it takes to compute what is left of its prompt."""
        row = self._core.slot_row(context.slot)
        left = max(1, row.tokens - row.computed)
        fit = self._m.costs.prefill[self.device].known()
        return max(1.0, fit.ns(left, row.computed)) if fit is not None else TOKEN_NS * left

    @staticmethod
    def _job(context: Context) -> Job:
        if context.job is None:
            raise Panic(f"context {context.cid} is queued without a job")
        return context.job

    def _overtaken(self, context: Context, waiting: list[Context]) -> None:
        """It is served before those of `waiting` in its group whose place is earlier."""
        place, group = context.place(), context.process.group
        for other in waiting:
            if other.process.group is group and other.place() < place:
                self._job(other).passed += 1

    def late(self, context: Context, args: GenerateArgs) -> Late | None:
        """None unless the policy refuses a generation with these targets."""
        if not self.policy.refuses or not (args.ttft_ms or args.tpot_ms):
            return None
        m, fit = self._m, self._m.costs.prefill[self.device].known()
        if fit is None:
            return None
        job = Job(JobKind.GENERATE, context.job.order if context.job is not None else 1 << 60)
        job.args = args
        job.since_ns = m.now_ns
        job.due_ns = m.now_ns + args.ttft_ms * 1_000_000 if args.ttft_ms else 0
        others = [c for c in self.queue if c is not context][:LOOK]
        mine, *theirs = facts(m, [(context, job), *((c, self._job(c)) for c in others)], True, self.policy.attains)
        late_ns = self.policy.late_ns(mine, self._forecast(mine, theirs))
        if late_ns <= 0:
            return None
        last = self._forecast(mine._replace(due_ns=m.now_ns + MAX_TARGET_MS * 1_000_000), theirs)
        return Late(late_ns, last.first_ns, last.token_ns)

    def _forecast(self, mine: Waiting, theirs: list[Waiting]) -> Forecast:
        m = self._m
        fit, decode = m.costs.prefill[self.device].known(), m.costs.decode[self.device].known()
        if fit is None:
            return Forecast(0, 0, 0)
        ahead = [job for job in theirs if rank(self.policy, job) < rank(self.policy, mine)]
        jobs = (*ahead, mine)
        first_ns = sum(fit.ns(job.left, job.resident + job.arriving + job.awaited) - fit.k for job in jobs)
        passes = -(-sum(job.left for job in jobs) // m.sysctl.step_tokens)
        rows = [self._core.slot_row(slot) for slot in self.decoding]
        cached = sum(row.tokens for row in rows)
        first_ns += passes * (fit.k + decode_part_ns(decode, len(rows), cached))
        if decode is None:
            return Forecast(round(first_ns), 0, 0)
        left = [
            c.job.args.max_tokens - (row.tokens - c.job.start - count(c.job.injected))
            for c, row in zip(self.decoding.values(), rows, strict=True)
            if c.job is not None
        ]
        pass_ns = decode.ns(len(rows), cached)
        token_ns = decode.ns(len(rows) + 1, cached + mine.left + mine.resident)
        return Forecast(round(first_ns), round(token_ns), round(max(0, min(left, default=0)) * pass_ns))

    def _admit(self) -> None:
        """Give frames to those that wait, in order.  The first that does not fit is `_first`: see `_passes`."""
        active = -1
        first: Context | None = None
        limited: list[int] = []  # groups at a limit of their own: that holds up nobody else
        spare = tried = 0
        self.short = None
        # Those that nobody waits for yet come last: what they took would be taken back by whoever is short of it.
        for context in sorted(self._line, key=lambda c: c.wait is not None):
            if context.admitted or not context.queued or self._core.in_flight(context.slot):
                continue
            if limited and any(context.process.group.within(number) for number in limited):
                continue
            if active < 0:
                active = self.active()
            if context.wait is not None:
                if first is None and not self.guard.full(active) and self.pager.admit(context, active):
                    active = self._one_more(active)
                elif first is None and self.pager.full:
                    self._m.lifetimes.no_room(context)
                continue
            if self.guard.full(active):
                self.short = first or context
                return
            if first is not None:
                tried += 1
                if tried > PASSERS or not active:
                    return
                if self._passes(first, context) and self.pager.admit(context, active, spare):
                    self._passers.append(context)
                    self._overtaken(context, [c for c in self.queue if not c.admitted])
                    active = self._one_more(active)
            elif self.pager.admit(context, active):
                if not self.policy.plain:
                    self._overtaken(context, [c for c in self.queue if not c.admitted])
                active = self._one_more(active)
            elif context.job is None:
                return  # it never will fit: its job has ended
            elif self.pager.over:
                limited.append(self.pager.over)
            elif not self.pager.full or self._job(context).passed >= OVERTAKES:
                self.short = context
                return  # a transfer is to end; or enough have passed it
            else:
                first = self.short = context
                if self._job(first).order != self._first:
                    self._first, self._passers = self._job(first).order, []
                spare = self._spare(first)
                if self._core.free_frames(self.device) + self._core.reclaimable_frames(self.device) <= spare:
                    return

    def _one_more(self, active: int) -> int:
        self.widest = max(self.widest, active + 1)
        return active + 1

    def _passes(self, first: Context, context: Context) -> bool:
        """May `context` have frames before `first`, which does not fit?  Only if `first` still fits beside it and all that
        passed it, once those have ended that had their frames before it came first: so it waits no longer for them (EASY
        backfilling, Lifka, JSSPP'95)."""
        self._passers = [c for c in self._passers if c.job is not None and c.admitted]
        most = sum(self._most_frames(c) for c in (*self._passers, context))
        wanted = -(-self._core.slot_row(first.slot).tokens // self._m.config.block_tokens) + 1
        reserve = self._device.capacity * self._m.sysctl.watermark_permille // 1000 + len(self._passers) + 1
        return most + wanted + reserve <= self._device.capacity

    def _most_frames(self, context: Context) -> int:
        """What it may come to hold before its job ends."""
        job = self._job(context)
        tokens = self._core.slot_row(context.slot).tokens
        if job.kind is JobKind.GENERATE:
            tokens = max(
                tokens, min(job.start + job.args.max_tokens + count(job.injected), self._m.config.window_tokens)
            )
        return -(-tokens // self._m.config.block_tokens) + 1

    def _spare(self, first: Context) -> int:
        """Reclaimable frames with the beginning of its prompt: whoever passes it must find others."""
        if not self.policy.looks:
            return 0
        seen = self._job(first).seen
        return seen[0] // self._m.config.block_tokens if seen is not None else 0

    # -- what of their prompts ------------------------------------------------------------------------------------

    def _chunks(self) -> list[bytes]:
        """PREFILL records for the budget that decoding leaves."""
        sysctl, turns = self._m.sysctl, self.turns
        one = bool(self._device.isolate)
        room = 1 if one else sysctl.max_running
        if one:
            turns.release(self.decoding)
            decode = min(len(self.decoding), 1)
        else:
            prompts = sum(1 for c in self.queue if c.admitted) if self.queue else 0
            places = min(prompts, room // 2) if turns.sharing else 0
            decode = turns.choose(self.decoding, room - places, bool(prompts)) if self.decoding else 0
            turns.begin_chunks(self.decoding, decode, self.queue)
        if room == 1 and self.decoding and (not self.queue or self._device.seq % 2):
            return []  # one place in a pass: decoding and prompts take turns
        if room > 1:
            room -= min(decode, room // 2)  # prompts that keep coming leave half of the places
        budget = max(sysctl.step_tokens - decode, sysctl.step_tokens // 4, 1)
        fit = self._m.costs.prefill[self.device].known() if decode and self.queue else None
        chunks: list[bytes] = []
        self._loading = []
        for context in self._line:
            if budget <= 0 or len(chunks) >= room:
                break
            if not context.admitted or not context.queued:
                continue
            job = self._job(context)
            if context.gates and not self._gates_hold(context):
                self._loading.append(context)
                continue  # even when nothing is left to compute but its last token: that reads what is still arriving
            allowed = budget
            if decode:
                row = self._core.slot_row(context.slot)
                need = min(budget, max(1, row.tokens - row.computed))
                group = context.process.group.name
                allowed = turns.pace.room(group, need, row.computed, fit, sysctl.step_tokens)
                if allowed <= 0 and job.passed >= OVERTAKES:
                    break  # nor does anybody whose place is later
                if allowed <= 0:
                    continue
            choose = self._score_chunk if job.kind is JobKind.SCORE else self._chunk
            record = choose(context, job, allowed)
            if record is None:
                continue
            chunks.append(PREFILL.pack(*record))
            budget -= record[2]
            if decode:
                turns.pace.took(record[2], record[1], fit)
        return chunks

    def _went(self, chunks: list[bytes]) -> None:
        """The pass with these chunks is on its way."""
        chunked = {slot for chunk in chunks for slot, *_ in PREFILL.iter_unpack(chunk)}
        self.turns.sent(self.decoding, self.queue, chunked)
        for slot in sorted(chunked) if not self.policy.plain else ():
            context = self._m.by_slot[slot]
            job = self._job(context)
            if not job.started:
                job.started = True
                self._overtaken(context, [c for c in self.queue if c.admitted and c.slot not in chunked])

    def learn(self, flight: Exec, elapsed_ns: int) -> None:
        """What the time of a pass that has ended says of costs (kernel/cost.py), and who pays for it."""
        turns = self.turns
        sequences, tokens = len(flight.seqs) // SEQ_BYTES, len(flight.tokens) // 4
        if sequences == tokens and not (turns.wanted or self.policy.refuses) and flight.seq % LEARN_EVERY:
            return
        if turns.sharing:
            turns.charge(unpack_seqs(flight.seqs), elapsed_ns)
        if sequences == tokens:
            starts = memoryview(flight.seqs).cast("i")[_SEQ_START::_SEQ_WORDS]
            turns.decoded(sequences, sum(starts.tolist()), elapsed_ns)
            return
        costs, device = self._m.costs, self.device
        seqs = unpack_seqs(flight.seqs)
        prompts = [q for q in seqs if q.ntokens > 1]
        ones, cached = len(seqs) - len(prompts), sum(q.start for q in seqs if q.ntokens == 1)
        decode, prefill = costs.decode[device].known(), costs.prefill[device].known()
        if decode is not None:  # what decoding takes of it is known better
            elapsed_ns -= round(decode_part_ns(decode, ones, cached))
            seqs = prompts
        elif prefill is not None and ones:
            rest_ns = elapsed_ns - sum(prefill.ns(q.ntokens, q.start) - prefill.k for q in prompts)
            if rest_ns > 0:
                turns.decoded(ones, cached, round(rest_ns))
            return
        if elapsed_ns >= 0:
            pairs = sum(q.ntokens * (q.start + q.ntokens / 2) for q in seqs)
            costs.prefill[device].seen(sum(q.ntokens for q in seqs), pairs, elapsed_ns)

    def _advance(self, context: Context) -> tuple[int, int]:
        """(computed, ready) of a queued context; a block that nobody is filling any more is taken over."""
        while True:
            at = self._core.advance(context.slot)
            if at.blocked_by == BLOCKED_BY_LOAD:
                if not self._through_gates(context):
                    self._loading.append(context)
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
                self.backlog.begun()
                self._m.finish(context, "done")
                return None
            return (context.slot, total - 1, 1, self._final_flags(job), -1, 0)
        count = min(ready, budget)
        if count <= 0:
            return None
        left = total - computed - count
        return (context.slot, computed, count, 0 if left else self._final_flags(job), -1, left)

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
        if not job.begun:
            self.backlog.begun()
        job.begun = True
        if context.queued:
            self._unqueue(context)
            if self._core.is_running(context.slot):
                context.admitted = True
                self.decoding[context.slot] = context
                self.turns.aim(context)
