"""Drawing on the device: sampler.py's rules over a batch of logits that never leaves it.

Here: greedy, temperature, top-k, top-p, min-p, log-probabilities, alternatives and scores.  Rows with penalties go to the
host sampler: they need the history, and few ask for them.  The numbers that decide are sampler.py's, a function of
(seed, position), made on the host with the other inputs of the pass.

Everything is torch, row by row and in float32 with float64 sums as there, so a row draws the same whatever else is in the
batch.  exp and log of a device may differ from the host's in the last place: a draw may then differ where a number falls
within that of the border between two tokens.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

_BLOCK: Final = 256  # width of the coarse level of the inverse, as in sampler.py


class Options(NamedTuple):
    """Per row, on the device.

    temperature, top_p, min_p  [B] f32
    top_k                      [B] i64, 0 = off
    number                     [B] f64 in [0, 1)
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    number: torch.Tensor


class Uses(NamedTuple):
    """Which filters any row of a batch uses, known on the host: what nobody asked for is not computed."""

    draws: bool
    top_k: int  # the largest asked for, 0: nobody
    top_p: bool
    min_p: bool


def normalizers(logits: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(row))) [B] f64; NaN for a row without a finite maximum.

    logits  [B, V]  f32
    """
    peak = logits.amax(1, keepdim=True)
    sums = (logits - peak).exp_().sum(1, dtype=torch.float64).log_() + peak[:, 0].double()
    return torch.where(torch.isfinite(peak[:, 0]), sums, torch.nan)


def chosen_logprobs(logits: torch.Tensor, tokens: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """[B] f32: log-probability of one token per row."""
    return (logits.gather(1, tokens[:, None])[:, 0].double() - sums).float()


def top_tokens(logits: torch.Tensor, sums: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely tokens of each row and their log-probabilities, the lower id first among equals.

    logits  [B, V]  f32
    ->      [B, k]  i64, [B, k]  f32
    """
    # A stable sort keeps equals in the order of their ids; topk does not promise that.
    values, tokens = logits.sort(dim=1, descending=True, stable=True)
    return tokens[:, :k], (values[:, :k].double() - sums[:, None]).float()


def draw(logits: torch.Tensor, options: Options, uses: Uses) -> torch.Tensor:
    """One token per row [B] i64; logits [B, V] f32."""
    best = logits.argmax(1)  # the first of equals
    if not uses.draws:
        return best
    greedy = (options.temperature <= 0) | (options.top_k == 1)
    temperature = torch.where(greedy, 1.0, options.temperature)[:, None]
    weights = ((logits - logits.amax(1, keepdim=True)) / temperature).exp_()
    weights = weights.masked_fill_(weights < _floor(weights, options, uses)[:, None], 0.0)
    return torch.where(greedy, best, _invert(weights, options.number))


def _floor(weights: torch.Tensor, options: Options, uses: Uses) -> torch.Tensor:
    """[B] f32: the weight that a token must have to stay."""
    floor = options.min_p if uses.min_p else torch.zeros_like(options.min_p)
    kth: torch.Tensor | None = None
    if uses.top_k:
        k = min(uses.top_k, weights.shape[1])
        largest = weights.topk(k, dim=1).values
        at = (options.top_k - 1).clamp(0, k - 1)
        off = (options.top_k <= 0) | (options.top_k >= weights.shape[1])
        kth = torch.where(off, 0.0, largest.gather(1, at[:, None])[:, 0])
        floor = torch.maximum(floor, kth)
    if uses.top_p:
        descending = weights.sort(dim=1, descending=True).values
        if kth is not None:  # of what top-k left
            descending = descending.masked_fill(descending < kth[:, None], 0.0)
        within = descending.cumsum(1, dtype=torch.float64)
        wanted = options.top_p.double() * within[:, -1]
        last = (within < wanted[:, None]).sum(1).clamp(max=weights.shape[1] - 1)
        nucleus = descending.gather(1, last[:, None])[:, 0]
        floor = torch.maximum(floor, torch.where(options.top_p < 1, nucleus, 0.0))
    return floor.clamp(max=1.0)  # whatever was asked for, the likeliest token stays


def _invert(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Token whose share of the cumulative sum, in vocabulary order, holds number x total (sampler.py, `_invert`)."""
    rows, vocab = weights.shape
    blocks = -(-vocab // _BLOCK)
    grid = torch.nn.functional.pad(weights, (0, blocks * _BLOCK - vocab)).view(rows, blocks, _BLOCK)
    upto = grid.sum(2, dtype=torch.float64).cumsum(1)
    target = number * upto[:, -1]
    block = _first_above(upto, target)
    before = torch.where(block > 0, upto.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    row = torch.arange(rows, device=weights.device)
    inner = grid[row, block].cumsum(1, dtype=torch.float64)
    return block * _BLOCK + _first_above(inner, target - before)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index whose sum exceeds target; rounding at the very end falls back to the last step upwards."""
    above = (cumulative <= target[:, None]).sum(1)
    last = (cumulative < cumulative[:, -1:]).sum(1)
    return torch.minimum(above, last)
