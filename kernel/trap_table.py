"""Every system call of this kernel, by name: the traps of all files together.  One line per file."""

from __future__ import annotations

from typing import Final

from . import traps, traps_group, traps_load, traps_look, traps_memory, traps_names, traps_process, traps_wait
from .traps import Trap

TRAPS: Final[dict[str, Trap]] = {
    **traps.TRAPS,
    **traps_process.TRAPS,
    **traps_names.TRAPS,
    **traps_memory.TRAPS,
    **traps_wait.TRAPS,
    **traps_group.TRAPS,
    **traps_load.TRAPS,
    **traps_look.TRAPS,
}  # fmt: skip
