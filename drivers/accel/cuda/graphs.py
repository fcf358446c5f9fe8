"""Decode steps as captured graphs, one per bucket of batch size and of page-table width.

A pass of n sequences that bring one token each runs in the smallest bucket that holds it; the places that stay free have
no entries, so no kernel reads or writes anything for them.  A bucket is run eagerly the first time (that compiles its
kernels and warms its allocator), captured the second time, replayed from then on.  One whose capture ran out of memory
runs eagerly from then on, which needs less: a graph keeps its memory.  Passes with prefill chunks, and passes behind loads
(a graph cannot wait for the host between layers), run eagerly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from .device import Device, Graph
from .errors import is_out_of_memory

BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
ENTRY_BUCKETS: Final = (64, 512, 4096)  # and the whole row


class Bucket(NamedTuple):
    """sequences: places in the batch; entries: of the page table that its kernels look at; is_shifted: some entry has a shift."""

    sequences: int
    entries: int
    is_shifted: bool = False


def bucket_of(sequences: int, entries: int, row_entries: int, is_shifted: bool = False) -> Bucket | None:
    """The smallest that holds such a pass; None: it is too large for any."""
    batch = next((size for size in BATCH_BUCKETS if size >= sequences), 0)
    width = next((size for size in ENTRY_BUCKETS if size >= entries), row_entries)
    return Bucket(batch, min(width, row_entries), is_shifted) if batch else None


class Captured(NamedTuple):
    """inputs: the address of what it reads, which must not have moved; logits [sequences, vocab] f32: what it leaves."""

    graph: Graph
    inputs: int
    logits: torch.Tensor


class DecodeGraphs:
    """counters: eager, captured, replayed passes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seen: set[Bucket] = set()
        self._too_large: set[Bucket] = set()
        self._captured: dict[Bucket, Captured] = {}
        self.counters = {"eager_passes": 0, "captured_graphs": 0, "replayed_passes": 0}

    def run(self, bucket: Bucket, inputs: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Logits of a pass in this bucket, whose inputs lie at an address; they are good until the next run.

        compute  the pass, over the tensors at that address
        """
        known = self._captured.get(bucket)
        if known is not None and known.inputs == inputs:
            known.graph.replay()
            self.counters["replayed_passes"] += 1
            return known.logits
        if bucket not in self._seen or bucket in self._too_large:
            self._seen.add(bucket)
            self.counters["eager_passes"] += 1
            return compute()
        logits: list[torch.Tensor] = []

        def work() -> None:
            made = compute()
            if logits:  # a stand-in's graph computes anew; a device's writes where it wrote when it was captured
                logits[0].copy_(made)
            else:
                logits.append(made)

        graph = self._capture(work)
        if graph is None:
            self._too_large.add(bucket)
            self._captured.pop(bucket, None)
            logits.clear()  # what the attempt made goes back, too
            self._device.trim()
            print(f"attnix.drivers.accel: no memory for a graph of {bucket}: it runs without", file=sys.stderr)
            self.counters["eager_passes"] += 1
            return compute()
        self._captured[bucket] = Captured(graph, inputs, logits[0])
        self.counters["captured_graphs"] += 1
        self.counters["replayed_passes"] += 1
        return logits[0]

    def _capture(self, work: Callable[[], None]) -> Graph | None:
        """Captured, and run once: capturing runs nothing.  None: there is no memory for it, and the pass can still be run."""
        try:
            graph = self._device.capture(work)
            graph.replay()
            return graph
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def forget(self) -> None:
        """The frames or rows are others now."""
        self._captured.clear()
