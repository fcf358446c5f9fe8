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

Files are mapped and a tensor is read when it is asked for: whoever packs the weights in a layout of its own never holds
two copies of the whole.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import safetensors
import torch

from attnix.gguf_header import GgufError, read_header

from .config import ModelConfig
from .gguf_weights import GgufTensors
from .metadata import Metadata, config_of
from .model_files import ModelError, find_files

_IGNORED_SUFFIXES: Final = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")  # buffers that old checkpoints saved
_WIDTHS: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes


class TensorFile(Protocol):
    """Where tensors come from."""

    shapes: dict[str, tuple[int, ...]]
    storage: Counter[str]

    def read(self, name: str) -> torch.Tensor: ...


class Weights(Mapping[str, torch.Tensor]):
    """name -> tensor, read anew at each access and not kept."""

    def __init__(self, source: TensorFile, names: list[str], dtype: torch.dtype | None) -> None:
        self._source = source
        self._names = dict.fromkeys(names)
        self._dtype = dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor = self._source.read(name)
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def open_model(path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> tuple[ModelConfig, Weights, Metadata]:
    """Check that everything is there and fits, and read nothing yet.

    dtype  what each tensor is converted to; None: as stored (float32 where quantised)
    Error: ModelError: not supported, incomplete, truncated, or shapes that do not fit the geometry.
    """
    files = find_files(path)
    config = config_of(files)
    source: TensorFile
    if files.layout == "hf":
        source = _SafeTensors(files.weights, config)
    else:
        try:
            source = GgufTensors(read_header(files.path), config)
        except GgufError as error:
            raise ModelError(str(error)) from error
    shapes = expected_shapes(config)
    for name, shape in source.shapes.items():
        if name not in shapes:
            raise ModelError(
                f"{files.path} has the tensor {name}, for which a {config.arch} model like this has no place"
            )
        if shape != shapes[name]:
            raise ModelError(f"{files.path}: {name} has shape {shape}, the geometry says {shapes[name]}")
    missing = [name for name in shapes if name not in source.shapes]
    if missing:
        raise ModelError(
            f"{files.path} lacks {len(missing)} of {len(shapes)} tensors, the first is {missing[0]}: fetch the model again"
        )
    storage = ", ".join(kind for kind, _ in source.storage.most_common())
    scalars = sum(math.prod(shape) for shape in shapes.values())
    return config, Weights(source, list(shapes), dtype), Metadata(files, storage, scalars)


def load_model(
    path: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> tuple[ModelConfig, dict[str, torch.Tensor], Metadata]:
    """`open_model`, with all tensors read."""
    config, weights, metadata = open_model(path, dtype)
    return config, dict(weights), metadata


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this geometry has."""
    hidden, wide = config.hidden, config.intermediate
    rows = {
        "q": config.heads * config.head_dim,
        "k": config.kv_heads * config.head_dim,
        "v": config.kv_heads * config.head_dim,
    }
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


class _SafeTensors:
    """The tensors of one or several safetensors files."""

    def __init__(self, files: tuple[Path, ...], config: ModelConfig) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.storage: Counter[str] = Counter()
        self._opened: dict[str, Any] = {}
        for file in files:
            try:
                opened: Any = safetensors.safe_open(file, framework="pt")
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    if name.endswith(_IGNORED_SUFFIXES) or (config.tied and name == "lm_head.weight"):
                        continue
                    entry = opened.get_slice(name)
                    if entry.get_dtype() not in _WIDTHS:
                        raise ModelError(f"{file}: {name} is {entry.get_dtype()}; only float weights are supported")
                    self.shapes[name] = tuple(entry.get_shape())
                    self.storage[entry.get_dtype()] += math.prod(entry.get_shape()) * _WIDTHS[entry.get_dtype()]
                    self._opened[name] = opened
            except safetensors.SafetensorError as error:
                raise ModelError(f"{file} cannot be read ({error}): truncated or damaged, fetch it again") from error

    def read(self, name: str) -> torch.Tensor:
        """A view of the mapped file."""
        tensor: torch.Tensor = self._opened[name].get_tensor(name)
        return tensor
