"""What a policy sees of the kernel: see protocol.BlockView."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..records import FACT
from .protocol import Fact

if TYPE_CHECKING:
    from ..machine import Machine


class KernelView:
    """Reads the core of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._core = machine.core

    @property
    def now_ns(self) -> int:
        return self._m.now_ns

    def oldest(self, device: int, want: int) -> Sequence[int]:
        return self._core.oldest(device, want)

    def sample(self, device: int, want: int, seed: int) -> Sequence[int]:
        return self._core.sample(device, want, seed)

    def evictable(self, device: int, blocks: Sequence[int], want: int) -> Sequence[int]:
        return self._core.evictable(device, blocks, want)

    def chain(self, device: int, leaf: int, want: int) -> Sequence[int]:
        return self._core.chain(device, leaf, want)

    def keys(self, blocks: Sequence[int]) -> Sequence[int]:
        return self._core.key_heads(blocks)

    def facts(self, blocks: Sequence[int]) -> Sequence[Fact]:
        return [
            Fact(used, due, depth, hits, kind, turn, children, 1 if mask & (mask - 1) else 0, priority)
            for used, due, depth, hits, turn, children, _, kind, priority, mask, _ in FACT.iter_unpack(
                self._core.facts(blocks)
            )
        ]

    def rebuild_ns(self, depth: int) -> int:
        return self._m.costs.rebuild_ns(0, depth)

    def reload_ns(self, device: int) -> int:
        below = self._m.tiers.below(device)
        return int(self._m.costs.link(below.index, "read").ns(self._m.costs.frame_bytes)) if below else 0

    def capacity_frames(self, device: int) -> int:
        return self._m.devices[device].capacity

    def reclaimable_frames(self, device: int) -> int:
        return self._core.reclaimable_frames(device)
