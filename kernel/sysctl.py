"""Tunables: name, meaning, bounds.  Read and set by the `sysctl` call."""

from __future__ import annotations

from dataclasses import dataclass

from .calls import SysctlRow
from .errors import E, Errno
from .evict import registry
from .order import registry as orders
from .params import (
    GROWTH_PERMILLE,
    MAX_ADMITTED,
    MAX_RUNNING,
    OOM_AFTER_MS,
    STEP_TOKENS,
    THRASH_HIGH_PERMILLE,
    THRASH_LOW_PERMILLE,
    THRASH_WINDOW_MS,
    WATERMARK_PERMILLE,
)
from .wait import registry as wait_registry

_BOUNDS: dict[str, tuple[int, int, str]] = {
    "sched.step_tokens": (1, 1 << 20, "token budget of one forward pass"),
    "sched.max_running": (1, 1 << 16, "sequences in one forward pass"),
    "sched.max_admitted": (0, 1 << 16, "contexts that may own frames and run at once, 0: as many as fit"),
    "sched.watermark_permille": (0, 500, "share of the frames that an admission leaves available for growth"),
    "sched.tpot_ms": (0, 60_000, "wanted time per token of every generation that names none; prompts give way, 0: off"),
    "sched.growth_permille": (
        0,
        999,
        "how surely running generations find the frames that they grow into, by lengths seen here; 0: one frame each",
    ),
    "sched.max_wait_ms": (
        0,
        86_400_000,
        "new work that would wait longer for its turn is refused (EAGAIN), 0: none is",
    ),
    "sched.max_queue": (0, 1 << 20, "jobs that may wait for their turn; more are refused (EAGAIN), 0: any number"),
    "load.thrash_high_permille": (
        1,
        1000,
        "share of work done twice above which fewer contexts run at once, 1000: never",
    ),
    "load.thrash_low_permille": (0, 1000, "share below which more may run again"),
    "load.thrash_window_ms": (1, 600_000, "time over which these shares are taken"),
    "oom.after_ms": (
        0,
        86_400_000,
        "a device on which nothing runs because frames are short takes them by force after this, and ends a process after "
        "twice this; 0: never",
    ),
    "tier.selective_hits": (
        1,
        1 << 20,
        "admissions that must have found a block before tier.write=selective copies it down",
    ),
    "tier.partial_tokens": (
        0,
        1 << 10,
        "fewest first tokens of a known block worth copying, 0: only whole blocks are hits",
    ),
    "tier.gates": (0, 1, "1: a pass may begin before its loads have landed, and waits for them layer by layer"),
    "wait.ttl_ms": (
        0,
        86_400_000,
        "for how long at least the frames of a context that waits for a tool are kept (wait.policy=cost; 0: not first), or at all (ttl)",
    ),
    "wait.grace_ms": (
        0,
        60_000,
        "for how long after a turn no admission takes its frames, so that its client can say that it waits for a tool",
    ),
    "pin.share_permille": (0, 1000, "share of a device's frames that pinned contexts may hold"),
    "pin.max_ms": (1, 86_400_000, "longest time a context stays pinned"),
}

_CHOICES: dict[str, tuple[str, str]] = {
    "evict.policy": ("policy", "eviction policy of every tier that has none of its own"),
    "evict.hbm": ("policy_hbm", "eviction policy of hbm, empty: evict.policy"),
    "evict.dram": ("policy_dram", "eviction policy of dram, empty: evict.policy"),
    "evict.nvme": ("policy_nvme", "eviction policy of nvme, empty: evict.policy"),
    "evict.remote": ("policy_remote", "eviction policy of remote, empty: evict.policy"),
    "sched.policy": ("order", "which waiting job is next"),
    "wait.policy": ("wait", "what becomes of the frames of contexts that wait for a tool"),
    "tier.write": (
        "write",
        "back: copied down when frames are wanted; through: at the end of a turn; selective: then, after some hits",
    ),
    "domain.public": (
        "public",
        "whose contexts may share prefixes with any user's (each asks for it): nobody, owner (the daemon's user), all",
    ),
}
_WRITE = ("back", "through", "selective")
_PUBLIC = ("nobody", "owner", "all")


@dataclass(slots=True)
class Sysctl:
    step_tokens: int = STEP_TOKENS
    max_running: int = MAX_RUNNING
    max_admitted: int = MAX_ADMITTED
    watermark_permille: int = WATERMARK_PERMILLE
    tpot_ms: int = 0
    growth_permille: int = GROWTH_PERMILLE
    max_wait_ms: int = 0
    max_queue: int = 0
    thrash_high_permille: int = THRASH_HIGH_PERMILLE
    thrash_low_permille: int = THRASH_LOW_PERMILLE
    thrash_window_ms: int = THRASH_WINDOW_MS
    after_ms: int = OOM_AFTER_MS
    selective_hits: int = 2
    partial_tokens: int = 1
    gates: int = 1
    share_permille: int = 500
    max_ms: int = 600_000
    ttl_ms: int = 2000
    grace_ms: int = 100
    wait: str = wait_registry.DEFAULT
    policy: str = registry.DEFAULT
    policy_hbm: str = ""
    policy_dram: str = ""
    policy_nvme: str = ""
    policy_remote: str = ""
    write: str = "back"
    order: str = orders.DEFAULT
    public: str = "nobody"

    def policy_of(self, tier: str) -> str:
        """Name of the eviction policy in force there."""
        return str(getattr(self, f"policy_{tier}", "")) or self.policy

    def rows(self, name: str) -> tuple[SysctlRow, ...]:
        """One, all ("") or those under a prefix that ends in a dot.  ENOENT: no such name."""
        every = [
            SysctlRow(key, getattr(self, key.split(".")[1]), meaning, True) for key, (_, _, meaning) in _BOUNDS.items()
        ]
        every += [
            SysctlRow(key, getattr(self, field), self._meaning(key), True) for key, (field, _) in _CHOICES.items()
        ]
        found = tuple(r for r in every if name in ("", r.name) or (name.endswith(".") and r.name.startswith(name)))
        if not found:
            raise Errno(E.ENOENT, f"no sysctl is called {name!r}; `sysctl` without a name lists them", name=name)
        return found

    def set(self, name: str, value: str | int | float) -> None:
        """EINVAL: wrong type or out of bounds (both named)."""
        self.rows(name)
        if name in _CHOICES:
            allowed = _allowed(name)
            if value not in allowed:
                raise Errno(
                    E.EINVAL, f"{name} is one of {', '.join(a or '(empty)' for a in allowed)}, not {value!r}", name=name
                )
            setattr(self, _CHOICES[name][0], str(value))
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

    @staticmethod
    def _meaning(name: str) -> str:
        meaning = _CHOICES[name][1]
        return meaning + ": " + ", ".join(_allowed(name)) if name.endswith(".policy") else meaning


def _allowed(name: str) -> tuple[str, ...]:
    if name == "tier.write":
        return _WRITE
    if name == "domain.public":
        return _PUBLIC
    if name == "sched.policy":
        return orders.names()
    if name == "wait.policy":
        return tuple(wait_registry.POLICIES)
    return registry.names() + (("",) if name != "evict.policy" else ())
