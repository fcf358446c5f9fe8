"""How each kernel is launched: tile sizes, warps and stages by architecture, head dim and block size.

All of it comes from the rows of launch_table.py.  Nothing is tuned while serving: a kernel that picked its tiles by
racing them would sum in another order from one boot to the next.  `python -m attnix.kernels_gpu.tune` measures on a
device and writes the rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Final

import torch

from .launch_table import ROWS, Row
from .shapes import FP8_CAPABILITY, Launch

ARCHITECTURES: Final = (80, 90, 100)
SHARED_BYTES: Final = {
    80: 166_912,
    90: 232_448,
    100: 232_448,
}  # of one program; CUDA C++ guide, "technical specifications"
INTERPRETER_ARCHITECTURE: Final = 80  # whose rows the interpreter takes

_compiling_for: int | None = None
_taken: set[Row] = set()  # while compiling


def launch(kernel: str, architecture: int, head_dim: int = 0, block_tokens: int = 0) -> Launch:
    """The row that fits best: head dim and block size, then head dim alone, block size alone, then the kernel's own.

    architecture  one of ARCHITECTURES
    head_dim, block_tokens  0 for kernels that have none
    Error: KeyError when the table has no row.
    """
    row = _nearest(kernel, architecture, head_dim, block_tokens)
    if _compiling_for is not None:
        _taken.add(row)
    return Launch(*row[4:])


@functools.cache
def _nearest(kernel: str, architecture: int, head_dim: int, block_tokens: int) -> Row:
    for head, block in ((head_dim, block_tokens), (head_dim, 0), (0, block_tokens), (0, 0)):
        for row in ROWS:
            if row[:4] == (kernel, architecture, head, block):
                return row
    raise KeyError(f"no launch row for {kernel}, sm_{architecture}, head dim {head_dim}, blocks of {block_tokens}")


def architecture_of(device: torch.device) -> int:
    """Whose rows to take: the newest of ARCHITECTURES that is not newer than the device.

    Error: ValueError for a GPU older than sm_80.
    """
    if _compiling_for is not None:
        return _compiling_for
    if device.type != "cuda":
        return INTERPRETER_ARCHITECTURE
    major, minor = _capability(device)
    known = [architecture for architecture in ARCHITECTURES if architecture <= 10 * major + minor]
    if not known:
        raise ValueError(f"the kernels need compute capability 8.0 or later, this GPU has {major}.{minor}")
    return known[-1]


def has_fp8(device: torch.device) -> bool:
    """Whether frames may hold float8_e4m3fn: compute capability 8.9 or later, or the interpreter."""
    if _compiling_for is not None:
        return _compiling_for >= 10 * FP8_CAPABILITY[0] + FP8_CAPABILITY[1]
    return device.type != "cuda" or _capability(device) >= FP8_CAPABILITY


def is_compiling() -> bool:
    """Whether launches only compile (aot.py): then the tensors are the host's, and nothing runs."""
    return _compiling_for is not None


@contextlib.contextmanager
def compiling_for(architecture: int) -> Iterator[set[Row]]:
    """Every launch inside takes this architecture's rows, whatever the machine has: ahead-of-time compilation.

    Yields the rows that are taken, as they are taken.
    """
    global _compiling_for, _taken
    before, _compiling_for, _taken = _compiling_for, architecture, set()
    try:
        yield _taken
    finally:
        _compiling_for = before


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
