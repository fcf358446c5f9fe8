"""The fingerprint of a model: a hash of the content of its weights, the same wherever the files lie.

Every block key starts from it, so KV of one model can never be taken for another's.  Files are cut into pieces that are
hashed by several threads (hashlib lets the interpreter go); the digests are hashed in order.  Hashing 100 MB takes about
0.1 s, but 100 GB takes minutes: results are kept under the file's device, inode, size and both time stamps.  Only these
decide whether a kept result is used, never the path, and a write changes at least one of them (ctime cannot be set).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Final

from .config import ModelConfig

FORMAT: Final = b"attnix weights 1"
DIGEST_BYTES: Final = 16
_PIECE_BYTES: Final = 8 << 20


def fingerprint(files: Iterable[Path], config: ModelConfig, cache_dir: Path | None, threads: int = 2) -> str:
    """Hex digest of geometry and weights.

    files      weight files, in an order that does not depend on where they lie (their names')
    cache_dir  where digests are kept between runs; None: nowhere
    Error: OSError.
    """
    whole = hashlib.blake2b(FORMAT, digest_size=DIGEST_BYTES)
    whole.update(json.dumps(asdict(config), sort_keys=True).encode())
    for file in files:
        whole.update(bytes.fromhex(_file_digest(file, cache_dir, threads)))
    return whole.hexdigest()


def _file_digest(file: Path, cache_dir: Path | None, threads: int) -> str:
    with open(file, "rb") as opened:
        state = os.fstat(opened.fileno())
        label = f"{state.st_dev}-{state.st_ino}-{state.st_size}-{state.st_mtime_ns}-{state.st_ctime_ns}"
        kept = None if cache_dir is None else cache_dir / label
        if kept is not None:
            known = _kept_digest(kept)
            if known is not None:
                return known
        digest = _tree_digest(opened.fileno(), state.st_size, threads)
    if kept is not None:
        _keep(kept, digest)
    return digest


def _tree_digest(fd: int, size: int, threads: int) -> str:
    def piece(offset: int) -> bytes:
        wanted = min(_PIECE_BYTES, size - offset)
        data = os.pread(fd, wanted, offset)
        if len(data) != wanted:
            raise OSError(f"the file became shorter while it was read: {len(data)} of {wanted} bytes at {offset}")
        return hashlib.blake2b(data, digest_size=32).digest()

    root = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=32)
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for digest in pool.map(piece, range(0, size, _PIECE_BYTES)):
            root.update(digest)
    return root.hexdigest()


def _kept_digest(kept: Path) -> str | None:
    try:
        text = kept.read_text("ascii")
    except (OSError, ValueError):
        return None
    whole = len(text) == 64 and all(char in "0123456789abcdef" for char in text)
    return text if whole else None


def _keep(kept: Path, digest: str) -> None:
    """Write aside and rename; a failure only means hashing again."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
            file.write(digest)
        os.replace(file.name, kept)
    except OSError:
        return
