"""What every kernel is given: frames, page-table rows, a batch, rotary tables, launch parameters.

Letters as in docs/glossary.md: B sequences, T query rows (tokens) of a pass, N entries of a row, P tokens per block,
F frames, L layers, Hq and Hkv heads, D head dim; S slots (rows of the page table), W window.

A *place* is what a row's entries hold in order: place `e * P + o` is offset `o` of entry `e`.  It holds a token when
`o < count[e]`, whose logical position is `first[e] + o`.  Kernels walk places, not positions: no search is needed, and a
place never lies before its position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

KvDtype = Literal["float32", "float16", "bfloat16", "int8", "float8_e4m3"]
Numerics = Literal["fast", "invariant"]

ELEMENTS: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "float8_e4m3": torch.float8_e4m3fn,
}
SCALED: Final = frozenset({"int8", "float8_e4m3"})  # with a float32 scale per head and token, of K and of V
HEAD_DIMS: Final = (64, 96, 128, 256)
BLOCK_TOKENS: Final = (16, 32, 64, 128, 256)
FP8_CAPABILITY: Final = (8, 9)  # the first compute capability that converts e4m3


@dataclass(frozen=True, slots=True)
class PageTable:
    """The kernel's page-table rows, as they are (kernel/geometry.py RowLayout).

    frame  [S, N]  i32  hbm frame, -1 past the end
    shift  [S, N]  i32  logical minus home position of the entry's tokens, 0 except for relocated runs
    count  [S, N]  i16  tokens of the entry, from frame offset 0
    """

    frame: torch.Tensor
    shift: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one pass, on the device; what the kernels share over all layers is computed once, by `of`.

    slot     [B]         i32  row of the page table
    entries  [B]         i32  entries that cover start + ntokens tokens; 0: a place kept free in a bucket, nothing is done
    start    [B]         i32  logical position of the first token of this pass
    ntokens  [B]         i32  tokens of this pass
    row      [B]         i32  first query row of the sequence
    first    [B, E + 1]  i32  logical position where each entry begins, then that of the end; E >= max(entries)
    """

    slot: torch.Tensor
    entries: torch.Tensor
    start: torch.Tensor
    ntokens: torch.Tensor
    row: torch.Tensor
    first: torch.Tensor

    @classmethod
    def of(
        cls,
        pages: PageTable,
        slot: torch.Tensor,
        entries: torch.Tensor,
        start: torch.Tensor,
        ntokens: torch.Tensor,
        *,
        max_entries: int,
        row: torch.Tensor | None = None,
        first: torch.Tensor | None = None,
    ) -> Batch:
        """A batch whose query rows follow one another, unless `row` says where they are.

        slot, entries, start, ntokens  [B]  i32
        max_entries  E: at least the largest of `entries`; the host knows it, so nothing waits for the device
        first        memory to fill, [B, E + 1] i32 (a captured graph needs the same at each replay)
        """
        if row is None:
            row = (torch.cumsum(ntokens, 0) - ntokens).to(torch.int32)
        if first is None:
            first = torch.empty((slot.numel(), max_entries + 1), dtype=torch.int32, device=slot.device)
        fill_first(first, pages, slot, entries)
        return cls(slot, entries, start, ntokens, row, first)

    @property
    def max_entries(self) -> int:
        return self.first.shape[1] - 1


def fill_first(first: torch.Tensor, pages: PageTable, slot: torch.Tensor, entries: torch.Tensor) -> None:
    """first[b, e] = tokens of the row's entries before e, and of all of them from e = entries[b] on.  Captures in a graph."""
    width = first.shape[1] - 1
    counts = pages.count[:, :width].index_select(0, slot).to(torch.int32)
    counts.masked_fill_(torch.arange(width, device=slot.device)[None] >= entries[:, None], 0)
    first[:, 0] = 0
    torch.cumsum(counts, 1, dtype=torch.int32, out=first[:, 1:])


@dataclass(frozen=True, slots=True)
class Frames:
    """Views into a tier's arena of frames.

    kv     [F, L, 2, Hkv, P, D]  of the KV's dtype, keys first, rotated at their home position
    scale  [F, L, 2, Hkv, P]     f32, of int8 and fp8 KV: value = element * scale; None for the others

    With scales a layer of a frame is its keys, its values, then its scales, as in the CPU engine
    (drivers/accel/cpu/csrc/engine.h): frames travel between tiers and engines byte for byte.
    """

    kv: torch.Tensor
    scale: torch.Tensor | None = None

    @classmethod
    def over(
        cls, arena: torch.Tensor, kv_dtype: KvDtype, *, layers: int, kv_heads: int, block_tokens: int, head_dim: int
    ) -> Frames:
        """View an arena [F, frame_bytes] u8.  Error: ValueError when frame_bytes is not that of this geometry."""
        element = ELEMENTS[kv_dtype]
        rows = 2 * kv_heads * block_tokens
        kv_bytes, scale_bytes = rows * head_dim * element.itemsize, rows * 4 if kv_dtype in SCALED else 0
        layer_bytes = kv_bytes + scale_bytes
        if arena.dtype != torch.uint8 or arena.dim() != 2 or arena.shape[1] != layers * layer_bytes:
            raise ValueError(
                f"an arena of {tuple(arena.shape)} {arena.dtype} does not hold frames of {layers * layer_bytes} bytes"
            )
        by_layer = arena.view(arena.shape[0], layers, layer_bytes)
        planes = (arena.shape[0], layers, 2, kv_heads, block_tokens)
        kv = by_layer[:, :, :kv_bytes].view(element)
        kv = kv.as_strided(
            (*planes, head_dim),
            (kv.stride(0), kv.stride(1), rows // 2 * head_dim, block_tokens * head_dim, head_dim, 1),
        )
        if not scale_bytes:
            return cls(kv)
        scale = by_layer[:, :, kv_bytes:].view(torch.float32)
        return cls(kv, scale.as_strided(planes, (scale.stride(0), scale.stride(1), rows // 2, block_tokens, 1)))

    @property
    def block_tokens(self) -> int:
        return self.kv.shape[4]

    @property
    def head_dim(self) -> int:
        return self.kv.shape[5]

    @property
    def kv_heads(self) -> int:
        return self.kv.shape[3]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary tables, halves paired (i, i + D/2) (arXiv 2104.09864): cos and sin of position * frequency.

    cosine, sine  [W, D / 2]  f32
    """

    cosine: torch.Tensor
    sine: torch.Tensor

    @classmethod
    def of(cls, frequencies: torch.Tensor, window: int) -> Rope:
        """frequencies [D / 2] f32.  The angle is one product in float32, its cosine is that of float64: as the CPU engine."""
        angle = torch.arange(window, device=frequencies.device).float()[:, None] * frequencies.float()[None]
        return cls(angle.double().cos().float(), angle.double().sin().float())


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel is launched: a row of the launch table.

    block_m   query rows of a tile; decode ignores it (all query heads of a KV head, padded to 16)
    block_n   places of a tile
    warps     per program
    stages    tiles in flight
    programs  decode: programs per multiprocessor
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs: int = 2
