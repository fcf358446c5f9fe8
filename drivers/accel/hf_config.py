"""ModelConfig out of a Hugging Face config.json (transformers 4 and 5 spellings)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

from .config import Arch, ModelConfig, RopeScaling
from .model_files import ModelError

ARCHITECTURES: Final[tuple[Arch, ...]] = ("llama", "mistral", "qwen2", "qwen3")

# What transformers assumes where config.json is silent.
_WINDOW: Final[dict[Arch, int]] = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


def config_from_hf(raw: dict[str, Any], file: Path) -> ModelConfig:
    """Translate and check; whatever the forward pass does not do is refused.  Error: ModelError."""
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise ModelError(f"{file}: model_type {kind!r} is not supported ({', '.join(ARCHITECTURES)} are)")
    arch = cast(Arch, kind)
    _refuse(raw, file)
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        head_dim = raw.get("head_dim") or (128 if arch == "qwen3" else hidden // heads)
        attention_bias = bool(raw.get("attention_bias", False))
        rope = raw.get("rope_parameters") or {}
        return ModelConfig(
            arch=arch,
            layers=int(raw["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(raw["intermediate_size"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            vocab=int(raw["vocab_size"]),
            window=int(raw.get("max_position_embeddings", _WINDOW[arch])),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            rope_scaling=_rope_scaling(raw.get("rope_scaling") or rope, file),
            qkv_bias=arch == "qwen2" or (attention_bias and arch != "mistral"),
            o_bias=arch in ("llama", "qwen3") and attention_bias,
            qk_norm=arch == "qwen3",
            tied=bool(raw.get("tie_word_embeddings", False)),
            sliding_window=_sliding_window(raw, arch, file),
        )
    except KeyError as error:
        raise ModelError(f"{file} does not say {error.args[0]}") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{file}: {error}") from error


def _refuse(raw: dict[str, Any], file: Path) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"{file}: weights quantised with {method} are not supported: use float weights or a GGUF file")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{file}: hidden_act {raw['hidden_act']!r} is not supported (silu is)")
    if raw.get("mlp_bias"):
        raise ModelError(f"{file}: mlp_bias is not supported")
    if float(raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"{file}: partial_rotary_factor {raw['partial_rotary_factor']} is not supported (1.0 is)")


def _rope_scaling(raw: dict[str, Any], file: Path) -> RopeScaling | None:
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(raw["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(raw["factor"]),
            float(raw["low_freq_factor"]),
            float(raw["high_freq_factor"]),
            int(raw["original_max_position_embeddings"]),
        )
    raise ModelError(
        f"{file}: rope scaling {kind!r} is not supported (linear and llama3 are); drop it to use the short window"
    )


def _sliding_window(raw: dict[str, Any], arch: Arch, file: Path) -> int | None:
    """Mistral has one window for all layers; Qwen may use it in some layers only, which is refused."""
    window = raw.get("sliding_window")
    if arch == "llama" or window is None:
        return None
    if arch == "mistral":
        return int(window)
    if not raw.get("use_sliding_window", False):
        return None
    layers = int(raw["num_hidden_layers"])
    full = min(layers, int(raw.get("max_window_layers", 28)))
    sliding = [kind == "sliding_attention" for kind in raw.get("layer_types") or []]
    sliding = sliding or [layer >= full for layer in range(layers)]
    if any(sliding) and not all(sliding):
        raise ModelError(f"{file}: a sliding window in only some layers is not supported")
    return int(window) if all(sliding) else None
