"""The file behind a file tier: a superblock, then slots of one stored frame each, all of it allocated in advance.

    offset                       bytes
    0                            4096          superblock: what the slots were made for, with a CRC-32C
    4096 + slot * stored_bytes   stored_bytes  a stored frame (kernel/tag.py), or anything else: an empty slot

A file whose superblock says another format is made anew.  One that is somebody else's is refused.  One descriptor does everything:
the lock (flock) belongs to it, and io_uring keeps it until the last operation has ended, so whoever gets the lock after
this process was killed finds no operation of it still under way.

The file can be deleted or cut while we run.  `state` looks, `recreate` starts over with an empty one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Final

from ..serve import ConfigError
from ..stored import StoredFormat, crc32c

MAGIC: Final = b"ATNXFIL1"
FILE_VERSION: Final = 1
SUPERBLOCK_BYTES: Final = 4096
_SUPERBLOCK: Final = struct.Struct(
    "<8sII16sQIIQ"
)  # magic, version, CRC, identity, frame_bytes, layers, block_tokens, slots
_CRC_OFFSET: Final = 12
_SLOTS_OFFSET: Final = _SUPERBLOCK.size - 8
_MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "ramfs"})  # they accept O_DIRECT and mean nothing by it

Log = Callable[[str], None]


class FileState(Enum):
    INTACT = "intact"
    GONE = "deleted or replaced"
    SHORT = "cut"


class SlotFile:
    """An open, locked file of `capacity_frames` slots.  Error at construction: ConfigError, which says what to do.

    fd           of everything
    direct       whether it bypasses the page cache
    file_system  its type, for people
    """

    def __init__(
        self,
        path: str,
        format: StoredFormat,
        capacity_frames: int,
        *,
        allow_shrink: bool,
        lock_wait_s: float = 5.0,
        log: Log,
    ) -> None:
        self._lock_wait_s = lock_wait_s
        self.path = path
        self.format = format
        self.capacity_frames = capacity_frames
        self.stored_bytes = format.stored_bytes
        self._log = log
        self._page = mmap.mmap(-1, SUPERBLOCK_BYTES)  # aligned, as direct I/O wants it
        try:
            self.fd = self._open()
        except OSError as error:
            raise ConfigError(f"cannot open {path!r}: {error.strerror}") from error
        try:
            self._prepare(allow_shrink)
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(f"cannot prepare {path!r}: {error.strerror}") from error
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def total_bytes(self) -> int:
        return self.offset(self.capacity_frames)

    def offset(self, slot: int) -> int:
        """Where slot `slot` begins."""
        return SUPERBLOCK_BYTES + slot * self.stored_bytes

    def state(self) -> FileState:
        """What became of the file, looked up by its name."""
        try:
            named = os.stat(self.path)
        except OSError:
            return FileState.GONE
        if not os.path.samestat(named, self._status):
            return FileState.GONE
        return FileState.SHORT if named.st_size < self.total_bytes else FileState.INTACT

    def recreate(self) -> None:
        """Start over with an empty file of the same capacity under the same name.  No operation may be under way.

        Error: OSError, ConfigError (somebody else's file has the name now); then the tier has nowhere to write to.
        """
        old = self.fd
        self.fd = self._open()
        try:
            self._read_superblock()
            os.ftruncate(self.fd, 0)
            self._allocate()
            self._write_superblock()
            self._choose_direct()
        except BaseException:
            os.close(self.fd)
            self.fd = old
            raise
        os.close(old)

    def extend(self) -> None:
        """Give a file that was cut its size back; the slots that it lost read as zeros.  Error: OSError."""
        self._allocate()
        self._write_superblock()

    def close(self) -> None:
        os.close(self.fd)

    # -- opening --------------------------------------------------------------------------------------------------

    def _open(self) -> int:
        """A locked descriptor of the file that has the name.  Error: OSError, ConfigError."""
        deadline = time.monotonic() + self._lock_wait_s
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise ConfigError(f"{self.path!r} is not a regular file")
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise ConfigError(
                            f"{self.path!r} is in use by another daemon; give each its own file"
                        ) from None
                    time.sleep(0.02)  # somebody else's operations: there is nothing to wait on
                else:
                    # Deleted between open and lock: another may lock the new one.
                    with contextlib.suppress(FileNotFoundError):
                        if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                            return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _prepare(self, allow_shrink: bool) -> None:
        found = self._read_superblock()
        if found != self._superblock()[:_SLOTS_OFFSET]:
            if found:
                self._log(f"{self.path}: of another format or identity; made anew, whatever was in it is dropped")
            os.ftruncate(self.fd, 0)
        self._allocate_at_most(allow_shrink)
        if os.fstat(self.fd).st_size > self.total_bytes:
            self._log(f"{self.path}: has more than {self.capacity_frames} slots; those beyond are dropped")
            os.ftruncate(self.fd, self.total_bytes)
        self._write_superblock()
        self.file_system = _file_system(self.fd)
        self._choose_direct()

    def _allocate_at_most(self, allow_shrink: bool) -> None:
        wanted = self.capacity_frames
        while True:
            try:
                return self._allocate()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                reason = error.strerror
            free = self._free_bytes() + os.fstat(self.fd).st_blocks * 512
            needed = self.total_bytes
            if not allow_shrink:
                if os.fstat(self.fd).st_size == 0:
                    os.unlink(self.path)  # nothing was in it: leave no trace of the attempt
                raise ConfigError(
                    f"{self.path!r} needs {needed} bytes for {wanted} frames: {reason}; "
                    f"{free} bytes are free there. Ask for less, or set allow_shrink=true with `attnix attach-tier`"
                )
            # A file system needs some space for itself; after a wrong guess, a tenth less.
            fit = (free - (free >> 6) - SUPERBLOCK_BYTES) // self.stored_bytes
            self.capacity_frames = min(fit, self.capacity_frames * 9 // 10)
            if self.capacity_frames < 1:
                raise ConfigError(f"{self.path!r}: not even one frame of {self.stored_bytes} bytes fits: {reason}")
            self._log(f"{self.path}: {reason} for {wanted} frames; trying {self.capacity_frames}")

    def _allocate(self) -> None:
        """Make every byte of the file exist.  Error: OSError."""
        status = os.fstat(self.fd)
        size = status.st_size
        # Looked at first: a file system may fill up to its last byte before it says no, and others live there too.
        if self.total_bytes - status.st_blocks * 512 > self._free_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            os.posix_fallocate(self.fd, 0, self.total_bytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, size)  # give back what was had before it failed
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            os.ftruncate(self.fd, max(size, self.total_bytes))
            self._log(f"{self.path}: this file system cannot allocate in advance; a full disk will show when writing")

    def _free_bytes(self) -> int:
        space = os.fstatvfs(self.fd)
        return space.f_bavail * space.f_frsize

    def _choose_direct(self) -> None:
        """O_DIRECT, where the file system has it and takes our alignment."""
        self._status = os.fstat(self.fd)
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        self.direct = False
        if self.file_system in _MEMORY_FILE_SYSTEMS:
            return
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            self.direct = True
            os.preadv(self.fd, [self._page], 0)
            return
        if self.direct:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            self.direct = False

    # -- superblock -----------------------------------------------------------------------------------------------

    def _superblock(self) -> bytes:
        """Without its checksum."""
        made_for = self.format
        return _SUPERBLOCK.pack(
            MAGIC, FILE_VERSION, 0, made_for.identity, made_for.frame_bytes, made_for.layers, made_for.block_tokens,
            self.capacity_frames,
        )  # fmt: skip

    def _read_superblock(self) -> bytes:
        """What is comparable of it: all but checksum and number of slots; b"" in a file that is new.

        Error: ConfigError when the file is not a tier's: it would be lost.
        """
        self._page[:] = bytes(SUPERBLOCK_BYTES)
        os.preadv(self.fd, [self._page], 0)
        if self._page[:8] != MAGIC:
            if self._page[:] != bytes(SUPERBLOCK_BYTES):
                raise ConfigError(f"{self.path!r} is not the file of a tier: name another, or move it away")
            return b""
        (stored,) = struct.unpack_from("<I", self._page, _CRC_OFFSET)
        struct.pack_into("<I", self._page, _CRC_OFFSET, 0)
        return self._page[:_SLOTS_OFFSET] if crc32c(self._page) == stored else MAGIC

    def _write_superblock(self) -> None:
        """Error: OSError."""
        self._page[:] = self._superblock().ljust(SUPERBLOCK_BYTES, b"\0")
        struct.pack_into("<I", self._page, _CRC_OFFSET, crc32c(self._page))
        if os.pwritev(self.fd, [self._page], 0) != SUPERBLOCK_BYTES:
            raise OSError(errno.EIO, "short write of the superblock")
        os.fsync(self.fd)


def _file_system(fd: int) -> str:
    """The type of the file system that a descriptor is on; "unknown" where /proc does not say."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == wanted:
                return rest.split()[0]
    return "unknown"
