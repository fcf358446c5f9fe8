"""Where things are: the one place that decides the socket's path and where models are kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

MAX_PATH_BYTES: Final = 107  # sockaddr_un.sun_path holds 108 with its final zero


def default_socket_path() -> str:
    """`$ATTNIX_SOCKET`, or `attnix-UID/attnix.sock` under `$XDG_RUNTIME_DIR` (or /tmp where that is not set)."""
    explicit = os.environ.get("ATTNIX_SOCKET")
    if explicit:
        return explicit
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return os.path.join(base, f"attnix-{os.geteuid()}", "attnix.sock")


def too_long(path: str) -> str:
    """Why no socket can have this path; "" when one can."""
    size = len(os.fsencode(path))
    if size <= MAX_PATH_BYTES:
        return ""
    return (
        f"the socket path is {size} bytes long and the system allows {MAX_PATH_BYTES}: {path}; "
        "choose a shorter one with --socket or ATTNIX_SOCKET"
    )


def home_dir() -> Path:
    """`$ATTNIX_HOME`, or ~/.cache/attnix: pulled models, and what can be made again from them."""
    return Path(os.environ.get("ATTNIX_HOME") or Path.home() / ".cache" / "attnix")
