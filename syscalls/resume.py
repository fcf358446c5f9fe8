"""Coming back to a daemon that died or closed: what a client that was told to resume does, without any I/O.

A client knows its contexts by cid; handles are of one connection.  After a new `hello` with the session's token the kept
contexts have new handles and everything else is gone.  What was under way when the connection broke is then

    a generation             reattached with the tokens that the client has of it, or sent again when it had not begun
    a call that can be made  sent again: those that only look, and those that say what shall be and not what shall change
    twice
    anything else            ConnectionLost: whether it was done is not known; `stat` tells
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from attnix.kernel import calls as c

from .abi import Record
from .exceptions import AttnixError, ConnectionLost

GONE: Final = -1  # no handle, on any connection
FIRST_DELAY_S: Final = 0.02
LONGEST_DELAY_S: Final = 1.0

GENERATIONS: Final = frozenset({"generate", "reattach"})
REPEATABLE: Final = frozenset(
    {
        "uname", "tiers", "vmstat", "ps", "dmesg", "fsck", "names", "stat", "pagemap", "explain", "forward", "score",
        "truncate", "publish", "detach", "open", "pin", "unpin", "advise", "prefetch", "demote", "evict", "sysctl", "sleep",
        "wake", "snapshot",
    }
)  # fmt: skip


def delays() -> Iterator[float]:
    """Seconds to wait before each attempt to reach the daemon again."""
    delay = FIRST_DELAY_S
    while True:
        yield delay
        delay = min(LONGEST_DELAY_S, 1.6 * delay)


class Handles:
    """Which context a handle means, and which handle a context has now."""

    def __init__(self) -> None:
        self._cids: dict[int, int] = {}  # handle of this connection -> cid
        self._handles: dict[int, int] = {}  # cid -> handle

    def learn(self, result: Record) -> None:
        """Take note of the contexts in a call's result."""
        if isinstance(result, (c.AllocContextResult, c.OpenResult, c.SpawnResult)):
            self._learn(result.ctx, result.cid)
        elif isinstance(result, (c.ForkResult, c.RestoreResult)):
            for handle, cid in zip(result.ctxs, result.cids, strict=True):
                self._learn(handle, cid)

    def _learn(self, handle: int, cid: int) -> None:
        if handle:
            self._cids[handle] = cid
            self._handles[cid] = handle

    def forget(self, handle: int) -> None:
        """It was released."""
        cid = self._cids.pop(handle, 0)
        if cid:
            del self._handles[cid]

    def now(self, cid: int, otherwise: int) -> int:
        """The handle of a context on the present connection; GONE when it went with an earlier one."""
        return self._handles.get(cid, otherwise)

    def cid(self, handle: int) -> int:
        """0: not known."""
        return self._cids.get(handle, 0)

    def renew(self, rows: tuple[c.KeptRow, ...]) -> Renewed:
        """Another connection with these contexts: the others are gone."""
        renewed = Renewed(self._cids, {row.cid: row for row in rows})
        self._cids = {row.ctx: row.cid for row in rows}
        self._handles = dict.fromkeys(self._handles, GONE) | {row.cid: row.ctx for row in rows}
        return renewed


class Again(NamedTuple):
    """Send this in the place of a request that was under way."""

    name: str
    args: Record


class Renewed:
    """From the old connection's handles to the new one's contexts."""

    def __init__(self, cids: dict[int, int], rows: dict[int, c.KeptRow]) -> None:
        self._cids = cids
        self._rows = rows

    def again(self, name: str, args: Record, tokens: bytes, undone: bool) -> Again | ConnectionLost:
        """What to do about a request without its answer; of a generation, `tokens` are those that came already.

        undone: the daemon said that it goes down and has not done this.
        """
        if name in GENERATIONS:
            return self._generation(name, args, tokens)
        appends = isinstance(args, c.ForwardArgs) and bool(args.tokens)
        if (name not in REPEATABLE or appends) and not undone:
            return ConnectionLost(f"the connection broke during {name}: whether it was done is not known; `stat` tells")
        translated = self.translate(args)
        if translated is None:
            return ConnectionLost(f"the connection broke during {name}, and the context was neither named nor detached")
        return Again(name, translated)

    def translate(self, args: Record) -> Record | None:
        """The same arguments with the handles of the new connection; None when a context is gone."""
        if isinstance(args, c.SnapshotArgs):
            rows = [self._row(handle) for handle in args.ctxs]
            return args._replace(ctxs=tuple(row.ctx for row in rows if row)) if all(rows) else None
        handle = getattr(args, "ctx", 0)
        if not handle:
            return args
        row = self._row(handle)
        return None if row is None else args._replace(ctx=row.ctx)  # type: ignore[attr-defined]

    def _row(self, handle: int) -> c.KeptRow | None:
        return self._rows.get(self._cids.get(handle, 0))

    def _generation(self, name: str, args: Record, tokens: bytes) -> Again | ConnectionLost:
        assert isinstance(args, (c.GenerateArgs, c.ReattachArgs))
        row = self._row(args.ctx)
        if row is None:
            return ConnectionLost("the connection broke during a generation on a context neither named nor detached")
        if row.generation:
            known = args.tokens if isinstance(args, c.ReattachArgs) else b""
            return Again("reattach", c.ReattachArgs(row.ctx, max(tokens, known, key=len), args.stream))
        if tokens or isinstance(args, c.ReattachArgs):
            return ConnectionLost("the system has lost a generation that it had begun")
        return Again(name, args._replace(ctx=row.ctx))


def went_down(answer: Record | AttnixError) -> bool:
    """Whether an answer only says that the system goes down: what was asked for can go on when the system is back."""
    if isinstance(answer, c.GenerateResult):
        return answer.reason == "suspended"
    return isinstance(answer, AttnixError) and bool(answer.detail.get("going_down"))
