"""What a diagnosis looks at: the answers of a few system calls, taken together, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from attnix.syscalls.types import (
    HeadRow,
    HealthResult,
    HoldingRow,
    PressureResult,
    SampleRow,
    SysctlResult,
    TierRow,
    TiersResult,
    UnameResult,
    VmstatResult,
)

from .prefixes import Compared, compare

FEW = 8  # contexts that have ended, below which those that have not are looked at, too
WINDOW_S = 120.0  # what the kernel remembers, and what is looked at unless told otherwise


class Source(Protocol):
    """A connection, or a saved dump of one."""

    def uname(self) -> UnameResult: ...
    def tiers(self) -> TiersResult: ...
    def vmstat(self) -> VmstatResult: ...
    def sysctl(self, name: str = "") -> SysctlResult: ...
    def health(self) -> HealthResult: ...
    def pressure(self) -> PressureResult: ...


@dataclass(frozen=True)
class Facts:
    """first, last  the window's ends; both the same when nothing is known of what was before"""

    uname: UnameResult
    tiers: tuple[TierRow, ...]
    counters: dict[str, int]
    sysctl: dict[str, str | int | float]
    health: HealthResult
    pressure: PressureResult
    first: SampleRow
    last: SampleRow

    @property
    def window_ns(self) -> int:
        return self.last.at_ns - self.first.at_ns

    def grew(self, field: str) -> int:
        """By how much a sum of the samples grew in the window."""
        grown: int = getattr(self.last, field) - getattr(self.first, field)
        return grown

    def setting(self, name: str) -> int:
        """A sysctl that is a number; 0 when this system has none of that name."""
        value = self.sysctl.get(name, 0)
        return value if isinstance(value, int) else 0

    @cached_property
    def window(self) -> tuple[SampleRow, ...]:
        return tuple(s for s in self.health.samples if s.at_ns >= self.first.at_ns)

    @property
    def block_tokens(self) -> int:
        return self.uname.block_tokens

    @cached_property
    def hbm(self) -> tuple[TierRow, ...]:
        return tuple(tier for tier in self.tiers if tier.tier == "hbm")

    @cached_property
    def capacity_frames(self) -> int:
        """Of all compute devices."""
        return sum(tier.capacity_frames for tier in self.hbm)

    @property
    def holdings(self) -> tuple[HoldingRow, ...]:
        return self.health.holdings

    @property
    def heads(self) -> tuple[HeadRow, ...]:
        return self.health.heads

    @cached_property
    def compared(self) -> list[Compared]:
        """Prompts beside one another."""
        return compare(self.heads)

    @cached_property
    def ended(self) -> list[Compared]:
        """Of them, those that are as long as they got; all, when few are."""
        ended = [c for c in self.compared if not c.row.live]
        return ended if len(ended) >= FEW else self.compared

    @cached_property
    def short_share(self) -> float:
        """Share of the window in which some context with work waited for frames, 0..1."""
        return min(1.0, self.grew("some_ns") / self.window_ns) if self.window_ns > 0 else 0.0

    @cached_property
    def used_share(self) -> float:
        """Of the frames, those that contexts mapped when most did, 0..1."""
        least = min((s.free_frames + s.reclaimable_frames for s in self.window), default=0)
        return 1.0 - least / self.capacity_frames if self.capacity_frames else 0.0

    @cached_property
    def prompt_ns(self) -> float:
        """To compute a token of a prompt, of the length that prompts have here; 0: nobody has measured it."""
        costs = [(t.prefill_token_ns, t.prefill_pair_ns) for t in self.hbm if t.prefill_token_ns]
        if not costs:
            return 0.0
        lengths = [head.prompt_tokens for head in self.heads]
        middle = sum(lengths) / len(lengths) / 2 if lengths else 0.0
        return sum(token + pair * middle for token, pair in costs) / len(costs)

    def time_share(self, tokens: float) -> float:
        """What computing so many tokens of prompts was of the device's time in the window, 0..1."""
        if self.prompt_ns and self.grew("compute_ns"):
            return min(1.0, tokens * self.prompt_ns / self.grew("compute_ns"))
        return min(1.0, tokens / self.grew("computed_tokens")) if self.grew("computed_tokens") else 0.0

    @cached_property
    def prompt_share(self) -> float:
        """Of the device's time in the window, what went into prompts."""
        return self.time_share(max(0, self.grew("computed_tokens") - self.grew("generated_tokens")))


def read(source: Source, window_s: float = WINDOW_S) -> Facts:
    """Ask for everything.  What the caller's uid may not see is empty, and says nothing is wrong."""
    health = source.health()
    settings = {row.name: row.value for row in source.sysctl("").rows}
    samples = health.samples or (_NOTHING._replace(at_ns=health.at_ns),)
    last = samples[-1]
    first = next(s for s in samples if s.at_ns >= last.at_ns - window_s * 1e9)
    return Facts(
        source.uname(), source.tiers().tiers, source.vmstat().counters, settings, health, source.pressure(), first, last
    )


_NOTHING = SampleRow(*(0 for _ in SampleRow._fields))
