"""Snapshot files: whole or not there, whatever moment the writer dies at (case 18), and never believed when damaged."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from attnix.kernel.errors import E
from attnix.kernel.snapshot import SnapshotEntry
from attnix.simulated import ints
from attnix.syscalls import snapshots
from attnix.syscalls.snapshots import Snapshot, SnapshotError

TOKEN_BYTES = 8
IDENTITY = (("weights", "sim"), ("numerics", "fast"))
SYSTEM_CALLS = ("mkdir", "open", "write", "fsync", "close", "rename")


def snapshot(*lengths: int, fill: int = 1) -> Snapshot:
    """Of contexts with so many tokens, and KV for their full blocks of 4."""
    entries = []
    for n, length in enumerate(lengths):
        kv_tokens = length // 4 * 4
        kv = bytes([fill]) * (kv_tokens * TOKEN_BYTES)
        entries.append(SnapshotEntry(n + 1, f"c{n}", ints([fill] * length), kv_tokens, kv))
    return Snapshot(IDENTITY, TOKEN_BYTES, tuple(entries))


OLD, NEW = snapshot(9, 0, 40), snapshot(5, 17, fill=2)


def dies_at(directory: Path, k: int) -> bool:
    """Write NEW over OLD in a child process that exits before its k-th system call.  False: it made fewer than k."""
    child = os.fork()
    if not child:
        calls = 0

        def counted(real: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == k:
                    os._exit(7)
                if real is real_write:  # short writes too: every piece is a place to die at
                    args = (args[0], bytes(args[1][:64]))
                return real(*args, **kwargs)

            return call

        real_write = os.write
        for name in SYSTEM_CALLS:
            setattr(os, name, counted(getattr(os, name)))
        snapshots.write(directory, 0, "s", snapshots.encode(NEW))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 7)
    return code == 7


def test_case_18_a_torn_snapshot_is_wholly_old_or_wholly_new(tmp_path: Path) -> None:
    found: list[Snapshot] = []
    k = 0
    while True:
        k += 1
        directory = tmp_path / str(k)
        directory.mkdir()
        snapshots.write(directory, 0, "s", snapshots.encode(OLD))
        died = dies_at(directory, k)
        left = [path.name for path in (directory / "uid-0").iterdir()]
        assert snapshots.sweep(directory) == len(left) - 1, "what was cut short, and nothing else, is swept"
        assert [path.name for path in (directory / "uid-0").iterdir()] == ["s"]
        read = snapshots.read(directory, 0, "s")
        assert read in (OLD, NEW)
        for entry in read.entries:
            assert len(entry.kv) == entry.kv_tokens * read.token_bytes, "tokens x bytes = KV length, for every entry"
        found.append(read)
        if not died:
            break
    assert k > 15, "many places to die at"
    assert found[0] == OLD and found[-1] == NEW
    assert found == sorted(found, key=lambda s: s == NEW), "old up to the rename, new from there on"


def test_the_first_snapshot_of_a_name_is_there_or_not(tmp_path: Path) -> None:
    k, last = 0, True
    while last:
        k += 1
        directory = tmp_path / str(k)
        directory.mkdir()
        last = dies_at(directory, k)
        snapshots.sweep(directory)
        try:
            assert snapshots.read(directory, 0, "s") == NEW
        except SnapshotError as error:
            assert error.code == E.ENOENT and last
    assert snapshots.read(directory, 0, "s") == NEW


def test_no_damage_is_believed(tmp_path: Path) -> None:
    data = snapshots.encode(OLD)
    assert snapshots.decode(data) == OLD
    for at in range(0, len(data), 7):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(SnapshotError) as caught:
            snapshots.decode(bytes(changed))
        assert caught.value.code == E.ECORRUPT
    for size in range(0, len(data), 11):
        with pytest.raises(SnapshotError):
            snapshots.decode(data[:size])
    with pytest.raises(SnapshotError):
        snapshots.decode(data + b"\0")


def test_kv_that_does_not_fit_its_tokens_is_not_written() -> None:
    wrong = OLD.entries[0]._replace(kv_tokens=4)
    with pytest.raises(ValueError, match="are not the KV of 4 tokens"):
        snapshots.encode(OLD._replace(entries=(wrong,)))


def test_a_full_disk_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots.write(tmp_path, 0, "s", snapshots.encode(OLD))

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(SnapshotError) as caught:
            snapshots.write(tmp_path, 0, "s", snapshots.encode(NEW))
    assert caught.value.code == E.ENOSPC
    assert [path.name for path in (tmp_path / "uid-0").iterdir()] == ["s"]
    assert snapshots.read(tmp_path, 0, "s") == OLD


def test_files_are_private_and_of_one_uid(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        snapshots.write(tmp_path / "snapshots", 1000, "s", snapshots.encode(OLD))
    finally:
        os.umask(before)
    path = tmp_path / "snapshots" / "uid-1000" / "s"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(SnapshotError) as caught:
        snapshots.read(tmp_path / "snapshots", 1001, "s")
    assert caught.value.code == E.ENOENT
    os.symlink(path, path.with_name("link"))
    with pytest.raises(SnapshotError):
        snapshots.read(tmp_path / "snapshots", 1000, "link")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A FIFO in the place of a snapshot would hold its worker, and all jobs behind it, until their deadline."""
    (tmp_path / "uid-0").mkdir()
    os.mkfifo(tmp_path / "uid-0" / "s")
    caught: list[SnapshotError] = []

    def read() -> None:
        try:
            snapshots.read(tmp_path, 0, "s")
        except SnapshotError as error:
            caught.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert [error.code for error in caught] == [E.EIO]
