"""What became of blocks that were brought up before anybody needed them.

A prefetched block is *in time* when a job finds it in the place that it was brought to, *late* when the job comes while
it is still on its way, and *wasted* when its copy there goes before any job came.  Until one of the three has happened it
is outstanding.  Partial tails are not followed: they are private frames, and there is one per context at most.

    prefetched_blocks = in time + late + wasted + abandoned + failed + outstanding
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .context import Context
    from .machine import Machine


class Prefetches:
    """Outstanding ones, by device and block; with the head of its key, since a number may stand for other content later."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine
        self._core = machine.core
        self._open: list[dict[int, int]] = [{} for _ in machine.devices]

    def __len__(self) -> int:
        return sum(len(blocks) for blocks in self._open)

    def begun(self, device: int, blocks: Sequence[int]) -> None:
        """Copies of these are on their way to `device`, for nobody yet."""
        while len(self._open) <= device:
            self._open.append({})
        keys = self._core.key_heads(blocks)
        row = self._open[device]
        new = {
            b: key for b, key in zip(blocks, keys, strict=True) if b not in row and self._core.copies_of(b)[device] >= 0
        }
        row.update(new)
        self._m.count("prefetched_blocks", len(new))

    def wanted(self, context: Context, loads: Sequence[int]) -> None:
        """A job wants this context in hbm: what it maps was prefetched to there, what it loads to a tier on the way.

        loads: CoreApi.loads of its admission."""
        if not any(self._open):
            return
        if self._open[context.device]:
            entries = self._core.row_entries(context.slot)
            self._found(context.device, list(zip(entries[::2], entries[1::2], strict=True)))
        for device in range(len(self._open)):
            if self._open[device]:
                mine = [(loads[k], loads[k + 2]) for k in range(0, len(loads), 4) if loads[k + 1] == device]
                self._found(device, mine)

    def _found(self, device: int, copies: Sequence[tuple[int, int]]) -> None:
        row = self._open[device]
        chosen = [(b, f) for b, f in copies if b in row]
        if not chosen:
            return
        unfinished = self._m.movers.unfinished()
        keys = self._core.key_heads([b for b, _ in chosen])
        other = [b for (b, _), key in zip(chosen, keys, strict=True) if row[b] != key]  # what was prefetched is gone
        self.gone(device, other)
        used = [(b, f) for b, f in chosen if row.pop(b, None) is not None]
        late = sum((device, f) in unfinished for _, f in used)
        self._m.count("prefetch_late_blocks", late)
        self._m.count("prefetch_in_time_blocks", len(used) - late)

    def gone(self, device: int, blocks: Sequence[int], why: str = "wasted") -> None:
        """Copies of these on `device` are there no more."""
        if device >= len(self._open) or not self._open[device]:
            return
        lost = sum(self._open[device].pop(b, None) is not None for b in blocks)
        if lost:
            self._m.count(f"prefetch_{why}_blocks", lost)
            if why == "wasted":
                self._m.count("prefetch_wasted_bytes", lost * self._m.costs.frame_bytes)

    def lost(self, device: int) -> None:
        """The device has lost everything."""
        if device < len(self._open):
            self.gone(device, list(self._open[device]), "failed")

    def outstanding(self) -> list[int]:
        """By device number."""
        return [len(row) for row in self._open]
