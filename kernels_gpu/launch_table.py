"""The launch rows: kernel, architecture, head dim, block tokens (0 = any), then shapes.Launch: block_m, block_n, warps, stages,
programs.

Untuned: chosen by hand from what the ahead-of-time checks report (registers, shared memory), never measured on a device.
`python -m attnix.kernels_gpu.tune --write` replaces the rows of the device that it runs on.
"""

from __future__ import annotations

from typing import Final

Row = tuple[str, int, int, int, int, int, int, int, int]

ROWS: Final[tuple[Row, ...]] = (
    ("copy_frames", 80, 0, 0, 1, 2048, 8, 1, 1),
    ("copy_frames", 90, 0, 0, 1, 2048, 8, 1, 1),
    ("copy_frames", 100, 0, 0, 1, 2048, 8, 1, 1),
    ("rmsnorm", 80, 0, 0, 1, 0, 8, 1, 1),
    ("rmsnorm", 90, 0, 0, 1, 0, 8, 1, 1),
    ("rmsnorm", 100, 0, 0, 1, 0, 8, 1, 1),
    ("rope_write", 80, 0, 0, 4, 0, 4, 1, 1),
    ("rope_write", 90, 0, 0, 4, 0, 4, 1, 1),
    ("rope_write", 100, 0, 0, 4, 0, 4, 1, 1),
    ("silu_mul", 80, 0, 0, 1, 1024, 4, 1, 1),
    ("silu_mul", 90, 0, 0, 1, 1024, 4, 1, 1),
    ("silu_mul", 100, 0, 0, 1, 1024, 4, 1, 1),
)
