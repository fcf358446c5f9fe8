"""Weights of a model as arrays under their Hugging Face names, from safetensors or GGUF.

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
two copies of the whole.  numpy has no bfloat16: an array of uint16 is one of bit patterns (cpu/ops.py).  Nothing here
imports torch, which takes five times as long as the rest of a CPU driver's start.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import safetensors

from attnix.gguf_header import GgufError, read_header

from .config import Array, Dtype, ModelConfig
from .cpu.ops import from_bfloat16, to_bfloat16
from .gguf_weights import GgufTensors
from .metadata import Metadata, config_of
from .model_files import ModelError, find_files

_IGNORED_SUFFIXES: Final = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")  # buffers that old checkpoints saved
_STORED: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # safetensors' name -> numpy's


class TensorFile(Protocol):
    """Where tensors come from."""

    shapes: dict[str, tuple[int, ...]]
    storage: Counter[str]

    def read(self, name: str) -> Array: ...


def converted(stored: Array, dtype: Dtype) -> Array:
    """A float array of any width as float32, or as bfloat16's bit patterns.  The same array where it is that already."""
    if dtype == "bfloat16":
        return stored if stored.dtype == np.uint16 else to_bfloat16(stored)
    return from_bfloat16(stored) if stored.dtype == np.uint16 else stored.astype(np.float32, copy=False)


class Weights(Mapping[str, Array]):
    """name -> array, read anew at each access and not kept."""

    def __init__(self, source: TensorFile, names: list[str], dtype: Dtype | None) -> None:
        self._source = source
        self._names = dict.fromkeys(names)
        self._dtype: Dtype | None = dtype

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        stored = self._source.read(name)
        return stored if self._dtype is None else converted(stored, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def open_model(path: str | os.PathLike[str], dtype: Dtype | None = None) -> tuple[ModelConfig, Weights, Metadata]:
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
    path: str | os.PathLike[str], dtype: Dtype | None = None
) -> tuple[ModelConfig, dict[str, Array], Metadata]:
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


class _Place(NamedTuple):
    """Where a tensor lies in a mapped file."""

    mapped: mmap.mmap
    offset: int
    form: str
    shape: tuple[int, ...]


class _SafeTensors:
    """The tensors of one or several safetensors files.

    The package checks a file; the bytes are taken from where its header says, since to numpy it gives no bfloat16.
    """

    def __init__(self, files: tuple[Path, ...], config: ModelConfig) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.storage: Counter[str] = Counter()
        self._places: dict[str, _Place] = {}
        for file in files:
            try:
                with safetensors.safe_open(file, framework="numpy"):
                    pass
            except safetensors.SafetensorError as error:
                raise ModelError(f"{file} cannot be read ({error}): truncated or damaged, fetch it again") from error
            with open(file, "rb") as opened:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            begin = 8 + int.from_bytes(mapped[:8], "little")
            for name, entry in json.loads(mapped[8:begin]).items():
                if (
                    name == "__metadata__"
                    or name.endswith(_IGNORED_SUFFIXES)
                    or (config.tied and name == "lm_head.weight")
                ):
                    continue
                if entry["dtype"] not in _STORED:
                    raise ModelError(f"{file}: {name} is {entry['dtype']}; only float weights are supported")
                first, end = entry["data_offsets"]
                self.shapes[name] = tuple(entry["shape"])
                self.storage[entry["dtype"]] += end - first
                self._places[name] = _Place(mapped, begin + first, _STORED[entry["dtype"]], self.shapes[name])

    def read(self, name: str) -> Array:
        """A view of the mapped file."""
        mapped, offset, form, shape = self._places[name]
        return np.frombuffer(mapped, form, math.prod(shape), offset).reshape(shape)
