"""Tunables: name, meaning, bounds.  Read and set by the `sysctl` call."""

from __future__ import annotations

from dataclasses import dataclass

from .calls import SysctlRow
from .errors import E, Errno
from .evict.lru import Lru
from .evict.protocol import EvictionPolicy
from .params import MAX_RUNNING, STEP_TOKENS, WATERMARK_PERMILLE

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": Lru}

_BOUNDS: dict[str, tuple[int, int, str]] = {
    "sched.step_tokens": (1, 1 << 20, "token budget of one forward pass"),
    "sched.max_running": (1, 1 << 16, "sequences in one forward pass"),
    "sched.watermark_permille": (0, 500, "share of the frames that an admission leaves available for growth"),
}


@dataclass(slots=True)
class Sysctl:
    step_tokens: int = STEP_TOKENS
    max_running: int = MAX_RUNNING
    watermark_permille: int = WATERMARK_PERMILLE
    policy: str = "lru"

    def rows(self, name: str) -> tuple[SysctlRow, ...]:
        """One, all ("") or those under a prefix that ends in a dot.  ENOENT: no such name."""
        every = [
            SysctlRow(key, getattr(self, key.split(".")[1]), meaning, True) for key, (_, _, meaning) in _BOUNDS.items()
        ]
        every.append(SysctlRow("evict.policy", self.policy, "eviction policy: " + ", ".join(sorted(POLICIES)), True))
        found = tuple(r for r in every if name in ("", r.name) or (name.endswith(".") and r.name.startswith(name)))
        if not found:
            raise Errno(E.ENOENT, f"no sysctl is called {name!r}; `sysctl` without a name lists them", name=name)
        return found

    def set(self, name: str, value: str | int | float) -> None:
        """EINVAL: wrong type or out of bounds (both named)."""
        self.rows(name)
        if name == "evict.policy":
            if value not in POLICIES:
                raise Errno(E.EINVAL, f"evict.policy is one of {', '.join(sorted(POLICIES))}, not {value!r}", name=name)
            self.policy = str(value)
            return
        if name not in _BOUNDS:
            raise Errno(E.EINVAL, f"{name!r} is a prefix: name one sysctl to set it", name=name)
        low, high, _ = _BOUNDS[name]
        try:
            number = int(value) if not isinstance(value, float) else None
        except ValueError:
            number = None
        if number is None or not low <= number <= high:
            raise Errno(
                E.EINVAL, f"{name} is an integer from {low} to {high}, not {value!r}", name=name, low=low, high=high
            )
        setattr(self, name.split(".")[1], number)
