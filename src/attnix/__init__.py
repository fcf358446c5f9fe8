"""attnix: an operating system for attention state.

    import attnix

    with attnix.connect() as system:
        ctx = system.alloc_context()

The clients are loaded when they are first asked for, so that a driver process does not load them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnix.syscalls.aclient import aconnect
    from attnix.syscalls.client import connect
    from attnix.syscalls.exceptions import AttnixError

__all__ = ["AttnixError", "__version__", "aconnect", "connect"]

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    if name == "connect":
        from attnix.syscalls.client import connect

        return connect
    if name == "aconnect":
        from attnix.syscalls.aclient import aconnect

        return aconnect
    if name == "AttnixError":
        from attnix.syscalls.exceptions import AttnixError

        return AttnixError
    raise AttributeError(f"module 'attnix' has no attribute {name!r}")
