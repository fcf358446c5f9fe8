"""The socket: who may reach it, who owns it, and who is at the other end.

The directory is private (0700), the socket is 0600 from the first instant, and one lock file beside it says which
daemon owns the path: a second daemon fails without touching the first, and only a socket that nobody serves is
replaced.  With a group, its members may search the directory (0710) and connect (0660) too; they are told apart by uid.  What is not a socket is never deleted.  The lock file stays behind: taking it away would race with the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
import struct
from typing import Final, NamedTuple

from .paths import too_long

BACKLOG: Final = 512


class CannotListen(Exception):
    """The daemon cannot have this socket path; the message says why and what to do."""


class Credentials(NamedTuple):
    """Who connected, as the operating system says (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


def peer_credentials(fd: int) -> Credentials:
    """The process at the other end of a connected Unix socket."""
    connected = socket.socket(fileno=fd)  # and no descriptor more: there may be none
    try:
        packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    finally:
        connected.detach()
    return Credentials(*struct.unpack("3i", packed))


class Listener:
    """Owns a socket path from construction to `close`.  Error: CannotListen, and then nothing was changed.

    group  name or number of a group whose members may connect too; "": nobody but the owner
    """

    def __init__(self, path: str, group: str = "") -> None:
        self.path: Final = os.path.abspath(path)
        self.shared: Final = bool(group)
        gid = _gid(group) if group else -1
        if why := too_long(self.path):
            raise CannotListen(why)
        directory = os.path.dirname(self.path)
        _private_directory(directory, gid)
        self._lock = take_lock(self.path)
        try:
            _clear_stale(self.path)
            self.socket: Final = _bind(self.path)
            self._inode = os.lstat(self.path).st_ino
            if self.shared:
                os.chown(self.path, -1, gid)
                os.chmod(self.path, 0o660)
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Stop listening; remove the socket file, unless somebody has put another in its place."""
        self.socket.close()
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(self.path)
            if stat.S_ISSOCK(found.st_mode) and found.st_ino == self._inode:
                os.unlink(self.path)
        os.close(self._lock)


def _gid(group: str) -> int:
    try:
        gid = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise CannotListen(f"there is no group {group!r} to share the socket with; `getent group` lists them") from None
    if os.geteuid() != 0 and gid not in (os.getegid(), *os.getgroups()):
        raise CannotListen(f"you are no member of group {group}, so you cannot share the socket with it")
    return gid


def _private_directory(directory: str, gid: int) -> None:
    """Make the directory (0700, or 0710 for a group) or check that it can be trusted: ours, and nobody else may put files
    into it."""
    try:
        with contextlib.suppress(FileExistsError):
            os.makedirs(os.path.dirname(directory), exist_ok=True)
            os.mkdir(directory, 0o700)
            if gid >= 0:
                os.chown(directory, -1, gid)
            os.chmod(directory, 0o700 if gid < 0 else 0o710)  # mkdir's mode passes through the umask
        found = os.lstat(directory)
    except OSError as error:
        raise CannotListen(f"the socket's directory {directory} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise CannotListen(f"the socket's directory {directory} is not a directory")
    if found.st_uid != os.geteuid():
        raise CannotListen(f"the socket's directory {directory} belongs to uid {found.st_uid}, not to you")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CannotListen(
            f"others can write to the socket's directory {directory} (mode {stat.S_IMODE(found.st_mode):04o}); "
            "use one of your own, mode 0700"
        )
    if gid >= 0 and not found.st_mode & stat.S_IXOTH and not (found.st_gid == gid and found.st_mode & stat.S_IXGRP):
        raise CannotListen(
            f"group {gid} cannot reach the socket's directory {directory} (mode {stat.S_IMODE(found.st_mode):04o}): "
            f"chgrp {gid} {directory} && chmod 0710 {directory}, or let attnix make one (--socket)"
        )


def take_lock(path: str) -> int:
    """Be the one that serves this path.  Error: CannotListen, which names the process that does."""
    name = f"{path}.lock"
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise CannotListen(f"the lock file {name} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        whose = f" (process {holder})" if holder else ""
        if os.path.lexists(path):
            raise CannotListen(f"another attnix{whose} already serves {path}; stop it with `attnix shutdown`") from None
        end = (
            f"`kill {holder}` ends it in order"
            if holder.isdecimal()
            else f"`fuser -v {name}` shows which process it is"
        )
        raise CannotListen(
            f"another attnix{whose} has {path}, and its socket file is not there: unless it is just starting, nobody can reach it, "
            f"`attnix shutdown` neither; {end}"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _clear_stale(path: str) -> None:
    """Remove a socket that nobody serves.  We hold the lock and the directory is ours, so nobody can interfere."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise CannotListen(f"{path} exists and is not a socket; it was left alone: remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            if error.errno != errno.ECONNREFUSED:
                raise CannotListen(f"{path} is in use: {error.strerror}") from error
        else:
            raise CannotListen(f"another program already serves {path}")
    os.unlink(path)


def _bind(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)  # the kernel applies it as it creates the file: there is no moment with wider rights
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(f"cannot listen at {path}: {error.strerror}") from error
    finally:
        os.umask(before)
    return listener
