"""A live run as a file: every event with its time, and a digest of what the kernel answered.

The kernel is deterministic: the same events at the same times give the same effects.  So a log of its events is the
whole run, and `attnix replay LOG` makes a fresh kernel decide everything again.

    attnix boot --record run.log ...      Recorder stands between daemon and kernel
    attnix replay run.log                 replay/again.py

A log is the line `attnix recording 2`, then records: 4 bytes of length and 4 of CRC-32 (little-endian), and that much MessagePack.  The
first is a Header; each other one is a step: [now_ns, kind, event, digest], where `kind` is the name of the event's class
in kernel/events.py and `digest` is of all its effects in order (`digest_of`), or empty when the kernel panicked.

It holds every token of every client, their session tokens, and the secret behind the block keys (without which no key
could be made again): mode 0600, and nothing to give away.  Writes are buffered for half a second and never synced, so a
machine that dies loses the end; a log that ends inside a record is good up to there, and is said to be torn.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, get_args, get_type_hints
from zlib import crc32

import msgspec

from attnix.kernel import events
from attnix.kernel.config import KernelConfig
from attnix.kernel.errors import E
from attnix.kernel.events import Effect, Event, Syscall
from attnix.syscalls.abi import CALLS
from attnix.syscalls.ports import KernelPort

MAGIC: Final = b"attnix recording 2\n"
_ANY: Final = b"attnix recording "
FLUSH_NS: Final = 500_000_000
FLUSH_BYTES: Final = 1 << 20
_LENGTH: Final = struct.Struct("<II")  # bytes, and their CRC-32
_DIGEST_BYTES: Final = 8
_pack: Final = msgspec.msgpack.Encoder().encode
_KINDS: Final = {kind.__name__: kind for kind in get_args(events.Event)}
_ARGUMENTS: Final = {call.name: msgspec.msgpack.Decoder(call.args) for call in CALLS}


class BadRecording(Exception):
    """The file is no recording, or not one that this version can read."""


@dataclass(frozen=True)
class Header:
    """What a kernel is made of.

    policies  eviction policies that were registered besides the built-in ones: the run cannot be repeated without them
    """

    config: KernelConfig
    secret: bytes
    policies: tuple[str, ...] = ()


class Step(NamedTuple):
    """digest: b"" when the kernel panicked."""

    now_ns: int
    event: Event
    digest: bytes


def digest_of(effects: list[Effect]) -> bytes:
    """Of the effects of one step: their kinds and every byte in them, in order."""
    data = _pack([(type(effect).__name__, effect) for effect in effects])
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


class Recorder:
    """A kernel that writes down what it is asked.  A file that cannot be written ends the recording, not the daemon."""

    def __init__(self, kernel: KernelPort, path: Path, header: Header) -> None:
        """OSError: it cannot be made, or is there already: a recording is never written over."""
        self._kernel = kernel
        self._path = path
        self.tail = kernel.tail
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)  # below 0: nothing is recorded any more
        self._unwritten = bytearray(MAGIC)
        self._written_ns = 0
        self._add(_pack(header))
        self._write()

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """As Kernel.step."""
        if self._fd < 0:
            return self._kernel.step(event, now_ns)
        try:
            effects = self._kernel.step(event, now_ns)
        except BaseException:
            self._add(_pack((now_ns, type(event).__name__, event, b"")))
            self.close()
            raise
        self._add(_pack((now_ns, type(event).__name__, event, digest_of(effects))))
        if now_ns - self._written_ns >= FLUSH_NS or len(self._unwritten) >= FLUSH_BYTES:
            self._written_ns = now_ns
            self._write()
        return effects

    def close(self) -> None:
        """Write what is left."""
        self._write()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _add(self, data: bytes) -> None:
        self._unwritten += _LENGTH.pack(len(data), crc32(data))
        self._unwritten += data

    def _write(self) -> None:
        try:
            while self._fd >= 0 and self._unwritten:
                del self._unwritten[: os.write(self._fd, self._unwritten)]
        except OSError as error:  # a hole in the log would be worse than its end
            os.close(self._fd)
            self._fd = -1
            text = f"attnix: warning: {self._path}: {error.strerror}; nothing more is recorded"
            print(text, file=sys.stderr, flush=True)


# -- reading --------------------------------------------------------------------------------------------------------


def is_recording(path: Path) -> bool:
    """OSError."""
    with path.open("rb") as file:
        return file.read(len(_ANY)) == _ANY


class Recording:
    """A log, read step by step."""

    def __init__(self, path: Path) -> None:
        """OSError, BadRecording."""
        self.path = path
        self.cut_short = False  # known once `steps` is through: the file ends inside a record
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise BadRecording(f"{path} is no recording of this version: it does not begin with {MAGIC!r}")
            data = _record(file, f"{path}, its header")
            self._start = file.tell()
        if data is None:
            raise BadRecording(f"{path} is torn: it ends before anything was recorded")
        try:
            self.header = msgspec.msgpack.decode(data, type=Header)
        except msgspec.MsgspecError as error:
            raise BadRecording(f"{path}: its header cannot be read: {error}") from error

    def steps(self) -> Iterator[Step]:
        """In order.  BadRecording, with the number of the step."""
        with self.path.open("rb") as file:
            file.seek(self._start)
            number = 0
            while True:
                at = file.tell()
                data = _record(file, f"{self.path}, step {number}")
                if data is None:
                    self.cut_short = file.seek(0, os.SEEK_END) != at
                    return
                try:
                    yield _step(data)
                except (msgspec.MsgspecError, KeyError, ValueError) as error:
                    raise BadRecording(f"{self.path}, step {number}: {error}") from error
                number += 1


def _record(file: IO[bytes], what: str) -> bytes | None:
    """The next one; None at the end, also inside one.  BadRecording when it is not as it was written."""
    length = file.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        return None
    size, crc = _LENGTH.unpack(length)
    data = file.read(size)
    if len(data) < size:
        return None
    if crc32(data) != crc:
        raise BadRecording(f"{what}: damaged, its checksum is not that of its bytes")
    return data


_envelope: Final = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw, bytes]).decode
_syscall: Final = msgspec.msgpack.Decoder(tuple[int, int, str, msgspec.Raw]).decode


def _fields(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    """All fields of an event as one array.  An errno is an int: equal to the enum's member, and in every text the same."""
    hints = get_type_hints(kind)
    types = tuple(int if hints[name] == E | int else hints[name] for name in kind._fields)
    return msgspec.msgpack.Decoder(tuple[types])  # type: ignore[valid-type]


_FIELDS: Final = {name: _fields(kind) for name, kind in _KINDS.items() if kind is not Syscall}


def _step(data: bytes) -> Step:
    now_ns, name, raw, digest = _envelope(data)
    if name == Syscall.__name__:
        conn, request, call, args = _syscall(raw)
        return Step(now_ns, Syscall(conn, request, call, _ARGUMENTS[call].decode(args)), digest)
    return Step(now_ns, _KINDS[name]._make(_FIELDS[name].decode(raw)), digest)
