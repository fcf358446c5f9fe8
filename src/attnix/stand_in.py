"""A GGUF file with SmolLM2-135M's geometry and seeded random weights, for machines that do not have the model.

    python -m attnix.stand_in FILE [--small]

It computes and weighs what the model does and says nothing: `make gpu` measures with it.  Its vocabulary is every byte and
fillers up to the model's number.  `--small` has two layers and 512 words, for dry runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final, NamedTuple

import gguf
import numpy as np
from tokenizers import pre_tokenizers

SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SEED: Final = 135
WINDOW: Final = 8192
_ORDINARY: Final = 1  # GGUF's kinds of token
_SPECIAL: Final = 3


class Geometry(NamedTuple):
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int


SMOLLM2: Final = Geometry(30, 576, 1536, 9, 3, 49_152)
SMALL: Final = Geometry(2, 192, 256, 3, 1, 512)


def write_stand_in(path: Path, shape: Geometry = SMOLLM2, seed: int = SEED) -> Path:
    """The same file for the same seed.  Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("stand-in")
    writer.add_block_count(shape.layers)
    writer.add_context_length(WINDOW)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_vocab_size(shape.vocab)
    _add_tokenizer(writer, shape.vocab)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = draw.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)
        bf16 = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, bf16), raw_dtype=bf16)

    width = shape.hidden // shape.heads
    ones = np.ones(shape.hidden, np.float32)
    matrix("token_embd", shape.vocab, shape.hidden)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        matrix(f"{at}attn_q", shape.heads * width, shape.hidden)
        matrix(f"{at}attn_k", shape.kv_heads * width, shape.hidden)
        matrix(f"{at}attn_v", shape.kv_heads * width, shape.hidden)
        matrix(f"{at}attn_output", shape.hidden, shape.heads * width)
        matrix(f"{at}ffn_gate", shape.inner, shape.hidden)
        matrix(f"{at}ffn_up", shape.inner, shape.hidden)
        matrix(f"{at}ffn_down", shape.hidden, shape.inner)
        writer.add_tensor(f"{at}attn_norm.weight", ones)
        writer.add_tensor(f"{at}ffn_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [f"{pieces[0]} {pieces[1]}"]  # GGUF has no empty arrays
    words = [*SPECIALS, *pieces, merges[0].replace(" ", "")]
    words += [f"<filler {n}>" for n in range(vocab - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([_SPECIAL if word in SPECIALS else _ORDINARY for word in words])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)


def main() -> None:
    parser = argparse.ArgumentParser(prog="attnix.stand_in", description="Write a model of random weights.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--small", action="store_true", help="two layers and 512 words")
    options = parser.parse_args()
    print(write_stand_in(options.file, SMALL if options.small else SMOLLM2))


if __name__ == "__main__":
    main()
