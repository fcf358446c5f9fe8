"""Which device and which hands an engine gets: CUDA with Triton, or a dry run on the CPU.

A dry run (`--device cuda-dry`) is this engine on CPU tensors, with plain torch for the kernels, or with
ATTNIX_CUDA_DRY=interpreter with the Triton kernels in Triton's interpreter: slow, the very kernels.  It is for tests and
for trying `make gpu` where there is no GPU; nobody should serve with it.
"""

from __future__ import annotations

import os
from typing import Final, Literal

from attnix.kernels_gpu.shapes import Numerics

from .device import CudaDevice, Device, DryDevice
from .ops import Ops, TorchOps

DRY_VARIABLE: Final = "ATTNIX_CUDA_DRY"


def open_device(device: Literal["cuda", "cuda-dry"], ordinal: int, numerics: Numerics) -> tuple[Device, Ops]:
    """Error: ValueError: no such device, or no triton."""
    if device == "cuda-dry":
        if os.environ.get(DRY_VARIABLE, "torch") != "interpreter":
            return DryDevice("cuda-dry/torch"), TorchOps()
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
        return DryDevice("cuda-dry/interpreter"), _triton_ops(numerics)
    return CudaDevice(ordinal), _triton_ops(numerics)


def _triton_ops(numerics: Numerics) -> Ops:
    from .triton_ops import TritonOps

    return TritonOps(numerics)
