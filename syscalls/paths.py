"""Where things are: the one place that decides the socket's path."""

from __future__ import annotations

import os


def default_socket_path() -> str:
    """`$ATTNIX_SOCKET`, or `attnix-UID/attnix.sock` under `$XDG_RUNTIME_DIR` (or /tmp where that is not set)."""
    explicit = os.environ.get("ATTNIX_SOCKET")
    if explicit:
        return explicit
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return os.path.join(base, f"attnix-{os.geteuid()}", "attnix.sock")
