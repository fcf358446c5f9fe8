"""The dram tier: one arena of stored frames in shared memory.  It has no driver; whoever is at the other end copies.

One slab for the whole budget, so nothing is lost between allocations, whatever the size of a frame.  Huge pages are
taken from the reserved pool when it holds enough of them, else asked for by madvise in every process that maps the arena.
Pages are not touched here: on a machine with several NUMA nodes they come from the node of the thread that first writes
them, which is the accel's.  Pinning for DMA is the business of the driver that owns the DMA engine; what can be done
here is to lock the pages in memory, and a machine that does not allow that gets pageable memory and a warning.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from attnix.kernel.tag import stored_bytes

from .memfd import create_memfd, map_shared
from .spec import Log

HUGE_PAGE_BYTES: Final = 2 << 20
_MFD_HUGE_2MB: Final = 21 << 26
_POOL: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
_SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def frames_in(budget_bytes: int, frame_bytes: int) -> int:
    """Stored frames that fit into a budget."""
    return budget_bytes // stored_bytes(frame_bytes)


def machine_bytes(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int:
    """Memory that this process may ever use: the machine's, or when that is less its control group's or that of any
    group around it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    files = [root / "memory.max", root / "memory/memory.limit_in_bytes"]  # cgroup v2 and v1
    with contextlib.suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            for folder in (group, *map(str, Path(group).parents)):
                if not controllers:
                    files.append(root / folder.strip("/") / "memory.max")
                elif "memory" in controllers.split(","):
                    files.append(root / "memory" / folder.strip("/") / "memory.limit_in_bytes")
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number, and a group may be out of our sight
            limits.append(int(file.read_text()))
    return min(limits)


@dataclass(frozen=True)
class DramSpec:
    """device, name, capacity_frames as in the kernel's DeviceConfig; frame_bytes of the bare KV.

    pages  "locked": may not be swapped out, where the system allows it
    """

    device: int
    name: str
    capacity_frames: int
    frame_bytes: int
    pages: Literal["pageable", "locked"] = "pageable"

    @property
    def frames_bytes(self) -> int:
        return self.capacity_frames * stored_bytes(self.frame_bytes)

    @property
    def arena_bytes(self) -> int:
        """Whole huge pages, unless that would be a twentieth more than the frames need."""
        rounded = -(-self.frames_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        return rounded if rounded * 20 <= self.frames_bytes * 21 else self.frames_bytes


class DramArena:
    """The memfd of a dram tier, for as long as the daemon lives.

    fd     the arena; frame f is bytes [f * stored_bytes, (f + 1) * stored_bytes)
    pages  what it is made of, for people
    Error: MemoryError when the machine can never hold it; ValueError when it has no frame; OSError.
    """

    def __init__(self, spec: DramSpec, log: Log) -> None:
        self.spec = spec
        self.n_bytes = spec.arena_bytes
        limit = machine_bytes()
        if self.n_bytes > limit:
            raise MemoryError(f"{spec.name} needs {self.n_bytes} bytes and this machine allows {limit}")
        self._locked: mmap.mmap | None = None
        self.fd, self.pages = _make_memfd(f"attnix-{spec.name}", self.n_bytes)
        if spec.pages == "locked":
            self._lock(log)
        nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
        where = "" if nodes < 2 else f", on the node of the accel's threads (of {nodes})"
        log("info", f"{spec.name}: {spec.capacity_frames} frames in {self.n_bytes} bytes of {self.pages}{where}")

    def close(self) -> None:
        if self._locked is not None:
            self._locked.close()
            self._locked = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _lock(self, log: Log) -> None:
        mapping = map_shared(self.fd)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(self.n_bytes)) == 0:
            self._locked = mapping
            self.pages += ", locked"
            return
        why = os.strerror(ctypes.get_errno())
        mapping.close()
        log("warning", f"{self.spec.name}: pages stay pageable, locking {self.n_bytes} bytes failed: {why}")


def _make_memfd(name: str, n_bytes: int) -> tuple[int, str]:
    """A memfd sealed against resizing, and what its pages are."""
    if n_bytes > 0 and n_bytes % HUGE_PAGE_BYTES == 0 and _pool_bytes() >= n_bytes:
        with contextlib.suppress(OSError):  # somebody else was quicker: ordinary pages do as well
            return _make_huge(name, n_bytes), "reserved 2 MiB pages"
    asked = _setting(_SHMEM_ENABLED) in ("always", "advise", "within_size", "force")
    return create_memfd(name, n_bytes), "2 MiB pages where they are free" if asked else "4 KiB pages"


def _make_huge(name: str, n_bytes: int) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | _MFD_HUGE_2MB
    fd = os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, n_bytes)
        os.posix_fallocate(fd, 0, n_bytes)  # now or never: a page that is missing later would be a SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _pool_bytes() -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(_POOL.read_text()) * HUGE_PAGE_BYTES
    return 0


def _setting(path: Path) -> str:
    """The chosen word of a kernel setting that shows its choice in brackets."""
    with contextlib.suppress(OSError, IndexError):
        return path.read_text().split("[")[1].split("]")[0]
    return ""
