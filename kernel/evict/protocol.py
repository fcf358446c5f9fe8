"""What an eviction policy is to the kernel: a function from arrays to block numbers.

A policy never holds kernel objects and never calls a driver.  It may be wrong: the core refuses to evict a block that
is mapped, wired or has a child in the same device, and the kernel takes least-recently-released blocks for whatever a
policy leaves short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BlockView(Protocol):
    """The read-only view of the block table that a policy is given."""

    def oldest(self, device: int, want: int) -> Sequence[int]:
        """Up to `want` reclaimable blocks of `device`, least recently released first."""
        ...

    def reclaimable_frames(self, device: int) -> int: ...

    def frame_table(self, device: int) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes]:
        """Per frame: state uint8, refs int32, wired int32, block int32, stamp uint64, children int32."""
        ...

    def block_table(self) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]:
        """Per block: parent, domain, depth, hits int32, indexed uint8, key 16 bytes, copies int32 per device."""
        ...


class EvictionPolicy(Protocol):
    """Chosen by name at boot or by `sysctl evict.policy`."""

    name: str

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        """At least `want` blocks to free on `device`, first to go first, leaves before their parents."""
        ...
