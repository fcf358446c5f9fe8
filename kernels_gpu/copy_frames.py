"""Frames copied in batches: between scattered frames and a staging area, layer by layer, and for copy-on-write.

One launch moves the same layers of any number of frames; each program moves some words of one of them.  A host arena that
is registered as pinned is read and written in place, through its device address, so there is no staging in between
and one launch does what would be a cudaMemcpyAsync per frame and layer.  The idea of moving scattered KV by a kernel
instead of by the copy engine is vLLM's swap_blocks and LMCache's layer-wise transfers; what it costs (it takes
multiprocessors from the pass) is why copies of whole frames stay with the copy engine (docs/kernels.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .lang import tl, triton
from .launch import architecture_of, launch

WORD_BYTES = 8


@triton.jit
def copy_frames_kernel(source, target, pairs, first_word, words, source_step, target_step, shares, WORDS: tl.constexpr):
    item = tl.program_id(0) // shares
    share = tl.program_id(0) % shares
    at = share * WORDS + tl.arange(0, WORDS)
    there = at < words
    source_frame = tl.load(pairs + 2 * item).to(tl.int64)
    target_frame = tl.load(pairs + 2 * item + 1).to(tl.int64)
    value = tl.load(source + source_frame * source_step + first_word + at, mask=there)
    tl.store(target + target_frame * target_step + first_word + at, value, mask=there)


def copy_frames(
    source: torch.Tensor,
    target: torch.Tensor,
    pairs: torch.Tensor,
    *,
    layer_bytes: int,
    first_layer: int = 0,
    layers: int = 0,
) -> None:
    """target[b, layers] = source[a, layers] for each pair (a, b).

    source       [F1, frame_bytes]  u8   hbm, or pinned host memory  frames may be apart: a view that skips headers
    target       [F2, frame_bytes]  u8   the same; may be source
    pairs        [n, 2]             i32  hbm  (source, target)
    layer_bytes  bytes of one layer in a frame
    first_layer, layers             which; layers 0: all from first_layer on
    Requires: a multiple of 8 bytes everywhere; no target twice, and no frame source and target in one launch
    (`independent` cuts a list so).  Error: none, bytes are bytes.  Tested on: the interpreter.
    """
    frame_bytes = source.shape[1]
    count = layers or frame_bytes // layer_bytes - first_layer
    first, moved = first_layer * layer_bytes, count * layer_bytes
    sizes = (frame_bytes, layer_bytes, source.stride(0), target.stride(0), source.data_ptr(), target.data_ptr())
    if target.shape[1] != frame_bytes or first < 0 or count < 0 or first + moved > frame_bytes:
        raise ValueError(f"layers {first_layer}+{count} of {layer_bytes} bytes do not fit {frame_bytes}")
    if source.dtype != torch.uint8 or target.dtype != torch.uint8 or any(size % WORD_BYTES for size in sizes):
        raise ValueError("copy_frames wants uint8 frames in whole words of 8 bytes")
    if len(pairs) == 0 or moved == 0:
        return
    device = pairs.device
    how = launch("copy_frames", architecture_of(device))
    words, per_program = moved // WORD_BYTES, how.block_n
    shares = triton.cdiv(words, per_program)
    copy_frames_kernel[(len(pairs) * shares,)](
        _words(source),
        _words(target),
        pairs,
        first // WORD_BYTES,
        words,
        source.stride(0) // WORD_BYTES,
        target.stride(0) // WORD_BYTES,
        shares,
        WORDS=per_program,
        num_warps=how.warps,
        num_stages=how.stages,
    )


def independent(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """A list of copies that are to happen in order, cut where a launch, which has no order, must end.

    A copy may not read or write what an earlier one of its launch writes, nor write what an earlier one reads.
    """
    launch_pairs: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if source in written or target in written or target in read:
            yield launch_pairs
            launch_pairs, read, written = [], set(), set()
        launch_pairs.append((source, target))
        read.add(source)
        written.add(target)
    if launch_pairs:
        yield launch_pairs


def _words(frames: torch.Tensor) -> torch.Tensor:
    """The same memory as int64.  Strides are in bytes still; the kernel gets them in words."""
    return frames.as_strided((frames.shape[0] and 1, frames.shape[1]), (frames.shape[1], 1)).view(torch.int64)
