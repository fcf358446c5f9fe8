"""The errno values a system call can return, and the exception that carries one through the kernel.

An errno is a *returned* error: nothing was done, and the detail says in fields what was wrong and what would help.
`Panic` is different: a broken invariant.  It is never caught inside the kernel; the daemon dumps and stops.

    Exception
    ├── Errno                 a system call's error: code + detail fields
    └── Panic                 an invariant of DESIGN.md §3 does not hold
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

Detail: TypeAlias = dict[str, int | float | str]


class E(IntEnum):
    """Errno numbers on the wire; 0 is success.  Linux's numbers where Linux has the name."""

    ENOENT = 2
    EIO = 5
    E2BIG = 7
    EBADF = 9
    EAGAIN = 11
    ENOMEM = 12
    EACCES = 13
    EBUSY = 16
    EEXIST = 17
    ENODEV = 19
    EINVAL = 22
    ENOSPC = 28
    ENOSYS = 38
    ECORRUPT = 74  # Linux EBADMSG
    ETIMEDOUT = 110
    EHOSTDOWN = 112
    ESTALE = 116
    EDQUOT = 122
    ECANCELED = 125


class Errno(Exception):
    """A system call failed and changed nothing.

    code    which error
    detail  the facts as fields; always has `message`, a sentence that names what was wrong and what to do
    """

    def __init__(self, code: E, message: str, /, **fields: int | float | str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.detail: Detail = {"message": message, **fields}


class Panic(Exception):
    """An invariant is broken: state can no longer be trusted, so the kernel stops instead of serving wrong KV."""
