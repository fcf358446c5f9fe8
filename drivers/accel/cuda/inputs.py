"""What a pass takes to the device: one array, one copy.

The array is int32, cut into parts whose places depend on sizes alone, so a captured graph finds its inputs where they
always are.  Rows beyond the sequences of a pass (a bucket is filled up) have entries 0: no kernel touches them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch

from ..engine import Seqs
from ..model import I32, I64
from .device import Device

_PARTS: Final = ("slot", "entries", "start", "ntokens", "row", "write_from")


class Split(NamedTuple):
    """The sequences of a pass by what attention takes them: one token each (decode), or more (prefill).  i64 indices."""

    decode: I64
    prefill: I64


def split(seqs: Seqs) -> Split:
    one = seqs["ntokens"] == 1
    return Split(np.flatnonzero(one), np.flatnonzero(~one))


class Sequences(NamedTuple):
    """Views [B] i32 of one group of sequences on the device, and what the host knows of them."""

    slot: torch.Tensor
    entries: torch.Tensor
    start: torch.Tensor
    ntokens: torch.Tensor
    row: torch.Tensor
    write_from: torch.Tensor
    max_entries: int
    max_tokens: int


class Staging:
    """Pinned memory and its double on the device, grown as passes need it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = device.staging((0,), torch.int32)
        self._there = torch.empty(0, dtype=torch.int32, device=device.torch_device)
        self._used = 0

    def reserve(self, words: int) -> None:
        """Begin a pass of at most this many words.  Growing moves everything: graphs over it are void (`address`)."""
        self._used = 0
        if words > self._host.numel():
            room = max(4096, 1 << (words - 1).bit_length())
            self._host = self._device.staging((room,), torch.int32)
            self._there = torch.empty(room, dtype=torch.int32, device=self._device.torch_device)

    @property
    def address(self) -> int:
        return self._there.data_ptr()

    def put(self, values: I32, room: int = 0) -> torch.Tensor:
        """Lay values down; where they will be on the device after `send`.  room: words to keep for them."""
        size = max(values.size, room)
        to = self._host[self._used : self._used + values.size]
        to.numpy()[:] = values.reshape(-1)
        view = self._there[self._used : self._used + size]
        self._used += -(-size // 4) * 4  # 16 bytes: kernels load vectors
        return view

    def send(self) -> None:
        self._there[: self._used].copy_(self._host[: self._used], non_blocking=True)


def put_sequences(staging: Staging, seqs: Seqs, chosen: I64, rows: int = 0, max_entries: int = 0) -> Sequences:
    """Lay some sequences of a pass down.  rows: fill up to so many, with rows after the last token."""
    n = max(len(chosen), rows)
    parts = np.zeros((len(_PARTS), n), np.int32)
    for part, name in zip(parts, _PARTS, strict=True):
        if name != "row":
            part[: len(chosen)] = seqs[name][chosen]
    parts[4, : len(chosen)] = seqs["token_offset"][chosen]
    parts[4, len(chosen) :] = np.arange(len(chosen), n)
    slot, entries, start, ntokens, row, write_from = (staging.put(part) for part in parts)
    longest = int(seqs["ntokens"][chosen].max(initial=0))
    widest = int(seqs["entries"][chosen].max(initial=0))
    return Sequences(slot, entries, start, ntokens, row, write_from, max(max_entries, widest), longest)
