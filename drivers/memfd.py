"""Shared memory of the daemon and its drivers: anonymous files that cannot change size once made (DESIGN.md §10, item 20).

The daemon creates one for the frames (the arena) and one for the page-table rows of each accel, keeps both open while
drivers come and go, and passes the descriptors at spawn.  Sealing the size means that no process can make another's
mapping raise SIGBUS.  A descriptor reopened read-only keeps honest readers honest; it is no protection against root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from typing import Final

_MADV_POPULATE_WRITE: Final = 23  # Python 3.11 has no name for it
_POPULATE_BYTES: Final = 16 << 20  # at once


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


def give_back(fd: int) -> None:
    """Free the memory behind the whole file; it reads as zeros from now on.  Requires: no device has it registered (DESIGN.md
    §10, item 20)."""
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size, punch_hole = 1, 2
    if libc.fallocate(fd, keep_size | punch_hole, ctypes.c_long(0), ctypes.c_long(memfd_bytes(fd))):
        error = ctypes.get_errno()
        raise OSError(error, f"memory of a memfd cannot be given back: {os.strerror(error)}")


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


def populate_aside(mapping: mmap.mmap) -> threading.Thread:
    """Begin to have every page there, in this process's page table and, with several nodes, near this process.

    Else the first transfers pay for it: 4 KiB at a time, an order of magnitude slower than the copy.  What is in the pages
    stays.  Returns the thread that does it beside the caller's work; the mapping must outlive it.  Linux before 5.14
    cannot do it, nor can a system that is short of memory: then the thread just ends.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    thread = threading.Thread(target=_populate, args=(address, len(mapping)), daemon=True, name="populate")
    thread.start()
    return thread


def _populate(address: int, n_bytes: int) -> None:
    madvise = ctypes.CDLL(None).madvise  # Python's own keeps the interpreter lock
    for at in range(0, n_bytes, _POPULATE_BYTES):
        part = ctypes.c_size_t(min(_POPULATE_BYTES, n_bytes - at))
        if madvise(ctypes.c_void_p(address + at), part, _MADV_POPULATE_WRITE):
            return
