"""attnix: an operating system for attention state.

    import attnix

    with attnix.connect() as system:
        ctx = system.alloc_context()

The clients are loaded when they are first asked for, so that a driver process does not load them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from attnix.syscalls.aclient import aconnect
    from attnix.syscalls.client import connect
    from attnix.syscalls.exceptions import AttnixError

__all__ = ["AttnixError", "__version__", "aconnect", "connect"]

__version__ = "0.1.0.dev0"

_LATE: Final = {
    "AttnixError": "attnix.syscalls.exceptions",
    "aconnect": "attnix.syscalls.aclient",
    "connect": "attnix.syscalls.client",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'attnix' has no attribute {name!r}")
