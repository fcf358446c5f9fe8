"""What a block size costs attention: decode passes of the CPU engine over the same tokens in frames of different sizes.

The head geometry is SmolLM2-135M's (9 query heads, 3 KV heads of 64), with four layers, bfloat16 KV, random weights and
the rest of the model as small as it may be; only the attention phase is read, off the engine's own clock.  Contexts fill
the pool, and their frames are scattered over it at random: the worst that allocation can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from attnix.drivers.accel.config import Array, ModelConfig
from attnix.drivers.accel.model import Model, PageRows
from attnix.kernel.batch import SEQ_FIELDS
from attnix.kernel.geometry import RowLayout

ROUNDS: Final = 9  # block sizes in turn, so that a slow moment of the machine hits them all
LAYERS: Final = 4


class Attention(NamedTuple):
    """One decode step of `contexts` contexts of `tokens` tokens: nanoseconds per cached token and layer, median of `n`."""

    block_tokens: int
    contexts: int
    tokens: int
    token_ns: float
    n: int


def attention(
    seed: int, sizes: Sequence[int], pool_tokens: int, context_tokens: int, rounds: int = ROUNDS
) -> list[Attention]:
    """One row per block size.  Requires: context_tokens divides pool_tokens, and every size divides context_tokens."""
    config = ModelConfig("llama", LAYERS, 576, 64, 9, 3, 64, 64, context_tokens, 1e-5, 10_000.0, tied=True)
    draw = np.random.default_rng(seed)
    model = Model(config, _weights(config, seed), kv_dtype="bfloat16", dtype="bfloat16")
    # Every byte is written: pages never touched would all be one page of zeros, and that one is in the cache.
    values = draw.standard_normal(1 << 20, np.float32).view(np.uint16)[1::2]
    arena = np.resize(values, pool_tokens * config.token_bytes("bfloat16") // 2)
    contexts = pool_tokens // context_tokens
    tables = {size: _scattered(draw, contexts, context_tokens, size) for size in sizes}
    seqs = np.zeros(contexts, np.dtype(SEQ_FIELDS))
    seqs["slot"] = seqs["token_offset"] = np.arange(contexts)
    seqs["start"] = seqs["write_from"] = context_tokens - 1
    seqs["ntokens"] = 1
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(rounds + 1):  # the first finds cold caches, and does not count
        for size, rows in tables.items():
            model.attach(arena, rows, size, pool_tokens // size)
            seqs["entries"] = context_tokens // size
            model.phase_ns()
            model.forward(seqs, np.zeros(contexts, np.int32), np.zeros((0, 2), np.int32), np.zeros(0, np.int32))
            if turn:
                times[size].append(model.phase_ns()["attend"] / (pool_tokens * LAYERS))
    return [Attention(size, contexts, context_tokens, median(each), rounds) for size, each in times.items()]


def _scattered(draw: np.random.Generator, contexts: int, context_tokens: int, block_tokens: int) -> PageRows:
    """Page-table rows of full contexts whose frames are a random permutation of the pool."""
    layout = RowLayout(contexts, context_tokens // block_tokens)
    rows = PageRows.over(np.zeros(layout.total_bytes, np.uint8), layout)
    rows.frame[:] = draw.permutation(contexts * layout.entries).reshape(rows.frame.shape)
    rows.count[:] = block_tokens
    return rows


def _weights(config: ModelConfig, seed: int) -> dict[str, Array]:
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        values = draw.standard_normal(shape, np.float32)
        return values * np.float32(config.hidden**-0.5)

    kv, q = config.kv_heads * config.head_dim, config.heads * config.head_dim
    made = {"model.embed_tokens.weight": normal(config.vocab, config.hidden)}
    made["model.norm.weight"] = np.ones(config.hidden, np.float32)
    for layer in range(config.layers):
        at = f"model.layers.{layer}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            made[f"{at}self_attn.{name}_proj.weight"] = normal(rows, config.hidden)
        made[f"{at}self_attn.o_proj.weight"] = normal(config.hidden, q)
        for name in ("gate", "up"):
            made[f"{at}mlp.{name}_proj.weight"] = normal(config.intermediate, config.hidden)
        made[f"{at}mlp.down_proj.weight"] = normal(config.hidden, config.intermediate)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{at}{name}.weight"] = np.ones(config.hidden, np.float32)
    return made
