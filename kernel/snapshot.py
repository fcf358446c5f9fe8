"""What a snapshot holds of a context.  The file around it is made and read outside the kernel (syscalls/snapshots.py)."""

from __future__ import annotations

from typing import NamedTuple


class SnapshotEntry(NamedTuple):
    """One context.

    tokens     its whole log, int32
    name       its name when the snapshot was taken, for people; a restore does not take the name
    kv_tokens  how many tokens, from the first on, have their KV in the file
    kv         that KV: kv_tokens x token_bytes, frame after frame as the driver lays it out
    """

    cid: int
    name: str
    tokens: bytes
    kv_tokens: int = 0
    kv: bytes = b""
