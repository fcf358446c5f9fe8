"""System calls about groups: setlimit, groups."""

from __future__ import annotations

from . import calls as c
from .errors import E, Errno
from .events import Syscall
from .machine import Machine
from .process import Connection
from .traps import Trap


def setlimit(m: Machine, connection: Connection, call: Syscall, args: c.SetlimitArgs) -> None:
    raise Errno(E.ENOSYS, "setlimit is being built")


def groups(m: Machine, connection: Connection, call: Syscall, args: c.GroupsArgs) -> None:
    raise Errno(E.ENOSYS, "groups is being built")


TRAPS: dict[str, Trap] = {"setlimit": setlimit, "groups": groups}
