"""The operations of a forward pass, by two hands: Triton's kernels (triton_ops.py), and plain torch, here, for dry runs.

`TorchOps` is not fast, and computes in float64 what it sums, so that a row comes out the same in a batch, alone or in
chunks: what the tests of the engine compare is then the engine, not torch's choice of a product's order.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from attnix.kernels_gpu.reference import quantise_fp8, quantise_int8
from attnix.kernels_gpu.shapes import Batch, Frames, PageTable, Rope


class Attention(NamedTuple):
    """What attention needs of a pass beside q and the frames: the sequences that decode and those that prefill."""

    pages: PageTable
    rope: Rope | None  # None: no entry of the pass has a shift
    window: int  # sliding; 0: none
    decode: Batch | None
    prefill: Batch | None


class Ops(Protocol):
    """A layer's steps; kernels_gpu says what each argument is."""

    def rmsnorm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, wide: bool = False
    ) -> torch.Tensor:
        """x . weight^T + bias; wide: in float32."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def places(
        self, pages: PageTable, batches: list[Batch], write_from: list[torch.Tensor], tokens: int, max_tokens: int
    ) -> torch.Tensor:
        """[T, 4] i32: where the KV of each row goes (kernels_gpu/rope_write.py, Places)."""
        ...

    def rope_write(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, frames: Frames, places: torch.Tensor, rope: Rope, *,
        layer: int, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float,
    ) -> torch.Tensor: ...  # fmt: skip

    def attend(self, q: torch.Tensor, frames: Frames, how: Attention, layer: int) -> torch.Tensor: ...

    def copy_frames(
        self, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, *, layer_bytes: int, first_layer: int = 0,
        layers: int = 0,
    ) -> None: ...  # fmt: skip


class TorchOps:
    """In torch, on any device."""

    def rmsnorm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        value = x.double()
        if residual is not None:
            value = (value + residual.double()).to(residual.dtype)
            residual.copy_(value)
            value = value.double()
        y = value * torch.rsqrt((value * value).mean(-1, keepdim=True) + eps) * weight.double()
        return y.to(x.dtype)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, wide: bool = False
    ) -> torch.Tensor:
        y = x.double() @ weight.double().T
        if bias is not None:
            y += bias.double()
        return y.float() if wide else y.to(x.dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.double().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    def places(
        self, pages: PageTable, batches: list[Batch], write_from: list[torch.Tensor], tokens: int, max_tokens: int
    ) -> torch.Tensor:
        rows = torch.full((tokens, 4), -1, dtype=torch.int32)
        for batch, least in zip(batches, write_from, strict=True):
            for b in range(batch.slot.numel()):
                n, slot = int(batch.entries[b]), int(batch.slot[b])
                if n == 0:
                    continue
                position = torch.arange(int(batch.ntokens[b]), dtype=torch.int32) + batch.start[b]
                # the last entry that begins at or before it: empty ones are passed over
                entry = torch.searchsorted(batch.first[b, :n].contiguous(), position, right=True) - 1
                first = int(batch.row[b])
                to = rows[first : first + len(position)]
                to[:, 0] = torch.where(position >= least[b], pages.frame[slot, entry], -1)
                to[:, 1] = position - batch.first[b, entry]
                to[:, 2] = position - pages.shift[slot, entry]
                to[:, 3] = position
        return rows

    def rope_write(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, frames: Frames, places: torch.Tensor, rope: Rope, *,
        layer: int, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        if q_norm is not None and k_norm is not None:
            q, k = self.rmsnorm(q, q_norm, eps), self.rmsnorm(k, k_norm, eps)
        written = torch.nonzero(places[:, 0] >= 0)[:, 0]
        frame, offset = places[written, 0].long(), places[written, 1].long()
        keys, values = _turned(k[written], places[written, 2].long(), rope), v[written].float()
        for plane, value in ((0, keys), (1, values)):
            if frames.scale is None:
                frames.kv[frame, layer, plane, :, offset] = value.to(frames.kv.dtype)
            else:
                quantise = quantise_int8 if frames.kv.dtype == torch.int8 else quantise_fp8
                elements, scale = quantise(value)
                frames.kv[frame, layer, plane, :, offset] = elements
                frames.scale[frame, layer, plane, :, offset] = scale
        return _turned(q, places[:, 3].long().clamp(min=0), rope).to(q.dtype)

    def attend(self, q: torch.Tensor, frames: Frames, how: Attention, layer: int) -> torch.Tensor:
        out = torch.zeros_like(q)
        for batch in (how.decode, how.prefill):
            for b in range(0 if batch is None else batch.slot.numel()):
                assert batch is not None
                self._attend_one(q, out, frames, how, batch, b, layer)
        return out

    def _attend_one(
        self, q: torch.Tensor, out: torch.Tensor, frames: Frames, how: Attention, batch: Batch, b: int, layer: int
    ) -> None:
        entries, slot, start, n = (int(part[b]) for part in (batch.entries, batch.slot, batch.start, batch.ntokens))
        if entries == 0:
            return
        pages, rows = how.pages, slice(int(batch.row[b]), int(batch.row[b]) + n)
        count = pages.count[slot, :entries].long()
        entry = torch.repeat_interleave(torch.arange(entries), count)[: start + n]
        frame = pages.frame[slot, entry].long()
        offset = torch.arange(len(entry)) - (count.cumsum(0) - count)[entry]
        held = frames.kv[frame, layer, :, :, offset].double()  # [positions, 2, Hkv, D]
        if frames.scale is not None:
            held = held * frames.scale[frame, layer, :, :, offset].double()[..., None]
        group = q.shape[1] // frames.kv_heads
        keys, values = held.repeat_interleave(group, 2).unbind(1)
        position, shift = torch.arange(start, start + n), pages.shift[slot, entry].long()
        scores = torch.empty((q.shape[1], n, len(entry)), dtype=torch.float64)
        for moved in sorted(set(shift.tolist())):
            turned = q[rows] if moved == 0 else _turned(q[rows], torch.full((n,), -moved), _given(how.rope))
            run = shift == moved
            scores[:, :, run] = torch.einsum("thd,nhd->htn", turned.double(), keys[run])
        key = torch.arange(len(entry))
        unseen = key[None] > position[:, None]
        if how.window:
            unseen |= key[None] <= position[:, None] - how.window
        weights = (scores / q.shape[2] ** 0.5).masked_fill_(unseen, -torch.inf).softmax(-1)
        held_values = values.masked_fill(unseen.all(0)[:, None, None], 0.0)  # what nobody sees may be anything
        out[rows] = torch.einsum("htn,nhd->thd", weights, held_values).to(out.dtype)

    def copy_frames(
        self, source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, *, layer_bytes: int, first_layer: int = 0,
        layers: int = 0,
    ) -> None:  # fmt: skip
        first = first_layer * layer_bytes
        end = first + layers * layer_bytes if layers else source.shape[1]
        target[pairs[:, 1].long(), first:end] = source[pairs[:, 0].long(), first:end]


def _given(rope: Rope | None) -> Rope:
    if rope is None:
        raise ValueError("an entry has a shift, and the pass said that none has")
    return rope


def _turned(x: torch.Tensor, position: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x [T, H, D] turned on by each row's position, negative: back; float32."""
    at = position.abs()
    cosine = rope.cosine[at].double()[:, None]
    sine = (rope.sine[at].double() * position.sign().double()[:, None])[:, None]
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1).float()
