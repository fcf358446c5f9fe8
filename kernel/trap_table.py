"""Every system call of this kernel, by name: the traps of all files together.  One line per file."""

from __future__ import annotations

from typing import Final

from . import traps, traps_memory, traps_names
from .traps import Trap

TRAPS: Final[dict[str, Trap]] = {
    **traps.TRAPS,
    **traps_names.TRAPS,
    **traps_memory.TRAPS,
}  # fmt: skip
