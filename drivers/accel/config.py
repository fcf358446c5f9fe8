"""The shape of a model: everything the forward pass and the frame arena need to know, and nothing about files.

Architectures are one family, the Llama block (RMSNorm, rotary attention with grouped KV heads, SwiGLU), with switches:
Mistral adds a sliding window, Qwen2 biases on q/k/v, Qwen3 an RMSNorm over each head of q and k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy.typing as npt

from attnix.kernel.geometry import KvShape

Arch = Literal["llama", "mistral", "qwen2", "qwen3"]
KvDtype = Literal["float32", "bfloat16", "int8"]  # of frames
Dtype = Literal["float32", "bfloat16"]  # of packed weights
Array = npt.NDArray[Any]  # of weights as they are read: floats, or bit patterns of bfloat16 as uint16

ELEMENT_BYTES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "int8": 1}
SCALE_BYTES: Final[dict[str, int]] = {"float32": 0, "bfloat16": 0, "int8": 4}  # per head and token, of K and of V


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched past the window the model was trained on.

    `linear` divides every frequency by `factor` (position interpolation, arXiv 2306.15595).  `llama3` leaves short
    wavelengths alone, divides long ones by `factor` and blends between (Llama 3.1 model card, "RoPE scaling").
    """

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_window: int = 8192  # tokens


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and constants of one model.  Requires: heads % kv_heads == 0 and head_dim even."""

    arch: Arch
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int  # tokens, the longest context
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    tied: bool = False  # lm_head is the embedding matrix
    sliding_window: int | None = None  # tokens a position sees, itself included

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads != 0:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2 != 0:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: rotary pairs")

    def kv_shape(self, kv_dtype: KvDtype) -> KvShape:
        """What a token's KV weighs in frames of this dtype."""
        return KvShape(self.layers, self.kv_heads, self.head_dim, ELEMENT_BYTES[kv_dtype], SCALE_BYTES[kv_dtype])

    def token_bytes(self, kv_dtype: KvDtype) -> int:
        """Live KV of one token over all layers."""
        return self.kv_shape(kv_dtype).token_bytes

    def frame_bytes(self, block_tokens: int, kv_dtype: KvDtype) -> int:
        """Bytes of one frame."""
        return self.kv_shape(kv_dtype).frame_bytes(block_tokens)


def weight_scalars(config: ModelConfig) -> int:
    """How many numbers a model's weights are: boot sizes frames by what they leave."""
    c = config
    attention = (2 * c.heads + 2 * c.kv_heads) * c.head_dim * c.hidden
    biases = (c.heads + 2 * c.kv_heads) * c.head_dim if c.qkv_bias else 0
    layer = attention + biases + 3 * c.hidden * c.intermediate + 2 * c.hidden + (2 * c.head_dim if c.qk_norm else 0)
    return c.layers * layer + c.hidden + c.vocab * c.hidden * (1 if c.tied else 2)
