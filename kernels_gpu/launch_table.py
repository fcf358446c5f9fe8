"""The launch rows: (kernel, architecture, head dim, block tokens, warps, stages, sizes); 0 = any.

Untuned: chosen by hand from what the ahead-of-time checks report (registers, shared memory), never measured on a device.
`python -m attnix.kernels_gpu.tune --write` replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Row = tuple[str, int, int, int, int, int, Mapping[str, int]]

ROWS: Final[tuple[Row, ...]] = (
    ("rmsnorm", 80, 0, 0, 8, 1, {}),
    ("rmsnorm", 90, 0, 0, 8, 1, {}),
    ("rmsnorm", 100, 0, 0, 8, 1, {}),
    ("silu_mul", 80, 0, 0, 4, 1, {"columns": 1024}),
    ("silu_mul", 90, 0, 0, 4, 1, {"columns": 1024}),
    ("silu_mul", 100, 0, 0, 4, 1, {"columns": 1024}),
    ("copy_frames", 80, 0, 0, 8, 1, {"words": 2048}),
    ("copy_frames", 90, 0, 0, 8, 1, {"words": 2048}),
    ("copy_frames", 100, 0, 0, 8, 1, {"words": 2048}),
    ("rope_write", 80, 0, 0, 4, 1, {"heads": 4}),
    ("rope_write", 90, 0, 0, 4, 1, {"heads": 4}),
    ("rope_write", 100, 0, 0, 4, 1, {"heads": 4}),
)
