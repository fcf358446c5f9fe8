"""What the attention kernels check before they are launched, and the constants of the invariant mode."""

from dataclasses import replace
from typing import Any, Final

import torch

from .lang import is_interpreted, tl
from .launch import architecture_of, has_fp8, is_compiling, launch
from .shapes import BLOCK_TOKENS, HEAD_DIMS, Batch, Frames, Launch

INVARIANT_PLACES: Final = 1024  # places of one split in invariant mode; part of the numerics, not a launch parameter
INTERPRETED_PROCESSORS: Final = 3
MOST_HEADS: Final = 32  # query heads of a KV head


def padded(n: int, least: int) -> int:
    """The power of two from `least` on that n fits in."""
    return max(least, 1 << (n - 1).bit_length())


def processors(device: torch.device) -> int:
    """Multiprocessors of a device; of the interpreter, a small number of programs that take turns."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def compute_type(q: torch.Tensor, frames: Frames) -> Any:
    """The dtype that the tensor cores multiply: that of the KV, or of q where the KV is int8 or fp8 (both exact in it)."""
    dtype = q.dtype if frames.scale is not None else frames.kv.dtype
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def checked(q: torch.Tensor, frames: Frames, batch: Batch) -> tuple[int, int]:
    """Query heads per KV head, and D.  Error: ValueError when the kernels cannot do these shapes."""
    _, q_heads, head_dim = q.shape
    if q_heads % frames.kv_heads != 0 or q_heads // frames.kv_heads > MOST_HEADS:
        raise ValueError(f"{q_heads} query heads over {frames.kv_heads} KV heads")
    if head_dim not in HEAD_DIMS or frames.head_dim != head_dim:
        raise ValueError(f"head_dim {head_dim} over frames of {frames.head_dim}: it is one of {HEAD_DIMS}")
    if frames.block_tokens not in BLOCK_TOKENS:
        raise ValueError(f"block_tokens {frames.block_tokens} is not one of {BLOCK_TOKENS}")
    if q.stride(2) != 1 or frames.kv.stride(5) != 1:
        raise ValueError("a head's elements must follow one another")
    if q.device.type != "cuda" and not is_interpreted() and not is_compiling():
        raise RuntimeError(
            "the kernels run on CUDA tensors; on CPU tensors only in triton's interpreter (TRITON_INTERPRET=1)"
        )
    if frames.kv.dtype == torch.float8_e4m3fn and not has_fp8(q.device):
        raise ValueError("fp8 KV needs compute capability 8.9")
    return q_heads // frames.kv_heads, head_dim


def decode_launch(device: torch.device, frames: Frames) -> Launch:
    """Decode's launch parameters: the table's, which are for 16-bit KV.

    Narrow KV is widened in registers, so its tiles are half as long; float32 has one row, here.
    """
    if frames.kv.dtype == torch.float32:
        return Launch(
            block_m=16, block_n=32 if frames.head_dim == 64 else 16, warps=8 if frames.head_dim > 128 else 4, stages=2
        )
    row = launch("paged_decode", architecture_of(device), frames.head_dim, frames.block_tokens)
    return row if frames.scale is None else replace(row, block_n=max(16, row.block_n // 2))


def prefill_launch(device: torch.device, frames: Frames) -> Launch:
    """Prefill's launch parameters: the table's; float32 has one row, here."""
    if frames.kv.dtype == torch.float32:
        return Launch(block_m=32, block_n=32, warps=8, stages=1)
    return launch("paged_prefill", architecture_of(device), frames.head_dim, frames.block_tokens)


def invariant_launch(frames: Frames) -> Launch:
    """The one tile shape per dtype and head dim of the invariant mode, for decode and prefill alike.

    Not from the launch table: another shape gives other bits, and KV computed with one must equal that computed with the other.
    """
    if frames.kv.dtype == torch.float32:
        return Launch(block_m=32, block_n=16 if frames.head_dim > 128 else 32, warps=8, stages=1)
    return Launch(block_m=64, block_n=32, warps=8, stages=2)
