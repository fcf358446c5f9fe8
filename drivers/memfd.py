"""Shared memory of the daemon and its drivers: anonymous files that cannot change size once made (DESIGN.md §10, item 20).

The daemon creates one for the frames (the arena) and one for the page-table rows of each accel, keeps both open while
drivers come and go, and passes the descriptors at spawn.  Sealing the size means that no process can make another's
mapping raise SIGBUS.  A descriptor reopened read-only keeps honest readers honest; it is no protection against root.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os


def create_memfd(name: str, n_bytes: int) -> int:
    """A zero-filled anonymous file of exactly n_bytes, for ever; returns a close-on-exec descriptor that the caller owns.

    Error: ValueError when n_bytes is not positive; OSError when the system has no room for it.
    """
    if n_bytes <= 0:
        raise ValueError(f"memfd {name!r} needs a positive size, not {n_bytes}")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, n_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def reopen_read_only(fd: int) -> int:
    """A second, close-on-exec descriptor of the same file through which nothing can be written or mapped writable."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def memfd_bytes(fd: int) -> int:
    """The size of the file behind a descriptor; a driver learns the size of what it inherited from it."""
    return os.fstat(fd).st_size


def map_shared(fd: int) -> mmap.mmap:
    """Map the whole file readable and writable, shared.  The descriptor may be closed afterwards."""
    return mmap.mmap(fd, memfd_bytes(fd), mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def map_read_only(fd: int) -> mmap.mmap:
    """Map the whole file for reading, shared: what the other side writes shows."""
    return mmap.mmap(fd, memfd_bytes(fd), mmap.MAP_SHARED, mmap.PROT_READ)


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for 2 MiB pages, which decode likes (fewer TLB misses); a kernel built without them makes this a no-op."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
