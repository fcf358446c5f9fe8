"""Shapes two sides must agree on: the layout of page-table rows in their memfd, and what a token's KV weighs."""

from __future__ import annotations

from typing import NamedTuple

from .params import PAGE_TABLE_ALIGN_BYTES


class RowLayout(NamedTuple):
    """Where the page-table rows of one accel lie in its memfd.

    slots    context slots (rows)
    entries  N, entries per row = ceil(window / block_tokens)
    Arrays, in this order, each starting on a 4,096-byte boundary:
    frame [slots, N] int32   hbm frame, -1 past the end
    shift [slots, N] int32   position shift of the run, 0 except for relocated mappings
    count [slots, N] int16   tokens of the entry, from frame offset 0
    generation [slots] uint32  changes when the row is released
    """

    slots: int
    entries: int

    @property
    def frame_offset(self) -> int:
        return 0

    @property
    def shift_offset(self) -> int:
        return _align(self.slots * self.entries * 4)

    @property
    def count_offset(self) -> int:
        return self.shift_offset + _align(self.slots * self.entries * 4)

    @property
    def generation_offset(self) -> int:
        return self.count_offset + _align(self.slots * self.entries * 2)

    @property
    def total_bytes(self) -> int:
        return self.generation_offset + _align(self.slots * 4)


def _align(n_bytes: int) -> int:
    return -(-n_bytes // PAGE_TABLE_ALIGN_BYTES) * PAGE_TABLE_ALIGN_BYTES


class KvShape(NamedTuple):
    """The KV geometry of a model.

    A frame is `[layers, 2, kv_heads, block_tokens, head_dim]`; with scales each layer's KV is followed by those,
    `[2, kv_heads, block_tokens]` of scale_bytes.
    """

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    scale_bytes: int = 0  # per head and token, of K and of V: 4 for int8

    @property
    def token_bytes(self) -> int:
        """Live KV of one token: 2 (K and V) x layers x kv_heads x head_dim x bytes; 131,072 for Llama-3-8B in bf16."""
        return 2 * self.layers * self.kv_heads * (self.head_dim * self.element_bytes + self.scale_bytes)

    def frame_bytes(self, block_tokens: int) -> int:
        return self.token_bytes * block_tokens
