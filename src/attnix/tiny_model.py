"""A tiny Llama with random weights and a window of any length, as a Hugging Face directory: for studies that need the real
engine, and not a model that says anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB: Final = 257  # every byte, and the end of the text
HIDDEN: Final = 64
LAYERS: Final = 2
HEADS: Final = 4
KV_HEADS: Final = 2
INNER: Final = 128
_SPREAD: Final = 0.4  # of the weights: large, so that attention is far from uniform


def write_tiny_model(directory: Path, window_tokens: int, seed: int = 17) -> Path:
    """The same weights for the same seed.  Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    head = HIDDEN // HEADS

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=draw) * _SPREAD

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        weights |= {
            at + "self_attn.q_proj.weight": matrix(HEADS * head, HIDDEN),
            at + "self_attn.k_proj.weight": matrix(KV_HEADS * head, HIDDEN),
            at + "self_attn.v_proj.weight": matrix(KV_HEADS * head, HIDDEN),
            at + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head),
            at + "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            at + "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            at + "mlp.down_proj.weight": matrix(HIDDEN, INNER),
            at + "input_layernorm.weight": torch.ones(HIDDEN),
            at + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
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
