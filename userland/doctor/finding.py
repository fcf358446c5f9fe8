"""What a diagnosis says, and what one is.

Damage makes findings comparable: the share of the machine, of its time or of its frames, that the fault costs, as well as the
counters tell.  It orders findings; it does not promise that much back, since faults hide one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .facts import Facts

Number: TypeAlias = int | float | str


@dataclass(frozen=True)
class Finding:
    """
    name      of the diagnosis
    title     what is wrong, in a sentence
    damage    0..1 of the machine's `costs`
    costs     time | frames; "": nobody can say how much
    evidence  lines with the numbers
    remedies  lines that say what to do; a command stands in backquotes
    settings  of the remedies, those that are sysctls: name, value
    numbers   the same for programs
    """

    name: str
    title: str
    damage: float
    costs: str
    evidence: tuple[str, ...]
    remedies: tuple[str, ...]
    settings: Mapping[str, Number] = field(default_factory=dict)
    numbers: Mapping[str, Number] = field(default_factory=dict)


Diagnosis: TypeAlias = Callable[[Facts], Finding | None]
