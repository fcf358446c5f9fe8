"""The CPU engine: one C call per pass (model.py), then the sampler, on frames in the arena that the daemon shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .engine import Arena, Pass, Results, sampling_rows, top_rows
from .model import Model, PageRows
from .sampler import sample, token_logprobs, top_logprobs
from .transfers import Transfers


class CpuEngine(Model):
    """model.py's Model as an engine.  Frames outlive the process: they lie in the daemon's memfd."""

    arena: Arena = "kept"
    compiles = False
    _frames: Any = None
    _block_tokens = 0

    def attach(self, arena: Any, rows: PageRows, block_tokens: int, capacity: int) -> None:
        super().attach(arena, rows, block_tokens, capacity)
        self._frames, self._block_tokens = memoryview(arena).cast("B"), block_tokens

    def scratch(self, block_tokens: int, frames: int) -> Any:
        # Written, so that what is cached lies in memory as real KV does, not in the one page of zeros.
        return np.full(frames * self.frame_bytes(block_tokens), 0, np.uint8)

    def compute(self, work: Pass) -> Results:
        logits = self.forward(work.seqs, work.tokens, work.copies, work.want.rows, work.gates)
        last = logits[: len(work.want.last)]
        rows, chosen = sampling_rows(work)
        whole = len(rows) == len(last)
        drawn = sample(
            last if whole else last[rows], work.seqs[chosen], [work.histories[int(seq)] for seq in chosen]
        )  # fmt: skip
        tops = [top_logprobs(last[row], k, allowed) for row, k, allowed in top_rows(work)]
        scores = []
        at = len(last)
        for targets in work.want.scored:
            scores.append(token_logprobs(logits[at : at + len(targets)], targets))
            at += len(targets)
        return Results(drawn.tokens, drawn.logprobs, tops, scores, self.waited_ns)

    def drop(self, frames: Sequence[int]) -> None:
        size = self.frame_bytes(self._block_tokens)
        zeros = bytes(size)
        for frame in frames:
            self._frames[frame * size : (frame + 1) * size] = zeros

    def carrier(self, dram: Any, device: int, gates: Any) -> Transfers:
        return Transfers(
            self.frame_bytes(self._block_tokens), self.config.layers, self._block_tokens, self._frames, dram, device,
            gates, self.threads,
        )  # fmt: skip
