"""The least time a pass of a Llama can take on a machine of a given bandwidth and multiply rate (the roofline model,
Williams et al., CACM 52(4), 2009, without its overlap of the two: the longer one counts)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Shape(NamedTuple):
    """What a pass reads and computes.

    weight_bytes  all matrices, each read once per pass
    linear        weights that every token is multiplied with, the output head not among them
    head          weights of the output head
    attended      operations per pair of tokens: 2 products x 2 operations x layers x heads x head_dim
    token_bytes   KV of a token
    """

    weight_bytes: int
    linear: int
    head: int
    attended: int
    token_bytes: int

    def decode_seconds(self, batch: int, length: float, bandwidth: float, flops: float) -> float:
        """A decode pass over contexts of `length` tokens.  bandwidth: bytes/s; flops: operations/s."""
        read = self.weight_bytes + batch * length * self.token_bytes
        done = batch * (2 * (self.linear + self.head) + self.attended * length)
        return max(read / bandwidth, done / flops)

    def prefill_seconds(self, batch: int, length: int, bandwidth: float, flops: float) -> float:
        """Prompts of `length` tokens and the next token of each."""
        done = batch * (2 * self.linear * length + self.attended * length * (length + 1) / 2 + 2 * self.head)
        return max(self.weight_bytes / bandwidth, done / flops)


def shape_of(config: Path, token_bytes: int) -> Shape:
    """From a Llama's config.json, weights in bfloat16."""
    c = json.loads(config.read_text())
    h, d = c["hidden_size"], c["head_dim"]
    attention = h * d * (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"])
    linear = c["num_hidden_layers"] * (attention + 3 * h * c["intermediate_size"])
    head = h * c["vocab_size"]
    attended = 4 * c["num_hidden_layers"] * c["num_attention_heads"] * d
    return Shape(2 * (linear + head), linear, head, attended, token_bytes)
