"""What an error of a device means: its memory ran out, and the next pass may fit; or nothing can be computed any more.

Memory runs out in more places than torch's allocator: a graph's instantiation and pinned memory fail with CUDA's own error
2, Triton's launches and cuBLAS's handles with a text.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

import torch

_MEMORY_ALLOCATION: Final = 2  # cudaErrorMemoryAllocation
_TEXTS: Final = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or its pinned memory ran out.  Such an error does not stick."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if getattr(error, "error_code", 0) == _MEMORY_ALLOCATION and isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def end_driver(error: Exception) -> NoReturn:
    """An error of the device that sticks: nothing in this process can be computed any more, a restart is what helps."""
    print(f"attnix.drivers.accel: the device failed: {error}", file=sys.stderr, flush=True)
    os._exit(os.EX_SOFTWARE)


@contextlib.contextmanager
def answered(trim: Callable[[], None]) -> Iterator[None]:
    """Errors of the device, as a pass has them: MemoryError, after `trim`; one that sticks ends the driver."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            trim()
            raise MemoryError(f"the device is out of memory: {error}") from error
        if isinstance(error, torch.AcceleratorError):
            end_driver(error)
        raise


def take_last_error(launch: Callable[[], None]) -> None:
    """A call that CUDA refused is told again to the next launch of this thread, whoever's it is (cudaGetLastError), and
    torch binds nothing that takes the error away.  So let a launch of ours be told, and see that the next one is not.
    """
    with contextlib.suppress(torch.AcceleratorError):
        launch()
    launch()
