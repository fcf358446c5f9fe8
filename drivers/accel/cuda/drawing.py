"""From logits on the device to the results of a pass: what is drawn there, what comes back, and what the host still does.

Everything that a pass brings back is copied into pinned memory without waiting; then the host waits once.  Rows with
penalties, and rows whose alternatives have a mask, bring their logits along for sampler.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..engine import Pass, Results, sampling_rows, top_rows
from ..model import F32, I32, I64
from ..sampler import BadLogits, Top, sample, top_logprobs, uniforms
from .device import Device
from .inputs import Staging
from .sampling import Options, Uses, chosen_logprobs, draw, normalizers, top_tokens

Rows = Callable[[int, int], torch.Tensor]  # (first, end) -> logits [n, vocab] f32 of those wanted rows


class Laid(NamedTuple):
    """What a pass's draws need, on the device after the staging was sent.

    on_device  sampling rows (of `want.last`) that are drawn there; there: the same, on the device
    on_host    those with penalties
    """

    on_device: I64
    on_host: I64
    there: torch.Tensor
    options: Options
    uses: Uses
    host_index: torch.Tensor
    top_index: torch.Tensor
    masked_index: torch.Tensor  # those of them with a mask
    targets: torch.Tensor


class Drawing:
    def __init__(self, device: Device) -> None:
        self._device = device

    @staticmethod
    def words(work: Pass) -> int:
        """Of staging, at most."""
        return 16 * len(work.want.last) + 2 * len(work.want.rows) + 128

    def lay(self, work: Pass, staging: Staging) -> Laid:
        """Error: ValueError, a temperature that is no number."""
        rows, chosen = sampling_rows(work)
        seqs = work.seqs[chosen]
        if not np.isfinite(seqs["temperature"]).all():
            raise ValueError(f"temperatures must be finite, not {seqs['temperature'].tolist()}")
        penalised = np.array([work.histories[int(seq)] is not None for seq in chosen], np.bool_)
        on_device, on_host = rows[~penalised], rows[penalised]
        seqs = seqs[~penalised]
        numbers = uniforms(seqs["seed"].astype(np.uint64), seqs["start"].astype(np.int64) + seqs["ntokens"])

        def floats(values: F32) -> torch.Tensor:
            return staging.put(np.ascontiguousarray(values, np.float32).view(np.int32)).view(torch.float32)

        def ints(values: I64 | I32) -> torch.Tensor:
            return staging.put(np.ascontiguousarray(values, np.int32))

        options = Options(
            floats(seqs["temperature"]), floats(seqs["top_p"]), floats(seqs["min_p"]), ints(seqs["top_k"]),
            staging.put(np.ascontiguousarray(numbers).view(np.int32)).view(torch.float64),
        )  # fmt: skip
        draws = (seqs["temperature"] > 0) & (seqs["top_k"] != 1)
        uses = Uses(
            bool(draws.any()), int(np.where(draws, seqs["top_k"], 0).max(initial=0)),
            bool((draws & (seqs["top_p"] < 1)).any()), bool((draws & (seqs["min_p"] > 0)).any()),
        )  # fmt: skip
        scored = np.concatenate(work.want.scored) if work.want.scored else np.empty(0, np.int32)
        return Laid(
            on_device, on_host, ints(on_device), options, uses, ints(on_host),
            ints(np.array([row for row, _, _ in top_rows(work)], np.int64)),
            ints(np.array([row for row, _, allowed in top_rows(work) if allowed is not None], np.int64)), ints(scored),
        )  # fmt: skip

    def finish(self, work: Pass, laid: Laid, rows: Rows, head_rows: int) -> Results:
        """Draw, bring back, wait.  head_rows: as many rows of scores at a time.  Error: BadLogits, ValueError."""
        back = _Back(self._device)
        n = len(work.want.last)
        tops = top_rows(work)
        widest = max((k for _, k, allowed in tops if allowed is None), default=0)
        if n:
            logits = rows(0, n)
            sums = normalizers(logits)
            back.add("sums", sums)
            if len(laid.on_device):
                whole = len(laid.on_device) == n
                mine, my_sums = (logits, sums) if whole else (_of(logits, laid.there), _of(sums, laid.there))
                options = laid.options._replace(top_k=laid.options.top_k.long())
                tokens = draw(mine, options, laid.uses)
                back.add("tokens", tokens.int())
                back.add("logprobs", chosen_logprobs(mine, tokens, my_sums))
            if len(laid.on_host):
                back.add("penalised", _of(logits, laid.host_index))
            if len(laid.masked_index):
                back.add("masked", _of(logits, laid.masked_index))
            if widest:
                ids, logprobs = top_tokens(_of(logits, laid.top_index), _of(sums, laid.top_index), widest)
                back.add("top_ids", ids.int())
                back.add("top_logprobs", logprobs)
        total = len(work.want.rows)
        for first in range(n, total, head_rows):
            logits = rows(first, min(first + head_rows, total))
            sums = normalizers(logits)
            targets = laid.targets[first - n : first - n + len(logits)].long()
            back.add(f"sums{first}", sums)
            back.add(f"scores{first}", chosen_logprobs(logits, targets, sums))
        back.wait()
        self._require_finite(back, n, total, head_rows)
        tokens_back, logprobs_back = self._merged(work, laid, back)
        at, scores = n, []
        every = [back.get(f"scores{first}") for first in range(n, total, head_rows)]
        flat: F32 = np.concatenate(every) if every else np.empty(0, np.float32)
        for wanted in work.want.scored:
            scores.append(flat[at - n : at - n + len(wanted)])
            at += len(wanted)
        return Results(tokens_back, logprobs_back, self._tops(work, back, widest), scores, 0)

    @staticmethod
    def _tops(work: Pass, back: _Back, widest: int) -> list[Top]:
        """The alternatives of each sequence that wants some.  widest: how many of each row came back."""
        found, masked = [], 0
        for at, (_, k, allowed) in enumerate(top_rows(work)):
            if allowed is not None:
                found.append(top_logprobs(back.get("masked")[masked], k, allowed))
                masked += 1
            elif widest:
                ids, logprobs = back.get("top_ids")[at], back.get("top_logprobs")[at]
                found.append(Top(ids[:k], logprobs[:k]))
            else:
                found.append(Top(np.empty(0, np.int32), np.empty(0, np.float32)))
        return found

    @staticmethod
    def _require_finite(back: _Back, n: int, total: int, head_rows: int) -> None:
        parts = ([back.get("sums")] if n else []) + [back.get(f"sums{first}") for first in range(n, total, head_rows)]
        bad = np.flatnonzero(np.isnan(np.concatenate(parts))) if parts else np.empty(0, np.int64)
        if len(bad):
            raise BadLogits(f"logits of row {', '.join(map(str, bad[:8]))} are not finite")

    @staticmethod
    def _merged(work: Pass, laid: Laid, back: _Back) -> tuple[I32, F32]:
        """Tokens and log-probabilities in batch order, those of the host's rows among them."""
        rows, chosen = sampling_rows(work)
        tokens, logprobs = np.empty(len(rows), np.int32), np.empty(len(rows), np.float32)
        if len(laid.on_device):
            at = np.searchsorted(rows, laid.on_device)
            tokens[at], logprobs[at] = back.get("tokens"), back.get("logprobs")
        if len(laid.on_host):
            at = np.searchsorted(rows, laid.on_host)
            seqs = chosen[at]
            drawn = sample(back.get("penalised"), work.seqs[seqs], [work.histories[int(seq)] for seq in seqs])
            tokens[at], logprobs[at] = drawn.tokens, drawn.logprobs
        return tokens, logprobs


def _of(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, index)


class _Back:
    """Results on their way to the host."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._parts: dict[str, torch.Tensor] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        to = self._device.staging(tuple(tensor.shape), tensor.dtype)
        to.copy_(tensor, non_blocking=True)
        self._parts[name] = to

    def wait(self) -> None:
        self._device.mark().synchronize()

    def get(self, name: str) -> Any:
        return self._parts[name].numpy()
