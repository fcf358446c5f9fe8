"""A model's weights on the device, and the share of them that one rank of a tensor-parallel group would hold.

Products are `x @ W.T`, so matrices stay as Hugging Face has them, [out, in]; q, k and v lie in one matrix, gate and up in
another.  `Shard` says which heads and which MLP columns are this rank's: with one rank, all.  Nothing in the engine takes
head counts from anywhere else, so that several ranks are a matter of two sums per layer (after o and after down) and of
who talks to whom, not of another engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..config import Array, ModelConfig
from ..model import rotary_frequencies


class Shard(NamedTuple):
    """One rank's part.  Requires: the ranks divide heads, KV heads and MLP columns."""

    ranks: int = 1
    rank: int = 0

    def part(self, total: int) -> slice:
        if total % self.ranks:
            raise ValueError(f"{self.ranks} ranks do not divide {total}")
        size = total // self.ranks
        return slice(self.rank * size, (self.rank + 1) * size)

    def share(self, total: int) -> int:
        self.part(total)
        return total // self.ranks


@dataclass(frozen=True, slots=True)
class Layer:
    """norm_attn, norm_ffn [hidden]; qkv [(Hq + 2 Hkv) D, hidden] and its bias; o [hidden, Hq D]; gate_up [2 n, hidden];
    down [hidden, n]; norm_q, norm_k [D]"""

    norm_attn: torch.Tensor
    norm_ffn: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    norm_q: torch.Tensor | None
    norm_k: torch.Tensor | None
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """heads, kv_heads, intermediate: this rank's; embed, head [vocab, hidden]; inv_freq [D / 2] f32"""

    heads: int
    kv_heads: int
    intermediate: int
    embed: torch.Tensor
    head: torch.Tensor
    norm_out: torch.Tensor
    inv_freq: torch.Tensor
    layers: tuple[Layer, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype


def as_tensor(array: Array) -> torch.Tensor:
    """A tensor over an array of weights, or over a copy where that may not be written; uint16 is bfloat16."""
    writable = np.require(array, requirements="W")
    if writable.dtype == np.uint16:
        return torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(writable)


def load_weights(
    config: ModelConfig,
    weights: Mapping[str, Array],
    device: torch.device,
    dtype: torch.dtype,
    shard: Shard = Shard(),  # noqa: B008 (immutable)
) -> DeviceWeights:
    """Copy the weights over, one tensor at a time.  Error: ValueError: shapes; MemoryError: no room on the device."""
    c, d = config, config.head_dim

    def rows(name: str, part: slice | None = None) -> torch.Tensor:
        tensor = as_tensor(weights[name])
        return (tensor if part is None else tensor[part]).to(device=device, dtype=dtype)

    def columns(name: str, part: slice) -> torch.Tensor:
        return as_tensor(weights[name])[:, part].to(device=device, dtype=dtype).contiguous()

    def of_heads(total: int) -> slice:
        part = shard.part(total)
        return slice(part.start * d, part.stop * d)

    def layer(number: int) -> Layer:
        at = f"model.layers.{number}."
        attn, mlp = at + "self_attn.", shard.part(c.intermediate)
        three = (("q_proj", of_heads(c.heads)), ("k_proj", of_heads(c.kv_heads)), ("v_proj", of_heads(c.kv_heads)))
        biases = [rows(f"{attn}{name}.bias", part) for name, part in three] if c.qkv_bias else []
        return Layer(
            norm_attn=rows(at + "input_layernorm.weight"),
            norm_ffn=rows(at + "post_attention_layernorm.weight"),
            qkv=torch.cat([rows(f"{attn}{name}.weight", part) for name, part in three]),
            qkv_bias=torch.cat(biases) if biases else None,
            norm_q=rows(attn + "q_norm.weight") if c.qk_norm else None,
            norm_k=rows(attn + "k_norm.weight") if c.qk_norm else None,
            o=columns(attn + "o_proj.weight", of_heads(c.heads)),
            gate_up=torch.cat([rows(at + "mlp.gate_proj.weight", mlp), rows(at + "mlp.up_proj.weight", mlp)]),
            down=columns(at + "mlp.down_proj.weight", mlp),
        )

    embed = rows("model.embed_tokens.weight")
    return DeviceWeights(
        heads=shard.share(c.heads),
        kv_heads=shard.share(c.kv_heads),
        intermediate=shard.share(c.intermediate),
        embed=embed,
        head=embed if c.tied else rows("lm_head.weight"),
        norm_out=rows("model.norm.weight"),
        inv_freq=torch.from_numpy(rotary_frequencies(c)).to(device),
        layers=tuple(layer(number) for number in range(c.layers)),
    )
