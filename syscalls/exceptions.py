"""What a client can catch.

Exception
└── AttnixError                 everything below; `.detail` has the facts as fields
    ├── ConnectionLost          the daemon is gone, or closed this connection (the detail says why)
    └── SyscallError            a call failed and changed nothing; `.errno` says which error
        ├── InvalidArgument     EINVAL      ├── NoMemory        ENOMEM
        ├── BadHandle           EBADF       ├── QuotaExceeded   EDQUOT
        ├── StaleHandle         ESTALE      ├── TryAgain        EAGAIN
        ├── AccessDenied        EACCES      ├── Busy            EBUSY
        ├── NoSuchCall          ENOSYS      ├── TimedOut        ETIMEDOUT
        ├── AlreadyExists       EEXIST      ├── Canceled        ECANCELED
        ├── NotFound            ENOENT      ├── NoSpace         ENOSPC
        ├── TooBig              E2BIG       ├── DeviceError     EIO
        ├── NoDevice            ENODEV      ├── Corrupt         ECORRUPT
        └── DeviceDown          EHOSTDOWN
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from attnix.kernel.errors import E


class AttnixError(Exception):
    """Anything that goes wrong between a program and the daemon."""

    def __init__(self, message: str, detail: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail: dict[str, object] = dict(detail or {})


class ConnectionLost(AttnixError):
    """The daemon cannot be reached, or this connection ended.  What it held has been released, but for named and detached
    contexts."""


class SyscallError(AttnixError):
    """A system call returned an errno: nothing was done."""

    code: ClassVar[E | None] = None

    def __init__(self, errno: int, detail: Mapping[str, object], call: str = "") -> None:
        try:
            name = E(errno).name
        except ValueError:  # a newer server's errno
            name = f"errno {errno}"
        message = str(detail.get("message", ""))
        super().__init__(f"{call}: {name}: {message}" if call else f"{name}: {message}", detail)
        self.errno = errno
        self.call = call


class InvalidArgument(SyscallError):
    code = E.EINVAL


class BadHandle(SyscallError):
    code = E.EBADF


class StaleHandle(SyscallError):
    code = E.ESTALE


class AccessDenied(SyscallError):
    code = E.EACCES


class NoSuchCall(SyscallError):
    code = E.ENOSYS


class AlreadyExists(SyscallError):
    code = E.EEXIST


class NotFound(SyscallError):
    code = E.ENOENT


class TooBig(SyscallError):
    code = E.E2BIG


class NoMemory(SyscallError):
    code = E.ENOMEM


class QuotaExceeded(SyscallError):
    code = E.EDQUOT


class TryAgain(SyscallError):
    code = E.EAGAIN


class Busy(SyscallError):
    code = E.EBUSY


class TimedOut(SyscallError):
    code = E.ETIMEDOUT


class Canceled(SyscallError):
    code = E.ECANCELED


class NoSpace(SyscallError):
    code = E.ENOSPC


class DeviceError(SyscallError):
    code = E.EIO


class NoDevice(SyscallError):
    code = E.ENODEV


class Corrupt(SyscallError):
    code = E.ECORRUPT


class DeviceDown(SyscallError):
    code = E.EHOSTDOWN


_BY_ERRNO: dict[int, type[SyscallError]] = {
    cls.code: cls for cls in SyscallError.__subclasses__() if cls.code is not None
}


def syscall_error(errno: int, detail: Mapping[str, object], call: str = "") -> SyscallError:
    """The exception that belongs to an errno; an unknown one gives a plain SyscallError."""
    return _BY_ERRNO.get(errno, SyscallError)(errno, detail, call)
