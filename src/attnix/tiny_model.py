"""A tiny Llama with random weights and a window of any length, as a Hugging Face directory: for studies that need the real
engine, and not a model that says anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB: Final = 257  # every byte, and the end of the text
_SPREAD: Final = 0.4  # of the weights: large, so that attention is far from uniform


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int

    def kv_bytes(self, tokens: int) -> int:
        """Of so many tokens, in float32."""
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * 4 * tokens


SMALL: Final = Shape(64, 2, 4, 2, 128)
SMALLEST: Final = Shape(
    16, 1, 1, 1, 32
)  # what a long prompt costs least on: attention is all that grows with its square


def write_tiny_model(directory: Path, window_tokens: int, seed: int = 17, shape: Shape = SMALL) -> Path:
    """The same weights for the same seed and shape.  Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    hidden, layers, heads, kv_heads, inner = shape
    head = hidden // heads

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) * _SPREAD

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, hidden),
        "lm_head.weight": matrix(VOCAB, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for i in range(layers):
        at = f"model.layers.{i}."
        weights |= {
            at + "self_attn.q_proj.weight": matrix(heads * head, hidden),
            at + "self_attn.k_proj.weight": matrix(kv_heads * head, hidden),
            at + "self_attn.v_proj.weight": matrix(kv_heads * head, hidden),
            at + "self_attn.o_proj.weight": matrix(hidden, heads * head),
            at + "mlp.gate_proj.weight": matrix(inner, hidden),
            at + "mlp.up_proj.weight": matrix(inner, hidden),
            at + "mlp.down_proj.weight": matrix(hidden, inner),
            at + "input_layernorm.weight": torch.ones(hidden),
            at + "post_attention_layernorm.weight": torch.ones(hidden),
        }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": VOCAB,
        "max_position_embeddings": window_tokens, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": VOCAB - 1,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: n for n, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory
