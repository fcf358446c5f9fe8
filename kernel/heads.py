"""The first tokens of recent prompts: what shows that two prompts differ where they need not.

A prefix is shared from its first token on, so one token that is never the same (a request id, the time) in front of a
thousand that always are makes every prompt a miss.  No counter shows that: the misses look like those of prompts that have
nothing in common.  So the heads of the contexts that went last are kept; those of live ones are read from their logs.

A context counts from its first generation (or forward, or score) on; forks do not, since they share by themselves.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from .calls import HeadRow
from .params import HEAD_TOKENS, HEADS

if TYPE_CHECKING:
    from .context import Context
    from .machine import Machine


class _Gone(NamedTuple):
    uid: int
    row: HeadRow


class Heads:
    """Of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._gone: deque[_Gone] = deque(maxlen=HEADS)

    def asked(self, context: Context) -> None:
        """Somebody wants something computed; the first time, the log is its prompt."""
        if not context.prompt_tokens:
            context.prompt_tokens = self._m.core.slot_row(context.slot).tokens

    def left(self, context: Context) -> None:
        """The context goes.  Requires: its slot is still open."""
        if _counts(context):
            self._gone.append(_Gone(context.process.uid, self._row(context, False)))

    def rows(self, uid: int, everybody: bool, each: int) -> tuple[HeadRow, ...]:
        """The latest, `each` of those that went and of those that are there, oldest first.  everybody: of others, too, but not
        what they began with."""
        gone = [g.row if g.uid == uid else g.row._replace(head=b"") for g in self._gone if everybody or g.uid == uid]
        live = [c for c in self._m.contexts.values() if _counts(c) and (everybody or c.process.uid == uid)]
        found = gone[max(0, len(gone) - each) :]
        for context in live[max(0, len(live) - each) :]:
            row = self._row(context, True)
            found.append(row if context.process.uid == uid else row._replace(head=b""))
        return tuple(found)

    def _row(self, context: Context, live: bool) -> HeadRow:
        core = self._m.core
        row = core.slot_row(context.slot)
        head = core.read_log(context.slot, 0, min(row.tokens, context.prompt_tokens, HEAD_TOKENS))
        return HeadRow(context.cid, context.domain, context.prompt_tokens, row.tokens, row.hit_total, live, head)


def _counts(context: Context) -> bool:
    return context.prompt_tokens > 0 and not context.parent
