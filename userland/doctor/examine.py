"""All diagnoses of one machine, the worst first."""

from __future__ import annotations

from typing import Final

from .block_size import block_size
from .concurrency import concurrency
from .crowding import crowding
from .driver import driver
from .eta import eta
from .facts import Facts
from .finding import Diagnosis, Finding
from .heads import heads
from .lost_place import lost_place
from .slow_tier import slow_tier
from .thrashing import thrashing

DIAGNOSES: Final[tuple[Diagnosis, ...]] = (
    heads, thrashing, block_size, crowding, concurrency, slow_tier, driver, lost_place, eta
)  # fmt: skip


def examine(facts: Facts) -> list[Finding]:
    """What is wrong, in order of damage; empty: nothing that this knows of."""
    found = [finding for finding in (diagnose(facts) for diagnose in DIAGNOSES) if finding is not None]
    return sorted(found, key=lambda finding: -finding.damage)
