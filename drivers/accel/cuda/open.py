"""Which device and which hands an engine gets: CUDA with Triton, or a dry run on the CPU.

A dry run (`--device cuda-dry`) is this engine on CPU tensors, with plain torch for the kernels, or with
ATTNIX_CUDA_DRY=interpreter with the Triton kernels in Triton's interpreter: slow, the very kernels.  It is for tests and
for trying `make gpu` where there is no GPU; nobody should serve with it.
"""

from __future__ import annotations

import os
from typing import Final, Literal

from attnix.kernels_gpu.shapes import BLOCK_TOKENS, HEAD_DIMS, Numerics

from ..config import ModelConfig
from .device import CudaDevice, Device, DryDevice
from .ops import Ops, TorchOps

DRY_VARIABLE: Final = "ATTNIX_CUDA_DRY"
MOST_QUERY_HEADS: Final = 32


def open_device(
    device: Literal["cuda", "cuda-dry"], ordinal: int, numerics: Numerics, config: ModelConfig, block_tokens: int
) -> tuple[Device, Ops]:
    """Error: ValueError: no such device, no triton, or a model that the kernels cannot run."""
    if device == "cuda-dry":
        if os.environ.get(DRY_VARIABLE, "torch") != "interpreter":
            return DryDevice("cuda-dry/torch"), TorchOps()
        _check(config, block_tokens)
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
        return DryDevice("cuda-dry/interpreter"), _triton_ops(numerics)
    _check(config, block_tokens)
    return CudaDevice(ordinal), _triton_ops(numerics)


def _check(config: ModelConfig, block_tokens: int) -> None:
    if config.head_dim not in HEAD_DIMS:
        raise ValueError(f"head dim {config.head_dim}: the CUDA kernels have {', '.join(map(str, HEAD_DIMS))}")
    if block_tokens not in BLOCK_TOKENS:
        raise ValueError(f"blocks of {block_tokens} tokens: the CUDA kernels have {', '.join(map(str, BLOCK_TOKENS))}")
    if config.heads // config.kv_heads > MOST_QUERY_HEADS:
        raise ValueError(
            f"{config.heads // config.kv_heads} query heads per KV head: the CUDA kernels take {MOST_QUERY_HEADS}"
        )


def _triton_ops(numerics: Numerics) -> Ops:
    from .triton_ops import TritonOps

    return TritonOps(numerics)
