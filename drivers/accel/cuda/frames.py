"""The frames of a CUDA device: one allocation, viewed as bytes by what moves frames and as K and V by the kernels.

With a mirror (tests only) the arena that the daemon shares shows the frames after every message and sets them before: the
conformance suite can look at bytes that else only the device sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from attnix.kernels_gpu.shapes import Frames

from ..config import KvDtype, ModelConfig
from .device import Device
from .ops import Ops


class DeviceFrames:
    """Error at construction: MemoryError, no room; ValueError.

    bytes_  [F, frame_bytes]  u8
    views   kernels_gpu's Frames over them
    """

    def __init__(
        self,
        config: ModelConfig,
        kv_dtype: KvDtype,
        block_tokens: int,
        capacity: int,
        device: Device,
        ops: Ops,
        kv_heads: int,
        mirror: Any = None,
    ) -> None:
        self.capacity, self.layers = capacity, config.layers
        self.frame_bytes = config.frame_bytes(block_tokens, kv_dtype) * kv_heads // config.kv_heads
        self.layer_bytes = self.frame_bytes // config.layers
        self._ops, self._device = ops, device
        total, free = capacity * self.frame_bytes, device.free_bytes()
        if total > free:
            raise MemoryError(f"{capacity} frames are {total} bytes and the device has {free} free: give less --hbm")
        try:
            self.bytes_ = torch.zeros((capacity, self.frame_bytes), dtype=torch.uint8, device=device.torch_device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{capacity} frames of {self.frame_bytes} bytes: {error}") from error
        self.views = Frames.over(
            self.bytes_, kv_dtype, layers=config.layers, kv_heads=kv_heads, block_tokens=block_tokens,
            head_dim=config.head_dim,
        )  # fmt: skip
        self._mirror: torch.Tensor | None = None
        if mirror is not None:
            whole = torch.frombuffer(mirror, dtype=torch.uint8)
            self._mirror = whole[:total].view(capacity, self.frame_bytes)
            self._shown = torch.zeros_like(self._mirror)

    def pull(self) -> None:
        """Take over what was written to the mirror since it was shown, and nothing else: loads may be under way."""
        if self._mirror is None:
            return
        changed = torch.nonzero(self._mirror != self._shown)
        if len(changed):
            frame, byte = changed.unbind(1)
            there = self.bytes_.device
            with self._device.computing():
                self.bytes_[frame.to(there), byte.to(there)] = self._mirror[frame, byte].to(there)
                self._device.mark().synchronize()  # a copy stream may read them next, and waits for nobody
            self._shown.copy_(self._mirror)

    def show(self) -> None:
        if self._mirror is not None:
            self._shown.copy_(self.bytes_)
            self._mirror.copy_(self._shown)

    def wipe(self) -> None:
        self.bytes_.zero_()

    def drop(self, frames: Sequence[int]) -> None:
        index = torch.tensor(list(frames), dtype=torch.int64, device=self._device.torch_device)
        self.bytes_.index_fill_(0, index, 0)

    def copy(self, pairs: torch.Tensor, apart: bool, first_layer: int = 0, layers: int = 0) -> None:
        """Copy on write: pairs [n, 2] i32 on the device, in any order (`resolved`).  apart: no source is also a target."""
        source = self.bytes_
        if not apart:
            source = self.bytes_.index_select(0, pairs[:, 0])
            aside = torch.arange(len(pairs), dtype=torch.int32, device=pairs.device)
            pairs = torch.stack((aside, pairs[:, 1]), 1).contiguous()
        self._ops.copy_frames(
            source, self.bytes_, pairs, layer_bytes=self.layer_bytes, first_layer=first_layer, layers=layers
        )


def resolved(copies: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Copies that are made in order, as copies that may be made all at once from what was there before the first.

    ->  (source, target) pairs with no target twice; a source may be another's target
    """
    origin: dict[int, int] = {}
    for source, target in copies:
        origin[target] = origin.get(source, source)
    return [(source, target) for target, source in origin.items() if source != target]
