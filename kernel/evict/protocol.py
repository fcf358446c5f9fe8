"""What an eviction policy is to the kernel: a function from arrays to block numbers.

A policy never holds kernel objects and never calls a driver.  It may be wrong: the core refuses to evict a block that
is mapped, wired or has a child in the same device, and the kernel takes least-recently-released blocks for whatever a
policy leaves short.  There is one instance per device, so its state is of that device only.

All times are the kernel's `now_ns`; a policy reads no clock and draws no random number (it may keep a counter of its own
and mix it).  `inserted`, `used`, `ended` and `removed` are called only for policies that say `listens = True`: one call per
admission, transfer, turn or eviction, with all its blocks, along a context in its order (parents first).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Fact(NamedTuple):
    """What is known of one block.

    used_ns   last time a context mapped it or let go of it
    due_ns    when somebody said it will be wanted again (tool eta); 0: nobody did
    depth     tokens before it
    hits      admissions that found it
    kind      class number that the kernel gave it when its context's last turn ended (see KINDS)
    turn      turn of its context at that moment, from 1
    children  blocks that continue it, in any tier
    elsewhere 1 if another tier has a copy (evicting this one loses nothing but time)
    priority  0..100, 50 unless advised
    """

    used_ns: int
    due_ns: int
    depth: int
    hits: int
    kind: int
    turn: int
    children: int
    elsewhere: int
    priority: int


# Why the last turn of a block's context ended; the learned policy estimates per class.
KIND_NONE = 0  # never noted
KIND_TURN = 1  # the model ended its turn: a person may answer
KIND_TOOL = 2  # it waits for a tool
KIND_LENGTH = 3
KIND_CANCELLED = 4
KIND_CLOSED = 5  # its context was released
KIND_SUPERSEDED = 6  # cut off by truncate or left behind by a branch
KIND_DEMOTED = 7
# 16 + n: it waits for the n-th tool by name that the kernel has seen; KIND_TOOL beyond the first KIND_TOOLS.
KIND_FIRST_TOOL = 16
KIND_TOOLS = 48


class BlockView(Protocol):
    """The read-only view of the block table that a policy is given."""

    @property
    def now_ns(self) -> int: ...

    def oldest(self, device: int, want: int) -> Sequence[int]:
        """Up to `want` reclaimable blocks of `device`, least recently released first."""
        ...

    def sample(self, device: int, want: int, seed: int) -> Sequence[int]:
        """Up to `want` different reclaimable leaves of `device` (no child there), drawn by a generator started at `seed`."""
        ...

    def evictable(self, device: int, blocks: Sequence[int], want: int) -> Sequence[int]:
        """Those of `blocks` that could go from `device` if they went in this order, the first `want` of them: reclaimable,
        and each child there comes earlier in the answer.  For policies that keep a queue of their own."""
        ...

    def chain(self, device: int, leaf: int, want: int) -> Sequence[int]:
        """`leaf`, its parent, its parent's parent ..., up to `want` blocks that could go from `device` in this order; it ends
        before a block that is mapped, wired or has another child there.  For policies that look at leaves only."""
        ...

    def keys(self, blocks: Sequence[int]) -> Sequence[int]:
        """64 bits of each block's key: what remains of a block when its number is used for another (ghost lists)."""
        ...

    def facts(self, blocks: Sequence[int]) -> Sequence[Fact]: ...

    def rebuild_ns(self, depth: int) -> int:
        """Estimated time to compute one block at this depth again (kernel/cost.py)."""
        ...

    def reload_ns(self, device: int) -> int:
        """Estimated time to bring one block back into hbm from the tier below `device`; 0: there is none."""
        ...

    def capacity_frames(self, device: int) -> int: ...

    def reclaimable_frames(self, device: int) -> int: ...


class EvictionPolicy(Protocol):
    """Chosen by name per tier at boot or by `sysctl evict.<tier>`; third parties register the entry point group
    `attnix.eviction`.  One file each."""

    name: str
    listens: bool

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        """At least `want` blocks to free on `device`, first to go first, leaves before their parents."""
        ...

    def inserted(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        """Blocks that got a copy on `device`."""
        ...

    def used(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        """Blocks of `device` that an admission found."""
        ...

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        """A turn of a context ended; these are its blocks on `device`, and their facts have the new kind, turn and due_ns."""
        ...

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        """Blocks whose copy on `device` is gone; their numbers will be used for other content."""
        ...
