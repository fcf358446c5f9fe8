"""Snapshot files: contexts' tokens (and their KV, where it was had), whole or not there.

    offset   bytes   what
         0       8   MAGIC
         8       4   version, little-endian
        12       4   H, bytes of the header
        16       H   MessagePack map: identity [[tag, value], ...], token_bytes, entries [[cid, name, tokens, kv_tokens], ...]
                     then per entry: tokens x 4 bytes of int32, kv_tokens x token_bytes bytes of KV
     end-16     16   BLAKE2b-128 of everything before

A file is written under another name, brought to the disk, and only then given its own name: whenever that is cut short,
the earlier file is still there, or the new one is.  What is left of the first kind is swept at the next start.  One
directory per uid: a name never reaches another's file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import stat
import struct
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from attnix.kernel.errors import Detail, E
from attnix.kernel.snapshot import SnapshotEntry

MAGIC: Final = b"ATNXSNP1"
VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sII")
_DIGEST_BYTES: Final = 16
_TEMPORARY: Final = ".tmp-"  # no snapshot's name begins with a dot
_number: Final = itertools.count(1)

Identity = tuple[tuple[str, str], ...]


class SnapshotError(Exception):
    """It could not be written, or read; nothing was changed."""

    def __init__(self, code: E, message: str, **fields: int | str) -> None:
        super().__init__(message)
        self.code = code
        self.detail: Detail = {"message": message, **fields}


class Snapshot(NamedTuple):
    identity: Identity
    token_bytes: int
    entries: tuple[SnapshotEntry, ...]


class _Header(msgspec.Struct):
    identity: Identity
    token_bytes: int
    entries: tuple[tuple[int, str, int, int], ...]


def encode(snapshot: Snapshot) -> bytes:
    """The bytes of a file.  ValueError: an entry's KV is not as long as its tokens say."""
    rows = []
    body = bytearray()
    for entry in snapshot.entries:
        if len(entry.kv) != entry.kv_tokens * snapshot.token_bytes or 4 * entry.kv_tokens > len(entry.tokens):
            raise ValueError(f"context {entry.cid}: {len(entry.kv)} bytes are not the KV of {entry.kv_tokens} tokens")
        rows.append((entry.cid, entry.name, len(entry.tokens) // 4, entry.kv_tokens))
        body += entry.tokens + entry.kv
    header = msgspec.msgpack.encode(_Header(snapshot.identity, snapshot.token_bytes, tuple(rows)))
    data = _HEAD.pack(MAGIC, VERSION, len(header)) + header + body
    return data + hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def decode(data: bytes) -> Snapshot:
    """The reverse.  SnapshotError (ECORRUPT): not a snapshot, of a version that this attnix does not know, or damaged."""
    if len(data) < _HEAD.size + _DIGEST_BYTES or data[:8] != MAGIC:
        raise SnapshotError(E.ECORRUPT, "this is not a snapshot file", field="magic")
    _, version, header_bytes = _HEAD.unpack_from(data)
    if version != VERSION:
        text = f"the snapshot has format {version} and this attnix reads {VERSION}"
        raise SnapshotError(E.ECORRUPT, text, field="version", stored=version, running=VERSION)
    if hashlib.blake2b(data[:-_DIGEST_BYTES], digest_size=_DIGEST_BYTES).digest() != data[-_DIGEST_BYTES:]:
        raise SnapshotError(E.ECORRUPT, "the snapshot is damaged: its checksum does not match", field="checksum")
    try:
        header = msgspec.msgpack.decode(data[_HEAD.size : _HEAD.size + header_bytes], type=_Header)
    except (msgspec.MsgspecError, ValueError) as error:
        raise SnapshotError(E.ECORRUPT, f"the snapshot's header is damaged: {error}", field="header") from None
    at = _HEAD.size + header_bytes
    entries = []
    for cid, name, tokens, kv_tokens in header.entries:
        middle, end = at + 4 * tokens, at + 4 * tokens + kv_tokens * header.token_bytes
        entries.append(SnapshotEntry(cid, name, data[at:middle], kv_tokens, data[middle:end]))
        at = end
    if at != len(data) - _DIGEST_BYTES:
        raise SnapshotError(E.ECORRUPT, "the snapshot is longer or shorter than its header says", field="length")
    return Snapshot(header.identity, header.token_bytes, tuple(entries))


def write(directory: Path, uid: int, name: str, data: bytes) -> int:
    """Give the snapshot `name` of `uid` this content, whole or not at all; its bytes.

    SnapshotError: ENOSPC, EIO; the earlier file is as it was.
    """
    folder = directory / f"uid-{uid}"
    temporary = folder / f"{_TEMPORARY}{os.getpid()}-{next(_number)}"
    try:
        for path in (directory, folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        try:
            _write_whole(temporary, data)
            os.rename(temporary, folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _sync(folder)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        text = f"the snapshot {name!r} cannot be written: {error.strerror}"
        raise SnapshotError(E.ENOSPC if full else E.EIO, text, bytes=len(data)) from None
    return len(data)


def _write_whole(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view[: 1 << 20]) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync(folder: Path) -> None:
    """A rename is on the disk when its directory is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read(directory: Path, uid: int, name: str) -> Snapshot:
    """SnapshotError: ENOENT, ECORRUPT, EIO."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO is not waited for
        fd = os.open(directory / f"uid-{uid}" / name, flags)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            data = file.read()
    except FileNotFoundError:
        raise SnapshotError(E.ENOENT, f"no snapshot is called {name!r}", name=name) from None
    except OSError as error:
        raise SnapshotError(E.EIO, f"the snapshot {name!r} cannot be read: {error.strerror}", name=name) from None
    return decode(data)


def sweep(directory: Path) -> int:
    """Remove what writes that were cut short left behind; how many files."""
    swept = 0
    for path in directory.glob(f"uid-*/{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            path.unlink()
            swept += 1
    return swept
