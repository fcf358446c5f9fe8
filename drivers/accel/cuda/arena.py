"""The dram arena as a device copies from it and to it: the payloads of stored frames, between their headers."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from attnix.kernel.tag import HEADER_BYTES, stored_bytes

from .device import Device, Work
from .frames import DeviceFrames
from .ops import Ops


class StoredArena:
    """buffer: the arena; payload [frames, frame_bytes] u8, the KV in it; is_pinned: registered, so the device reads and
    writes it in place."""

    def __init__(self, buffer: Any, frame_bytes: int, is_pinned: bool) -> None:
        size = stored_bytes(frame_bytes)
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
        slots = whole.numel() // size
        self.buffer, self.is_pinned = buffer, is_pinned
        self.payload = whole[: slots * size].view(slots, size)[:, HEADER_BYTES : HEADER_BYTES + frame_bytes]

    def copies(
        self,
        verb: Literal["read", "write"],
        frames: DeviceFrames,
        bare: npt.NDArray[Any],
        stored: npt.NDArray[Any],
        device: Device,
        ops: Ops,
        first: int = 0,
        layers: int = 0,
    ) -> Work:
        """Some layers of frames, as work for a stream; layers 0: all.  "read": to the arena, as in a transfer.

        bare, stored  [n >= 1]  frames of the device and of the arena
        Error: MemoryError or AcceleratorError, no pinned memory for their numbers.
        """
        layers = layers or frames.layers
        source, target = (frames.bytes_, self.payload) if verb == "read" else (self.payload, frames.bytes_)
        pairs = device.staging((len(bare), 2), torch.int32)
        pairs.numpy()[:] = np.stack((bare, stored) if verb == "read" else (stored, bare), 1)
        a, b = first * frames.layer_bytes, (first + layers) * frames.layer_bytes

        def work() -> None:
            if self.is_pinned and frames.layer_bytes % 8 == 0:
                there = pairs.to(device.torch_device, non_blocking=True)
                ops.copy_frames(source, target, there, layer_bytes=frames.layer_bytes, first_layer=first, layers=layers)
                return
            for one, other in pairs.tolist():
                target[other, a:b].copy_(source[one, a:b])

        return work
