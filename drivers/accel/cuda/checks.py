"""What a pass must be before anything of it is begun: the checks of the CPU engine (cpu/csrc/forward.c, decode_spans), with the
same refusals in the same order, over arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..model import I32, I64, PageRows, PassRefused, Refusal

Mask = npt.NDArray[np.bool_]


class Table(NamedTuple):
    """The page-table entries of a pass, as the rows held them; what lies behind a sequence's last entry is -1, 0 and 0.

    frame, shift, counts  [S, N]  i32
    """

    frame: I32
    shift: I32
    counts: I32


def _refuse(reason: Refusal, bad: Any) -> None:
    if bad.any():
        raise PassRefused(reason, int(bad.argmax()))


def check_records(seqs: npt.NDArray[Any], tokens: I32, rows: PageRows, window: int, vocab: int) -> None:
    """Slots, generations, entries, positions, tokens.  Error: PassRefused."""
    slots, entries = rows.frame.shape
    slot, start, ntokens = seqs["slot"], seqs["start"].astype(np.int64), seqs["ntokens"].astype(np.int64)
    _refuse(Refusal.SLOT, (slot < 0) | (slot >= slots))
    _refuse(Refusal.STALE, rows.generation[slot] != seqs["generation"])
    _refuse(Refusal.ENTRIES, (seqs["entries"] < 1) | (seqs["entries"] > entries))
    _refuse(Refusal.POSITION, (start < 0) | (ntokens < 1) | (start + ntokens > window))
    ends = np.cumsum(ntokens)
    _refuse(Refusal.TOKEN, (seqs["token_offset"] != ends - ntokens) | (ends > tokens.size))
    if (int(ends[-1]) if ends.size else 0) != tokens.size:
        raise PassRefused(Refusal.TOKEN, len(seqs))
    _refuse(Refusal.TOKEN, (tokens < 0) | (tokens >= vocab))


def read_table(seqs: npt.NDArray[Any], rows: PageRows, block_tokens: int, capacity: int) -> Table:
    """The entries of a pass whose records were checked.  Error: PassRefused."""
    widest = int(seqs["entries"].max(initial=1))
    slot = seqs["slot"]
    used = np.arange(widest) < seqs["entries"][:, None]
    frame = np.where(used, rows.frame[slot, :widest], -1).astype(np.int32)
    shift = np.where(used, rows.shift[slot, :widest], 0).astype(np.int32)
    count = np.where(used, rows.count[slot, :widest], 0).astype(np.int32)
    _refuse(Refusal.COUNT, ((count < 0) | (count > block_tokens)).any(1))
    ends = np.cumsum(count, axis=1, dtype=np.int32)
    first = ends - count
    need = (seqs["start"] + seqs["ntokens"])[:, None]
    needed = used & (first < need)
    _refuse(Refusal.FRAME, (needed & ((frame < 0) | (frame >= capacity))).any(1))
    _refuse(Refusal.COUNT, ends[:, -1] < need[:, 0])
    return Table(np.where(needed, frame, -1).astype(np.int32), shift, np.where(needed, count, 0).astype(np.int32))


def check_rest(copies: I32, want: I32, gates: I64, ntokens: int, capacity: int, gate_count: int) -> None:
    """Copies, wanted rows and gates.  Error: PassRefused."""
    _refuse(Refusal.COPY, ((copies < 0) | (copies >= capacity)).any(1))
    _refuse(Refusal.WANT, (want < 0) | (want >= ntokens))
    _refuse(Refusal.GATE, (gates[:, 0] < 0) | (gates[:, 0] >= gate_count) | (gates[:, 1] < 0))
