"""System calls about waiting for tools: wait_tool, resume, inject."""

from __future__ import annotations

from . import calls as c
from .errors import E, Errno
from .events import Syscall
from .machine import Machine
from .process import Connection
from .traps import Trap


def wait_tool(m: Machine, connection: Connection, call: Syscall, args: c.WaitToolArgs) -> None:
    raise Errno(E.ENOSYS, "wait_tool is being built")


def resume(m: Machine, connection: Connection, call: Syscall, args: c.ResumeArgs) -> None:
    raise Errno(E.ENOSYS, "resume is being built")


def inject(m: Machine, connection: Connection, call: Syscall, args: c.InjectArgs) -> None:
    raise Errno(E.ENOSYS, "inject is being built")


TRAPS: dict[str, Trap] = {"wait_tool": wait_tool, "resume": resume, "inject": inject}
