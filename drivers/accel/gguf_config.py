"""ModelConfig out of a GGUF header."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attnix.gguf_header import GgufHeader

from .config import Arch, ModelConfig, RopeScaling
from .model_files import ModelError

# llama.cpp keeps Mistral under "llama": the same tensors, and the window of Mistral 0.1 is not in the file.
ARCHITECTURES: Final[dict[str, Arch]] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ROPE_FACTORS: Final = "rope_freqs.weight"
_ORIGINAL_WINDOW: Final = 8192  # tokens; of every Llama 3
_F32: Final = 0


def config_from_gguf(header: GgufHeader) -> ModelConfig:
    """Translate and check; whatever the forward pass does not do is refused.  Error: ModelError."""
    try:
        return _translate(header)
    except ModelError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"{header.path}: the header makes no sense ({error}); download the file again") from error


def _translate(header: GgufHeader) -> ModelConfig:
    fields, tensors = header.fields, header.tensors
    name = fields.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(f"{header.path}: GGUF architecture {name!r} is not supported ({', '.join(ARCHITECTURES)} are)")

    def field(key: str, default: Any = None) -> Any:
        value = fields.get(f"{name}.{key}", default)
        if value is None:
            raise ModelError(f"{header.path}: the header lacks {name}.{key}")
        return value

    if fields.get(f"{name}.expert_count"):
        raise ModelError(f"{header.path}: mixture-of-experts models are not supported")
    if int(fields.get("split.count", 1)) > 1:
        raise ModelError(
            f"{header.path}: the model is split over several files; join them with `llama-gguf-split --merge`"
        )
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{header.path} has no tensor token_embd.weight: it is not a whole model")
    vocab, hidden = tensors["token_embd.weight"].shape
    heads = int(field("attention.head_count"))
    head_dim = int(field("attention.key_length", hidden // heads))
    if (
        int(field("attention.value_length", head_dim)) != head_dim
        or int(field("rope.dimension_count", head_dim)) != head_dim
    ):
        raise ModelError(f"{header.path}: heads whose key, value and rotary sizes differ are not supported")
    theta = float(field("rope.freq_base", 10000.0))
    return ModelConfig(
        arch=ARCHITECTURES[name],
        layers=int(field("block_count")),
        hidden=hidden,
        intermediate=int(field("feed_forward_length")),
        heads=heads,
        kv_heads=int(field("attention.head_count_kv", heads)),
        head_dim=head_dim,
        vocab=vocab,
        window=int(field("context_length")),
        norm_eps=float(field("attention.layer_norm_rms_epsilon")),
        rope_theta=theta,
        rope_scaling=_rope_scaling(header, name, theta, head_dim),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tied="output.weight" not in tensors,
        sliding_window=None,
    )


def _rope_scaling(header: GgufHeader, name: str, theta: float, head_dim: int) -> RopeScaling | None:
    if ROPE_FACTORS in header.tensors:
        entry = header.tensors[ROPE_FACTORS]
        if entry.kind != _F32 or entry.shape != (head_dim // 2,):
            raise ModelError(f"{header.path}: {ROPE_FACTORS} is not a float32 vector of {head_dim // 2} factors")
        if entry.offset + head_dim * 2 > header.file_bytes:
            raise ModelError(f"{header.path} is truncated: {ROPE_FACTORS} lies past its end; download it again")
        factors = np.fromfile(header.path, "<f4", head_dim // 2, offset=entry.offset)
        original = header.fields.get(f"{name}.rope.scaling.original_context_length", _ORIGINAL_WINDOW)
        scaling = scaling_of_factors(factors, theta, int(original))
        if scaling is None:
            raise ModelError(f"{header.path}: the factors in {ROPE_FACTORS} are not those of Llama 3's scaling")
        return None if scaling.factor == 1 else scaling
    kind = header.fields.get(f"{name}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(header.fields[f"{name}.rope.scaling.factor"]))
    raise ModelError(f"{header.path}: rope scaling {kind!r} is not supported (linear and Llama 3's are)")


def llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """What Llama 3's scaling divides each rotary frequency by [head_dim / 2] (model card of Llama 3.1)."""
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = scaling.original_window * frequency / (2 * math.pi)  # full turns within the original window
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0, 1)  # 0: long wave, divided by the factor; 1: short wave, left alone
    return np.asarray(1 / ((1 - blend) / scaling.factor + blend))


def scaling_of_factors(factors: npt.NDArray[np.float32], theta: float, original_window: int) -> RopeScaling | None:
    """The llama3 parameters that give these factors, or None.

    GGUF keeps only the resulting divisors.  The largest is the factor; where a frequency is blended, the blend is a
    straight line in the number of turns, so two such points give both limits; Meta's limits (1 and 4) are tried first.
    """
    head_dim = 2 * len(factors)
    factor = float(np.max(factors))
    if factor == 1:
        return RopeScaling("llama3", 1.0)
    candidates = [RopeScaling("llama3", factor, 1.0, 4.0, original_window)]
    blend = (1 / factors.astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    turns = original_window * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    middle = (blend > 1e-4) & (blend < 1 - 1e-4)
    if np.count_nonzero(middle) >= 2:
        slope, offset = np.polyfit(turns[middle], blend[middle], 1)
        low = -offset / slope
        high = low + 1 / slope
        candidates.append(RopeScaling("llama3", factor, round(low, 4), round(high, 4), original_window))
    for scaling in candidates:
        if np.allclose(llama3_factors(scaling, theta, head_dim), factors, rtol=1e-4):
            return scaling
    return None
