"""Tokens delivered into a running generation (`inject`).

They stand in the log behind the token of the pass in flight: a pass that samples for the context has to come back first,
so an interrupt waits for it, and for nothing else.  The generation then computes them like the rest of a prompt and
samples on; those that were injected do not count as its own (kernel/injected.py).
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, NamedTuple

from . import injected
from .calls import InjectResult
from .context import JobKind
from .errors import Detail, E, Errno

if TYPE_CHECKING:
    from .context import Context, Job
    from .machine import Machine


class Interrupt(NamedTuple):
    conn: int
    request: int
    tokens: bytes


class Interrupts:
    """Those that wait for a pass, by context."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self.pending: dict[Context, list[Interrupt]] = {}

    def add(self, context: Context, conn: int, request: int, tokens: bytes) -> None:
        """Deliver now, or when the pass in flight is back.  Requires: a generation runs, and the tokens were checked."""
        interrupt = Interrupt(conn, request, tokens)
        if self._m.core.in_flight(context.slot):
            self.pending.setdefault(context, []).append(interrupt)
        elif context.job is not None:
            self._deliver(context, context.job, [interrupt], False)

    def waiting_tokens(self, context: Context) -> int:
        """Tokens that wait to stand in its log, the one being sampled included."""
        tokens = sum(len(i.tokens) // 4 for i in self.pending.get(context, ()))
        return tokens + int(self._m.core.in_flight(context.slot))

    def deliver(self, ended: Container[int] = ()) -> None:
        """A pass is back.  ended: slots whose generation it ended, which is still to be told."""
        for context in [c for c in self.pending if not self._m.core.in_flight(c.slot)]:
            interrupts, job = self.pending.pop(context), context.job
            if job is not None and job.kind is JobKind.GENERATE:
                self._deliver(context, job, interrupts, context.slot in ended)
            else:
                self._refuse(context, interrupts, "the generation ended without its token in flight")

    def _deliver(self, context: Context, job: Job, interrupts: list[Interrupt], ended: bool) -> None:
        m, core = self._m, self._m.core
        window = min(m.config.window_tokens, m.devices[context.device].capacity * m.config.block_tokens)
        for interrupt in interrupts:
            n = len(interrupt.tokens) // 4
            length = core.slot_row(context.slot).tokens
            if length + n > window:
                text = f"{length + n} tokens do not fit the window of {window}: the generation has grown meanwhile"
                detail = Errno(E.E2BIG, text, wanted=length + n, limit=window).detail
                m.reply(interrupt.conn, interrupt.request, E.E2BIG, detail)
                continue
            sampled = length - job.start - injected.count(job.injected)
            job.injected = injected.add(job.injected, sampled, n)
            length = core.append(context.slot, interrupt.tokens)
            m.count("injected_tokens", n)
            m.names.injected(context, job)
            m.reply(interrupt.conn, interrupt.request, 0, InjectResult(length, n))
        if ended or job.ending:
            return
        scheduler = m.schedulers[context.device]
        scheduler.hold(context)  # it has something to compute before it decodes on
        if core.slot_row(context.slot).tokens >= m.config.window_tokens:
            m.finish(context, "length")
        elif not m.held(context):
            scheduler.add(context)

    def forget(self, context: Context) -> None:
        """It is being released."""
        self._refuse(context, self.pending.pop(context, []), "the context was released meanwhile")

    def cancel(self, conn: int, request: int) -> bool:
        for context, interrupts in self.pending.items():
            for interrupt in interrupts:
                if (interrupt.conn, interrupt.request) == (conn, request):
                    interrupts.remove(interrupt)
                    if not interrupts:
                        del self.pending[context]
                    self._m.reply(conn, request, E.ECANCELED, {"message": "inject was cancelled"})
                    return True
        return False

    def _refuse(self, context: Context, interrupts: list[Interrupt], why: str) -> None:
        for interrupt in interrupts:
            detail: Detail = {"message": f"{why}; nothing was injected", "cid": context.cid}
            self._m.reply(interrupt.conn, interrupt.request, E.ESTALE, detail)

    def problems(self) -> list[str]:
        """What fsck finds wrong here."""
        core = self._m.core
        found = [
            f"I9: interrupts wait for a pass of context {context.cid}, which has none"
            for context in self.pending
            if self._m.contexts.get(context.cid) is not context or not core.in_flight(context.slot)
        ]
        for context in self._m.contexts.values():
            job = context.job
            if job is not None and job.injected:
                behind = core.slot_row(context.slot).tokens - job.start - injected.count(job.injected)
                indices = [index for index, _ in job.injected]
                if behind < indices[-1] or indices != sorted(set(indices)) or min(n for _, n in job.injected) <= 0:
                    found.append(
                        f"context {context.cid} cannot have {job.injected} injected with {behind} sampled tokens"
                    )
        return found
