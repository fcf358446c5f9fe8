"""Processes and connections: who may ask for what, and which handles they hold."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from .calls import Usage
from .context import Context
from .errors import E, Errno
from .group import Group
from .ids import Conn, Pid

if TYPE_CHECKING:
    from .waiting import Waiter


class ProcessState(Enum):
    """DESIGN.md §5.  READY, RUNNING and TOOL_WAIT are read off the contexts, the most active of which counts; the
    others are set."""

    NEW = "new"
    READY = "ready"
    RUNNING = "running"
    TOOL_WAIT = "tool_wait"
    STOPPED = "stopped"
    ZOMBIE = "zombie"


class Process:
    """A schedulable unit: contexts, a nice value, an owner.  Never reused pids."""

    __slots__ = (
        "birth", "born_ns", "children", "code", "conn", "contexts", "ended", "group", "name", "nice", "oom_score_adj", "parent", "past", "pid", "reason",
        "stopped", "uid", "waiters", "zombie",
    )  # fmt: skip

    def __init__(
        self, pid: Pid, parent: Pid, uid: int, conn: Conn, name: str, nice: int, born_ns: int, group: Group
    ) -> None:
        self.group = group
        self.pid = pid
        self.parent = parent
        self.uid = uid
        self.conn = conn
        self.name = name
        self.nice = nice
        self.oom_score_adj = 0
        self.born_ns = born_ns
        self.birth = 0  # order of its first job; 0: it has had none
        self.contexts: dict[int, Context] = {}  # by cid
        self.children: dict[Pid, Process] = {}  # also those that ended and were not waited for
        self.ended: dict[Pid, Process] = {}  # of them, in the order in which they ended
        self.waiters: dict[Pid, list[Waiter]] = {}  # by the child waited for; 0: any
        self.past = Usage()  # of contexts that are gone
        self.stopped = False
        self.zombie = False
        self.code = 0
        self.reason = ""

    @property
    def state(self) -> ProcessState:
        if self.zombie:
            return ProcessState.ZOMBIE
        if self.stopped:
            return ProcessState.STOPPED
        states = {c.state() for c in self.contexts.values()}
        if "running" in states:
            return ProcessState.RUNNING
        if "tool_wait" in states and states <= {"tool_wait", "idle"}:
            return ProcessState.TOOL_WAIT
        return ProcessState.READY if self.contexts else ProcessState.NEW


class Connection:
    """One client.  A handle is generation << 32 | index + 1 and means nothing on any other connection.

    token, session  of the session that it is part of, and its digest (names.py)
    floor           generations of its handles are above it
    """

    __slots__ = ("_free", "_slots", "conn", "floor", "paused", "pid", "pids", "requests", "session", "token", "uid")

    def __init__(self, conn: Conn, uid: int, token: str = "") -> None:
        self.conn = conn
        self.uid = uid
        self.token = token
        self.session = ""
        self.floor = 0
        self.pid = Pid(0)  # its first process, made by hello
        self.pids: set[Pid] = set()
        self.paused = False
        self._slots: list[tuple[int, Context | None]] = []
        self._free: list[int] = []
        self.requests: dict[int, Context] = {}  # outstanding generate, forward, score -> the context they run on

    def add(self, context: Context) -> int:
        if self._free:
            index = self._free.pop()
            generation = self._slots[index][0] + 1
            self._slots[index] = (generation, context)
        else:
            index, generation = len(self._slots), self.floor + 1
            self._slots.append((generation, context))
        context.handle = generation << 32 | (index + 1)
        return context.handle

    def remove(self, handle: int) -> None:
        index = (handle & 0xFFFFFFFF) - 1
        self._slots[index] = (self._slots[index][0], None)
        self._free.append(index)

    def lookup(self, handle: int) -> Context:
        """EBADF: never was a handle here.  ESTALE: was one, and its context is gone."""
        index = (handle & 0xFFFFFFFF) - 1
        generation = handle >> 32
        if handle <= 0 or not 0 <= index < len(self._slots) or not 0 < generation <= self._slots[index][0]:
            raise Errno(E.EBADF, f"{handle} is not a context handle of this connection", ctx=handle)
        now, context = self._slots[index]
        if context is None or now != generation:
            raise Errno(E.ESTALE, f"no such context: handle {handle} was released", ctx=handle)
        return context
