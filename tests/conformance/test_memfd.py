"""Memory that two processes share must not change size under either."""

from __future__ import annotations

import errno
import mmap
import os

import pytest

from attnix.drivers.memfd import (
    advise_huge_pages,
    create_memfd,
    map_read_only,
    map_shared,
    memfd_bytes,
    populate_aside,
    reopen_read_only,
)


def test_sealed_shared_and_read_only() -> None:
    fd = create_memfd("test", 10_000)
    read_only_fd = reopen_read_only(fd)
    assert memfd_bytes(fd) == memfd_bytes(read_only_fd) == 10_000
    for n_bytes in (0, 9_999, 10_001):
        with pytest.raises(OSError, match="not permitted") as caught:
            os.ftruncate(fd, n_bytes)
        assert caught.value.errno == errno.EPERM
    with pytest.raises(OSError):
        os.pwrite(read_only_fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(read_only_fd, 10_000, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with map_shared(fd) as ours, map_read_only(read_only_fd) as theirs:
        assert len(ours) == len(theirs) == 10_000
        assert not any(bytes(ours))
        advise_huge_pages(ours)
        ours[9_990:] = b"0123456789"
        assert theirs[9_990:] == b"0123456789"
        with pytest.raises(TypeError):
            theirs[0] = 1
    assert not os.get_inheritable(fd)
    assert not os.get_inheritable(read_only_fd)
    os.close(fd)
    os.close(read_only_fd)


@pytest.mark.parametrize("n_bytes", [0, -1])
def test_an_empty_file_is_refused(n_bytes: int) -> None:
    with pytest.raises(ValueError, match="positive size"):
        create_memfd("test", n_bytes)


def test_populating_makes_every_page_real_and_keeps_what_is_in_it() -> None:
    n_bytes = (17 << 20) + 4096
    fd = create_memfd("test", n_bytes)
    with map_shared(fd) as mapping:
        mapping[5000] = 7
        if tuple(int(part) for part in os.uname().release.split(".")[:2]) < (5, 14):
            pytest.skip("Linux cannot do it before 5.14")
        assert os.fstat(fd).st_blocks * 512 < n_bytes
        populate_aside(mapping).join()
        assert os.fstat(fd).st_blocks * 512 == n_bytes
        assert mapping[5000] == 7 and mapping[4999:5002] == b"\0\7\0"
    os.close(fd)
