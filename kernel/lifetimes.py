"""Contexts that wait for a tool: how a wait begins and how it ends.

A context in TOOL_WAIT has no job (but for a prefill that brings it back in time, lifetimes' own), takes no place in any
queue and counts against nothing.  A wait ends in one of three ways: `resume` answers it, its deadline comes, or its
context goes.  Its number is never given again, in this daemon's life or the next, so an answer that comes late or twice
can be told from the one that is awaited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .alarms import Alarms
from .calls import WaitNote, WaitToolResult
from .context import JobKind
from .errors import E, Errno
from .events import Notify

if TYPE_CHECKING:
    from .context import Context
    from .machine import Machine

WAITS_PER_BOOT: Final = 1 << 40  # numbers of one boot lie below those of the next
MS: Final = 1_000_000


class Wait:
    """One wait.  All times are the kernel's `now_ns`.

    eta_ns       what the caller said it would take; -1: nothing
    due_ns       when the answer is expected; 0: nobody knows
    deadline_ns  when it is given up; 0: never
    """

    __slots__ = (
        "begun_ns",
        "context",
        "deadline_ns",
        "decision",
        "due_ns",
        "eta_ns",
        "keep_until_ns",
        "number",
        "tool",
    )

    def __init__(self, context: Context, number: int, tool: str, begun_ns: int, eta_ns: int, deadline_ns: int) -> None:
        self.context = context
        self.number = number
        self.tool = tool
        self.begun_ns = begun_ns
        self.eta_ns = eta_ns
        self.deadline_ns = deadline_ns
        self.due_ns = begun_ns + eta_ns if eta_ns >= 0 else 0
        self.decision = "keep"
        self.keep_until_ns = 0

    @property
    def over(self) -> bool:
        return self.context.wait is not self


class Lifetimes:
    """All waits of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._last = 0  # number of the wait that began last
        self._deadlines: Alarms[Wait] = Alarms(machine.set_timer, lambda wait: not wait.over)
        self.waiting = 0  # contexts

    def booted(self, boots: int) -> None:
        """This state directory was booted so often before."""
        self._last = max(self._last, boots * WAITS_PER_BOOT)

    # -- beginning and ending -------------------------------------------------------------------------------------

    def begin(self, context: Context, tool: str, eta_ns: int, deadline_ns: int) -> WaitToolResult:
        """The context waits from now on.  deadline_ns: from now; -1: none.  Requires: no job but a prefill, and no wait."""
        m = self._m
        if context.job is not None:
            m.finish(context, "waits")  # what is left of its prompt is computed with the answer, or before it is due
        self._last += 1
        at_ns = m.now_ns + deadline_ns if deadline_ns >= 0 else 0
        wait = context.wait = Wait(context, self._last, tool, m.now_ns, eta_ns, at_ns)
        context.waited = wait.number
        self.waiting += 1
        m.count("tool_waits")
        if at_ns:
            self._deadlines.add(at_ns, wait, m.now_ns)
        expected_ms = (wait.due_ns - m.now_ns) // MS if wait.due_ns else -1
        keep_ms = max(0, wait.keep_until_ns - m.now_ns) // MS
        return WaitToolResult(wait.number, wait.decision, keep_ms, expected_ms, deadline_ns // MS if at_ns else -1)

    def check(self, context: Context, number: int) -> Wait:
        """The wait that `number` means (0: whichever there is).  ESTALE: it is over.  EINVAL: there never was one."""
        wait = context.wait
        if wait is not None and number in (0, wait.number):
            return wait
        if wait is not None and 0 < number <= self._last:
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
        raise Errno(E.EINVAL, f"context {context.cid} waits for no tool: call wait_tool first", wait=number)

    def answered(self, context: Context) -> int:
        """The tool has answered; how long that took, in ns."""
        wait = context.wait
        if wait is None:
            return 0
        self._end(wait)
        self._m.count("tool_waits_answered")
        return self._m.now_ns - wait.begun_ns

    def forget(self, context: Context) -> None:
        """It is being released."""
        if context.wait is not None:
            self._end(context.wait)

    def _end(self, wait: Wait) -> None:
        wait.context.wait = None
        self.waiting -= 1
        if wait.deadline_ns:
            self._deadlines.over()

    def due(self) -> None:
        """A timer fired."""
        for wait in self._deadlines.due(self._m.now_ns):
            self._late(wait)

    def _late(self, wait: Wait) -> None:
        """Nobody has answered: the context is as it was before the wait."""
        m, context = self._m, wait.context
        self._end(wait)
        m.count("tool_waits_late")
        if context.process.conn in m.connections:
            note = WaitNote(context.handle, context.cid, wait.number, wait.tool, "deadline")
            m.emit(Notify(context.process.conn, "wait", note))

    # -- looking --------------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """What fsck finds wrong here."""
        waits = [c.wait for c in self._m.contexts.values() if c.wait is not None]
        found = []
        if len(waits) != self.waiting:
            found.append(f"{len(waits)} contexts wait for a tool, the count says {self.waiting}")
        timed = {wait.number for wait in self._deadlines.pending()}
        for wait in waits:
            context = wait.context
            if context.wait is not wait or context.waited != wait.number:
                found.append(f"wait {wait.number} is not of the context that is in it")
            if context.job is not None and context.job.kind is not JobKind.PREFILL:
                found.append(f"context {context.cid} waits for a tool and runs a {context.job.kind.value}")
            if bool(wait.deadline_ns) != (wait.number in timed):
                found.append(f"the deadline of wait {wait.number} is in no heap, or one that it has not")
        return found
