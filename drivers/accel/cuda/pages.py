"""The page-table rows on the device: the same rows as in shared memory, brought up to date before each pass.

A decode step changes one entry per sequence, so what travels is what changed: the host keeps what it sent last and
compares.  The rows in shared memory stay the only truth; what is on the device is a copy that nobody else writes.
"""

from __future__ import annotations

import numpy as np
import torch

from attnix.kernels_gpu.shapes import PageTable

from ..model import I32, I64
from .checks import Table


class DevicePages:
    """Rows of `slots` x `entries`, empty at first."""

    def __init__(self, slots: int, entries: int, device: torch.device) -> None:
        shape = (slots, entries)
        self.entries = entries
        self._frame = np.full(shape, -1, np.int32)
        self._shift = np.zeros(shape, np.int32)
        self._count = np.zeros(shape, np.int32)
        self.table = PageTable(
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int16, device=device),
        )

    def changes(self, slot: I32, table: Table) -> I32:
        """What differs from what was sent: [4, n] i32 (flat index, frame, shift, count)."""
        width = table.frame.shape[1]
        old = (self._frame[slot, :width], self._shift[slot, :width], self._count[slot, :width])
        new = (table.frame, table.shift, table.counts)
        differs = (old[0] != new[0]) | (old[1] != new[1]) | (old[2] != new[2])
        row, entry = np.nonzero(differs)
        values = [part[row, entry] for part in new]
        at: I64 = slot[row].astype(np.int64) * self.entries + entry
        return np.stack([at.astype(np.int32), *values])

    def apply(self, sent: I32, changes: torch.Tensor) -> None:
        """sent [4, n] i32, and the same on the device."""
        if sent.shape[1] == 0:
            return
        at = changes[0].long()
        self.table.frame.view(-1).index_copy_(0, at, changes[1])
        self.table.shift.view(-1).index_copy_(0, at, changes[2])
        self.table.count.view(-1).index_copy_(0, at, changes[3].short())
        # Only now: what failed on the way is sent again by the next pass.
        for kept, value in zip((self._frame, self._shift, self._count), sent[1:], strict=True):
            kept.reshape(-1)[sent[0]] = value
