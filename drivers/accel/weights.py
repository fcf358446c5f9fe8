"""Weights of a model as torch tensors under their Hugging Face names, from safetensors or GGUF.

    model.embed_tokens.weight                                   [vocab, hidden]
    model.layers.{i}.input_layernorm.weight                     [hidden]
    model.layers.{i}.self_attn.{q,k,v}_proj.weight              [heads or kv_heads x head_dim, hidden]
    model.layers.{i}.self_attn.{q,k,v}_proj.bias                when qkv_bias
    model.layers.{i}.self_attn.{q,k}_norm.weight                [head_dim], when qk_norm
    model.layers.{i}.self_attn.o_proj.{weight,bias}             [hidden, heads x head_dim]
    model.layers.{i}.post_attention_layernorm.weight            [hidden]
    model.layers.{i}.mlp.{gate,up}_proj.weight                  [intermediate, hidden]
    model.layers.{i}.mlp.down_proj.weight                       [hidden, intermediate]
    model.norm.weight                                           [hidden]
    lm_head.weight                                              [vocab, hidden], absent when tied

Files are mapped, and tensors are converted one at a time: never two copies of the whole.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import safetensors
import torch

from attnix.gguf_header import GgufError, read_header

from .config import ModelConfig
from .gguf_weights import read_tensors
from .metadata import Metadata, config_of
from .model_files import ModelError, find_files

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")  # buffers that old checkpoints saved


def load_model(
    path: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> tuple[ModelConfig, dict[str, torch.Tensor], Metadata]:
    """Read geometry and weights.

    dtype  what the tensors are converted to; None: as stored (float32 where quantised)
    Error: ModelError: not supported, incomplete, truncated, or shapes that do not fit the geometry.
    """
    files = find_files(path)
    config = config_of(files)
    shapes = expected_shapes(config)
    stored: Counter[str] = Counter()
    weights: dict[str, torch.Tensor] = {}
    if files.layout == "hf":
        tensors = _safetensors(files.weights, set(shapes), stored)
    else:
        try:
            header = read_header(files.path)
        except GgufError as error:
            raise ModelError(str(error)) from error
        tensors = read_tensors(header, config, stored)
    for name, tensor in tensors:
        if name not in shapes:
            raise ModelError(f"{files.path} has the tensor {name}, which a {config.arch} model of this shape has no place for")
        if tuple(tensor.shape) != shapes[name]:
            raise ModelError(f"{files.path}: {name} has shape {tuple(tensor.shape)}, the geometry says {shapes[name]}")
        weights[name] = tensor if dtype is None else tensor.to(dtype)
    missing = [name for name in shapes if name not in weights]
    if missing:
        raise ModelError(
            f"{files.path} lacks {len(missing)} of {len(shapes)} tensors, the first is {missing[0]}: fetch the model again"
        )
    storage = ", ".join(kind for kind, _ in stored.most_common())
    return config, weights, Metadata(files, storage, sum(tensor.numel() for tensor in weights.values()))


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this geometry has."""
    hidden, wide = config.hidden, config.intermediate
    rows = {"q": config.heads * config.head_dim, "k": config.kv_heads * config.head_dim, "v": config.kv_heads * config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, hidden)}
    for layer in range(config.layers):
        block = f"model.layers.{layer}."
        shapes[block + "input_layernorm.weight"] = (hidden,)
        for letter, size in rows.items():
            shapes[block + f"self_attn.{letter}_proj.weight"] = (size, hidden)
            if config.qkv_bias:
                shapes[block + f"self_attn.{letter}_proj.bias"] = (size,)
        if config.qk_norm:
            shapes[block + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[block + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[block + "self_attn.o_proj.weight"] = (hidden, rows["q"])
        if config.o_bias:
            shapes[block + "self_attn.o_proj.bias"] = (hidden,)
        shapes[block + "post_attention_layernorm.weight"] = (hidden,)
        shapes[block + "mlp.gate_proj.weight"] = (wide, hidden)
        shapes[block + "mlp.up_proj.weight"] = (wide, hidden)
        shapes[block + "mlp.down_proj.weight"] = (hidden, wide)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, hidden)
    return shapes


def _safetensors(files: tuple[Path, ...], wanted: set[str], stored: Counter[str]) -> Iterator[tuple[str, torch.Tensor]]:
    tied = "lm_head.weight" not in wanted
    for file in files:
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118: not a dict
                    if name.endswith(_IGNORED_SUFFIXES) or (tied and name == "lm_head.weight"):
                        continue
                    tensor = opened.get_tensor(name)
                    if not tensor.is_floating_point():
                        raise ModelError(f"{file}: {name} is {tensor.dtype}; only float weights are supported")
                    stored[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
                    yield name, tensor
        except safetensors.SafetensorError as error:
            raise ModelError(f"{file} cannot be read ({error}): it is truncated or damaged, fetch it again") from error
