"""One pass through all layers, on the device.

    embed -> per layer:  rmsnorm, qkv, rope_write, attention, o, rmsnorm (+ residual), gate_up, silu_mul, down
          -> rmsnorm of the wanted rows, head -> logits in float32

The residual is kept in float32, as the CPU engine keeps it; what goes into products has the weights' dtype.  Everything a
pass needs is in `Work`, whose tensors lie on the device; nothing here waits for the device or reads from it, so the same
code runs eagerly, layer by layer behind loads, and inside a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from attnix.kernels_gpu.shapes import Batch, Frames, PageTable, Rope

from ..config import ModelConfig
from .inputs import Sequences
from .ops import Attention, Ops
from .weights import DeviceWeights

BeforeLayer = Callable[[int], None]


class Work(NamedTuple):
    """A pass on the device.

    tokens   [T]  i32
    want     [w]  i32   rows whose logits are wanted
    decode, prefill     its sequences; max_tokens: the most of one
    """

    tokens: torch.Tensor
    want: torch.Tensor
    decode: Sequences | None
    prefill: Sequences | None
    is_shifted: bool  # some entry has a position shift

    @property
    def max_tokens(self) -> int:
        return max((group.max_tokens for group in (self.decode, self.prefill) if group is not None), default=0)


class Network:
    """The layers over one set of weights, frames and rows."""

    def __init__(self, config: ModelConfig, weights: DeviceWeights, ops: Ops, rope: Rope) -> None:
        self._config, self._weights, self._ops, self._rope = config, weights, ops, rope

    def hidden(
        self, work: Work, frames: Frames, pages: PageTable, before_layer: BeforeLayer | None = None
    ) -> torch.Tensor:
        """The wanted rows after the last norm [w, hidden].

        before_layer  called when a layer's frames are about to be touched for the first time
        """
        c, w, ops = self._config, self._weights, self._ops
        heads, kv_heads, d = w.heads, w.kv_heads, c.head_dim
        how, places = self._attention(work, pages)
        tokens = work.tokens.numel()
        x = w.embed.index_select(0, work.tokens)
        residual = x.float()
        x = ops.rmsnorm(x, w.layers[0].norm_attn, c.norm_eps)
        for number, layer in enumerate(w.layers):
            qkv = ops.linear(x, layer.qkv, layer.qkv_bias).view(tokens, heads + 2 * kv_heads, d)
            if before_layer is not None:
                before_layer(number)
            q = ops.rope_write(
                qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :], frames, places, self._rope,
                layer=number, q_norm=layer.norm_q, k_norm=layer.norm_k, eps=c.norm_eps,
            )  # fmt: skip
            x = ops.attend(q, frames, how, number)
            x = ops.linear(x.reshape(tokens, heads * d), layer.o)
            # Several ranks would add their shares of x here, and below after `down`.
            x = ops.rmsnorm(x, layer.norm_ffn, c.norm_eps, residual)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
            if number + 1 < len(w.layers):
                x = ops.rmsnorm(x, w.layers[number + 1].norm_attn, c.norm_eps, residual)
        wanted = residual.index_select(0, work.want)
        return ops.rmsnorm(x.index_select(0, work.want), w.norm_out, c.norm_eps, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[w, vocab] f32."""
        return self._ops.linear(hidden, self._weights.head, wide=True)

    def _attention(self, work: Work, pages: PageTable) -> tuple[Attention, torch.Tensor]:
        batches: list[Batch] = []
        made: dict[str, Batch] = {}
        groups = {"decode": work.decode, "prefill": work.prefill}
        for name, group in groups.items():
            if group is not None:
                made[name] = Batch.of(
                    pages, group.slot, group.entries, group.start, group.ntokens, max_entries=group.max_entries,
                    row=group.row,
                )  # fmt: skip
                batches.append(made[name])
        least = [group.write_from for group in groups.values() if group is not None]
        places = self._ops.places(pages, batches, least, work.tokens.numel(), work.max_tokens)
        rope, window = self._rope if work.is_shifted else None, self._config.sliding_window or 0
        return Attention(pages, rope, window, made.get("decode"), made.get("prefill")), places
