"""System calls about load: pressure."""

from __future__ import annotations

from . import calls as c
from .errors import E, Errno
from .events import Syscall
from .machine import Machine
from .process import Connection
from .traps import Trap


def pressure(m: Machine, connection: Connection, call: Syscall, args: c.PressureArgs) -> None:
    raise Errno(E.ENOSYS, "pressure is being built")


TRAPS: dict[str, Trap] = {"pressure": pressure}
