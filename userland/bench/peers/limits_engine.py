"""What the machine allows, measured beside the engines: streaming reads by every core, bfloat16 products in torch."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

STREAM_BYTES = 1 << 30  # in all threads together: far beyond the caches
SHAPES = ((2048, 2048, 2048), (1024, 3072, 576), (512, 576, 1536))  # a square, and SmolLM2's two largest products


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._np: Any = import_module("numpy")
        self._torch: Any = import_module("torch")
        self._threads = int(settings["threads"])
        self._torch.set_num_threads(self._threads)
        self._parts = [self._np.ones(STREAM_BYTES // self._threads // 8, self._np.int64) for _ in range(self._threads)]
        self._pool = ThreadPoolExecutor(self._threads)
        randn, bf16 = self._torch.randn, self._torch.bfloat16
        self._products = [(randn(m, k).to(bf16), randn(n, k).to(bf16)) for m, n, k in SHAPES]
        self.version = f"numpy {self._np.__version__}, torch {self._torch.__version__}"
        self.bandwidth(), self.gemm()

    def bandwidth(self) -> float:
        """Bytes per second: the best of three passes over 1 GiB."""
        best = 0.0
        for _ in range(3):
            began = time.perf_counter()
            list(self._pool.map(self._np.bitwise_or.reduce, self._parts))  # numpy lets go of the interpreter meanwhile
            best = max(best, STREAM_BYTES / (time.perf_counter() - began))
        return best

    def gemm(self) -> float:
        """Operations per second (a multiplication and an addition are two): the best shape, the best of five."""
        linear = self._torch.nn.functional.linear
        best = 0.0
        with self._torch.inference_mode():
            for (m, n, k), (a, b) in zip(SHAPES, self._products, strict=True):
                for _ in range(5):
                    began = time.perf_counter()
                    linear(a, b)
                    best = max(best, 2 * m * n * k / (time.perf_counter() - began))
        return best
