"""A pass behind loads: layer by layer, it goes no further than they have come (kernel/tag.py, "gates").

Loads that this driver makes itself are followed on the device: the host waits until a layer's copies have been issued,
the compute stream for their event.  Any other loader tells the gate in shared memory, at which the host looks.
"""

from __future__ import annotations

import time
from typing import Final

from attnix.kernel.tag import GATE_FAILED

from ...stored import Gates
from ..model import I64, LoadFailed
from .carrier import DeviceCarrier
from .moving import Moving

_LATE: Final = 14  # engine.h's codes, which LoadFailed knows
_LOAD: Final = 13
_SLEEP_S: Final = 20e-6


class GateWait:
    """The waiting of one pass.  waited_ns: so far; is_open: nothing is to be waited for."""

    def __init__(self, gates: Gates, pairs: I64, layers: int, limit_ns: int, carrier: DeviceCarrier | None) -> None:
        self._gates, self._layers = gates, layers
        self._deadline_ns = time.monotonic_ns() + limit_ns
        self.waited_ns = 0
        self._waits: list[tuple[int, int, Moving | None]] = []
        for gate, ticket in pairs.tolist():
            own = None if carrier is None else carrier.following(gate, ticket)
            if own is not None or self._landed(gate, ticket) < layers:
                self._waits.append((gate, ticket, own))

    @property
    def is_open(self) -> bool:
        return not self._waits

    def layer(self, number: int) -> None:
        """Return when every load has brought this layer.  Error: LoadFailed."""
        began_ns = time.monotonic_ns()
        try:
            for gate, ticket, own in self._waits:
                if own is None:
                    self._look(gate, ticket, number)
                    continue
                there = own.follow(number, (self._deadline_ns - time.monotonic_ns()) / 1e9)
                if there is not True:
                    raise LoadFailed(_LATE if there is None else _LOAD, gate)
        finally:
            self.waited_ns += time.monotonic_ns() - began_ns

    def _look(self, gate: int, ticket: int, number: int) -> None:
        while (layers := self._landed(gate, ticket)) <= number:
            if layers < 0:
                raise LoadFailed(_LOAD, gate)
            if time.monotonic_ns() >= self._deadline_ns:
                raise LoadFailed(_LATE, gate)
            time.sleep(_SLEEP_S)

    def _landed(self, gate: int, ticket: int) -> int:
        """Layers that have landed; -1: the load failed; all of them when it is over."""
        value = self._gates.load(gate)
        if value >> 10 != ticket:
            return self._layers if value >> 10 > ticket else 0
        layers = value & 1023
        return -1 if layers == GATE_FAILED else layers
