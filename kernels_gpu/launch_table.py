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
    ("paged_decode", 80, 64, 0, 16, 64, 4, 5, 2),
    ("paged_decode", 80, 96, 0, 16, 64, 4, 5, 2),
    ("paged_decode", 80, 128, 0, 16, 64, 4, 5, 2),
    ("paged_decode", 80, 256, 0, 16, 32, 4, 5, 2),
    ("paged_decode", 90, 64, 0, 16, 64, 4, 5, 2),
    ("paged_decode", 90, 96, 0, 16, 64, 4, 5, 2),
    ("paged_decode", 90, 128, 0, 16, 64, 4, 5, 2),
    ("paged_decode", 90, 256, 0, 16, 32, 4, 5, 2),
    ("paged_decode", 100, 64, 0, 16, 64, 4, 5, 2),
    ("paged_decode", 100, 96, 0, 16, 64, 4, 5, 2),
    ("paged_decode", 100, 128, 0, 16, 64, 4, 5, 2),
    ("paged_decode", 100, 256, 0, 16, 32, 4, 5, 2),
    ("paged_prefill", 80, 64, 0, 128, 64, 8, 2, 1),
    ("paged_prefill", 80, 96, 0, 128, 32, 8, 2, 1),
    ("paged_prefill", 80, 128, 0, 128, 32, 8, 2, 1),
    ("paged_prefill", 80, 256, 0, 64, 32, 8, 2, 1),
    ("paged_prefill", 90, 64, 0, 128, 64, 8, 2, 1),
    ("paged_prefill", 90, 96, 0, 128, 64, 8, 2, 1),
    ("paged_prefill", 90, 128, 0, 128, 64, 8, 2, 1),
    ("paged_prefill", 90, 256, 0, 64, 32, 8, 2, 1),
    ("paged_prefill", 100, 64, 0, 128, 64, 8, 2, 1),
    ("paged_prefill", 100, 96, 0, 128, 64, 8, 2, 1),
    ("paged_prefill", 100, 128, 0, 128, 64, 8, 2, 1),
    ("paged_prefill", 100, 256, 0, 64, 32, 8, 2, 1),
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
