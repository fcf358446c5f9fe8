"""Tensors of a GGUF file: dequantised, renamed, and with llama.cpp's reordering of q and k undone.

llama.cpp rotates neighbouring pairs of a head's elements, Hugging Face models the two halves; its converter therefore
interleaves the rows of q and k of the *llama* architecture.  Qwen's are left as they are.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

from attnix.gguf_header import GgufHeader, TensorEntry

from .config import Array, ModelConfig
from .gguf_config import ROPE_FACTORS
from .model_files import ModelError

KINDS: Final = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K)

_TOP: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FLOATS: Final = {Kind.F32: "<f4", Kind.F16: "<f2", Kind.BF16: "<u2"}
# Of blocks dequantised at a time: what gguf's arithmetic makes of them in between stays in the cache.
_PIECE_BYTES: Final = 32 << 10


class GgufTensors:
    """The tensors of one file under their Hugging Face names; reading one dequantises it, nothing is kept.

    shapes   name -> shape, outermost first
    storage  kind -> bytes
    Error, at construction: ModelError: a kind that is not supported, an unknown name, a truncated file.
    """

    def __init__(self, header: GgufHeader, config: ModelConfig) -> None:
        self._config = config
        self._entries: dict[str, TensorEntry] = {}
        self.storage: Counter[str] = Counter()
        for entry in header.tensors.values():
            if entry.name == ROPE_FACTORS:
                continue  # part of the geometry
            kind = _kind(header, entry)
            n_bytes = _stored_bytes(header, entry, kind)
            if entry.offset + n_bytes > header.file_bytes:
                raise ModelError(
                    f"{header.path} is truncated: {entry.name} ends at byte {entry.offset + n_bytes}, the file at "
                    f"{header.file_bytes}; download it again"
                )
            self.storage[kind.name] += n_bytes
            self._entries[_hf_name(header, entry)] = entry
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}
        with open(header.path, "rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, name: str) -> Array:
        """Float kinds keep their dtype (bfloat16's bit patterns as uint16), quantised ones become float32."""
        entry = self._entries[name]
        kind = Kind(entry.kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        n_bytes = math.prod(entry.shape) // block * block_bytes
        raw = np.frombuffer(self._mapped, np.uint8, n_bytes, entry.offset)
        return _restore_order(_dequantise(raw, kind, entry.shape), entry.name, self._config)


def _kind(header: GgufHeader, entry: TensorEntry) -> Kind:
    supported = ", ".join(kind.name for kind in KINDS)
    try:
        kind = Kind(entry.kind)
    except ValueError as error:
        raise ModelError(
            f"{header.path}: {entry.name} has the unknown type number {entry.kind} (supported: {supported})"
        ) from error
    if kind not in KINDS:
        raise ModelError(
            f"{header.path}: {entry.name} is quantised as {kind.name}, which is not supported ({supported} are); take "
            "another file of this model, e.g. Q8_0 or Q4_K_M"
        )
    return kind


def _stored_bytes(header: GgufHeader, entry: TensorEntry, kind: Kind) -> int:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if not entry.shape or 0 in entry.shape or entry.shape[-1] % block:
        raise ModelError(
            f"{header.path}: {entry.name} of shape {entry.shape} cannot be {kind.name}; the file is damaged"
        )
    return math.prod(entry.shape) // block * block_bytes


def _hf_name(header: GgufHeader, entry: TensorEntry) -> str:
    if entry.name in _TOP:
        return _TOP[entry.name]
    parts = entry.name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in _BLOCK:
        return f"model.layers.{int(parts[1])}.{_BLOCK[parts[2]]}.{parts[3]}"
    raise ModelError(f"{header.path}: the tensor {entry.name} is of no supported architecture")


def _dequantise(raw: npt.NDArray[np.uint8], kind: Kind, shape: tuple[int, ...]) -> Array:
    if kind in _FLOATS:
        return raw.view(_FLOATS[kind]).reshape(shape)
    values, stored = gguf.GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, stored)
    out = np.empty((len(blocks), values), np.float32)
    step = _PIECE_BYTES // stored
    arithmetic: Any = getattr(gguf.quants, kind.name)
    for first in range(0, len(blocks), step):
        out[first : first + step] = arithmetic.dequantize_blocks(blocks[first : first + step])
    return out.reshape(shape)


def _restore_order(tensor: Array, name: str, config: ModelConfig) -> Array:
    """Rows of q and k back from (pair, half) to (half, pair) within each head."""
    if config.arch != "llama" or (".attn_q." not in name and ".attn_k." not in name):
        return tensor
    heads = config.heads if ".attn_q." in name else config.kv_heads
    pairs = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(tensor.shape)
