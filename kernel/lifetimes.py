"""Contexts that wait for a tool: how a wait begins, what becomes of its frames meanwhile, and how it ends.

A context in TOOL_WAIT has no job (but for a prefill that brings it back in time), takes no place in any queue and counts
against nothing.  A wait ends in one of three ways: `resume` answers it, its deadline comes, or its context goes.  Its
number is never given again, in this daemon's life or the next, so an answer that comes late or twice can be told from the
one that is awaited.

What becomes of the frames is decided when the wait begins, by the wait policy (kernel/wait/) with measured costs and what
was learnt about the tool (kernel/tools.py).  The order in which resting contexts let go is in kernel/resting.py, and
kernel/returning.py brings a context back before its answer is due.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from .alarms import Alarms
from .calls import WaitNote, WaitToolResult
from .context import JobKind
from .errors import E, Errno
from .events import Journal, Notify
from .evict.protocol import KIND_FIRST_TOOL, KIND_TOOL, KIND_TOOLS
from .returning import Returning
from .tools import Forecast, OfUids, Sample, Tools
from .wait.memory import Memory
from .wait.protocol import Outlook, WaitPolicy
from .wait.registry import POLICIES

if TYPE_CHECKING:
    from .context import Context
    from .events import Restored
    from .machine import Machine

WAITS_PER_BOOT: Final = 1 << 40  # numbers of one boot lie below those of the next
MS: Final = 1_000_000
SHORT: Final = 4  # frames are short when fewer than one in so many is free or cache: then it is worth copying ahead
_QUEUED: Final = 100  # follow-ups whose wait for frames is remembered
_UNKNOWN_NS: Final = (
    1_000_000_000  # expected return of a context of which nothing is known and that rests since just now
)


class Wait:
    """One wait.  All times are the kernel's `now_ns`.

    eta_ns        what the caller said it would take; -1: nothing
    foretold      and it was believed: due_ns rests on that
    due_ns        when the answer is expected; 0: nobody knows
    early_ns      one in ten comes before that
    deadline_ns   when it is given up; 0: never
    keep_until_ns its frames go after everybody else's before that; 0: they do not
    fetches       times that it was brought back
    """

    __slots__ = (
        "begun_ns", "context", "deadline_ns", "decision", "due_ns", "early_ns", "eta_ns", "fetch_ns", "fetches",
        "foretold", "keep_until_ns", "number", "tool",
    )  # fmt: skip

    def __init__(self, context: Context, number: int, tool: str, begun_ns: int, eta_ns: int, deadline_ns: int) -> None:
        self.context = context
        self.number = number
        self.tool = tool
        self.begun_ns = begun_ns
        self.eta_ns = eta_ns
        self.deadline_ns = deadline_ns
        self.due_ns = 0
        self.early_ns = 0
        self.foretold = False
        self.decision = "keep"
        self.keep_until_ns = 0
        self.fetch_ns = 0  # when it is to be brought back; 0: not, or it is there
        self.fetches = 0

    @property
    def over(self) -> bool:
        return self.context.wait is not self


class Lifetimes:
    """All waits of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._last = 0  # number of the wait that began last
        self._deadlines: Alarms[Wait] = Alarms(machine.set_timer, lambda wait: not wait.over)
        self._keeps: Alarms[tuple[Wait, int]] = Alarms(
            machine.set_timer, lambda keep: not keep[0].over and keep[0].keep_until_ns == keep[1]
        )
        self._settled_ns = 0  # timer for admissions that wait until clients have had the time to say something
        self._journal = False
        self._queued_ns: deque[int] = deque(maxlen=_QUEUED)  # follow-ups of contexts that had lost their frames
        self._pauses = Sample(1024)  # between turns of contexts that wait for no tool
        self.waiting = 0  # contexts
        self._foretold = 0  # of them, those whose return somebody said and was believed
        self.tools = OfUids(machine.config.owner_uid)
        self.memory = Memory()
        self.returning = Returning(machine)

    @property
    def policy(self) -> WaitPolicy:
        return POLICIES[self._m.sysctl.wait]

    @property
    def ranks(self) -> bool:
        """Contexts that rest are taken by cost and due time now.  What was learnt of tools alone is not worth that: on recorded
        agents a call's past says so little of it that the least recently used context is as good a guess (docs/agents.md)."""
        return self._foretold > 0 and self.policy.ranks

    def tools_of(self, context: Context) -> Tools:
        """What is known of the tools of whoever has it."""
        return self.tools.of(context.process.uid)

    def restore(self, event: Restored) -> None:
        """What the journal holds."""
        self._journal = True
        self._last = max(self._last, event.boots * WAITS_PER_BOOT)
        for record in event.tools:
            self.tools.restore(record)

    def suspend(self) -> None:
        """The system goes down: put down what was learnt since."""
        if self._journal:
            records = self.tools.unwritten()
            if records:
                self._m.emit(Journal(records))

    # -- between a turn and a wait --------------------------------------------------------------------------------

    def turn_ended(self, context: Context) -> None:
        """A generation of it is over.  Where clients of its user say when they wait for a tool, nobody takes its frames before
        this one can have done so; unless they would be loaded again, which takes so little that others had better run (measured:
        docs/agents.md)."""
        m = self._m
        context.rested_ns = m.now_ns
        if not m.sysctl.grace_ms or context.dying or not len(self.tools_of(context)):
            return
        row = m.core.slot_row(context.slot)
        _, back_ns = self._moving_ns(context, row.entries)
        if not 0 <= back_ns <= self._computing_ns(context, row.entries):
            m.schedulers[context.device].idle.settle(context)

    def settling(self, device: int) -> bool:
        """Frames of `device` may not be taken by force yet, since turns have just ended.  There is a timer then."""
        m = self._m
        at_ns = m.schedulers[device].idle.settled_ns()
        if at_ns and not self.settles(device):
            self._settled_ns = at_ns
            m.set_timer(at_ns)
        return at_ns > 0

    def settles(self, device: int) -> bool:
        """A timer is set for that."""
        m = self._m
        return m.now_ns < self._settled_ns <= m.schedulers[device].idle.settled_ns()

    # -- beginning and ending -------------------------------------------------------------------------------------

    def begin(self, context: Context, tool: str, eta_ns: int, deadline_ns: int) -> WaitToolResult:
        """The context waits from now on.  deadline_ns: from now; -1: none.  Requires: no job but a prefill, and no wait."""
        m = self._m
        if context.job is not None:
            m.finish(context, "waits")  # what is left of its prompt is computed with the answer, or before it is due
        self._last += 1
        at_ns = m.now_ns + deadline_ns if deadline_ns >= 0 else 0
        wait = Wait(context, self._last, tool, m.now_ns, eta_ns, at_ns)
        forecast = self.tools_of(context).forecast(tool, eta_ns)
        if forecast.expected_ns >= 0:
            wait.due_ns = m.now_ns + max(1, forecast.expected_ns)
            wait.early_ns = m.now_ns + forecast.early_ns
            wait.foretold = forecast.by_eta
        self._decide(wait, forecast)
        context.wait, context.waited = wait, wait.number
        context.waits += 1
        context.rested_ns = context.asked_ns = 0
        self.waiting += 1
        self._foretold += wait.foretold
        m.count("tool_waits")
        m.count(f"tool_waits_{wait.decision}")
        m.schedulers[context.device].rest(context)
        self._note(wait, wait.due_ns)
        if at_ns:
            self._deadlines.add(at_ns, wait, m.now_ns)
        if wait.keep_until_ns:
            self._keeps.add(wait.keep_until_ns, (wait, wait.keep_until_ns), m.now_ns)
        else:
            self._let_go(wait)
        if not self.resident(context):
            self.lost(wait)
        expected_ms = (wait.due_ns - m.now_ns) // MS if wait.due_ns else -1
        keep_ms = max(0, wait.keep_until_ns - m.now_ns) // MS
        return WaitToolResult(wait.number, wait.decision, keep_ms, expected_ms, deadline_ns // MS if at_ns else -1)

    def check(self, context: Context, number: int) -> Wait:
        """The wait that `number` means (0: whichever there is).  ESTALE: it is over, or would be, had its timer fired yet: a
        machine that was held up takes no answer that is late.  EINVAL: there never was one."""
        wait = context.wait
        current = wait is not None and number in (0, wait.number)
        if wait is not None and current and not 0 < wait.deadline_ns <= self._m.now_ns:
            return wait
        if wait is not None and not current and 0 < number <= self._last:
            raise Errno(
                E.ESTALE,
                f"wait {number} of context {context.cid} is over; it waits for {wait.tool!r} now (wait {wait.number})",
                wait=number,
                current=wait.number,
            )
        if 0 < number <= self._last or (not number and context.waited):
            raise Errno(
                E.ESTALE,
                f"wait {number or context.waited} of context {context.cid} is over: it was answered, its deadline came, or the system "
                "was booted since; nothing was appended",
                wait=number or context.waited,
            )
        if wait is not None:
            raise Errno(
                E.EINVAL,
                f"there never was a wait {number}; context {context.cid} waits for {wait.tool!r} now (wait {wait.number})",
                wait=number,
                current=wait.number,
            )
        raise Errno(E.EINVAL, f"context {context.cid} waits for no tool: call wait_tool first", wait=number)

    def answered(self, context: Context) -> int:
        """The tool has answered; how long that took, in ns."""
        m, wait = self._m, context.wait
        if wait is None:
            return 0
        row = m.core.slot_row(context.slot)
        if row.computed + 1 >= row.tokens:  # the last token of a generation is computed with what follows it
            m.count("tool_answers_resident")
        elif not row.entries:
            m.count("tool_answers_absent")
            self.tools_of(context).named(wait.tool).absent += 1
            context.asked_ns = m.now_ns
        self._end(wait)
        self._learn(wait)
        if context.job is not None:
            m.errands.adopted(context)
        m.count("tool_waits_answered")
        return m.now_ns - wait.begun_ns

    def served(self, context: Context) -> None:
        """It has frames again, after its tool had answered."""
        self._queued_ns.append(self._m.now_ns - context.asked_ns)
        context.asked_ns = 0

    def forget(self, context: Context) -> None:
        """It is being released."""
        if context.wait is not None:
            self._end(context.wait)
        self.memory.ended(context.waits)

    def _end(self, wait: Wait) -> None:
        wait.context.wait = None
        self.waiting -= 1
        self._foretold -= wait.foretold
        self.returning.cancel(wait)
        if wait.deadline_ns:
            self._deadlines.over()
        if wait.keep_until_ns:
            self._keeps.over()
        if wait.context.job is None:
            self._m.schedulers[wait.context.device].rest(wait.context)

    def due(self) -> None:
        """A timer fired."""
        m = self._m
        for wait in self._deadlines.due(m.now_ns):
            self._late(wait)
        for wait, _ in self._keeps.due(m.now_ns):
            if wait.decision == "demote":
                self._copy_down(wait.context)
        self.returning.due()

    def _late(self, wait: Wait) -> None:
        """Nobody has answered: the context is as it was before the wait."""
        m, context = self._m, wait.context
        self._end(wait)
        self._learn(wait)
        self._note(wait, 0)
        m.count("tool_waits_late")
        if context.process.conn in m.connections:
            note = WaitNote(context.handle, context.cid, wait.number, wait.tool, "deadline")
            m.emit(Notify(context.process.conn, "wait", note))

    # -- learning -------------------------------------------------------------------------------------------------

    def _learn(self, wait: Wait) -> None:
        """It took so long; a deadline counts as an answer, since what is asked here is for how long frames lie idle."""
        uid, tools = wait.context.process.uid, self.tools_of(wait.context)
        tool = tools.learn(wait.tool, self._m.now_ns - wait.begun_ns, wait.eta_ns)
        if not self._journal:
            tools.dropped.clear()
            return
        records = [self.tools.record(uid, name, b"") for name in tools.dropped]
        tools.dropped.clear()
        if tools.due_for_journal(tool):
            records.append(self.tools.record(uid, tool.name, tools.packed(tool)))
        if records:
            self._m.emit(Journal(tuple(records)))

    def used_again(self, context: Context) -> None:
        """Somebody does something with a context that had ended a turn and waited for no tool."""
        if context.rested_ns:
            self._pauses.add(self._m.now_ns - context.rested_ns)
            context.rested_ns = 0

    # -- what becomes of the frames -------------------------------------------------------------------------------

    def _decide(self, wait: Wait, forecast: Forecast) -> None:
        m, context = self._m, wait.context
        row = m.core.slot_row(context.slot)
        if not row.entries:
            return  # it has nothing that could be kept
        frames = max(1, row.entries - row.shared)
        device = m.devices[context.device]
        scheduler = m.schedulers[context.device]
        running = scheduler.active()
        others = device.capacity - m.core.free_frames(device.index) - m.core.reclaimable_frames(device.index) - frames
        others = max(0, others) * running // max(1, running + len(scheduler.idle))
        out_ns, back_ns = self._moving_ns(context, frames)
        queue_ns = sum(self._queued_ns) / len(self._queued_ns) if self._queued_ns else 0.0
        outlook = Outlook(
            frames, others, forecast.expected_ns, forecast.distribution, out_ns, back_ns, self._computing_ns(context, frames),
            queue_ns, self.memory.of, m.sysctl.ttl_ms * MS, forecast.by_eta,
        )  # fmt: skip
        decision = self.policy.decide(outlook)
        wait.decision = decision.what
        wait.keep_until_ns = m.now_ns + decision.keep_ns if decision.keep_ns else 0
        plain = f"{decision.what} while {wait.tool} runs"
        m.tiers.decide("wait", device, context.cid, (), f"{plain}: {decision.why}", plain=plain)

    def _moving_ns(self, context: Context, frames: int) -> tuple[float, float]:
        """(out, back) of so many frames; -1 where that cannot be or is not known."""
        m = self._m
        below = m.tiers.below(context.device)
        if below is None:
            return -1.0, -1.0
        out, back = (m.costs.link(*m.tiers.link_of(*hop)).ns(frames * m.costs.frame_bytes)
                     for hop in ((context.device, below.index), (below.index, context.device)))  # fmt: skip
        return (out, back) if out and back else (-1.0, -1.0)

    def _computing_ns(self, context: Context, frames: int) -> float:
        """To compute the last so many frames of it; -1: unknown."""
        fit = self._m.costs.prefill[context.device].known()
        if fit is None:
            return -1.0
        total = self._m.core.slot_row(context.slot).tokens
        tokens = min(total, frames * self._m.config.block_tokens)
        return fit.ns(tokens, total - tokens)

    def rebuild_ns(self, context: Context, frames: int) -> float:
        """The cheaper of loading and computing so many frames of it; 0: unknown."""
        known = [ns for ns in (self._moving_ns(context, frames)[1], self._computing_ns(context, frames)) if ns >= 0]
        return min(known, default=0.0)

    def _let_go(self, wait: Wait) -> None:
        """It was decided not to keep its frames."""
        if wait.decision != "keep" and not self.ranks:
            self._m.schedulers[wait.context.device].idle.first(wait.context)
        if wait.decision == "demote":
            self._copy_down(wait.context)

    def _copy_down(self, context: Context) -> None:
        """So that its frames can go at once when they are wanted.  Not while there are plenty: then nobody wants them."""
        m, index = self._m, context.device
        below = m.tiers.below(index)
        available = m.core.free_frames(index) + m.core.reclaimable_frames(index)
        if below is None or available * SHORT > m.devices[index].capacity or m.core.in_flight(context.slot):
            return
        todo = m.tiers.lacking(m.core.row_blocks(context.slot), m.tiers.keepers(m.devices[index]))
        room = m.tiers.evictors[below.index].room(len(todo))
        m.count("wait_copied_blocks", m.movers.copy(index, below.index, todo[:room], "demote", context.cid))

    def _note(self, wait: Wait, due_ns: int) -> None:
        """Tell the eviction policies what its blocks wait for, and until when."""
        number = self.tools_of(wait.context).named(wait.tool).number
        kind = KIND_FIRST_TOOL + number if number < KIND_TOOLS else KIND_TOOL
        self._m.core.note(wait.context.slot, kind, wait.context.turns, due_ns)

    # -- who is worth what (resting.py) ---------------------------------------------------------------------------

    def remaining_ns(self, context: Context) -> int:
        """Until somebody is expected to want it, from now."""
        m, wait = self._m, context.wait
        if wait is not None and wait.due_ns > m.now_ns:
            return wait.due_ns - m.now_ns
        since_ns = wait.begun_ns if wait is not None else context.rested_ns
        elapsed_ns = m.now_ns - since_ns if since_ns else 0
        if wait is not None:
            remaining_ns = self.tools_of(context).remaining_ns(wait.tool, elapsed_ns, wait.eta_ns)
        else:
            remaining_ns = int(self._pauses.beyond(elapsed_ns)) - elapsed_ns if len(self._pauses) else -1
        return max(MS, remaining_ns if remaining_ns >= 0 else max(elapsed_ns, _UNKNOWN_NS))

    def worth(self, context: Context) -> float:
        """What a frame of it saves per ns that it is held: the time to have it back, over the time until it is wanted."""
        m = self._m
        row = m.core.slot_row(context.slot)
        frames = max(1, row.share_millionths // 1_000_000)
        cost = self.rebuild_ns(context, frames) / frames if row.entries else 0.0
        return (cost or 1.0) / self.remaining_ns(context)

    def later(self, context: Context, before: Wait) -> bool:
        """It is expected back after the answer of `before`."""
        return self._m.now_ns + self.remaining_ns(context) > before.due_ns

    # -- being there in time (returning.py) -----------------------------------------------------------------------

    def resident(self, context: Context) -> bool:
        row = self._m.core.slot_row(context.slot)
        return row.entries > 0 and row.computed + 1 >= row.tokens and not self._m.core.loading(context.slot)

    def lost(self, wait: Wait) -> None:
        """Its context has no frames, or not all."""
        if wait.due_ns and not wait.over:
            self.returning.plan(wait)

    def no_room(self, context: Context) -> None:
        """What should bring it back found no frames."""
        if context.wait is not None:
            self.returning.no_room(context.wait)

    def keep_until(self, wait: Wait, until_ns: int) -> None:
        """Its frames go last before that."""
        if wait.keep_until_ns:
            self._keeps.over()
        wait.keep_until_ns = until_ns
        self._keeps.add(until_ns, (wait, until_ns), self._m.now_ns)

    # -- looking --------------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """What fsck finds wrong here."""
        waits = [c.wait for c in self._m.contexts.values() if c.wait is not None]
        found = []
        if len(waits) != self.waiting:
            found.append(f"{len(waits)} contexts wait for a tool, the count says {self.waiting}")
        foretold = sum(wait.foretold for wait in waits)
        if foretold != self._foretold:
            found.append(f"{foretold} callers have said when they are back, the count is {self._foretold}")
        timed = {wait.number for wait in self._deadlines.pending()}
        for wait in waits:
            context = wait.context
            if context.wait is not wait or context.waited != wait.number:
                found.append(f"wait {wait.number} is not of the context that is in it")
            if context.job is not None and context.job.kind is not JobKind.PREFILL:
                found.append(f"context {context.cid} waits for a tool and runs a {context.job.kind.value}")
            if bool(wait.deadline_ns) != (wait.number in timed):
                found.append(f"the deadline of wait {wait.number} is in no heap, or one that it has not")
        return found + self.returning.problems(waits)
