"""What a GPU allows, measured beside the engines: copies within its memory, bfloat16 products in torch.

`cuda-dry` takes the same steps with tiny tensors on the CPU: whether they work, not what they measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

COPY_BYTES = 1 << 30  # far beyond the caches
SQUARE = 8192
ROUNDS = 5
DRY_BYTES, DRY_SQUARE = 1 << 16, 64


class Engine:
    """bandwidth, gemm: the best of some rounds."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._torch: Any = import_module("torch")
        torch = self._torch
        self._is_dry = settings["device"] == "cuda-dry"
        device = torch.device("cpu" if self._is_dry else "cuda")
        n_bytes, self._n = (DRY_BYTES, DRY_SQUARE) if self._is_dry else (COPY_BYTES, SQUARE)
        self._source, self._target = (torch.ones(n_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        self._a, self._b = (torch.randn(self._n, self._n, device=device).to(torch.bfloat16) for _ in range(2))
        name = "dry run" if self._is_dry else torch.cuda.get_device_name(device)
        self.version = f"torch {torch.__version__}, {name}"
        self.bandwidth()  # warm
        self.gemm()

    def bandwidth(self) -> float:
        """Bytes per second, read and written."""
        return 2 * float(self._source.numel()) / self._best(lambda: self._target.copy_(self._source))

    def gemm(self) -> float:
        """Operations per second (a multiplication and an addition are two)."""
        return 2 * self._n**3 / self._best(lambda: self._torch.mm(self._a, self._b))

    def _best(self, call: Callable[[], Any]) -> float:
        """Seconds, by the device's own clock."""
        return min(self._seconds(call) for _ in range(ROUNDS))

    def _seconds(self, call: Callable[[], Any]) -> float:
        if self._is_dry:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
