"""A GGUF file with SmolLM2-135M's geometry and seeded random weights, for machines that do not have the model.

    python -m attnix.stand_in FILE [--shape smollm2|thin|small|least]

It computes and weighs what the model does and says nothing: `make gpu` measures with it.  Its words are every byte, what the
end-to-end tests say (_MERGES), and fillers up to the model's number.  For dry runs: `thin` has the model's frames and
vocabulary and hardly any arithmetic, `small` has two layers and 512 words, `least` one layer of one head.
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


# Of SmolLM2's 48,900 merges those, in its order, that the texts of tests/e2e/conftest.py need: those tests size their tiers
# in tokens, and with these every text of theirs is cut into the same pieces as by the model.
_MERGES: Final = """\
Ġ t, i n, h e, r e, o n, e r, Ġt he, a t, Ġ s, Ġ o, e n, Ġ c, e s, n d, i t, o r, i s, a l, Ġ p, a n, Ġ b, a r,
Ġ in, Ġo f, Ġ m, Ġ d, r o, a s, Ġ h, Ġt h, Ġ re, e l, s t, Ġ n, e t, i m, Ġ g, i d, Ġ T, Ġ is, u r, r a, o t, i g,
Ġb e, u l, Ġ C, t er, Ġ M, Ġ P, u m, Ġ he, Ġ B, k e, or t, Ġ W, i al, Ġ D, Ġ R, ar t, o g, Ġ N, Ġ L, Ġth is, Ġ G,
i z, o st, Ġ O, a k, i e, as s, e p, k s, or s, b er, Ġ K, Ġg o, Ġ ra, Ġ V, o v, Ġre g, I n, he n, u c, it s, Ġn um,
er n, er g, Ġ ke, Ġs he, ĠW e, u nd, Ġnum ber, u g, Ġke ep, at s, Ġ Q, m in, i k, ul es, g o, Ġg e, a i, is ter,
Ġd og, es e, l s, ĠQ u, re t, C l, ar a, ĠG ra, Ġdog s, ĠT ur, l o, n s, ĠP ort, ĠM art, ot o, Ġp ig, ors es,
Ġc ats, Ġra b, Ġkeep s, Ġh orses, ĠMart in, ĠL im, ĠP et, b its, Ġbe es, ĠN ov, Ġreg ister, ĠC ost, K e, ak a,
Ġshe ep, ĠB ern, ĠO s, Ġpig s, uc ks, it o, ĠK y, ĠB erg, Ġrab bits, ĠD ial, ĠT an, ro v, ĠR u, ĠCost a, Ġgo ats,
ai ro, ik o, ĠR ig, Ġd ucks, F ar, ĠKy oto, ĠC airo, ass er, Ġge ese, Ġhe ns, ĠWe i, ĠL und, J on, og el, or is,
ĠLim a, ĠOs lo, D ie
"""


class Geometry(NamedTuple):
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


SHAPES: Final = {
    "smollm2": Geometry(30, 576, 1536, 9, 3, 64, 49_152),
    "thin": Geometry(30, 64, 64, 3, 3, 64, 49_152),
    "small": Geometry(2, 192, 256, 3, 1, 64, 512),
    "least": Geometry(1, 64, 64, 1, 1, 64, 512),
}


def write_stand_in(path: Path, shape: Geometry = SHAPES["smollm2"], seed: int = SEED) -> Path:
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
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_vocab_size(shape.vocab)
    _add_tokenizer(writer, shape.vocab)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = draw.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)
        bf16 = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, bf16), raw_dtype=bf16)

    ones = np.ones(shape.hidden, np.float32)
    matrix("token_embd", shape.vocab, shape.hidden)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        matrix(f"{at}attn_q", shape.heads * shape.head_dim, shape.hidden)
        matrix(f"{at}attn_k", shape.kv_heads * shape.head_dim, shape.hidden)
        matrix(f"{at}attn_v", shape.kv_heads * shape.head_dim, shape.hidden)
        matrix(f"{at}attn_output", shape.hidden, shape.heads * shape.head_dim)
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
    merges = [pair.strip() for pair in _MERGES.split(",")]
    words = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(pair.replace(" ", "") for pair in merges)]
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
    parser.add_argument("--shape", choices=SHAPES, default="smollm2", help="(%(default)s)")
    options = parser.parse_args()
    print(write_stand_in(options.file, SHAPES[options.shape]))


if __name__ == "__main__":
    main()
