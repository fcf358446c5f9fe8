"""One transfer under way between the frames and the dram arena, as the mover and the passes that follow it see it."""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

from attnix.kernel.events import Transfer

from ..model import I64
from .device import Event

_GROUP_BYTES: Final = 1 << 20  # moved by one launch, at least: less does not fill a bus


class Moving:
    """bare, stored  [n]  frames of this accel and of the arena; event: of the last group, once all are issued."""

    def __init__(self, transfer: Transfer, layers: int, layer_bytes: int) -> None:
        pairs = np.frombuffer(transfer.pairs, np.int32).reshape(-1, 2)
        self.transfer = transfer
        self.bare: I64 = pairs[:, 0].astype(np.int64)
        self.stored = np.ascontiguousarray(pairs[:, 1])
        self.layers = layers
        # A gated load goes layer by layer; what nobody follows goes in one piece.
        gated = transfer.verb == "write" and transfer.gate >= 0
        self.group = min(layers, max(1, _GROUP_BYTES // (len(pairs) * layer_bytes))) if gated else layers
        self._changed = threading.Condition()
        self._events: list[Event] = []  # one per group of layers that the copy stream was given
        self._failed = self._over = False

    def __len__(self) -> int:
        return len(self.bare)

    @property
    def groups(self) -> list[tuple[int, int]]:
        """(first layer, layers) of each."""
        return [(first, min(self.group, self.layers - first)) for first in range(0, self.layers, self.group)]

    def issued(self, event: Event) -> None:
        """Another group was given to the copy stream, verified; the event is behind it."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def end(self, failed: bool) -> None:
        """Everything has happened, or will not."""
        with self._changed:
            self._over, self._failed = True, failed
            self._changed.notify_all()

    def wait(self) -> None:
        """Until it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over)

    def follow(self, layer: int, timeout_s: float) -> bool | None:
        """Let the compute stream go on to `layer` once it is there.  False: the load failed; None: not in this time."""
        wanted = layer // self.group
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._over or self._failed or len(self._events) > wanted, timeout=max(0.0, timeout_s)
            )
            if self._failed:
                return False
            event = self._events[wanted] if len(self._events) > wanted else None
        if event is not None:
            event.wait()
        return True if there else None

    def touches(self, frames: I64) -> bool:
        return bool(np.isin(self.bare, frames).any())
