"""Started by systemd, or by anything else that speaks its two small protocols: sd_listen_fds(3) and sd_notify(3).

With socket activation the socket exists before the daemon does and outlives it: clients that connect while it boots wait
in the backlog.  Its rights are the unit's (SocketMode, SocketGroup), and are checked here as `Listener` would have set them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from typing import Final

from .listen import CannotListen, take_lock

FIRST_FD: Final = 3  # SD_LISTEN_FDS_START
_NOT_OURS: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


def inherited(group: str = "") -> InheritedListener | None:
    """The listener that this process was started with; None: it was not.  Error: CannotListen.

    group  as of `Listener`: without one, others must not be able to connect
    """
    if os.environ.get("LISTEN_PID", "") != str(os.getpid()):
        return None
    count = os.environ.get("LISTEN_FDS", "")
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)  # meant for us, not for the drivers
    if count != "1":
        raise CannotListen(
            f"LISTEN_FDS={count}: the unit must pass exactly one socket (ListenStream=/run/attnix/attnix.sock)"
        )
    return InheritedListener(FIRST_FD, group)


class InheritedListener:
    """What `Listener` is, over a socket that somebody else made and will remove."""

    def __init__(self, fd: int, group: str) -> None:
        os.set_inheritable(fd, False)
        self.socket: Final = socket.socket(fileno=fd)
        self.socket.setblocking(False)
        if self.socket.family != socket.AF_UNIX or self.socket.type != socket.SOCK_STREAM:
            raise CannotListen("the socket that was passed is no Unix stream socket: ListenStream= wants a path")
        self.path: Final = str(self.socket.getsockname())
        self.shared: Final = bool(group)
        if not self.path.startswith("/"):
            raise CannotListen("the socket that was passed has no path: ListenStream= wants one")
        mode = stat.S_IMODE(os.lstat(self.path).st_mode)
        if mode & 0o006:
            raise CannotListen(
                f"everybody may connect to {self.path} (mode {mode:04o}): the unit wants SocketMode=0600, or 0660"
            )
        if mode & 0o060 and not self.shared:
            raise CannotListen(
                f"the group of {self.path} may connect (mode {mode:04o}): say --socket-group too, or SocketMode=0600 in the unit"
            )
        self._lock = -1
        try:
            self._lock = take_lock(self.path)
        except CannotListen as error:
            # systemd makes the socket's directory as root.  Whoever may not write there cannot replace the socket either.
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno not in _NOT_OURS:
                raise

    def close(self) -> None:
        """Stop listening.  The file stays: who passed the socket starts us again when somebody connects."""
        self.socket.close()
        if self._lock >= 0:
            os.close(self._lock)


def notify(state: str) -> None:
    """Tell who started us: `READY=1`, `STOPPING=1`.  Nobody asked, or nobody listens any more: nothing happens."""
    where = os.environ.get("NOTIFY_SOCKET", "")
    if not where:
        return
    address = "\0" + where[1:] if where.startswith("@") else where
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
        to.sendto(state.encode(), address)
