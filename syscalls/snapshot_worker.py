"""One snapshot written or read, in a process of its own: waiting for the disk is not for the daemon's one thread.

    python -m attnix.syscalls.snapshot_worker    MessagePack job on standard input, MessagePack answer on standard output

job     ["write", directory, uid, name, [identity, token_bytes, entries]] or ["read", directory, uid, name, nil]
answer  [code, detail, file_bytes, snapshot or nil]
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from attnix.kernel.errors import Detail

from . import snapshots


class Job(msgspec.Struct, array_like=True):
    verb: str
    directory: str
    uid: int
    name: str
    snapshot: snapshots.Snapshot | None = None


class Answer(msgspec.Struct, array_like=True):
    code: int
    detail: Detail = {}
    file_bytes: int = 0
    snapshot: snapshots.Snapshot | None = None


def perform(job: Job) -> Answer:
    """Do it; what goes wrong is in the answer."""
    directory = Path(job.directory)
    try:
        if job.snapshot is None:
            return Answer(0, snapshot=snapshots.read(directory, job.uid, job.name))
        return Answer(0, file_bytes=snapshots.write(directory, job.uid, job.name, snapshots.encode(job.snapshot)))
    except snapshots.SnapshotError as error:
        return Answer(int(error.code), error.detail)


def main() -> int:
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.msgpack.encode(perform(job)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
